package arena

import (
	"sync"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/internal/magazine"
)

var _ [quota.NumClasses - magazine.Classes]struct{}

// Late are the blocks of a device that C code was putting into a magazine while they were paused. They count as used, and the
// engine frees them with the device's lock. While there are any the device's state says that frees wait, so that requests get
// to the engine.
type Late struct {
	mu sync.Mutex
	// +checklocks:mu
	blocks []cuda.Ptr
}

func (l *Late) add(p cuda.Ptr) {
	l.mu.Lock()
	l.blocks = append(l.blocks, p)
	l.mu.Unlock()
}

// Any reports whether there are any.
func (l *Late) Any() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.blocks) > 0
}

// Take returns the blocks, which the caller frees.
func (l *Late) Take() []cuda.Ptr {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := l.blocks
	l.blocks = nil
	return out
}

// SetMagazine gives the arena a magazine, which is its stream's from now on.
func (a *Arena) SetMagazine(f *magazine.Magazine, t *timeline.Stream) {
	a.mu.Lock()
	f.Lock()
	a.magazine.Store(f)
	t.SetMagazine(f)
	a.Unlock()
}

// Outdate keeps C code from taking the blocks that are in the magazine, or get there although their tokens ended.
//
// +checklocks:a.mu
func (a *Arena) Outdate() {
	if f := a.magazine.Load(); f != nil {
		f.Outdate()
	}
}

// empty excludes C and empties the magazine.
//
// +checklocks:a.mu
func (a *Arena) empty(f *magazine.Magazine) {
	f.Lock()
	a.takeStock(f)
	a.drain(f)
	f.Advance()
}

// refill sets the limits of C, and lets it go on.
//
// +checklocks:a.mu
func (a *Arena) refill(f *magazine.Magazine) {
	a.show(f)
	f.Unlock()
}

// takeStock brings the gauges up to date. A block in the magazine counts as a free block of its own.
//
// +checklocks:a.mu
func (a *Arena) takeStock(f *magazine.Magazine) {
	for c := range a.Quota.Classes {
		net, taken := f.Stock(c)
		if net == (magazine.Amount{}) && taken == (magazine.Amount{}) {
			continue
		}
		a.Quota.Classes[c].Exchange(net, taken)
		a.heaps[c].NoteFree(uint64(taken.Bytes + net.Bytes))
	}
}

// drain frees the blocks in the magazine. They were counted when they were put there, so all that changes is the number of
// free blocks, where they merge with their neighbours.
//
// +checklocks:a.mu
func (a *Arena) drain(f *magazine.Magazine) {
	for _, e := range f.Slots() {
		h := a.heaps[f.ClassOf(e.Requested)]
		id, place, ok := h.blocks.Lookup(e.Addr)
		if !ok {
			panic("a block in the magazine that the heap does not know")
		}
		if b := h.blocks.At(id); b.Uses != 0 {
			h.gauges.TakeOut(b.Requested, b.Size)
			a.late.add(cuda.Ptr(b.Addr))
			a.health.SetWaiting(true)
			continue
		}
		before := h.blocks.FreeBlocks
		h.blocks.FreeAt(id, place, e.Stamp)
		h.gauges.Merge(h.blocks.FreeBlocks - before)
	}
	f.Empty()
}

// show sets the limits of what C may do from the allowances: of what it may put into the magazine, and of what it may take
// from it. While nothing is taken but what was put after the magazine was empty, there is nothing to exceed that was not
// reached when it was; so that limit is 0, except for blocks that stay in the magazine.
//
// +checklocks:a.mu
func (a *Arena) show(f *magazine.Magazine) {
	f.Limits.Puts = a.Quota.FreeRoom()
	for c, h := range a.heaps {
		if h != nil {
			f.Limits.Frees[c] = h.untilClose()
		}
	}
	if len(f.Slots()) == 0 {
		f.NoTakes()
		return
	}
	*f.TakeLimits() = a.Quota.AllocRoom()
}

// AllocMagazine meets a request from the arena's magazine f or, once that is empty, from the heap; 0 if it cannot. Where the
// magazine's own lock is free the arena's is not needed: its holders have both.
//
// +checklocksignore: likewise
func (h *Heap) AllocMagazine(f *magazine.Magazine, size uint64) (cuda.Ptr, uint32) {
	a := h.arena
	if !f.TryLock() {
		a.Enter()
		defer a.mu.Unlock()
	}
	if !a.health.Quick() {
		f.Unlock()
		return 0, 0
	}
	addr, mark, o := f.Take(size, a.health.Waiting(), 0)
	if o == magazine.Taken {
		f.Unlock()
		return cuda.Ptr(addr), mark
	}
	a.takeStock(f)
	a.drain(f)
	if o == magazine.Due {
		f.Polled()
	} else if n := f.Round(size); a.Quota.RoomForAlloc(h.class, size, n) && !h.collectDue() && h.stream.Capture() == 0 {
		if id := h.blocks.Take(n, size); id != 0 {
			h.gauges.Alloc(size, n, h.blocks.FreeBlocks)
			mark = f.Advance()
			b := h.blocks.At(id)
			b.Tag, b.Capture, b.Mark = 0, 0, uint8(mark)
			addr = b.Addr
		}
	}
	a.refill(f)
	return cuda.Ptr(addr), mark
}

// freeMagazine takes a block back into the magazine, so that the next request of its size meets it there. NeedsDevice says
// that it is not for the magazine: such a block is freed as any other.
func (h *Heap) freeMagazine(f *magazine.Magazine, p cuda.Ptr) Outcome {
	a := h.arena
	a.Enter()
	b, o := h.forMagazine(f, p)
	if o != Done {
		a.leave(f)
		return o
	}
	if f.Put(uint64(p), b.Requested, f.Recent(b.Mark), 0) {
		a.leave(f)
		return Done
	}
	a.takeStock(f)
	if a.Quota.RoomForFree(h.class, b.Size, 0) {
		h.putAlone(f, b)
	} else {
		o = NeedsQuota
	}
	a.Unlock()
	return o
}

// PutBeyond puts a block into the magazine whatever the allowances say. The caller has the device's lock, has entered the
// arena, and rebalances. NeedsDevice is as for freeMagazine.
//
// +checklocks:h.arena.mu
func (h *Heap) PutBeyond(p cuda.Ptr) Outcome {
	f := h.arena.magazine.Load()
	h.arena.takeStock(f)
	b, o := h.forMagazine(f, p)
	if o == Done {
		h.putAlone(f, b)
	}
	return o
}

// putAlone puts a block into the magazine, which is emptied if it is full, and takes stock of it. The caller has taken stock
// and will show.
//
// +checklocks:h.arena.mu
func (h *Heap) putAlone(f *magazine.Magazine, b *heap.Block) {
	if f.Full() {
		h.arena.drain(f)
	}
	f.PutBeyond(b.Addr, b.Requested, f.Recent(b.Mark))
	h.arena.takeStock(f)
}

// forMagazine finds a block that may be put into the magazine.
//
// +checklocks:h.arena.mu
func (h *Heap) forMagazine(f *magazine.Magazine, p cuda.Ptr) (*heap.Block, Outcome) {
	id, _, known := h.blocks.Lookup(uint64(p))
	if !known || f.Has(uint64(p)) {
		return nil, Unknown
	}
	b := h.blocks.At(id)
	if b.State != heap.Used || b.Uses != 0 || b.Tag != 0 || h.blocks.Stacks.Of(id) != 0 || !h.arena.health.Quick() || h.class != f.ClassOf(b.Requested) {
		return nil, NeedsDevice
	}
	return b, Done
}
