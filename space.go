package cistern

import (
	"math"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/internal/vm"
)

// lane is what one (pool, stream) has: a space for each size class, one lock over them and their statistics. A program
// uses a stream from one thread at a time as a rule, so the lock is nearly always free.
type lane struct {
	mu      laneMutex
	quota   quota.Arena
	refs    int  // guarded by Device.mu: spaces
	planned bool // guarded by Device.mu: locked by Device.plan
	// spaces by class, nil where there is none. Guarded by mu.
	spaces [quota.NumClasses]*space
}

// space is what one (pool, stream, size class) owns: addresses, the chunks mapped there, the blocks. Its methods in
// this file are the hot path: one lock, no driver call, no allocation of Go memory.
type space struct {
	*lane
	dev    *Device
	pool   *Pool
	stream *Stream
	class  int
	index  int32 // in Device.spaces
	// capture is the number of the capture of the stream that the free blocks were sorted for, 0 while there is none.
	// Guarded by mu, changed only by holders of Device.mu.
	capture uint32

	heap   *heap.Heap   // guarded by mu
	area   *vm.Area     // guarded by mu; nil where the pool is made of segments
	gauges *quota.Class // guarded by mu: the lane's for this class
	// sinceClose counts the bytes freed since the stream's epoch was last closed from here. Guarded by mu.
	sinceClose uint64
	// requests counts, modulo its size, the requests made while frees waited for other streams. Guarded by mu.
	requests uint32
	// chunkBytes is the physical memory mapped here. Guarded by mu, changed only by holders of Device.mu.
	chunkBytes uint64
	// absent is what of its addresses has paused memory, in address order, and pausedBytes how much of that blocks have.
	// Guarded by mu, changed only by holders of Device.mu.
	absent      []*absence
	pausedBytes int64
	climbs      int // guarded by Device.mu: requests on the ladder, which keep the space from being dissolved
}

// round is the size of the block that a request of n bytes gets.
func (p *Pool) round(n uint64) uint64 { return (n + p.mask) &^ p.mask }

// maxRequest bounds a request, far above any device's memory, so that sizes never overflow.
const maxRequest = 1 << 46

// Alloc hands out size bytes, aligned to 512 bytes, that work queued on the stream from now on may use. Size 0 is a
// valid request and returns null. The error is an *OutOfMemoryError when the ladder ended, else a driver's error.
//
// The stream must exist until the block is freed, unless that is done behind another stream (Allocator.FreeOn); it may
// be destroyed right after that. A stream that is being captured
// must have been announced (BeginCapture): a request that is met from cache asks the driver nothing, so it would be
// given memory that is not pinned.
func (d *Device) Alloc(size uint64, st *Stream) (cuda.Ptr, error) {
	p := st.route.Load()
	if p == nil || p.dev != d {
		p = d.pool0
	}
	var by origin
	if catch := d.catch.Load(); catch != nil {
		by.stack = (*catch)(size)
	}
	return p.alloc(size, st, by)
}

// Alloc hands out memory of the pool; see Device.Alloc.
func (p *Pool) Alloc(size uint64, st *Stream) (cuda.Ptr, error) {
	var by origin
	if catch := p.dev.catch.Load(); catch != nil {
		by.stack = (*catch)(size)
	}
	return p.alloc(size, st, by)
}

// alloc hands out memory on somebody's behalf.
func (p *Pool) alloc(size uint64, st *Stream, by origin) (cuda.Ptr, error) {
	if size == 0 {
		return 0, nil
	}
	d := p.dev
	n := p.round(size)
	if s := p.spaceFor(st, d.classOf(n)); s != nil && size <= maxRequest && d.health.Quick() {
		capture := st.timeline.Capture()
		s.mu.Lock()
		if addr := s.fit(size, n, capture, by); addr != 0 {
			s.mu.Unlock()
			return addr, nil
		}
		s.mu.Unlock()
	}
	return p.allocSlow(size, n, st, by)
}

// allocCached is alloc as far as it goes without waiting for anybody and without a driver call; 0 where that is not enough.
func (p *Pool) allocCached(size uint64, st *Stream, by origin) cuda.Ptr {
	d := p.dev
	n := p.round(size)
	s := p.spaceFor(st, d.classOf(n))
	if s == nil || size-1 >= maxRequest || !d.health.Quick() {
		return 0
	}
	capture := st.timeline.Capture()
	if !s.mu.TryLock() {
		return 0
	}
	defer s.mu.Unlock()
	return s.fit(size, n, capture, by)
}

// fit hands out a free block of the space; 0 where there is none, or more has to be done first. The caller holds the lane's
// lock.
func (s *space) fit(size, n uint64, capture uint32, by origin) cuda.Ptr {
	if capture != s.capture || !s.dev.health.Quick() || !s.quota.RoomForAlloc(s.class, size, n) || s.collectDue() {
		return 0
	}
	id := s.heap.Take(n, size)
	if id == 0 {
		return 0
	}
	s.gauges.Alloc(size, n, s.heap.FreeBlocks)
	b := s.heap.At(id)
	b.Tag, b.Capture = by.label, capture
	if by.stack != 0 {
		s.heap.SetStack(id, by.stack)
	}
	return cuda.Ptr(b.Addr)
}

// collectDue reports whether this request should go the slow way so that frees which wait for other streams are
// collected: one in collectEvery does while there are such frees. PyTorch polls at every request; a poll costs a lock
// and a driver call.
func (s *space) collectDue() bool {
	if !s.dev.health.Waiting() {
		return false
	}
	s.requests++
	return s.requests%collectEvery == 0
}

const collectEvery = 16

// freePtr takes back a block. behind is the space's stream where that was named, else nil.
func (s *space) freePtr(p cuda.Ptr, behind *Stream) error {
	d := s.dev
	if f := s.stream.timeline.Front(); f != nil && s.pool == d.pool0 {
		if done, err := s.freeFront(f, p); done {
			return err
		}
	}
	s.mu.Lock()
	id, place, ok := s.heap.Lookup(uint64(p))
	if !ok {
		s.mu.Unlock()
		return &PointerError{Op: "free", Ptr: p}
	}
	b := s.heap.At(id)
	if b.State != heap.Used {
		s.mu.Unlock()
		return &PointerError{Op: "free", Ptr: p, Detail: waitsDetail}
	}
	n, requested := b.Size, b.Requested
	if b.Uses != 0 || s.capture != 0 || !d.health.Quick() || !s.quota.RoomForFree(s.class, n, s.heap.FreeNeighbours(id)) {
		s.mu.Unlock()
		return s.freeSlow(p, FreeOptions{Stream: behind})
	}
	s.heap.FreeAt(id, place, s.stream.timeline.Epoch())
	s.gauges.Free(requested, n, s.heap.FreeBlocks)
	s.noteFree(n)
	s.mu.Unlock()
	return nil
}

const waitsDetail = "it was freed already and waits for other streams"

// noteFree closes the stream's epoch where a later taker would otherwise wait too long, or could not wait at all.
func (s *space) noteFree(n uint64) {
	t := s.stream
	if t.timeline.Eager() {
		t.timeline.Freed()
		return
	}
	if !s.dev.manyStreams.Load() {
		return
	}
	if s.sinceClose += n; s.sinceClose >= timeline.CloseBytes && t.timeline.Capture() == 0 {
		s.sinceClose = 0
		t.timeline.Close() // an error is kept by the device; a taker closes the epoch again
	}
}

// untilClose is how many bytes may be given back before noteFree must be told.
func (s *space) untilClose() int64 {
	if !s.dev.manyStreams.Load() {
		return math.MaxInt64
	}
	return timeline.CloseBytes - int64(s.sinceClose)
}

// freeSlow takes back a block that other streams use, or when history, statistics or a broken context want attention.
func (s *space) freeSlow(p cuda.Ptr, o FreeOptions) error {
	d := s.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	s.mu.Lock()
	id, _, ok := s.heap.Lookup(uint64(p))
	if !ok || s.heap.At(id).State != heap.Used {
		s.mu.Unlock()
		return &PointerError{Op: "free", Ptr: p, Detail: "it was freed already"}
	}
	err := d.freeLocked(s, id, o)
	d.rebalance(s, nil)
	s.mu.Unlock()
	return err
}

// freeLocked takes back a used block, all but settling the statistics: in the order of its own stream, or of another one
// (o.Stream), and then its own is not looked at. An error is for the caller's information: the block is given back all the
// same. The caller holds Device.mu and the lane's lock.
//
// +checklocks:d.mu
func (d *Device) freeLocked(s *space, id heap.ID, o FreeOptions) error {
	b, behind := s.heap.At(id), o.Stream
	n, requested := b.Size, b.Requested
	e := s.event(event.FreeRequested, id, o.Stack, o.Thread)
	d.record(e)
	owner := s.stream
	if t := d.borrower(b.Uses); t != nil {
		owner, b.Uses = t, d.dropUse(b.Uses, t)
		if behind == nil {
			behind = t
		}
	} else if behind == s.stream {
		behind = nil
	}
	if x := d.exports[cuda.Ptr(b.Addr)]; x != nil {
		x.end()
	}
	stamp := s.stream.timeline.Epoch()
	if behind != nil {
		d.enlist(behind)
		b.Uses = d.addUse(b.Uses, behind)
		stamp = s.lastMark()
	}
	if b.Uses != 0 && d.health.Broken() == nil {
		uses := d.takeUses(b.Uses)
		b.Uses = 0
		if f, err := d.parkUses(s, id, stamp, uses); len(f.waits) > 0 {
			f.owner, f.stack, f.thread = owner, e.Stack, e.Thread
			s.heap.Park(id)
			s.noteParked(s.heap.At(id))
			s.gauges.Park(requested, n)
			d.pending = append(d.pending, f)
			d.health.SetWaiting(true)
			if behind == nil {
				s.noteFree(n)
			}
			return err
		}
	}
	back := d.takeBack(s, id, stamp)
	s.gauges.Park(requested, n)
	s.gauges.Unpark(n, back, s.heap.FreeBlocks)
	if behind == nil {
		s.noteFree(n)
	}
	e.Kind = event.FreeCompleted
	d.record(e)
	return nil
}

// recordStream notes that another stream uses the block.
func (s *space) recordStream(p cuda.Ptr, t *Stream) error {
	d := s.dev
	if t == s.stream {
		if lent, err := s.mayBeLent(p, "record stream"); !lent {
			return err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	id, _, ok := s.heap.Lookup(uint64(p))
	if !ok || s.heap.At(id).State != heap.Used {
		return &PointerError{Op: "record stream", Ptr: p}
	}
	if b := s.heap.At(id); t != s.streamOf(b) {
		d.enlist(t)
		b.Uses = d.addUse(b.Uses, t)
	}
	return nil
}

// mayBeLent reports whether a block that is out may be another stream's: Device.mu is needed to know.
func (s *space) mayBeLent(p cuda.Ptr, op string) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id, _, ok := s.heap.Lookup(uint64(p))
	if !ok || s.heap.At(id).State != heap.Used {
		return false, &PointerError{Op: op, Ptr: p}
	}
	return s.heap.At(id).Uses != 0, nil
}
