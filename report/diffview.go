package report

import (
	"fmt"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/recording"
)

// DifferenceView is what a page shows of two runs. It needs neither any more.
type DifferenceView struct {
	Name        string              `json:"name"`
	Names       [2]string           `json:"names"`      // of the two runs
	Difference  *analyze.Difference `json:"difference"` // of each list the entries that changed most
	Left        map[string]int      `json:"left"`       // how many of each list that changed are not there
	Points      int                 `json:"points"`     // of the chart
	Ends        [2]int              `json:"ends"`       // the last point of each run
	Frames      []string            `json:"frames"`
	ShortFrames []string            `json:"short_frames"` // "" where it is the same
	FrameLayers []int               `json:"frame_layers"` // recording.Layer

	long longData // of which the series are all
}

// mostChanges bounds what the page lists of stacks, sizes, pools and streams; its flame graph has all stacks.
const mostChanges = 400

// NewDifferenceView collects what a page shows of two runs; d is analyze.Diff's.
func NewDifferenceView(a, b *recording.Trace, d *analyze.Difference) (*DifferenceView, error) {
	v := &DifferenceView{Name: fmt.Sprintf("%s → %s", name(a), name(b)), Names: [2]string{name(a), name(b)}, Left: map[string]int{}}
	var e encoder
	v.curves(&e, a, b)

	stacks := newStackTable(nil)
	var held encoder
	held.changes(d, stacks)
	e.stacks(stacks)
	e.buf = append(e.buf, held.buf...)
	v.Frames, v.ShortFrames, v.FrameLayers = stacks.frames, stacks.short(), stacks.layers()

	short := *d
	for what, list := range map[string]*[]analyze.Change{"stack": &short.Stack, "size": &short.Size, "exact": &short.Exact,
		"pool": &short.Pool, "stream": &short.Stream, "library": &short.Library, "tag": &short.Tag} {
		*list, v.Left[what] = mostChanged(*list, mostChanges)
	}
	v.Difference = &short
	var err error
	v.long.series, err = e.text()
	return v, err
}

// mostChanged is the beginning of a list, which has the largest change first, and how many others changed.
func mostChanged(all []analyze.Change, most int) (list []analyze.Change, left int) {
	list = all[:min(len(all), most)]
	for _, c := range all[len(list):] {
		if c.Grew != 0 {
			left++
		}
	}
	return list, left
}

// curves writes the live bytes of both runs on one axis, the time since each began: the points of both in the order of
// their times stand for the events of a chart.
func (v *DifferenceView) curves(e *encoder, a, b *recording.Trace) {
	type point struct{ us, value int64 }
	var runs [2][]point
	for k, t := range []*recording.Trace{a, b} {
		c := analyze.RecordedCurves(t).Live.Downsample(maxPoints / 2)
		start, last := analyze.StartUS(t), int64(0)
		for i, at := range c.Event {
			if at >= 0 {
				last = max(last, recording.SinceUS(start, t.Events[at].TimeUS))
			}
			runs[k] = append(runs[k], point{last, int64(c.Value[i])})
		}
	}
	var times []int64
	var curves [2]analyze.Curve
	at := [2]int{}
	for at[0] < len(runs[0]) || at[1] < len(runs[1]) {
		k := 0
		if at[0] == len(runs[0]) || at[1] < len(runs[1]) && runs[1][at[1]].us < runs[0][at[0]].us {
			k = 1
		}
		p := runs[k][at[k]]
		at[k]++
		curves[k].Event = append(curves[k].Event, int32(len(times)))
		curves[k].Value = append(curves[k].Value, uint64(p.value))
		v.Ends[k] = len(times)
		times = append(times, p.us)
	}
	v.Points = len(times)
	e.uint(1)
	e.uint(uint64(len(times)))
	last := int64(0)
	for _, us := range times {
		e.int(us - last)
		last = us
	}
	e.curve(curves[0])
	e.curve(curves[1])
}

// changes writes what every stack held in both runs, and by exact size what was allocated without one: count, then the
// columns node, size (0 where there is a stack), bytes and blocks before and after.
func (e *encoder) changes(d *analyze.Difference, s *stackTable) {
	var all []*analyze.Change
	for i := range d.Stack {
		if len(d.Stack[i].Frames) > 0 {
			all = append(all, &d.Stack[i])
		}
	}
	for i := range d.Bare {
		all = append(all, &d.Bare[i])
	}
	n := len(all)
	e.uint(uint64(n))
	e.column(n, func(i int) uint64 { return uint64(s.named(all[i].Frames)) })
	e.column(n, func(i int) uint64 { return all[i].Size })
	e.column(n, func(i int) uint64 { return all[i].BytesA })
	e.column(n, func(i int) uint64 { return all[i].BytesB })
	e.column(n, func(i int) uint64 { return uint64(all[i].BlocksA) })
	e.column(n, func(i int) uint64 { return uint64(all[i].BlocksB) })
}
