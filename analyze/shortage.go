package analyze

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/replay"
)

// ShortBy is how much was missing for a request that failed.
//
// Available is the largest amount that the request could have got at that moment under the run's allocator: the larger of the
// largest free piece that it may use, and what a new segment could be, that is the limit (or what the device had free) less
// what stays reserved after all that can be given back was given back. (At a recorded failure PyTorch has given back all wholly
// free segments.) For a request of a pool whose own limit was in the way it is what that limit left.
//
// Asked is the request as the allocator rounds it for what Available is: to a segment for a new segment, to a block for a free
// piece. Bytes is Asked less Available, for whichever of the two that is less.
type ShortBy struct {
	Bytes     uint64 `json:"bytes"`
	Asked     uint64 `json:"asked_bytes"`
	Available uint64 `json:"available_bytes"`
	// Bound is "at most" or "at least" where Bytes is a bound only, as the recording does not have the limit or where blocks
	// lay; Available is then bounded from the other side. "" where they are exact.
	Bound string `json:"bound"`
	// More is how much higher a limit, or how much more free memory of the device, meets the request at that moment: more than
	// Bytes where Available is a free piece. 0 where it is not known.
	More uint64 `json:"more_memory_bytes"`
}

// Bounds.
const (
	atMost  = "at most"
	atLeast = "at least"
)

func shortBy(asked, available uint64, bound string) *ShortBy {
	if available >= asked {
		return nil
	}
	return &ShortBy{Bytes: asked - available, Asked: asked, Available: available, Bound: bound}
}

// torchShortBy is the shortage at event i of a run on PyTorch's allocator; nil where the record contradicts the failure. given
// is the limit where the user says what it was, else 0.
func torchShortBy(t *recording.Trace, i int, s *state, given uint64) *ShortBy {
	conf, _ := replay.TorchConfOf(t.Settings)
	c := &torchSizes{conf}
	e := &t.Events[i]
	block := c.BlockSize(e.Size)
	segment := c.SegmentSize(block)
	segments := torchSegments(t, i, s, c, e.Stream, e.Pool, block <= torchSmallSize)
	piece, ok := largestUsable(segments, block, c)
	if !ok || strings.Contains(t.Settings.Conf, "cudaMallocAsync") {
		return nil
	}
	if given == 0 && e.Addr < segment && c.Expandable {
		page := c.LargeSegment
		if block <= torchSmallSize {
			page = torchSmallSegment
		}
		expandable := slices.DeleteFunc(segments, func(g *torchSegment) bool { return !g.expandable })
		x := shortBy(block, max(piece, growable(expandable, e.Addr, page)), "")
		if x != nil {
			x.More = (x.Bytes+page-1)/page*page - e.Addr%page
		}
		return x
	}
	room, bound := roomFor(t, i, s, segment, given)
	if given > 0 && given < s.reserved {
		// What was reserved then, the run could not have had: as much is missing at least.
		missing := max(block-piece, s.liveBytes+block-min(given, s.liveBytes+block))
		return shortBy(block, block-min(block, missing), atLeast)
	}
	x := shortBy(segment, room, bound)
	if x == nil {
		return nil
	}
	x.More = segment - room
	if block-piece < x.Bytes {
		x.Bytes, x.Asked, x.Available = block-piece, block, piece
	}
	if bound != "" {
		x.More = 0
	}
	return x
}

// roomFor is what a new segment could have been at event i, at which one of so many bytes was refused. Where the device had
// enough and the limit is not in the file, the most that was reserved at any time is the least that the limit can have been.
func roomFor(t *recording.Trace, i int, s *state, segment, given uint64) (room uint64, bound string) {
	switch free := t.Events[i].Addr; {
	case given > 0:
		return given - min(given, s.reserved), ""
	case free < segment:
		return free, ""
	}
	return min(peakReserved(t)-s.reserved, segment-1), atMost
}

// peakReserved is the most that was reserved at any time.
func peakReserved(t *recording.Trace) uint64 {
	s := startState(t)
	peak := s.reserved
	for i := range t.Events {
		switch e := &t.Events[i]; e.Kind {
		case event.SegmentAlloc, event.SegmentFree, event.SegmentMap, event.SegmentUnmap:
			s.apply(i, e)
			peak = max(peak, s.reserved)
		}
	}
	return peak
}

// shortOtherwise is the shortage where the free pieces that the request may use are not known one by one: from the figures of
// that moment and, where remedies were searched for, the largest request that a replay of the run met then.
func (x *FailureReport) shortOtherwise(kind runKind) *ShortBy {
	asked := x.Need
	if kind == runCistern {
		asked = inUnits(x.Need)
	}
	if x.Upstream != "" || x.cutOff {
		return nil
	}
	if f := x.said; x.poolLimit { // beside it, what the pool has free may serve too
		return shortBy(asked, f.PoolLimit-min(f.PoolLimit, f.PoolHolds), atMost)
	}
	if x.Reproduced && x.LargestRequest > 0 {
		if bound := atMost; kind != runCistern { // replayed in steps
			return shortBy(asked, x.LargestRequest, bound)
		}
		return shortBy(asked, x.LargestRequest, "")
	}
	if kind == runDriver && x.said == nil && x.DeviceFree > 0 {
		return shortBy(asked, x.DeviceFree, "")
	}
	if x.Capacity == 0 {
		return nil
	}
	reserved, largest := x.Reserved, uint64(0)
	if f := x.said; f != nil {
		reserved -= min(reserved, f.Elsewhere)
		if largest = f.Largest; largest >= asked { // of a kind that the request may not use
			largest = 0
		}
	}
	least := max(largest, x.Capacity-min(x.Capacity, reserved))
	most := x.Capacity - min(x.Capacity, x.heldHere())
	switch {
	case most <= least:
		return shortBy(asked, most, "")
	case most < asked:
		return shortBy(asked, most, atLeast)
	}
	return shortBy(asked, least, atMost)
}

// firstLine is what is missing and what to do about it, without a full stop at its end.
func (x *FailureReport) firstLine() string {
	text := x.inOneSentence()
	if s := x.ShortBy; s != nil {
		text = s.words(x.Requested, x.around())
	}
	if x.Searched || x.Unsearched != "" {
		if fix := x.fix(); fix != "" {
			text += ". Fix: " + strings.TrimSuffix(fix, ".")
		}
	}
	return text
}

// words is the shortage in a sentence.
func (s *ShortBy) words(requested uint64, around string) string {
	bound, other := s.Bound, ""
	switch bound {
	case atMost:
		bound, other = bound+" ", atLeast+" "
	case atLeast:
		bound, other = bound+" ", atMost+" "
	}
	asked := "%s asked for"
	sizes := []any{units.Size(s.Bytes), units.Size(s.Asked)}
	if units.FormatBytes(requested) != units.FormatBytes(s.Asked) {
		asked += " (%s rounded)"
		sizes = []any{units.Size(s.Bytes), units.Size(requested), units.Size(s.Asked)}
	}
	text := units.Sprintf("Short by "+bound+"%s: "+asked+", "+other+"%s available", append(sizes, units.Size(s.Available))...)
	return text + " (" + around + ")"
}

// around is what was in use and free, and what else stood in the way.
func (x *FailureReport) around() string {
	text := units.Sprintf("%s in use", sized(x.heldHere()))
	switch {
	case x.FreeInside == 0:
	case x.Pieces == 0:
		text = units.Sprintf("%s in use, %s free", sized(x.heldHere()), sized(x.FreeInside))
	case x.Pieces == 1:
		text = units.Sprintf("%s in use, %s free in one piece", sized(x.heldHere()), sized(x.FreeInside))
	default:
		text = units.Sprintf("%s in use, %s free in %d pieces", sized(x.heldHere()), sized(x.FreeInside), x.Pieces)
	}
	switch x.Cause {
	case CauseLimit:
		if x.poolLimit {
			return text + "; the limit of its pool was in the way"
		}
		return text + units.Sprintf("; a limit was in the way, though the device had %s free", sized(x.DeviceFree))
	case CauseProcesses:
		return text + "; other processes used the memory"
	case CausePinned:
		return text + "; captured graphs keep what is theirs"
	case CausePending:
		return text + units.Sprintf("; other streams still used %s that were given back", sized(x.Held.Pending))
	case CauseCached:
		return text + units.Sprintf("; the largest, of %s, is for other streams, pools or sizes", sized(x.LargestFree))
	}
	return text
}

// fix is what to do, as far as that is known.
func (x *FailureReport) fix() string {
	switch {
	case x.Warning != "":
		return "unknown, as the model does not explain this run"
	case len(x.Remedies) > 0 && x.Caveat == "":
		return x.Remedies[0].Title
	case x.Advice != "":
		return x.Advice
	case len(x.Remedies) > 0:
		return x.Remedies[0].Title + ", with care (see the remedies)"
	case x.poolLimit || x.Upstream != "" || x.cutOff:
		return ""
	case x.Capacity > 0 && x.Need > x.Capacity:
		return "a smaller request, or more memory: with nothing else in use it would have failed too"
	}
	text := x.holdLess()
	if text != "" && len(x.Tried) > 0 {
		text = "no setting that was tried meets it; " + text
	}
	return text
}

// holdLess is what to allocate less of: the largest class of allocations.
func (x *FailureReport) holdLess() string {
	for _, r := range x.Relief {
		if r.Advice != "" {
			return fmt.Sprintf("allocate less, first of the %s (%s): %s", r.Class, units.FormatBytes(r.Bytes), r.Advice)
		}
	}
	if x.StacksBy != "" {
		return "allocate less; stacks would name the allocations: " + x.StacksBy
	}
	if x.heldHere() == 0 {
		return ""
	}
	return "allocate less at this moment"
}
