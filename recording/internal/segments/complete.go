package segments

import (
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

// Complete is a trace as a PyTorch snapshot needs it, in which every block lies in a segment: PyTorch's viewer draws
// nothing of what lies in none. Files that tell of no segments, driver traces and RMM's logs, are of requests that were
// met one by one, so that each allocation becomes a segment of its own. One whose free is not in the file ends where its
// addresses are handed out again; one of no bytes is nowhere, and is left out. Other traces stay as they are.
func Complete(t *recording.Trace) *recording.Trace {
	if t.Final != nil || len(t.InitialSegments) > 0 {
		return t
	}
	for i := range t.Events {
		switch t.Events[i].Kind {
		case event.SegmentAlloc, event.SegmentFree, event.SegmentMap, event.SegmentUnmap:
			return t
		}
	}
	out := *t
	out.Events = make([]event.Event, 0, 2*len(t.Events))
	var live Set // each with its one block
	hold := func(b recording.Block) {
		live.Insert(recording.Segment{Addr: b.Addr, Size: b.Size, Stream: b.Stream, Pool: b.Pool, Large: b.Size > Small, Stack: b.Stack, Blocks: []recording.Block{b}})
	}
	tell := func(e event.Event, kinds ...event.Kind) {
		for _, e.Kind = range kinds {
			out.Events = append(out.Events, e)
		}
	}
	// end ends all that has a byte of a range without its free having been seen.
	end := func(addr, size uint64, us int64) {
		for s := live.Overlapping(addr, size); s != nil; s = live.Overlapping(addr, size) {
			gone := event.Event{Addr: s.Addr, Size: s.Size, Stream: s.Stream, Pool: s.Pool, TimeUS: us}
			if s.Blocks[0].State == recording.Active {
				tell(gone, event.FreeRequested)
			}
			tell(gone, event.FreeCompleted, event.SegmentFree)
			live.Remove(s.Addr)
		}
	}
	for _, b := range t.Initial {
		if b.Size > 0 && live.Overlapping(b.Addr, b.Size) == nil {
			hold(b)
		}
	}
	for i := range t.Events {
		e := t.Events[i]
		switch e.Kind {
		case event.Alloc:
			if e.Size == 0 || e.Addr+e.Size < e.Addr {
				continue
			}
			end(e.Addr, e.Size, e.TimeUS)
			tell(e, event.SegmentAlloc, event.Alloc)
			hold(recording.Block{Addr: e.Addr, Size: e.Size, Requested: e.Size, Stream: e.Stream, Pool: e.Pool, Stack: e.Stack, Tag: e.Tag,
				Library: e.Library, State: recording.Active})
		case event.FreeRequested, event.FreeCompleted:
			s := live.At(e.Addr)
			if s == nil || s.Addr != e.Addr {
				continue // of what ended already
			}
			e.Size = s.Blocks[0].Requested
			tell(e, e.Kind)
			if e.Kind == event.FreeRequested {
				s.Blocks[0].State = recording.PendingFree
				continue
			}
			e.Size = s.Size
			tell(e, event.SegmentFree)
			live.Remove(e.Addr)
		default:
			tell(e, e.Kind)
		}
	}
	out.Final = live.All()
	return &out
}
