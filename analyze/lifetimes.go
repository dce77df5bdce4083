package analyze

import (
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/driver"
)

// Never is the event at which something ends that was still there after the last one.
const Never = -2

// Lifetimes say of every block and every reserved range from which event to which it was there: all moments of a run
// at once. What MapAt and MomentAt say of an event is what is alive then; the page computes moments that way.
type Lifetimes struct {
	Blocks   []BlockLife // by the event that handed them out, then by address
	Segments []SegmentLife
	Calls    []DriverCall // in order
}

// BlockLife is one block: it is live after event i if From <= i, and i < To or To is Never.
type BlockLife struct {
	Addr   uint64
	Size   uint64 // bytes requested
	From   int32  // event that handed it out, -1 before the first
	Freed  int32  // event at which it was given back, -1 before the first, Never: it was not
	To     int32  // event that ended it, or Never
	Stream uint32 // index into Trace.Streams
	Pool   uint32 // index into Trace.Pools
	Stack  uint32 // index into Trace.Stacks
	Thread uint32 // that asked; 0 where the file does not say
	Tag    uint16 // index into Trace.Tags
	// Library is an index into Trace.Libraries, 0 where the library did not say: see BlockLibrary.
	Library uint8
}

// SegmentLife is a range of reserved addresses while it keeps its bounds: a mapped range that grows is another one.
type SegmentLife struct {
	Addr, Size uint64
	From, To   int32 // as of BlockLife
	Stream     uint32
	Pool       uint32
	Expandable bool
}

// DriverCall is a call of the driver: an event at which memory was got from it or given back, or a call that a driver
// trace saw.
type DriverCall struct {
	Event      int32  // state after this event when the call had ended
	Name       string // the event, as PyTorch calls it, or the driver's function
	Does       Effect
	Addr, Size uint64
	TookNS     uint64   // 0: the file does not say
	Frames     []string // innermost first
}

// Effect is what a driver call does with memory.
type Effect int8

const (
	GivesBack Effect = -1
	Neither   Effect = 0 // it reserves addresses, sets access, or failed
	Gets      Effect = 1
)

// effects are those of the functions that are seen. Virtual memory goes with its last handle or mapping.
var effects = map[recording.CallKind]Effect{recording.MemAlloc: Gets, recording.MemAllocPitch: Gets, recording.MemAllocManaged: Gets,
	recording.MemAllocHost: Gets, recording.MemHostAlloc: Gets, recording.MemFree: GivesBack, recording.MemFreeHost: GivesBack,
	recording.MemAllocAsync: Gets, recording.MemAllocFromPoolAsync: Gets, recording.MemFreeAsync: GivesBack,
	recording.MemCreate: Gets, recording.MemRelease: GivesBack, recording.MemUnmap: GivesBack, recording.ArrayCreate: Gets, recording.Array3DCreate: Gets,
	recording.ArrayDestroy: GivesBack, recording.MipmappedArrayCreate: Gets, recording.MipmappedArrayDestroy: GivesBack}

// Driver puts the calls of a driver trace in the place of those that the events tell: those on the trace's device or on
// none, of all processes.
func (l *Lifetimes) Driver(t *recording.Trace, d *recording.Driver) {
	l.Calls = l.Calls[:0]
	at := 0
	names := map[uint32][]string{}
	tracker := driver.NewTracker()
	for i := range d.Calls {
		c := &d.Calls[i]
		freed := uint64(0) // calls that free name no size
		tracker.Call(c, func(*driver.Holding) {}, func(h *driver.Holding) { freed += h.Size })
		if c.Device >= 0 && int(c.Device) != t.Device || !t.Made(c) {
			continue
		}
		end := int64((c.TimeNS + c.TookNS) / 1000)
		for at < len(t.Events) && t.Events[at].TimeUS <= end {
			at++
		}
		x := DriverCall{Event: int32(at - 1), Name: c.Kind.String(), Does: effects[c.Kind], Addr: c.Addr, Size: c.Size, TookNS: c.TookNS}
		if x.Does == GivesBack {
			x.Size = freed
		}
		if c.Failed() {
			x.Name, x.Does = x.Name+" (failed)", Neither
		}
		frames, ok := names[c.Stack]
		if !ok && int(c.Stack) < len(d.Stacks) {
			for _, f := range d.StackFrames(c.Stack) {
				frames = append(frames, f.String())
			}
			names[c.Stack] = frames
		}
		x.Frames = frames
		l.Calls = append(l.Calls, x)
	}
}

// LifetimesOf walks a trace once.
func LifetimesOf(t *recording.Trace) *Lifetimes {
	s := startState(t)
	l := &Lifetimes{Blocks: make([]BlockLife, 0, len(s.live)+len(t.Events)/3)}
	at := make(map[uint64]int, 1024) // where the block that is live at an address is
	for _, h := range s.sorted() {
		at[h.addr] = len(l.Blocks)
		freed := int32(Never)
		if h.pending {
			freed = -1
		}
		l.Blocks = append(l.Blocks, BlockLife{Addr: h.addr, Size: h.size, From: -1, Freed: freed, To: Never,
			Stream: h.stream, Pool: h.pool, Stack: h.stack, Tag: h.tag, Library: h.library})
	}
	ranges := rangesAlive{l: l, of: map[extent]int{}}
	for x := range s.segments.All() {
		ranges.follow(-1, nil, []extent{*x})
	}
	for i := range t.Events {
		e := &t.Events[i]
		switch e.Kind {
		case event.Alloc:
			if k, ok := at[e.Addr]; ok { // its end was lost
				l.Blocks[k].To = int32(i)
			}
			at[e.Addr] = len(l.Blocks)
			l.Blocks = append(l.Blocks, BlockLife{Addr: e.Addr, Size: e.Size, From: int32(i), Freed: Never, To: Never,
				Stream: e.Stream, Pool: e.Pool, Stack: e.Stack, Thread: e.Thread, Tag: e.Tag, Library: e.Library})
		case event.FreeRequested:
			if k, ok := at[e.Addr]; ok && l.Blocks[k].Freed == Never {
				l.Blocks[k].Freed = int32(i)
			}
		case event.FreeCompleted:
			if k, ok := at[e.Addr]; ok {
				l.Blocks[k].To = int32(i)
				delete(at, e.Addr)
			}
		case event.SegmentAlloc, event.SegmentFree, event.SegmentMap, event.SegmentUnmap:
			does := Gets
			if e.Kind == event.SegmentFree || e.Kind == event.SegmentUnmap {
				does = GivesBack
			}
			l.Calls = append(l.Calls, DriverCall{Event: int32(i), Name: e.Kind.String(), Does: does, Addr: e.Addr, Size: e.Size,
				Frames: FrameNames(t, e.Stack)})
			s.apply(i, e)
			ranges.follow(i, s.gone, s.came)
		}
	}
	return l
}

// rangesAlive turns what is reserved after each event into ranges that begin and end.
type rangesAlive struct {
	l  *Lifetimes
	of map[extent]int // index in l.Segments
}

// follow takes what event i changed.
func (r *rangesAlive) follow(i int, gone, came []extent) {
	for _, x := range gone {
		if k, ok := r.of[x]; ok {
			r.l.Segments[k].To = int32(i)
			delete(r.of, x)
		}
	}
	for _, x := range came {
		r.of[x] = len(r.l.Segments)
		r.l.Segments = append(r.l.Segments, SegmentLife{Addr: x.addr, Size: x.size, From: int32(i), To: Never,
			Stream: x.stream, Pool: x.pool, Expandable: x.expandable})
	}
}
