package fleet

import (
	"sort"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

// walk follows what one recording says of a device.
type walk struct {
	allocated, reserved, peak, peakReserved uint64
	requests, requested                     uint64
	hash                                    uint64
	live                                    map[uint64]uint64 // sizes by address
}

func newWalk(t *recording.Trace) *walk {
	w := &walk{live: map[uint64]uint64{}, hash: event.HashStart}
	for i := range t.Initial {
		b := &t.Initial[i]
		w.live[b.Addr] = b.Requested
		w.allocated += b.Requested
	}
	for i := range t.InitialSegments {
		w.reserved += t.InitialSegments[i].Size
	}
	w.peak, w.peakReserved = w.allocated, w.reserved
	return w
}

func (w *walk) event(e *event.Event) {
	switch e.Kind {
	case event.Alloc:
		w.live[e.Addr] = e.Size
		w.allocated += e.Size
		w.requests++
		w.requested += e.Size
		w.hash = event.Mix(w.hash, e.Size)
	case event.FreeRequested:
		w.allocated -= w.live[e.Addr]
		delete(w.live, e.Addr)
	case event.SegmentAlloc, event.SegmentMap:
		w.reserved += e.Size
	case event.SegmentFree, event.SegmentUnmap:
		w.reserved -= min(w.reserved, e.Size)
	}
	w.peak, w.peakReserved = max(w.peak, w.allocated), max(w.peakReserved, w.reserved)
}

// row is what happened since the last row.
func (w *walk) row(step, us int64) Row {
	r := Row{Step: step, TimeUS: us, Now: w.allocated, Peak: w.peak, Reserved: w.peakReserved, Requests: w.requests, Requested: w.requested, HashSum: w.hash}
	w.peak, w.peakReserved, w.requests, w.requested, w.hash = w.allocated, w.reserved, 0, 0, event.HashStart
	return r
}

// Steps are the rows of a recording whose steps ended at these times: exactly what a process can only estimate.
func Steps(t *recording.Trace, ends []int64) []Row {
	w := newWalk(t)
	rows := make([]Row, 0, len(ends))
	next := 0
	for i := range t.Events {
		for next < len(ends) && t.Events[i].TimeUS > ends[next] {
			rows = append(rows, w.row(int64(next)+1, ends[next]))
			next++
		}
		w.event(&t.Events[i])
	}
	for ; next < len(ends); next++ {
		rows = append(rows, w.row(int64(next)+1, ends[next]))
	}
	return rows
}

// Exact replaces estimates in a series by what a recording says: the peaks within steps, and hashes of the requests in their order.
// Only steps that lie in the recording as a whole are changed, and none of a series whose rows stand for several. It reports how
// many were.
func (s *Series) Exact(t *recording.Trace) (changed int) {
	if s.Every != 1 || len(t.Events) == 0 {
		return 0
	}
	from, to := t.Events[0].TimeUS, t.Events[len(t.Events)-1].TimeUS
	first := 0
	if !t.FromStart { // the first step may have begun before the recording
		first = 1 + sort.Search(len(s.TimeUS), func(i int) bool { return s.TimeUS[i] >= from })
	}
	last := sort.Search(len(s.TimeUS), func(i int) bool { return s.TimeUS[i] > to })
	rows := Steps(t, s.TimeUS)
	for i := first; i < last; i++ {
		s.Peak[i] = rows[i].Peak
		s.Reserved[i] = max(s.Reserved[i], rows[i].Reserved)
		for len(s.Hash) < len(s.Step) {
			s.Hash = append(s.Hash, 0)
		}
		if s.Hash[i] == 0 { // what the process computed does not depend on clocks
			s.Hash[i] = event.Mix(rows[i].HashSum, uint64(s.Step[i]))
		}
		changed++
	}
	return changed
}
