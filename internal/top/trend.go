package top

import "time"

// Trend is what was held over the last minutes, one point for a second at most.
type Trend struct{ points []point }

type point struct {
	at              time.Time
	held, allocated uint64
}

// remembered is how far back a trend goes.
const remembered = 10 * time.Minute

// Series says which of a trend's two numbers is wanted.
type Series int

const (
	Held      Series = iota // reserved, or where a process has no page what the driver says
	Allocated               // by the page
)

func (t *Trend) add(at time.Time, held, allocated uint64) {
	if n := len(t.points); n > 0 && t.points[n-1].at.Truncate(time.Second).Equal(at.Truncate(time.Second)) {
		p := &t.points[n-1]
		p.held, p.allocated = max(p.held, held), max(p.allocated, allocated)
		return
	}
	t.points = append(t.points, point{at, held, allocated})
	for len(t.points) > 0 && at.Sub(t.points[0].at) > remembered {
		t.points = t.points[1:]
	}
}

// Columns are the largest values of n equal stretches of time, of which the last one holds now. Stretches begin at
// multiples of their length, so that a curve moves in steps instead of trembling. A stretch in which nothing was read
// has the value before it; before the first reading there is none, -1.
func (t *Trend) Columns(s Series, n int, span time.Duration, now time.Time) []float64 {
	all := make([]float64, n)
	for i := range all {
		all[i] = -1
	}
	if n == 0 {
		return all
	}
	width := max(time.Second, (span / time.Duration(n)).Truncate(time.Second))
	begin := now.Truncate(width).Add(-time.Duration(n-1) * width)
	before := -1.0
	for _, p := range t.points {
		v := float64(p.held)
		if s == Allocated {
			v = float64(p.allocated)
		}
		switch i := int(p.at.Sub(begin) / width); {
		case p.at.Before(begin):
			before = v
		case i < n:
			all[i] = max(all[i], v)
		}
	}
	for i := range all {
		if all[i] < 0 {
			all[i] = before
		}
		before = all[i]
	}
	return all
}

// Width is how much time a column stands for.
func Width(n int, span time.Duration) time.Duration {
	return max(time.Second, (span / time.Duration(max(1, n))).Truncate(time.Second))
}
