package arena

import (
	"math"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/internal/magazine"
)

// Heap is one size class of an arena, as far as the hot path needs it.
type Heap struct {
	arena  *Arena
	class  int
	stream *timeline.Stream

	// Capture is the number of the capture of the stream that the free blocks were sorted for, 0 while there is none. The
	// arena's lock guards it; it is changed only by holders of the device's lock.
	Capture uint32
	blocks  *heap.Heap   // guarded by arena.mu
	gauges  *quota.Class // guarded by arena.mu: the arena's of the class
	// sinceClose counts the bytes freed since the stream's epoch was last closed from here. Guarded by arena.mu.
	sinceClose uint64
	// requests counts, modulo its size, the requests made while frees waited for other streams. Guarded by arena.mu.
	requests uint32
}

// Outcome is what became of an operation on a block.
type Outcome uint8

const (
	Done        Outcome = iota
	Unknown             // no block that is in use starts there
	Pending             // the block was freed before, and waits for other streams
	NeedsDevice         // nothing was changed: the caller carries the operation out with the device's lock
	NeedsQuota          // likewise: an allowance would be exceeded, and Heap.PutBeyond is called with the device's lock
)

// Alloc hands out a free block of n bytes for a request of size bytes; 0 where there is none, or more has to be done first.
func (h *Heap) Alloc(size, n uint64, tag, stack uint32) cuda.Ptr {
	h.arena.Lock()
	p := h.fit(size, n, tag, stack)
	h.arena.Unlock()
	return p
}

// TryAlloc is Alloc where no thread has to be waited for.
//
// +checklocksignore: the analyser does not know TryLock
func (h *Heap) TryAlloc(size, n uint64, tag, stack uint32) cuda.Ptr {
	if !h.arena.TryLock() {
		return 0
	}
	defer h.arena.Unlock()
	return h.fit(size, n, tag, stack)
}

// +checklocks:h.arena.mu
func (h *Heap) fit(size, n uint64, tag, stack uint32) cuda.Ptr {
	capture := h.stream.Capture()
	if capture != h.Capture || !h.arena.health.Quick() || !h.arena.Quota.RoomForAlloc(h.class, size, n) || h.collectDue() {
		return 0
	}
	id := h.blocks.Take(n, size)
	if id == 0 {
		return 0
	}
	h.gauges.Alloc(size, n, h.blocks.FreeBlocks)
	b := h.blocks.At(id)
	b.Tag, b.Capture = tag, capture
	if stack != 0 {
		h.blocks.Stacks.Set(id, stack)
	}
	return cuda.Ptr(b.Addr)
}

// collectDue reports whether this request should go the slow way so that frees which wait for other streams are
// collected: one in PollEvery does while there are such frees. PyTorch polls at every request; a poll costs a lock
// and a driver call.
//
// +checklocks:h.arena.mu
func (h *Heap) collectDue() bool {
	if !h.arena.health.Waiting() {
		return false
	}
	h.requests++
	return h.requests%magazine.PollEvery == 0
}

// Free takes a block back, in the order of its stream.
func (h *Heap) Free(p cuda.Ptr) Outcome {
	a := h.arena
	if f := a.magazine.Load(); f != nil {
		if o := h.freeMagazine(f, p); o != NeedsDevice {
			return o
		}
	}
	a.Lock()
	id, place, ok := h.blocks.Lookup(uint64(p))
	if !ok {
		a.Unlock()
		return Unknown
	}
	b := h.blocks.At(id)
	if b.State != heap.Used {
		a.Unlock()
		return Pending
	}
	n, requested := b.Size, b.Requested
	if b.Uses != 0 || h.Capture != 0 || !a.health.Quick() || !a.Quota.RoomForFree(h.class, n, h.blocks.FreeNeighbours(id)) {
		a.Unlock()
		return NeedsDevice
	}
	h.blocks.FreeAt(id, place, h.stream.Epoch())
	h.gauges.Free(requested, n, h.blocks.FreeBlocks)
	h.NoteFree(n)
	a.Unlock()
	return Done
}

// NoteFree notes that n bytes came back in the order of the stream. It closes the stream's epoch where a later taker would
// otherwise wait too long, or could not wait at all. The caller holds the arena's lock.
func (h *Heap) NoteFree(n uint64) {
	t := h.stream
	if t.Queue.Eager() {
		t.Freed()
		return
	}
	if !t.Device().Shared() {
		return
	}
	if h.sinceClose += n; h.sinceClose >= timeline.CloseBytes && t.Capture() == 0 {
		h.sinceClose = 0
		t.Close() // an error is kept by the device; a taker closes the epoch again
	}
}

// untilClose is how many bytes may come back before NoteFree must be called. The caller holds the arena's lock.
func (h *Heap) untilClose() int64 {
	if !h.stream.Device().Shared() {
		return math.MaxInt64
	}
	return timeline.CloseBytes - int64(h.sinceClose)
}

// UsedAlone says whether the block is in use and no other stream uses it (Done). The device's lock guards which other streams
// use or borrowed it.
func (h *Heap) UsedAlone(p cuda.Ptr) Outcome {
	h.arena.Lock()
	defer h.arena.Unlock()
	id, _, ok := h.blocks.Lookup(uint64(p))
	switch {
	case !ok || h.blocks.At(id).State != heap.Used:
		return Unknown
	case h.blocks.At(id).Uses != 0:
		return NeedsDevice
	}
	return Done
}
