package trace

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/cistern-gpu/cistern/event"
)

// FindStart fills Initial, InitialSegments and FromStart from Events and Final (which may be nil), for those who make a
// Trace of a history and a state of their own. The pools that events name are taken as they are.
func (t *Trace) FindStart() error {
	return t.walkBack(&budget{limit: math.MaxInt64}, t.Final != nil, true)
}

// walkBack goes from the trace's final state backwards over its events, and so finds what was there before the first:
// Initial, InitialSegments, FromStart. On the way it gives events the pool of the segment they lie in, unless
// ownPools says that the recorder named it. hasFinal is false for formats that do not end with a state; then only the
// blocks that are freed but never allocated are found.
func (t *Trace) walkBack(b *budget, hasFinal, ownPools bool) error {
	w := walker{t: t, b: b, hasFinal: hasFinal, ownPools: ownPools}
	if err := w.begin(); err != nil {
		return err
	}
	for i := len(t.Events) - 1; i >= 0; i-- {
		if err := w.undo(&t.Events[i]); err != nil {
			return err
		}
	}
	w.finish()
	return nil
}

// walker is the state of a device, from its end backwards.
type walker struct {
	t        *Trace
	b        *budget
	hasFinal bool // the file has the state at the end
	ownPools bool // events name their pools

	live   addrMap // indices of blocks by address
	blocks []Block
	free   []uint32 // unused indices of blocks
	segs   segset
	pools  bool // the pool of anything but the default is known

	pending                                     int // blocks that waited for streams at the end
	lostAllocs, lostFrees, lostSegs, noPoolSegs int
}

// begin takes the state at the end.
func (w *walker) begin() error {
	for i := range w.t.Final {
		s := &w.t.Final[i]
		if spare(s) {
			continue // of Cistern's, mapped nowhere: no event led to that
		}
		w.pools = w.pools || s.Pool != 0
		for _, blk := range s.Blocks {
			if blk.State == Inactive {
				continue
			}
			if blk.State == PendingFree {
				w.pending++
			}
			if err := w.put(blk); err != nil {
				return err
			}
		}
		seg := *s
		seg.Blocks = nil
		w.segs.insert(seg)
	}
	return w.b.take(int64(w.segs.n) * 2 * segmentSize)
}

func (w *walker) put(blk Block) error {
	if n := len(w.free); n > 0 {
		w.live.set(blk.Addr, w.free[n-1])
		w.blocks[w.free[n-1]] = blk
		w.free = w.free[:n-1]
		return nil
	}
	var err error
	if w.blocks, err = grow(w.b, w.blocks, 48+4+48); err != nil { // and its places in free and live
		return err
	}
	w.live.set(blk.Addr, uint32(len(w.blocks)))
	w.blocks = append(w.blocks, blk)
	return nil
}

func (w *walker) remove(addr uint64, index uint32) {
	w.live.del(addr)
	w.free = append(w.free, index)
}

// undo takes an event back, and gives it its pool where only the state tells that.
func (w *walker) undo(e *event.Event) error {
	switch e.Kind {
	case event.Alloc, event.FreeRequested, event.FreeCompleted:
		if w.pools && !w.ownPools {
			if s := w.segs.at(e.Addr); s != nil {
				e.Pool = s.Pool
			}
		}
		if e.Kind == event.Alloc {
			w.undoAlloc(e)
			return nil
		}
		return w.undoFree(e)
	case event.SegmentAlloc:
		w.undoSegmentAlloc(e)
	case event.SegmentMap:
		if s := w.segs.at(e.Addr); s != nil && !w.ownPools {
			e.Pool = s.Pool
		}
		if w.segs.cut(e.Addr, e.Size) != e.Size && w.hasFinal {
			w.lostSegs++
		}
	case event.SegmentFree, event.SegmentUnmap:
		return w.undoSegmentFree(e)
	}
	return nil
}

func (w *walker) undoAlloc(e *event.Event) {
	if j, ok := w.live.get(e.Addr); ok {
		w.remove(e.Addr, j)
	} else if w.hasFinal {
		w.lostFrees++
	}
}

func (w *walker) undoFree(e *event.Event) error {
	j, ok := w.live.get(e.Addr)
	if ok && e.Kind == event.FreeRequested && w.blocks[j].State == PendingFree {
		w.blocks[j].State = Active
		return nil
	}
	// Live here and not after: a free. Should something be live at the address after, its alloc was lost.
	if ok {
		w.lostAllocs++
		w.remove(e.Addr, j)
	}
	blk := Block{Addr: e.Addr, Size: roundBlock(e.Size), Requested: e.Size, Stream: e.Stream, Pool: e.Pool,
		Tag: e.Tag, Library: e.Library, State: PendingFree}
	if e.Kind == event.FreeRequested {
		blk.State = Active
	}
	return w.put(blk)
}

func (w *walker) undoSegmentAlloc(e *event.Event) {
	s := w.segs.at(e.Addr)
	if s == nil || s.Addr != e.Addr || s.Size != e.Size {
		if w.hasFinal {
			w.lostSegs++
		}
		return
	}
	if !w.ownPools {
		e.Pool = s.Pool
	}
	w.segs.remove(e.Addr)
}

func (w *walker) undoSegmentFree(e *event.Event) error {
	if s := w.segs.overlapping(e.Addr, e.Size); s != nil || e.Addr+e.Size < e.Addr {
		w.lostSegs++
		return nil
	}
	if err := w.b.take(2 * segmentSize); err != nil {
		return err
	}
	if e.Kind == event.SegmentFree {
		w.segs.insert(Segment{Addr: e.Addr, Size: e.Size, Stream: e.Stream, Pool: e.Pool, Large: e.Size > smallSegment})
		w.noPoolSegs++
		return nil
	}
	if l, k := w.segs.seek(e.Addr); !w.ownPools {
		// The rest of its range, where there is one next to it, knows the pool.
		if p := w.segs.before(l, k); p != nil && p.Expandable && p.Addr+p.Size == e.Addr {
			e.Pool = p.Pool
		}
	}
	w.segs.join(Segment{Addr: e.Addr, Size: e.Size, Stream: e.Stream, Pool: e.Pool, Expandable: true, Large: e.Size%largePage == 0})
	return nil
}

// finish makes what is left the state before the first event, and notes what is not known.
func (w *walker) finish() {
	t := w.t
	t.InitialSegments = w.segs.all()
	t.Initial = nil
	if w.live.n > 0 {
		t.Initial = w.initial()
	}
	t.FromStart = len(t.Initial) == 0 && len(t.InitialSegments) == 0
	t.noteInitial(w.hasFinal)
	if w.pending > 0 {
		t.note("%d blocks were freed but still in use by a stream when the file was written", w.pending)
	}
	if w.noPoolSegs > 0 && !w.ownPools {
		t.note("%d segments were given back before the end: the file does not say to which pool they belonged; "+
			"the default pool is assumed", w.noPoolSegs)
	}
	if w.lostAllocs > 0 || w.lostFrees > 0 || w.lostSegs > 0 {
		t.note("events and final state disagree: %d allocs without a free or a block at the end, %d frees of an address "+
			"that was allocated again without an alloc, %d segment events that fit no segment", w.lostFrees, w.lostAllocs, w.lostSegs)
	}
}

// initial are the blocks that are live, by address.
func (w *walker) initial() []Block {
	list := make([]Block, 0, w.live.n)
	for i, v := range w.live.vals {
		if v != 0 {
			blk := w.blocks[v-1]
			if blk.Addr != w.live.keys[i] {
				panic("trace: a block under the address of another")
			}
			list = append(list, blk)
		}
	}
	slices.SortFunc(list, func(a, b Block) int { return cmp.Compare(a.Addr, b.Addr) })
	return list
}

const (
	segmentSize  = 80       // bytes of a Segment in memory
	smallSegment = 2 << 20  // PyTorch's kSmallBuffer: segments up to this size hold small blocks
	largePage    = 20 << 20 // PyTorch's page of expandable segments for large blocks
	blockAlign   = 512      // PyTorch's kMinBlockSize
)

// roundBlock is the size of the block that PyTorch uses for a request of n bytes by default.
func roundBlock(n uint64) uint64 {
	if r := (n + blockAlign - 1) &^ (blockAlign - 1); r > n {
		return r
	}
	return max(n, blockAlign)
}

func (t *Trace) noteInitial(hasFinal bool) {
	if t.FromStart {
		return
	}
	var live, reserved uint64
	for i := range t.Initial {
		live += t.Initial[i].Requested
	}
	for i := range t.InitialSegments {
		reserved += t.InitialSegments[i].Size
	}
	if len(t.Events) == 0 {
		t.note("no history was kept: the file says what was held, %d blocks (%d bytes) in %d segments (%d bytes)", len(t.Initial), live,
			len(t.InitialSegments), reserved)
		return
	}
	if !hasFinal {
		t.note("recording began mid-run: %d blocks (%d bytes) are freed without an alloc and taken as live at the start",
			len(t.Initial), live)
		return
	}
	t.note("recording began mid-run or its ring overflowed: %d blocks (%d bytes) and %d segments (%d bytes) were held "+
		"before the first event; sizes of those freed later are rounded as by default", len(t.Initial), live,
		len(t.InitialSegments), reserved)
}

func (t *Trace) note(format string, args ...any) {
	t.Notes = append(t.Notes, fmt.Sprintf(format, args...))
}
