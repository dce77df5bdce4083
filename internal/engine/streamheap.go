package engine

import (
	"errors"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine/arena"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/memory"
)

// streamHeap is what one (pool, stream, size class) owns: addresses, the chunks mapped there, the blocks. Requests that are met
// from cache and most frees end in package arena; the functions here are for what needs the device's lock. The arena's lock
// guards blocks, gauges and what follows them.
type streamHeap struct {
	arena  *arena.Arena
	hot    *arena.Heap // works on the same blocks and gauges
	dev    *Device
	pool   *Pool
	stream *Stream
	class  int
	index  int32 // in poolTable.heaps

	blocks *heap.Heap
	gauges *quota.Class // the arena's for this class
	// backing is what it has of the pool's memory, held its physical memory in bytes. Changed only by holders of Device.mu.
	backing heapBacking
	held    uint64
	// paused is what of its addresses has paused memory, in address order, and pausedBytes how much of that blocks have.
	// Changed only by holders of Device.mu.
	paused           pausedRanges
	pausedBytes      int64
	worked           throttleMark // guarded by Device.mu
	requestsUnderWay int          // guarded by Device.mu: requests in the reclaim stages, which keep the stream heap from being dissolved
}

// round is the size of the block that a request of n bytes gets.
func (p *Pool) round(n uint64) uint64 { return (n + p.mask) &^ p.mask }

// maxRequest bounds a request, far above any device's memory, so that sizes never overflow.
const maxRequest = 1 << 46

// Alloc hands out size bytes, aligned to 512 bytes, that work queued on the stream from now on may use. Size 0 is a valid
// request and returns null. The error is an *OutOfMemoryError when the reclaim stages ended, else a driver's error.
//
// The stream must exist until the block is freed, unless the free names another stream (Allocator.FreeOn). It may be destroyed
// right after the free. A stream that is being captured must have been announced (Captures.Begin): a request that is met from
// cache makes no driver call, so it would be given memory that is not pinned.
func (d *Device) Alloc(size uint64, st *Stream) (cuda.Ptr, error) {
	p := st.poolOn(&d.gpu)
	var by origin
	if catch := d.catch.Load(); catch != nil {
		by.stack = (*catch)(size)
	}
	addr, err := p.alloc(size, st, by)
	for err != nil && replaced(p, st, err) {
		p = st.poolOn(&d.gpu)
		addr, err = p.alloc(size, st, by)
	}
	return addr, err
}

// poolOn is the pool of the device that the stream's requests go to.
func (t *Stream) poolOn(g *gpu) *Pool {
	if p := t.route.Load(); p != nil && &p.dev.gpu == g {
		return p
	}
	return g.pool0
}

// replaced reports whether a request of the stream failed because the pool that it had found as the stream's was released
// meanwhile: another thread ended the stream's capture, and with it the pool.
func replaced(p *Pool, st *Stream, err error) bool {
	released := &releasedError{}
	return errors.As(err, &released) && st.poolOn(&p.dev.gpu) != p
}

// Alloc hands out memory of the pool; see Device.Alloc.
func (p *Pool) Alloc(size uint64, st *Stream) (cuda.Ptr, error) {
	var by origin
	if catch := p.dev.catch.Load(); catch != nil {
		by.stack = (*catch)(size)
	}
	return p.alloc(size, st, by)
}

// alloc hands out memory for an origin.
func (p *Pool) alloc(size uint64, st *Stream, by origin) (cuda.Ptr, error) {
	if size == 0 {
		return 0, nil
	}
	d := p.dev
	n := p.round(size)
	if s := p.heaps.of(st, classOf(n)); s != nil && size <= maxRequest && d.health.Quick() {
		if addr := s.hot.Alloc(size, n, by.label, by.stack); addr != 0 {
			return addr, nil
		}
	}
	return p.allocSlow(size, n, st, by)
}

// allocCached is alloc as far as it goes without a wait and without a driver call; 0 where that is not enough.
func (p *Pool) allocCached(size uint64, st *Stream, by origin) cuda.Ptr {
	d := p.dev
	n := p.round(size)
	s := p.heaps.of(st, classOf(n))
	if s == nil || size-1 >= maxRequest || !d.health.Quick() {
		return 0
	}
	return s.hot.TryAlloc(size, n, by.label, by.stack)
}

// freePtr takes back a block. behind is the stream heap's stream where that was named, else nil.
func (s *streamHeap) freePtr(p cuda.Ptr, behind *Stream) error {
	switch o := s.hot.Free(p); o {
	case arena.Done:
		return nil
	case arena.NeedsQuota:
		if s.freeBeyond(p) {
			return nil
		}
		fallthrough
	case arena.NeedsDevice:
		return s.freeSlow(p, FreeOptions{Stream: behind})
	case arena.Pending:
		return &memory.PointerError{Op: "free", Ptr: p, Detail: waitsDetail}
	}
	return &memory.PointerError{Op: "free", Ptr: p}
}

const waitsDetail = "it was freed already and waits for other streams"

// freeBeyond puts a block into the magazine by which an allowance is exceeded, and reports whether it was for the magazine
// still.
func (s *streamHeap) freeBeyond(p cuda.Ptr) bool {
	d := s.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	s.arena.Enter()
	done := s.hot.PutBeyond(p) == arena.Done
	if done {
		d.state.phys.rebalance(s, nil)
	}
	s.arena.Unlock()
	_, _ = limitCache(d) // it is not the free's
	return done
}

// freeSlow takes back a block that other streams use, or when history, statistics or a broken context want attention.
func (s *streamHeap) freeSlow(p cuda.Ptr, o FreeOptions) error {
	d := s.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	s.arena.Lock()
	id, _, ok := s.blocks.Lookup(uint64(p))
	if !ok || s.blocks.At(id).State != heap.Used {
		s.arena.Unlock()
		return &memory.PointerError{Op: "free", Ptr: p, Detail: "it was freed already"}
	}
	err := d.state.frees.free(s, id, o)
	d.state.phys.rebalance(s, nil)
	s.arena.Unlock()
	_, _ = limitCache(d) // it is not the free's
	return err
}

// free takes back a used block, all but rebalancing the statistics: in the order of its own stream, or of another one
// (o.Stream), and then its own is not looked at. An error is for the caller's information: the block is given back all the
// same. The caller holds Device.mu and the arena's lock.
//
// +checklocks:fr.gpu.mu
func (fr *frees) free(s *streamHeap, id heap.ID, o FreeOptions) error {
	b, behind := s.blocks.At(id), o.Stream
	n, requested := b.Size, b.Requested
	e := s.event(event.FreeRequested, id, o.Stack, o.Thread)
	fr.gpu.record(e)
	owner := s.stream
	if t := fr.uses.borrower(b.Uses); t != nil {
		owner, b.Uses = t, fr.uses.drop(b.Uses, t)
		if behind == nil {
			behind = t
		}
	} else if behind == s.stream {
		behind = nil
	}
	if x := fr.exports[cuda.Ptr(b.Addr)]; x != nil {
		x.end()
	}
	stamp := s.stream.timeline.Epoch()
	if behind != nil {
		fr.streams.enlist(behind)
		b.Uses = fr.uses.add(b.Uses, behind)
		stamp = s.lastMark()
	}
	if b.Uses != 0 && fr.gpu.health.Broken() == nil {
		uses := fr.uses.take(b.Uses)
		b.Uses = 0
		if f, err := fr.parkUses(s, id, stamp, uses); len(f.waits) > 0 {
			f.owner, f.stack, f.thread = owner, e.Stack, e.Thread
			s.blocks.Park(id)
			s.paused.noteParked(s.blocks.At(id))
			s.gauges.Park(requested, n)
			fr.pending = append(fr.pending, f)
			fr.gpu.health.SetWaiting(true)
			if behind == nil {
				s.hot.NoteFree(n)
			}
			return err
		}
	}
	back := fr.takeBack(s, id, stamp)
	s.gauges.Park(requested, n)
	s.gauges.Unpark(n, back, s.blocks.FreeBlocks)
	if behind == nil {
		s.hot.NoteFree(n)
	}
	e.Kind = event.FreeCompleted
	fr.gpu.record(e)
	return nil
}

// recordStream notes that another stream uses the block.
func (s *streamHeap) recordStream(p cuda.Ptr, t *Stream) error {
	d := s.dev
	if t == s.stream {
		switch s.hot.UsedAlone(p) {
		case arena.Done:
			return nil
		case arena.Unknown:
			return &memory.PointerError{Op: "record stream", Ptr: p}
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	s.arena.Lock()
	defer s.arena.Unlock()
	id, _, ok := s.blocks.Lookup(uint64(p))
	if !ok || s.blocks.At(id).State != heap.Used {
		return &memory.PointerError{Op: "record stream", Ptr: p}
	}
	if b := s.blocks.At(id); t != s.streamOf(b) {
		d.state.streams.enlist(t)
		b.Uses = d.state.frees.uses.add(b.Uses, t)
	}
	return nil
}
