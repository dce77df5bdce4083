package engine

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/heap"
)

// Routes of streams to pools, and captures of streams into graphs. A graph uses the memory of its capture at every launch, on
// any stream. So a capture is given only memory in host order, and the pool that it came from is pinned.
//
// Captures are numbered. A stream heap knows for which capture its free blocks were sorted (arena.Heap.Capture). Blocks that
// the GPU is not known to be done with are held back. They are regained when it is, or when the stream asks for them after the
// capture. A block that a capture was given and gives back is free for it at once, in the order in which the graph runs. No
// queued work uses it: its mark is epoch 0.

// route is a pool that a stream allocates from until it is undone.
type route struct {
	pool    *Pool
	capture bool // it is that of Captures.Begin
}

// Route has the stream allocate from a pool of the device until Unroute. Frees do not depend on it: they always go where the
// block came from. Routes nest: the last one counts.
func (ca *Captures) Route(st *Stream, p *Pool) error {
	ca.gpu.mu.Lock()
	defer ca.gpu.mu.Unlock()
	return ca.route(st, p, false)
}

// +checklocks:ca.gpu.mu
func (ca *Captures) route(st *Stream, p *Pool, capture bool) error {
	if p.released {
		return fmt.Errorf("pool {%d, %d} was released", p.id[0], p.id[1])
	}
	if &p.dev.gpu != ca.gpu || st.gpu != ca.gpu {
		return fmt.Errorf("device %d: the pool belongs to device %d, the stream to device %d", ca.gpu.id, p.dev.id, st.gpu.id)
	}
	ca.streams.enlist(st)
	st.routes = append(st.routes, route{p, capture})
	st.setRoute(p)
	p.users++
	return nil
}

// setRoute changes where the stream allocates from; nil is the default pool.
//
// +checklocks:t.gpu.mu
func (t *Stream) setRoute(p *Pool) {
	t.route.Store(p)
	if f := t.timeline.Magazine(); f != nil {
		f.SetRouted(p != nil)
	}
}

// Unroute ends the last Route that was not ended.
func (ca *Captures) Unroute(st *Stream) error {
	ca.gpu.mu.Lock()
	defer ca.gpu.mu.Unlock()
	return ca.unroute(st, false)
}

// +checklocks:ca.gpu.mu
func (ca *Captures) unroute(st *Stream, capture bool) error {
	for i := len(st.routes) - 1; i >= 0; i-- {
		if st.routes[i].capture != capture {
			continue
		}
		st.routes[i].pool.users--
		st.routes = append(st.routes[:i], st.routes[i+1:]...)
		var p *Pool
		if n := len(st.routes); n > 0 {
			p = st.routes[n-1].pool
		}
		st.setRoute(p)
		return nil
	}
	return fmt.Errorf("stream %d is not routed to a pool", st.ID().ID)
}

// Begin announces that the stream is being captured into a graph whose memory comes from the pool. The pool is pinned from now
// on until Release, and so is every other pool that the stream is given memory from until End. Until End nothing waits for, or
// takes memory from, the stream, nor waits for the whole context, which would invalidate the capture. If such a wait has
// started, Begin waits until it is over. Several streams may be captured into one pool at a time.
//
// Begin may be called before the capture itself begins, or while it is under way. Before, it waits until the GPU is done with
// the memory that the stream has given back to the pool. Under way it cannot: memory that is not known to be done with is left
// alone, and the capture gets new memory instead. MarkFrees, called before the capture begins, makes that known.
func (ca *Captures) Begin(st *Stream, p *Pool) error {
	if p == ca.gpu.pool0 {
		return errNeedsPool
	}
	ca.gpu.mu.Lock()
	defer ca.gpu.mu.Unlock()
	if st.timeline.Capture() != 0 {
		return errCapturedAlready(st)
	}
	status, _, err := ca.gpu.drv.StreamCapture(ca.gpu.id, st.Handle())
	underWay := errors.Is(err, cuda.ErrStreamCaptureImplicit) || err == nil && status != cuda.CaptureNone
	if err != nil && !underWay {
		return ca.gpu.health.Failed(err)
	}
	if err := ca.route(st, p, true); err != nil {
		return err
	}
	if !underWay {
		if err := ca.gpu.await(ca.lastFrees(p, st)); err != nil {
			ca.unroute(st, true)
			return err
		}
	}
	ca.gpu.mu.Unlock()
	ca.gpu.timeline.Gate().Announce()
	ca.gpu.mu.Lock()
	if st.timeline.Capture() != 0 { // another thread was faster
		ca.unroute(st, true)
		ca.gpu.timeline.Gate().End()
		return errCapturedAlready(st)
	}
	if !underWay {
		ca.streams.markFrees() // where that fails, the capture gets new memory
	}
	if ca.number++; ca.number == 0 {
		ca.number = 1
	}
	// Held, so that no thread is in the middle of moving memory of the pool or recording on the stream.
	st.timeline.SetCapture(ca.number)
	ca.streams.capturing = append(ca.streams.capturing, st)
	p.pinned = true
	return nil
}

func errCapturedAlready(st *Stream) error {
	return fmt.Errorf("stream %d is being captured already", st.ID().ID)
}

var errNeedsPool = errors.New("a capture needs a pool of its own: its memory is pinned until the pool is released")

// MarkFrees records, on each stream, an event behind the work that may use memory given back until now. Later, also while the
// stream is being captured, the event shows whether the GPU is done with that memory. MarkFrees waits for nothing. It is for
// programs that know that captures will begin but not yet of which streams.
func (ca *Captures) MarkFrees() error {
	ca.gpu.mu.Lock()
	defer ca.gpu.mu.Unlock()
	return ca.streams.markFrees()
}

// +checklocks:ss.gpu.mu
func (ss *streamTable) markFrees() error {
	var first error
	for t := range ss.live() {
		if !t.active || !t.timeline.Queue.Durable() { // of others every free was marked
			continue
		}
		if err := t.timeline.Close(); err != nil && !timeline.Unordered(err) && first == nil {
			first = err
		}
	}
	return first
}

// lastFrees is until when the stream uses free memory of the pool.
//
// +checklocks:ca.gpu.mu
func (ca *Captures) lastFrees(p *Pool, st *Stream) (waits timeline.Waits) {
	for class := range quota.NumClasses {
		if s := p.heaps.of(st, class); s != nil {
			s.arena.Lock()
			s.blocks.FreeBins.Each(heap.Align, func(_ heap.ID, b *heap.Block) bool {
				if b.Stamp > 0 {
					waits.Add(&st.timeline, b.Stamp)
				}
				return true
			})
			s.arena.Unlock()
		}
	}
	for _, f := range ca.held.all {
		if f.heap.pool == p && f.heap.stream == st {
			waits.Add(&st.timeline, f.heap.blocks.At(f.block).Stamp)
		}
	}
	return waits
}

// heldFree is a free block that a capture must not be given.
type heldFree struct {
	heap  *streamHeap
	block heap.ID
}

// sort prepares the stream heaps of a pool and stream for a capture of the stream: the pool is pinned, and what the GPU is
// not known to be done with is held back. The caller holds Device.mu and the arena's lock.
//
// +checklocks:hl.gpu.mu
func (hl *heldFrees) sort(p *Pool, st *Stream) error {
	capture := st.timeline.Capture()
	if capture != 0 {
		if p == hl.gpu.pool0 {
			return errNeedsPool
		}
		p.pinned = true
	}
	for class := range quota.NumClasses {
		s := p.heaps.of(st, class)
		if s == nil || s.hot.Capture == capture {
			continue
		}
		s.hot.Capture = capture
		if capture == 0 {
			continue
		}
		n := len(hl.all)
		s.blocks.FreeBins.Each(heap.Align, func(id heap.ID, b *heap.Block) bool {
			if !st.timeline.IsOver(b.Stamp) {
				hl.all = append(hl.all, heldFree{s, id})
			}
			return true
		})
		for _, f := range hl.all[n:] {
			s.blocks.Hold(f.block)
		}
	}
	return nil
}

// takeBack makes a used or pending block free, as of an epoch of its stream, and returns how many of its bytes are free
// memory now: what of it is paused is not. The caller holds Device.mu and the arena's lock.
//
// +checklocks:fr.gpu.mu
func (fr *frees) takeBack(s *streamHeap, id heap.ID, stamp uint64) (back uint64) {
	addr, size := s.blocks.At(id).Addr, s.blocks.At(id).Size
	held := false
	switch {
	case s.hot.Capture == 0:
		id = s.blocks.Free(id, stamp)
	case s.blocks.At(id).Capture == s.hot.Capture:
		id = s.blocks.Free(id, 0)
	default:
		s.blocks.FreeHeld(id, stamp)
		held = true
	}
	back = size
	if len(s.paused) > 0 {
		back -= fr.paused.decommit(s, id, addr, size, held)
	} else if held {
		fr.held.all = append(fr.held.all, heldFree{s, id})
	}
	return back
}

// regain lets free blocks go that were held back: those that the GPU is known to be done with; and, of streams that are
// no longer captured, those that a request of the stream itself may have, held's, those of the whole pool, which may be
// nil, and those of pools that are not pinned. The others stay apart from what captures gave back, for the next capture.
// The caller holds Device.mu and held's lock.
//
// +checklocks:hl.gpu.mu
func (hl *heldFrees) regain(held *streamHeap, whole *Pool) {
	keep := hl.all[:0]
	for _, f := range hl.all {
		s := f.heap
		s.lockBeside(held)
		if s.hot.Capture == 0 && (held.in(s.arena) || s.pool.owner() == whole || !s.pool.pinned) || s.stream.timeline.IsOver(s.blocks.At(f.block).Stamp) {
			s.blocks.Regain(f.block)
			s.gauges.SetFree(s.blocks.FreeBlocks, 0)
		} else {
			keep = append(keep, f)
		}
		s.unlockBeside(held)
	}
	hl.all = keep
}

// End ends what Begin announced. Call it after the capture itself has ended.
func (ca *Captures) End(st *Stream) error {
	ca.gpu.mu.Lock()
	if st.timeline.Capture() == 0 {
		ca.gpu.mu.Unlock()
		return fmt.Errorf("stream %d: no capture was announced", st.ID().ID)
	}
	ca.unroute(st, true)
	st.timeline.SetCapture(0)
	st.order = nil
	ca.streams.capturing = slices.DeleteFunc(ca.streams.capturing, func(t *Stream) bool { return t == st })
	ca.gpu.timeline.Gate().End()
	st.timeline.Close() // of what was given back meanwhile; after an error a later use closes it
	for _, s := range ca.pools.heaps {
		if s != nil && s.stream == st && s.pool != ca.gpu.pool0 {
			s.arena.Lock()
			s.hot.Capture = 0
			s.arena.Unlock()
		}
	}
	ca.gpu.mu.Unlock()
	return ca.unpin()
}

// unpin lets the memory of released pools go that graphs used, once the GPU is done with all that was queued.
func (ca *Captures) unpin() error {
	ca.gpu.mu.Lock()
	defer ca.gpu.mu.Unlock()
	var pools []*Pool
	for _, p := range ca.pools.ending {
		for _, x := range p.parts() {
			if x.pinned {
				pools = append(pools, x)
			}
		}
	}
	if len(pools) == 0 || ca.gpu.timeline.Gate().Announced() {
		return nil // the end of the capture does it
	}
	if ca.gpu.health.Broken() == nil {
		ca.gpu.mu.Unlock()
		err := ca.gpu.timeline.SyncContext(ca.gpu.id)
		ca.gpu.mu.Lock()
		if err == timeline.ErrCapturing {
			return nil // likewise
		}
		if err != nil {
			return ca.gpu.health.Failed(err) // they stay pinned
		}
	}
	for _, p := range pools {
		p.pinned = false
	}
	ca.paused.compactAll(pools)
	ca.held.regain(nil, nil)
	ca.endings.sweep()
	return nil
}
