package analyze

import (
	"cmp"
	"slices"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

// Growth is what grew over the last part of a run. What is live rises and falls with every step of a program, so two
// moments tell little. The part is cut into growthWindows windows, and what counts of each is the least that was live
// in it: what a program leaks shows there and nowhere else, however much it works with in between.
type Growth struct {
	From       int   `json:"from_event"` // -1: from before the first
	DurationUS int64 `json:"duration_us"`
	// Repeats is how often live memory rose and fell again in that part. Below minRepeats there is nothing to compare, and
	// Known is false where what grew may be the work that was under way.
	Repeats int    `json:"repeats"`
	Known   bool   `json:"told"`
	Before  uint64 `json:"least_before_bytes"` // live in the first window, at least
	After   uint64 `json:"least_after_bytes"`  // and in the last
	// Steady are those that grew from window to window, the most first.
	Steady []Grown `json:"steady"`
}

// Grown is one stack, or where no stacks were recorded one exact size of request, that grew.
type Grown struct {
	Named
	Frames []string `json:"frames,omitempty"`
	Before uint64   `json:"before_bytes"` // live in the first window, at least
	After  uint64   `json:"after_bytes"`
	Blocks int      `json:"blocks"` // live now
}

const (
	growthWindows = 8
	minRepeats    = 3
	maxGrown      = 10
	// leastGrown is the part of what is live below which growth is not told.
	leastGrown = 0.002
)

// growthUntil is what grew over the last part of a run, up to event end.
func growthUntil(t *recording.Trace, end int) Growth {
	s, g := startState(t), newGrowing(t, end)
	for _, h := range s.live {
		g.changed(h, 1)
	}
	for i := 0; i <= end; i++ {
		e := &t.Events[i]
		if e.Kind == event.Alloc || e.Kind == event.FreeCompleted {
			if h, ok := s.live[e.Addr]; ok {
				g.changed(h, -1)
			}
		}
		s.apply(i, e)
		if e.Kind == event.Alloc {
			g.changed(s.live[e.Addr], 1)
		}
		g.event(i)
	}
	return g.result(t, s)
}

// growing watches the live blocks over the last part of a run, up to event end.
type growing struct {
	begin, end int
	bySize     bool
	window     int // the one that is under way, -1 before the first
	live       map[uint64]int64
	least      map[uint64]int64 // in this window, of what changed in it
	windows    [growthWindows]map[uint64]int64
	total      int64
	totals     []int64 // after each event of the part
	lows       [growthWindows]int64
}

func newGrowing(t *recording.Trace, end int) *growing {
	g := &growing{begin: end / 2, end: end, window: -1, live: map[uint64]int64{}, bySize: len(t.Stacks) < 2}
	return g
}

func (g *growing) key(b held) uint64 {
	if g.bySize {
		return b.size
	}
	return uint64(b.stack)
}

func (g *growing) changed(b held, sign int64) {
	k := g.key(b)
	before := g.live[k]
	g.live[k] = before + sign*int64(b.size)
	g.total += sign * int64(b.size)
	if g.window >= 0 {
		if old, ok := g.least[k]; !ok {
			g.least[k] = min(before, g.live[k])
		} else {
			g.least[k] = min(old, g.live[k])
		}
		g.lows[g.window] = min(g.lows[g.window], g.total)
	}
}

// event is called after event i was applied.
func (g *growing) event(i int) {
	if i < g.begin || i > g.end {
		return
	}
	g.totals = append(g.totals, g.total)
	w := (i - g.begin) * growthWindows / max(1, g.end-g.begin+1)
	if w != g.window {
		g.close()
		g.window, g.least = w, map[uint64]int64{}
		g.lows[w] = g.total
	}
}

// close ends a window: what did not change in it was live throughout.
func (g *growing) close() {
	if g.window < 0 {
		return
	}
	all := make(map[uint64]int64, len(g.live))
	for k, n := range g.live {
		if low, ok := g.least[k]; ok {
			n = low
		}
		all[k] = n
	}
	g.windows[g.window] = all
}

// repeats counts how often live memory fell from the upper third of its range to the lower.
func (g *growing) repeats() int {
	if len(g.totals) == 0 {
		return 0
	}
	low, high := slices.Min(g.totals), slices.Max(g.totals)
	n, up := 0, false
	for _, v := range g.totals {
		switch {
		case v > high-(high-low)/3:
			up = true
		case v < low+(high-low)/3 && up:
			n, up = n+1, false
		}
	}
	return n
}

// result is what grew, where the part was long enough to say.
func (g *growing) result(t *recording.Trace, s *state) Growth {
	r := Growth{From: g.begin - 1, DurationUS: timeOf(t, g.end) - timeOf(t, g.begin-1), Repeats: g.repeats(), Steady: []Grown{}}
	if g.window != growthWindows-1 {
		return r // fewer events than windows
	}
	g.close()
	r.Before, r.After = uint64(g.lows[0]), uint64(g.lows[growthWindows-1])
	if r.Known = r.Repeats >= minRepeats; !r.Known {
		return r
	}
	blocks := map[uint64]int{}
	for _, b := range s.live {
		blocks[g.key(b)]++
	}
	var stacks [][]recording.Frame
	for k, after := range g.windows[growthWindows-1] {
		rises, falls := 0, 0
		for w := 1; w < growthWindows; w++ {
			switch cmp.Compare(g.windows[w][k], g.windows[w-1][k]) {
			case 1:
				rises++
			case -1:
				falls++
			}
		}
		before := g.windows[0][k]
		if falls > 0 || rises < growthWindows/2 || float64(after-before) < leastGrown*float64(g.total) {
			continue
		}
		x := Grown{Before: uint64(max(0, before)), After: uint64(after), Blocks: blocks[k]}
		if g.bySize {
			x.Name = "blocks of " + shortSize(k)
		} else {
			stacks = append(stacks, t.FramesOf(uint32(k)))
		}
		r.Steady = append(r.Steady, x)
	}
	for i, n := range NameStacks(stacks) {
		x := &r.Steady[i]
		x.Frames = frameTexts(stacks[i])
		x.Named = n.words(stacks[i])
	}
	slices.SortFunc(r.Steady, func(a, b Grown) int {
		return cmp.Or(cmp.Compare(b.After-b.Before, a.After-a.Before), cmp.Compare(a.Name, b.Name), cmp.Compare(a.From, b.From))
	})
	r.Steady = r.Steady[:min(len(r.Steady), maxGrown)]
	return r
}
