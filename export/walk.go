package export

import (
	"cmp"
	"slices"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

// block is one that has not been returned for reuse.
type block struct {
	size    uint64 // bytes requested
	alloc   int32  // event that handed it out, -1 for one that was live before the first
	stream  uint32
	pool    uint32
	stack   uint32
	thread  uint32 // that asked; 0 where the file does not say
	tag     uint16
	library uint8
	pending bool // given back, still used by some stream
}

// allocated is the block that an alloc event hands out.
func allocated(i int, e *event.Event) block {
	return block{size: e.Size, alloc: int32(i), stream: e.Stream, pool: e.Pool, stack: e.Stack, thread: e.Thread, tag: e.Tag,
		library: e.Library}
}

// walker goes through a trace and knows what is live, by the rules of package analyze: a block is live from alloc to
// free_completed; a free of what is not live changes nothing; what is allocated where something is live ends that.
type walker struct {
	t        *recording.Trace
	live     map[uint64]block // by address
	bytes    uint64           // live, as requested
	active   uint64           // live, rounded to grain
	reserved uint64           // held from the driver; a handle that is mapped more than once counts once
	streams  []uint64         // live by stream
	pools    []uint64         // live by pool
	tags     []uint64         // live by tag
	libs     []uint64         // live by library
	touched  []block          // those that the last event brought or ended
	mapped   map[uint64]int   // mappings by handle, where the file tells handles
}

// grain is PyTorch's rounding of a block.
const grain = 512

func roundUp(n uint64) uint64 { return max(grain, (n+grain-1)/grain*grain) }

// newWalker is at the state before the first event.
func newWalker(t *recording.Trace) *walker {
	w := &walker{t: t, live: make(map[uint64]block, 1024), reserved: t.InitialReserved(), mapped: map[uint64]int{},
		streams: make([]uint64, max(1, len(t.Streams))), pools: make([]uint64, max(1, len(t.Pools))),
		tags: make([]uint64, max(1, len(t.Tags))), libs: make([]uint64, max(1, len(t.Libraries)))}
	for i := range t.Initial {
		b := &t.Initial[i]
		if b.State == recording.Inactive {
			continue
		}
		w.add(b.Addr, initialBlock(b))
	}
	return w
}

func initialBlock(b *recording.Block) block {
	size := b.Requested
	if size == 0 {
		size = b.Size
	}
	return block{size: size, alloc: -1, stream: b.Stream, pool: b.Pool, stack: b.Stack,
		tag: b.Tag, library: b.Library, pending: b.State == recording.PendingFree}
}

func (w *walker) add(addr uint64, b block) {
	w.drop(addr) // an event lost by the recorder may have left a block here
	if int(b.stream) >= len(w.streams) {
		b.stream = 0
	}
	if int(b.pool) >= len(w.pools) {
		b.pool = 0
	}
	// Numbers that no name goes with are labels all the same.
	for len(w.tags) <= int(b.tag) {
		w.tags = append(w.tags, 0)
	}
	for len(w.libs) <= int(b.library) {
		w.libs = append(w.libs, 0)
	}
	w.live[addr] = b
	w.bytes += b.size
	w.active += roundUp(b.size)
	w.streams[b.stream] += b.size
	w.pools[b.pool] += b.size
	w.tags[b.tag] += b.size
	w.libs[b.library] += b.size
	w.touched = append(w.touched, b)
}

func (w *walker) drop(addr uint64) {
	b, ok := w.live[addr]
	if !ok {
		return
	}
	delete(w.live, addr)
	w.bytes -= b.size
	w.active -= roundUp(b.size)
	w.streams[b.stream] -= b.size
	w.pools[b.pool] -= b.size
	w.tags[b.tag] -= b.size
	w.libs[b.library] -= b.size
	w.touched = append(w.touched, b)
}

// apply goes past event i. changed says whether it changed any sum.
func (w *walker) apply(i int) (changed bool) {
	w.touched = w.touched[:0]
	switch e := &w.t.Events[i]; e.Kind {
	case event.Alloc:
		w.add(e.Addr, allocated(i, e))
	case event.FreeRequested:
		if b, ok := w.live[e.Addr]; ok {
			b.pending = true
			w.live[e.Addr] = b
		}
		return false
	case event.FreeCompleted:
		w.drop(e.Addr)
	case event.SegmentAlloc, event.SegmentMap:
		if e.Handle != 0 {
			if w.mapped[e.Handle]++; w.mapped[e.Handle] > 1 {
				return false
			}
		}
		w.reserved += e.Size
	case event.SegmentFree, event.SegmentUnmap:
		if e.Handle != 0 {
			if w.mapped[e.Handle]--; w.mapped[e.Handle] > 0 {
				return false
			}
			delete(w.mapped, e.Handle)
		}
		w.reserved -= min(w.reserved, e.Size)
	default:
		return false
	}
	return true
}

// clock gives events times since the file's first, and a time to events without one: that of the event before.
type clock struct {
	start int64 // microseconds: since 1970 where the record says its date, else on the recorder's clock
	known bool  // some event has a time
}

// dated is the first time, in microseconds since 1970, that is taken as a date. A time of day without a date, as RMM
// writes it, is below, and so is a clock that counts from the machine's start.
const dated = 946_684_800_000_000 // 2000-01-01

// clockOf finds the first time in a file; its devices share one clock.
func clockOf(f *recording.File) clock {
	var c clock
	for _, t := range f.Traces {
		for i := range t.Events {
			if us := t.Events[i].TimeUS; us != 0 {
				us += t.WallUS
				if !c.known || us < c.start {
					c.start, c.known = us, true
				}
				break
			}
		}
	}
	return c
}

// timeline is the time of one device's events, asked for in order.
type timeline struct {
	clock
	last int64
	wall int64 // recording.Trace.WallUS
}

func (c clock) line(t *recording.Trace) timeline { return timeline{c, c.start, t.WallUS} }

// at is the time of an event on the file's clock.
func (l *timeline) at(e *event.Event) int64 {
	if e.TimeUS != 0 {
		l.last = e.TimeUS + l.wall
	}
	return l.last
}

// inOrder is what is live, in the order in which it was allocated.
func (w *walker) inOrder() []block {
	type placed struct {
		addr uint64
		block
	}
	all := make([]placed, 0, len(w.live))
	for addr, b := range w.live {
		all = append(all, placed{addr, b})
	}
	slices.SortFunc(all, func(a, b placed) int {
		return cmp.Or(cmp.Compare(a.alloc, b.alloc), cmp.Compare(a.addr, b.addr))
	})
	blocks := make([]block, len(all))
	for i := range all {
		blocks[i] = all[i].block
	}
	return blocks
}
