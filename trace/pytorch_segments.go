package trace

import "github.com/cistern-gpu/cistern/event"

// segmented is a trace as a PyTorch snapshot needs it, in which every block lies in a segment: PyTorch's viewer draws
// nothing of what lies in none. Files that tell of no segments, driver traces and RMM's logs, are of requests that were
// met one by one, so that each allocation becomes a segment of its own. One whose free is not in the file ends where its
// addresses are handed out again; one of no bytes is nowhere, and is left out. Other traces stay as they are.
func segmented(t *Trace) *Trace {
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
	var live segset // each with its one block
	hold := func(b Block) {
		live.insert(Segment{Addr: b.Addr, Size: b.Size, Stream: b.Stream, Pool: b.Pool, Large: b.Size > smallSegment, Stack: b.Stack, Blocks: []Block{b}})
	}
	tell := func(e event.Event, kinds ...event.Kind) {
		for _, e.Kind = range kinds {
			out.Events = append(out.Events, e)
		}
	}
	// end ends all that has a byte of a range without its free having been seen.
	end := func(addr, size uint64, us int64) {
		for s := live.overlapping(addr, size); s != nil; s = live.overlapping(addr, size) {
			gone := event.Event{Addr: s.Addr, Size: s.Size, Stream: s.Stream, Pool: s.Pool, TimeUS: us}
			if s.Blocks[0].State == Active {
				tell(gone, event.FreeRequested)
			}
			tell(gone, event.FreeCompleted, event.SegmentFree)
			live.remove(s.Addr)
		}
	}
	for _, b := range t.Initial {
		if b.Size > 0 && live.overlapping(b.Addr, b.Size) == nil {
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
			hold(Block{Addr: e.Addr, Size: e.Size, Requested: e.Size, Stream: e.Stream, Pool: e.Pool, Stack: e.Stack, Tag: e.Tag,
				Library: e.Library, State: Active})
		case event.FreeRequested, event.FreeCompleted:
			s := live.at(e.Addr)
			if s == nil || s.Addr != e.Addr {
				continue // of what ended already
			}
			e.Size = s.Blocks[0].Requested
			tell(e, e.Kind)
			if e.Kind == event.FreeRequested {
				s.Blocks[0].State = PendingFree
				continue
			}
			e.Size = s.Size
			tell(e, event.SegmentFree)
			live.remove(e.Addr)
		default:
			tell(e, e.Kind)
		}
	}
	out.Final = live.all()
	return &out
}
