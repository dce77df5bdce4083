package analyze

import (
	"slices"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

// A record ends with the request that failed; the program would have gone on. What it would have asked for next is not
// known, but a program that repeats itself has shown it: the repeats before asked at the same place of the program, and
// rose by so much more behind it. A remedy has to have room for that too.

const (
	// maxRepeats is how many of the repeats before are looked at.
	maxRepeats = 8
	// mostToCome bounds what is taken to follow, as a part of what would have been live: a place that means something else
	// in every repeat tells nothing.
	mostToCome = 0.25
)

// stillToCome is how many more bytes were live in the repeats before, at most, than at the request from the place at which
// one failed, scaled by how much larger this repeat is; 0 where the run does not repeat itself or tells no stacks. need is
// the request's size.
func stillToCome(t *recording.Trace, failed int, need uint64) uint64 {
	stack := t.Events[failed].Stack
	if stack == 0 || need > 1<<50 {
		return 0
	}
	live := make([]int64, failed) // after each event
	s := startState(t)
	for i := range failed {
		s.apply(i, &t.Events[i])
		live[i] = int64(s.liveBytes)
	}
	starts := repeatsOf(live)
	if len(starts) < minRepeats {
		return 0
	}
	same := func(i int) bool { return t.Events[i].Kind == event.Alloc && t.Events[i].Stack == stack }
	last := starts[len(starts)-1]
	nth := 1 // of the requests from there in this repeat
	for i := last; i < failed; i++ {
		if same(i) {
			nth++
		}
	}
	now := int64(s.liveBytes) + int64(need)
	rise, most := now-live[last], 0.0
	for k := max(0, len(starts)-1-maxRepeats); k+1 < len(starts); k++ {
		from, to := starts[k], starts[k+1]
		at, n := -1, 0
		for i := from; i < to && n < nth; i++ {
			if same(i) {
				at, n = i, n+1
			}
		}
		if at < 0 || live[at] <= live[from] {
			continue
		}
		more := slices.Max(live[at:to]) - live[at]
		most = max(most, float64(more)*float64(rise)/float64(live[at]-live[from]))
	}
	return uint64(max(0, min(most, mostToCome*float64(now))))
}

// repeatsOf are the events at which live memory was lowest before it rose again: from the lower third of its range over
// the last half to the upper.
func repeatsOf(live []int64) []int {
	if len(live) < 2 {
		return nil
	}
	half := live[len(live)/2:]
	low, high := slices.Min(half), slices.Max(half)
	lower, upper := low+(high-low)/3, high-(high-low)/3
	var starts []int
	least := -1
	up := false
	for i, v := range live {
		switch {
		case v > upper:
			if least >= 0 {
				starts = append(starts, least)
			}
			up, least = true, -1
		case v < lower && up || least >= 0:
			up = false
			if least < 0 || v <= live[least] {
				least = i
			}
		}
	}
	if least >= 0 {
		starts = append(starts, least)
	}
	return starts
}

// continued is a trace in which the request that failed is met and kept, and more bytes are asked for behind it. A trace
// that goes on after the failure has shown what followed, and stays as it is.
func continued(t *recording.Trace, failed int, more uint64) *recording.Trace {
	for i := failed + 1; i < len(t.Events); i++ {
		if k := t.Events[i].Kind; k == event.Alloc || k == event.OOM {
			return t
		}
	}
	out := *t
	out.Events = slices.Clone(t.Events[:failed+1])
	e := &out.Events[failed]
	e.Kind = event.Alloc
	addr := uint64(1) << 61
	e.Addr = addr
	piece := max(e.Size, more/64, 1<<20)
	for next := *e; more > 0; {
		addr += 1 << 43
		next.Addr, next.Size = addr, min(piece, more)
		more -= next.Size
		out.Events = append(out.Events, next)
	}
	return &out
}
