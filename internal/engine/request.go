package engine

import (
	"errors"
	"fmt"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine/journal"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/engine/views"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/memory"
)

// ordering says what the memory of a request must be ordered behind.
type ordering uint8

const (
	streamOrdered ordering = iota // the work that its stream has queued
	hostOrdered                   // nothing: request.waits is waited for before the block is used
	doneOnly                      // likewise, and its stream cannot be waited for: the GPU must be known to be done with it
)

// request is one request that no free block met on the hot path, on its way through the stages.
type request struct {
	d         *Device
	steps     reclaimer // by which memory is given back
	s         *streamHeap
	n         uint64 // rounded bytes, and what the alignment may take beyond
	size      uint64 // bytes asked for
	align     uint64 // 0: as every block is
	by        origin
	order     ordering
	alone     bool // no other stream can be waited for
	tight     bool // a segment of just the size will do
	waits     timeline.Waits
	observers observerWait  // for threads that are notifying observers
	met       memory.Stages // the stage that met the request
	from      *streamHeap   // the stream heap the block is in: s, or under pressure another of the same pool and stream
}

// allocSlow meets a request that the hot path could not, stage by stage. See memory.Stages for the order.
func (p *Pool) allocSlow(size, n uint64, st *Stream, by origin) (cuda.Ptr, error) {
	ptr, _, err := p.obtain(request{n: n, size: size, by: by}, st)
	return ptr, err
}

// obtain takes a request through the stages. The waits are for the caller, where the request is host-ordered.
func (p *Pool) obtain(what request, st *Stream) (cuda.Ptr, timeline.Waits, error) {
	d := p.dev
	if err := d.health.Broken(); err != nil {
		return 0, nil, err
	}
	var granted grants
	defer granted.done(d.id) // when no lock is held, also if a function that was called panicked
	return obtainLocked(p, what, st, &granted)
}

// obtainLocked is obtain with Device.mu, and returns what the node granted as well.
func obtainLocked(p *Pool, what request, st *Stream, granted *grants) (cuda.Ptr, timeline.Waits, error) {
	d := p.dev
	began := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	defer func() { d.state.phys.glance.slow.Add(uint64(time.Since(began).Microseconds())) }()
	c := d.state.policy.newRequest()
	*c = what
	allocs := d.state.phys.counts.DeviceAllocs
	defer func() {
		*granted = c.steps.grants
		granted.grew(d, allocs)
		d.state.policy.requestOver(c)
	}()
	ptr, err := c.meet(p, st)
	_, _ = limitCache(d) // it is not the request's
	return ptr, c.waits, err
}

// newRequest is a request that is over, or a new one: while there is a history every request takes this way, and is to allocate
// no Go memory.
//
// +checklocks:po.gpu.mu
func (po *policy) newRequest() *request {
	n := len(po.over)
	if n == 0 {
		return new(request)
	}
	c := po.over[n-1]
	po.over = po.over[:n-1]
	return c
}

// +checklocks:po.gpu.mu
func (po *policy) requestOver(c *request) {
	*c = request{} // which may refer to much
	po.over = append(po.over, c)
}

// meet takes a request through the stages. The caller holds Device.mu and nothing else; it is let go meanwhile.
//
// +checklocks:p.dev.gpu.mu
func (c *request) meet(p *Pool, st *Stream) (cuda.Ptr, error) {
	d := p.dev
	d.a.turns.Next()
	c.d, c.steps = d, reclaimer{d: d, log: attempts{drv: d.drv}, allowed: d.opts.Stages | memory.StageFit}
	if c.size > maxRequest {
		c.steps.log.try(memory.StageFit)
		return 0, c.fail(p, st)
	}
	if d.state.pools.dissolving {
		d.state.segments.release(func(x *Pool) bool { return x.released }, false)
		d.state.endings.sweep()
	}
	if d.state.observers.onUnmap != nil && d.state.phys.mem.Stale.Len() > 0 {
		d.state.mover.unmapReady() // of pools that ended, or from before there was an observer
	}
	if p.heaps.of(st, classOf(c.n)) == nil {
		d.state.endings.retire()
	}
	ptr, err := c.reclaim(p, st)
	if ptr == 0 && err == nil && p.spill != nil && c.steps.allowed&memory.StageSpill != 0 {
		ptr, err = c.spill(p, st)
	}
	if ptr == 0 && err == nil {
		err = c.fail(p, st)
	}
	return ptr, err
}

// reclaim takes the stages up to, and without, spill. It returns null and no error where there is no memory. The caller
// holds Device.mu and nothing else; it is let go meanwhile.
//
// +checklocks:c.d.gpu.mu
func (c *request) reclaim(p *Pool, st *Stream) (cuda.Ptr, error) {
	d := c.d
	s, err := p.streamHeap(st, classOf(c.n))
	if err != nil {
		return 0, err
	}
	c.s = s
	s.requestsUnderWay++
	s.arena.Lock()
	defer func() {
		if c.order == doneOnly {
			d.state.held.regain(s, nil)
		}
		s.requestsUnderWay--
		s.arena.Unlock()
	}()
	for {
		id, again, err := c.pass(p, st)
		if id != 0 {
			return c.handOut(id), nil
		}
		if err == nil && again {
			continue
		}
		d.state.phys.rebalanceAll(s, nil)
		if err == nil {
			// Other processes may use what was allocated for the request and is of no use to it now.
			if any, _ := d.state.phys.releaseSpares(); any {
				d.state.phys.rebalanceAll(s, nil)
			}
		}
		return 0, err
	}
}

// pass goes through the stages once, up to the first that met the request, or that gave memory back so that it is worth
// to start over.
//
// +checklocks:c.d.gpu.mu
func (c *request) pass(p *Pool, st *Stream) (id heap.ID, again bool, err error) {
	c.steps.log.oom = nil
	if err := c.d.state.held.sort(p, st); err != nil {
		return 0, false, err
	}
	if c.order != streamOrdered && c.s.hot.Capture != 0 {
		return 0, false, fmt.Errorf("host-ordered memory for stream %d: %w", st.ID().ID, timeline.ErrCapturing)
	}
	if id, err = c.run(); id != 0 || err != nil {
		return id, false, err
	}
	// Frees that wait, free blocks of other streams between live blocks, and steps that call out are left.
	c.setScope()
	if mayComeLate(&c.steps) && c.unlocked(awaitGrant) {
		return 0, true, nil
	}
	if again, err = c.giveBackUnlocked(); again || err != nil {
		return 0, again, err
	}
	if c.tighten() || c.awaitObservers() {
		return 0, true, nil
	}
	if id, err = c.borrow(); id != 0 || err != nil {
		return id, false, err
	}
	if c.callOutUnlocked() {
		return 0, true, nil
	}
	if again, err = c.awaitMore(); again || err != nil {
		return 0, again, err
	}
	return 0, c.unlocked(askNode), nil
}

// mostWaits is how often a request waits for frees before it fails. Other threads may take the memory that it waited for, and
// more may have been freed; a request that nothing can meet must end.
const mostWaits = 5

// awaitMore waits for what was freed since the request last waited.
//
// +checklocks:c.d.gpu.mu
func (c *request) awaitMore() (bool, error) {
	if c.steps.waited == 0 || c.steps.waited >= mostWaits || c.steps.allowed&memory.StageCollect == 0 {
		return false, nil // without a first wait there was nothing to wait for, or it is off
	}
	c.s.arena.Unlock()
	defer c.s.arena.Lock()
	return c.steps.awaitFrees()
}

// setScope sets which memory may be given back for the request: its pool's alone while the pool's own limit is in the way.
//
// +checklocks:c.d.gpu.mu
func (c *request) setScope() {
	p := c.s.pool
	usual, _ := p.backing.sizes(c.n)
	// Memory of one pool helps the other if both are of the device's own memory, or neither is.
	c.steps.scope.pools = func(o *Pool) bool { return p.backing.onDevice() == o.backing.onDevice() }
	c.steps.scope.need, c.steps.scope.heap = usual, c.s
	c.steps.scope.chunks = c.s.backing.wantsChunks(c.steps.scope.limit != nil)
}

// giveBackUnlocked is giveBack with the arena's lock let go.
//
// +checklocks:c.d.gpu.mu
func (c *request) giveBackUnlocked() (bool, error) {
	c.s.arena.Unlock()
	defer c.s.arena.Lock()
	return c.steps.giveBack()
}

// unlocked takes a step with the arena's lock let go.
//
// +checklocks:c.d.gpu.mu
func (c *request) unlocked(step func(*reclaimer) bool) bool {
	c.s.arena.Unlock()
	defer c.s.arena.Lock()
	return step(&c.steps)
}

// callOutUnlocked is callOut with the arena's lock let go.
//
// +checklocks:c.d.gpu.mu
func (c *request) callOutUnlocked() bool {
	var own []*callback
	if ask := c.s.pool.ask; ask != nil {
		own = []*callback{ask}
	}
	c.s.arena.Unlock()
	defer c.s.arena.Lock()
	return c.steps.callOut(own, c.n)
}

// tighten has a segment of just the size do, and reports whether that is less than what was tried.
//
// +checklocks:c.d.gpu.mu
func (c *request) tighten() bool {
	if usual, least := c.s.pool.backing.sizes(c.n); c.tight || least >= usual {
		return false
	}
	c.tight = true
	return true
}

// awaitObservers waits for another thread that is notifying observers of memory, which may do for the request, and reports
// whether there was one. All locks are let go meanwhile.
//
// +checklocks:c.d.gpu.mu
func (c *request) awaitObservers() bool {
	d := c.d
	if len(d.state.observers.publishing) == 0 {
		return false
	}
	if !c.observers.goesOn(d.state.observers.publishing[0], time.Now()) {
		return false
	}
	c.s.arena.Unlock()
	d.state.observers.awaitPublished(&c.observers)
	c.s.arena.Lock()
	return true
}

// fail ends the reclaim stages. The caller holds Device.mu and nothing else.
//
// +checklocks:c.d.gpu.mu
func (c *request) fail(p *Pool, st *Stream) error {
	d := c.d
	d.state.phys.counts.OOMs++
	err := d.state.usage.outOfMemory(p, &c.steps, failed{need: c.n, requested: c.size, by: c.by, heap: c.s})
	err.Stream, err.Handle = st.ID(), st.Handle()
	d.state.streams.enlist(st)
	d.record(event.Event{Kind: event.OOM, Addr: err.DriverFree, Size: c.n, Stream: st.number(), Pool: p.number,
		Tag: uint16(c.by.label), Library: journal.LibraryOf(c.by.label), Stack: c.by.stack, Thread: c.by.thread})
	return err
}

// run takes the request through the stages that need no lock to be let go. It returns a block, or an error that is not out of
// memory, or neither. The caller holds Device.mu and the arena's lock.
//
// +checklocks:c.d.gpu.mu
func (c *request) run() (heap.ID, error) {
	d, s := c.d, c.s
	c.from = s
	c.steps.scope.limit = nil
	c.steps.short = 0
	c.waits = c.waits[:0]
	c.steps.log.pass++
	c.steps.log.try(memory.StageFit)
	c.collect(false)
	if len(d.state.held.all) > 0 {
		d.state.held.regain(s, nil)
	}
	if c.order != streamOrdered {
		if err := c.mustWait(); err != nil {
			return 0, err
		}
	}
	if id, err := c.take(s); id != 0 || err != nil {
		c.met = memory.StageFit
		return id, err
	}
	d.state.mover.reap(s)
	return s.backing.supply(c)
}

// collectForced completes frees that waited for other streams by having their own streams wait, on the GPU.
//
// +checklocks:c.d.gpu.mu
func (c *request) collectForced() (id heap.ID, err error) {
	if c.order == streamOrdered && c.collect(true) {
		if id, err = c.take(c.s); id != 0 || err != nil {
			c.met = memory.StageCollect
		}
	}
	return id, err
}

// collect completes frees that waited for other streams, if there are any, and reports whether any was completed.
//
// +checklocks:c.d.gpu.mu
func (c *request) collect(force bool) bool {
	d := c.d
	if !d.health.Waiting() || c.steps.allowed&memory.StageCollect == 0 {
		return false
	}
	c.steps.log.try(memory.StageCollect)
	c.steps.log.start()
	before := d.state.frees.collected
	any := d.state.frees.collect(c.s, force)
	c.steps.log.lap(memory.StageCollect, d.state.frees.collected-before)
	return any
}

// elsewhere looks for a free block in the other size classes of the same pool and stream: free memory of another class is no
// reason to fail.
//
// +checklocks:c.d.gpu.mu
func (c *request) elsewhere() (heap.ID, error) {
	if c.steps.allowed&memory.StageLend == 0 {
		return 0, nil
	}
	c.steps.log.try(memory.StageLend)
	for class := range quota.NumClasses {
		o := c.s.pool.heaps.of(c.s.stream, class)
		if o == nil || o == c.s {
			continue
		}
		if id, err := c.take(o); id != 0 || err != nil { // the arena is ours
			c.met, c.from = memory.StageLend, o
			return id, err
		}
	}
	return 0, nil
}

// take hands out a free block of a stream heap of the request's arena, if one fits.
//
// +checklocks:c.d.gpu.mu
func (c *request) take(s *streamHeap) (heap.ID, error) {
	if c.order != streamOrdered || c.align != 0 {
		return c.choose(s)
	}
	return s.blocks.Take(c.n, c.size), nil
}

// choose hands out a free block of a stream heap of the request's arena, or a part of it that is aligned as the request wants.
// For a host-ordered request it is of those whose last use is known best; of these the smallest that fits. The caller holds
// Device.mu and the arena's lock.
//
// +checklocks:c.d.gpu.mu
func (c *request) choose(s *streamHeap) (heap.ID, error) {
	t, n := s.stream, s.pool.round(c.size)
	from := func(b *heap.Block) uint64 { return (b.Addr + max(c.align, 1) - 1) &^ (max(c.align, 1) - 1) }
	best, rank, size := heap.ID(0), timeline.Done, uint64(0)
	s.blocks.FreeBins.Each(n, func(id heap.ID, b *heap.Block) bool {
		at := from(b)
		if at+n > b.Addr+b.Size || s.blocks.Fit.Whole() && (b.Size != n || at != b.Addr) {
			return true
		}
		k := timeline.Done
		if c.order != streamOrdered {
			k = t.timeline.Progress(b.Stamp)
		}
		if best == 0 || k < rank || k == rank && b.Size < size {
			best, rank, size = id, k, b.Size
		}
		return true
	})
	if best == 0 {
		return 0, nil
	}
	if rank == timeline.Running {
		t.timeline.Queue.SetEager()
	}
	if stamp := s.blocks.At(best).Stamp; rank != timeline.Done {
		c.waits.Add(&t.timeline, stamp)
	}
	return s.blocks.TakeAt(best, from(s.blocks.At(best)), n, c.size), nil
}

// handOut completes a request that was met: statistics, history.
//
// +checklocks:c.d.gpu.mu
func (c *request) handOut(id heap.ID) cuda.Ptr {
	d, s := c.d, c.from
	b := s.blocks.At(id)
	s.gauges.Alloc(c.size, b.Size, s.blocks.FreeBlocks)
	b.Tag, b.Capture = c.by.label, s.hot.Capture
	s.blocks.Stacks.Set(id, c.by.stack)
	addr := cuda.Ptr(b.Addr)
	switch {
	case c.steps.helped&memory.StageNode != 0:
		c.met = memory.StageNode
	case c.steps.helped&memory.StageCallback != 0:
		c.met = memory.StageCallback
	case c.steps.helped&memory.StageLend != 0:
		c.met = memory.StageLend
	}
	if c.met&(memory.StageLend|memory.StageCallback|memory.StageNode) != 0 {
		d.state.phys.counts.Retries++
	}
	if s.pool.parent != nil {
		c.met = memory.StageSpill
	}
	views.CountMet(&d.state.phys.counts, c.met)
	if d.health.Recording() {
		if c.met != memory.StageFit {
			d.record(event.Event{Kind: event.Retry, Size: c.n, Stream: c.s.stream.number(), Pool: s.pool.number, Flags: uint8(c.met),
				Stack: c.by.stack, Thread: c.by.thread})
		}
		d.record(s.event(event.Alloc, id, c.by.stack, c.by.thread))
	}
	switch {
	case s.arena != c.s.arena:
		d.state.phys.counts.Borrows++
		d.state.phys.rebalanceAll(c.s, s)
		s.arena.Unlock()
	case c.met == memory.StageFit:
		d.state.phys.rebalance(s, nil)
	default:
		d.state.phys.rebalanceAll(s, nil) // other arenas may have changed as well
	}
	return addr
}

// spill takes a request that nothing else met through the reclaim stages of the pool's spill. The caller holds Device.mu and
// nothing else; it is let go meanwhile.
//
// +checklocks:c.d.gpu.mu
func (c *request) spill(p *Pool, st *Stream) (cuda.Ptr, error) {
	s := c.steps.log.try(memory.StageSpill)
	c.steps.log.start()
	x := request{d: c.d, steps: reclaimer{d: c.d, log: attempts{drv: c.d.drv}, allowed: c.steps.allowed, asked: c.steps.asked, helped: c.steps.helped, grants: c.steps.grants},
		n: p.spill.round(c.size), size: c.size, align: c.align, by: c.by, order: min(c.order, hostOrdered)}
	if c.align != 0 {
		x.n += p.spill.backing.alignSlack(c.align)
	}
	defer func() { c.steps.grants = x.steps.grants }() // also if a function that is called panics
	ptr, err := x.reclaim(p.spill, st)
	c.steps.log.lap(memory.StageSpill, 0)
	c.waits, s.err = x.waits, x.steps.log.oom
	if err != nil {
		return 0, fmt.Errorf("pool {%d, %d} is out of memory, and so is its spill: %w", p.id[0], p.id[1], err)
	}
	if x.steps.log.oom != nil {
		c.steps.log.oom = errors.Join(c.steps.log.oom, x.steps.log.oom)
	}
	return ptr, nil
}

// failed is the memory that could not be allocated.
type failed struct {
	need, requested uint64
	by              origin
	heap            *streamHeap // where; nil: nowhere in particular
}

// outOfMemory is the error that ends the stages. The caller holds Device.mu and nothing else.
//
// +checklocks:us.gpu.mu
func (us *usage) outOfMemory(p *Pool, r *reclaimer, f failed) *memory.OutOfMemoryError {
	e := &memory.OutOfMemoryError{Device: us.gpu.id, Pool: p.id, Requested: f.requested, Need: f.need, Tag: journal.TagOf(f.by.label), Library: journal.LibraryOf(f.by.label),
		Reserved: us.phys.quota.Total(), Elsewhere: us.phys.quota.Elsewhere, Cached: us.phys.quota.Spare, Limit: us.phys.quota.Limit, Tried: r.log.tried,
		Off: memory.AllStages &^ r.allowed, Cause: r.log.oom, Pools: us.byPool(nil), Upstream: p.backing.upstreamName(), OffDevice: !p.backing.onDevice(),
		Paused: uint64(us.phys.quota.Paused[quota.GroupAll].Current)}
	if p.spill == nil {
		e.Off &^= memory.StageSpill
	}
	if r.scope.limit != nil {
		e.PoolLimit, e.PoolReserved = p.limit, p.reserved
	}
	e.Stack, e.Thread, e.Stacks = f.by.stack, f.by.thread, us.byStack()
	if us.tagged.Load() {
		e.Tags = us.byTag()
	}
	if us.labelled.Load() {
		e.Libraries = us.byLibrary()
	}
	if !p.backing.onDevice() {
		e.Other = us.phys.quota.Spare
	}
	if f.heap != nil {
		f.heap.arena.Lock()
		e.Largest = f.heap.blocks.FreeBins.Largest()
		f.heap.arena.Unlock()
	}
	for _, s := range us.pools.heaps {
		if s == nil {
			continue
		}
		s.arena.Lock()
		e.Allocated += uint64(s.gauges.Now()[quota.Allocated])
		e.Pending += uint64(s.gauges.Now()[quota.ActiveBytes] - s.gauges.Now()[quota.Allocated])
		e.Cached += s.blocks.FreeBytes
		if s.pool.backing.onDevice() != p.backing.onDevice() {
			e.Other += s.blocks.FreeBytes
		} else if s.pool.pinned && s.pool != p {
			e.Pinned += s.blocks.FreeBytes
		}
		s.arena.Unlock()
	}
	if free, total, err := us.gpu.drv.MemInfo(us.gpu.id); err == nil {
		e.DriverFree, e.DriverTotal = free, total
	}
	e.Steps = us.report(r, e, p)
	return e
}

// isOutOfMemory distinguishes the error that starts reclaiming from those that are passed on.
func isOutOfMemory(err error) bool { return errors.Is(err, cuda.ErrOutOfMemory) }
