// Package initial finds what was there before the first event of a trace, for recordings that began mid-run or whose ring
// overflowed.
package initial

import (
	"cmp"
	"slices"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/segments"
)

// Options say how Find goes about it. The zero value is for traces whose events name their pools.
type Options struct {
	// InferPools gives each event the pool of the segment it lies in, for recorders that do not name it.
	InferPools bool
	// Charge is called before memory is allocated, with its bytes, and after it is dropped, with their negative; an error
	// of the first ends the search. Nil is no bound.
	Charge func(bytes int64) error
}

// Find fills Initial, InitialSegments and FromStart of a trace: it walks from Final backwards over Events to the state
// before the first of them. Without a final state, only blocks that are freed but never allocated are found.
func Find(t *recording.Trace, o Options) error {
	if o.Charge == nil {
		o.Charge = func(int64) error { return nil }
	}
	w := walker{t: t, charge: o.Charge, hasFinal: t.Final != nil, ownPools: !o.InferPools}
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
	t        *recording.Trace
	charge   func(bytes int64) error
	hasFinal bool // the file has the state at the end
	ownPools bool // events name their pools

	live   addrMap // indices of blocks by address
	blocks []recording.Block
	free   []uint32 // unused indices of blocks
	segs   segments.Set
	pools  bool // the pool of anything but the default is known

	pending                                     int // blocks that waited for streams at the end
	lostAllocs, lostFrees, lostSegs, noPoolSegs int
}

// begin takes the state at the end.
func (w *walker) begin() error {
	for i := range w.t.Final {
		s := &w.t.Final[i]
		if segments.Spare(s) {
			continue // of Cistern's, mapped nowhere: no event led to that
		}
		w.pools = w.pools || s.Pool != 0
		for _, blk := range s.Blocks {
			if blk.State == recording.Inactive {
				continue
			}
			if blk.State == recording.PendingFree {
				w.pending++
			}
			if err := w.put(blk); err != nil {
				return err
			}
		}
		seg := *s
		seg.Blocks = nil
		w.segs.Insert(seg)
	}
	return w.charge(int64(w.segs.Len()) * 2 * segments.SegmentSize)
}

func (w *walker) put(blk recording.Block) error {
	if n := len(w.free); n > 0 {
		w.live.set(blk.Addr, w.free[n-1])
		w.blocks[w.free[n-1]] = blk
		w.free = w.free[:n-1]
		return nil
	}
	if n := cap(w.blocks); len(w.blocks) == n {
		more := max(16, n+n/2)
		if err := w.charge(int64(more) * walkedSize); err != nil {
			return err
		}
		w.blocks = append(make([]recording.Block, 0, more), w.blocks...)
		_ = w.charge(-int64(n) * walkedSize)
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
			if s := w.segs.At(e.Addr); s != nil {
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
		if s := w.segs.At(e.Addr); s != nil && !w.ownPools {
			e.Pool = s.Pool
		}
		if w.segs.Cut(e.Addr, e.Size) != e.Size && w.hasFinal {
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
	if ok && e.Kind == event.FreeRequested && w.blocks[j].State == recording.PendingFree {
		w.blocks[j].State = recording.Active
		return nil
	}
	// Live here and not after: a free. Should something be live at the address after, its alloc was lost.
	if ok {
		w.lostAllocs++
		w.remove(e.Addr, j)
	}
	blk := recording.Block{Addr: e.Addr, Size: roundBlock(e.Size), Requested: e.Size, Stream: e.Stream, Pool: e.Pool,
		Tag: e.Tag, Library: e.Library, State: recording.PendingFree}
	if e.Kind == event.FreeRequested {
		blk.State = recording.Active
	}
	return w.put(blk)
}

func (w *walker) undoSegmentAlloc(e *event.Event) {
	s := w.segs.At(e.Addr)
	if s == nil || s.Addr != e.Addr || s.Size != e.Size {
		if w.hasFinal {
			w.lostSegs++
		}
		return
	}
	if !w.ownPools {
		e.Pool = s.Pool
	}
	w.segs.Remove(e.Addr)
}

func (w *walker) undoSegmentFree(e *event.Event) error {
	if s := w.segs.Overlapping(e.Addr, e.Size); s != nil || e.Addr+e.Size < e.Addr {
		w.lostSegs++
		return nil
	}
	if err := w.charge(2 * segments.SegmentSize); err != nil {
		return err
	}
	if e.Kind == event.SegmentFree {
		w.segs.Insert(recording.Segment{Addr: e.Addr, Size: e.Size, Stream: e.Stream, Pool: e.Pool, Large: e.Size > segments.Small})
		w.noPoolSegs++
		return nil
	}
	if !w.ownPools {
		// The rest of its range, where there is one next to it, knows the pool.
		if p := w.segs.Below(e.Addr); p != nil && p.Expandable && p.Addr+p.Size == e.Addr {
			e.Pool = p.Pool
		}
	}
	w.segs.Join(recording.Segment{Addr: e.Addr, Size: e.Size, Stream: e.Stream, Pool: e.Pool, Expandable: true, Large: e.Size%largePage == 0})
	return nil
}

// finish makes what is left the state before the first event, and notes what is not known.
func (w *walker) finish() {
	t := w.t
	t.InitialSegments = w.segs.All()
	t.Initial = nil
	if w.live.n > 0 {
		t.Initial = w.initial()
	}
	t.FromStart = len(t.Initial) == 0 && len(t.InitialSegments) == 0
	w.note()
	if w.pending > 0 {
		blocks := "blocks"
		if w.pending == 1 {
			blocks = "block"
		}
		t.Note("%d %s freed, but still in use by a stream when the file was written", w.pending, blocks)
	}
	if w.noPoolSegs > 0 && !w.ownPools {
		t.Note("%d segments were given back before the end: the file does not say to which pool they belonged; "+
			"the default pool is assumed", w.noPoolSegs)
	}
	if w.lostAllocs > 0 || w.lostFrees > 0 || w.lostSegs > 0 {
		t.Note("events and final state disagree: %d allocs without a free or a block at the end, %d frees of an address "+
			"that was allocated again without an alloc, %d segment events that fit no segment", w.lostFrees, w.lostAllocs, w.lostSegs)
	}
}

// initial are the blocks that are live, by address.
func (w *walker) initial() []recording.Block {
	list := make([]recording.Block, 0, w.live.n)
	for i, v := range w.live.vals {
		if v != 0 {
			blk := w.blocks[v-1]
			if blk.Addr != w.live.keys[i] {
				panic("trace: a block under the address of another")
			}
			list = append(list, blk)
		}
	}
	slices.SortFunc(list, func(a, b recording.Block) int { return cmp.Compare(a.Addr, b.Addr) })
	return list
}

const (
	walkedSize = 48 + 4 + 48 // bytes of a block, and of its places in free and live
	largePage  = 20 << 20    // PyTorch's page of expandable segments for large blocks
	blockAlign = 512         // PyTorch's kMinBlockSize
)

// roundBlock is the size of the block that PyTorch uses for a request of n bytes by default.
func roundBlock(n uint64) uint64 {
	if r := (n + blockAlign - 1) &^ (blockAlign - 1); r > n {
		return r
	}
	return max(n, blockAlign)
}

// note says what was there before the first event.
func (w *walker) note() {
	t := w.t
	if t.FromStart {
		return
	}
	live, reserved := t.InitialLive(), t.InitialReserved()
	if len(t.Events) == 0 {
		t.Note("no history was kept: the file says what was held, %d blocks (%d bytes) in %d segments (%d bytes)", len(t.Initial), live,
			len(t.InitialSegments), reserved)
		return
	}
	if !w.hasFinal {
		t.Note("recording began mid-run: %d blocks (%d bytes) are freed without an alloc and taken as live at the start",
			len(t.Initial), live)
		return
	}
	t.Note("recording began mid-run or its ring overflowed: %d blocks (%d bytes) and %d segments (%d bytes) were held "+
		"before the first event; sizes of those freed later are rounded as by default", len(t.Initial), live,
		len(t.InitialSegments), reserved)
}
