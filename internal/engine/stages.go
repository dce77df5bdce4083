package engine

import (
	"cmp"
	"slices"

	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/memory"
)

// The stages that give memory back exist once. A request goes through them when nothing that is free meets it, a resume
// when the driver has too little, and a trim for what there is. Each step is tried once; a request and a resume try again
// to get their memory after each step that gave some, a trim takes all steps.

// reclaimer is a request's, a resume's or a trim's way through the steps. Its methods are called with Device.mu and no
// arena's lock; Device.mu is let go while they wait and call out.
type reclaimer struct {
	d       *Device
	log     attempts
	allowed memory.Stages
	scope   scope
	// next is the next step: of those for all memory, and of those while a pool's own limit is in the way.
	next [2]uint8
	// asked is how many of the lists of functions were called: the pools' own, then all others'.
	asked  uint8
	waited uint8         // how often it waited for frees
	helped memory.Stages // the stages that gave memory back, or functions that were called
	short  uint64        // bytes of the device's own memory that growing lacked last, where no limit is in the way
	grants grants        // of the node
}

// scope says which memory is given back, and for what.
type scope struct {
	pools  func(*Pool) bool // whose segments may go
	only   *Pool            // whose chunks may go; nil: those of all pools
	chunks bool             // free chunks may go
	need   uint64           // so many bytes of chunks first, all of them when that is not enough
	limit  *Pool            // the pool whose own limit is in the way: only its memory goes then
	heap   *streamHeap      // where a request is to be met; nil: there is no request
}

// reclaimSteps are the steps by which memory is given back, in order.
var reclaimSteps = [...]struct {
	stage memory.Stages
	take  func(*reclaimer) (gave bool, err error)
}{
	{memory.StageCollect, (*reclaimer).awaitFrees},
	{memory.StageLend, (*reclaimer).releaseSegments},
	{memory.StageLend, (*reclaimer).releaseSomeChunks},
	{memory.StageLend, (*reclaimer).releaseAllChunks},
	{memory.StageLend, (*reclaimer).releaseAddresses},
}

// step is the position in the steps, which differs by whose memory may go.
func (r *reclaimer) step() *uint8 {
	if r.scope.limit != nil {
		return &r.next[1]
	}
	return &r.next[0]
}

// giveBack takes steps until one gave memory back, or failed. It reports false when none is left.
//
// +checklocks:r.d.gpu.mu
func (r *reclaimer) giveBack() (gave bool, err error) {
	at := r.step()
	for int(*at) < len(reclaimSteps) && !gave && err == nil {
		x := &reclaimSteps[*at]
		*at++
		if r.allowed&x.stage != 0 {
			gave, err = x.take(r)
		}
	}
	return gave, err
}

// giveAllBack takes all steps, whatever they give, and returns the first error.
//
// +checklocks:r.d.gpu.mu
func (r *reclaimer) giveAllBack() (first error) {
	for at := r.step(); int(*at) < len(reclaimSteps); {
		_, err := r.giveBack()
		first = cmp.Or(first, err)
	}
	return first
}

// measured notes what a step of StageLend gave back.
//
// +checklocks:r.d.gpu.mu
func (r *reclaimer) measured(give func() (bool, error)) (gave bool, err error) {
	d := r.d
	r.log.try(memory.StageLend)
	r.log.start()
	returned, spare := d.state.phys.quota.Returned, d.state.phys.quota.Spare
	gave, err = give()
	r.log.lap(memory.StageLend, d.state.phys.quota.Returned-returned+less(d.state.phys.quota.Spare, spare))
	return gave, err
}

// awaitFrees waits for the work that keeps free memory from being used: for a request, what other streams have free as
// well. It reports whether a request may be met now; what is collected for others gives nothing back by itself.
//
// +checklocks:r.d.gpu.mu
func (r *reclaimer) awaitFrees() (bool, error) {
	d, request := r.d, r.scope.heap != nil
	var waits timeline.Waits
	if request {
		waits = d.state.frees.unfinished(r.scope.heap)
	} else {
		waits = d.state.frees.unfinishedFrees(r.scope.pools)
	}
	if len(waits) == 0 {
		return false, nil
	}
	r.waited++
	r.log.try(memory.StageCollect).asked++
	r.log.start()
	before := d.state.frees.collected
	err := d.await(waits)
	if !request {
		d.state.frees.collect(nil, false)
	}
	r.log.lap(memory.StageCollect, d.state.frees.collected-before)
	return request, err
}

// releaseSegments gives back the free segments, what upstreams keep, and what could not be given back before.
//
// +checklocks:r.d.gpu.mu
func (r *reclaimer) releaseSegments() (bool, error) {
	d, p := r.d, r.scope.limit
	if !d.state.segments.sources.any {
		return false, nil
	}
	return r.measured(func() (any bool, err error) {
		if p != nil {
			return r.releaseSegmentsOf(p)
		}
		if any, err = d.state.segments.release(r.scope.pools, true); any {
			r.helped |= memory.StageLend
			if d.state.segments.sources.nested {
				*r.step()-- // what went may be a segment of another pool now
			}
		}
		asked, more := d.state.segments.trimUpstreams(r.scope.pools)
		err = cmp.Or(err, more)
		if d.state.segments.sources.single != nil {
			drained, _ := d.state.segments.sources.single.Drain() // what fails again is tried again
			asked = asked || drained
		}
		if asked {
			r.helped |= memory.StageLend
		}
		return any || asked, err
	})
}

// releaseSegmentsOf gives back the free segments of one pool: first those of pools over it, which are blocks here.
//
// +checklocks:r.d.gpu.mu
func (r *reclaimer) releaseSegmentsOf(p *Pool) (bool, error) {
	if r.d.state.segments.sources.nested {
		any, err := r.d.state.segments.release(func(x *Pool) bool { return x.backing.over(p) }, true)
		if any || err != nil {
			if err == nil {
				*r.step()--
			}
			return any, err
		}
	}
	any, err := r.d.state.segments.release(func(x *Pool) bool { return x == p }, true)
	if any {
		r.helped |= memory.StageLend
	}
	return any, err
}

// releaseSomeChunks gives back as many free chunks as are needed. A request that is met with chunks finds them spare.
//
// +checklocks:r.d.gpu.mu
func (r *reclaimer) releaseSomeChunks() (bool, error) {
	if !r.scope.chunks || r.scope.limit != nil || r.scope.need == everything {
		return false, nil
	}
	release := r.d.state.mover.releaseChunks
	if s := r.scope.heap; s != nil {
		release = s.backing.freeChunks
	}
	return r.chunks(func() (bool, error) { return release(r.scope.only, r.scope.need) })
}

// releaseAllChunks gives back all free chunks. Where a pool's own limit is in the way they stay the device's.
//
// +checklocks:r.d.gpu.mu
func (r *reclaimer) releaseAllChunks() (bool, error) {
	if p := r.scope.limit; p != nil {
		return p.backing.giveBackOwn(r)
	}
	if !r.scope.chunks {
		return false, nil
	}
	if r.scope.only == r.d.pool0 {
		r.d.state.endings.sweep() // makes the chunks spare that released pools left
	}
	return r.chunks(func() (bool, error) { return r.d.state.mover.releaseChunks(r.scope.only, everything) })
}

// chunks is measured for chunks.
//
// +checklocks:r.d.gpu.mu
func (r *reclaimer) chunks(give func() (bool, error)) (bool, error) {
	gave, err := r.measured(give)
	if gave {
		r.helped |= memory.StageLend
	}
	return gave, err
}

// releaseAddresses gives back addresses that chunks were mapped at, for a request whose segment may lack some.
//
// +checklocks:r.d.gpu.mu
func (r *reclaimer) releaseAddresses() (gave bool, err error) {
	s := r.scope.heap
	if s == nil || r.scope.limit != nil {
		return false, nil
	}
	if gave = s.backing.freeAddresses(); gave {
		r.helped |= memory.StageLend
	}
	return gave, nil
}

// callOut asks functions whether they can give memory back: the pools' own, and then, unless a pool's own limit is in the
// way, all others'. Each list is asked once. It reports whether any gave; then all steps are taken again.
//
// +checklocks:r.d.gpu.mu
func (r *reclaimer) callOut(own []*callback, need uint64) (gave bool) {
	if r.allowed&memory.StageCallback == 0 {
		return false
	}
	if r.asked == 0 {
		r.asked = 1
		gave = r.ask(own, need)
	}
	if !gave && r.asked == 1 && r.scope.limit == nil {
		r.asked = 2
		gave = r.ask(r.d.state.callbacks.all, need)
	}
	if gave {
		r.next = [2]uint8{}
	}
	return gave
}

// ask calls functions, and reports whether any gave memory back.
//
// +checklocks:r.d.gpu.mu
func (r *reclaimer) ask(list []*callback, need uint64) (any bool) {
	if len(list) == 0 {
		return false
	}
	r.helped |= memory.StageCallback
	s := r.log.try(memory.StageCallback)
	before := r.d.state.phys.idle()
	r.log.start()
	for _, x := range slices.Clone(list) {
		s.asked++
		if r.d.state.callbacks.call(x, need) {
			s.gave++
			any = true
		}
	}
	r.log.lap(memory.StageCallback, 0)
	s.gained += less(r.d.state.phys.idle(), before)
	return any
}

// idle is the bytes that are not in use: what the device's pools have free, and what the driver has. The caller holds
// Device.mu and nothing else.
//
// +checklocks:ph.gpu.mu
func (ph *physical) idle() uint64 {
	n := ph.quota.Spare
	for _, s := range ph.pools.heaps {
		if s != nil {
			s.arena.Lock()
			n += s.blocks.FreeBytes
			s.arena.Unlock()
		}
	}
	if free, _, err := ph.gpu.drv.MemInfo(ph.gpu.id); err == nil {
		n += free
	}
	return n
}

// unfinishedFrees is the work that the frees of some pools wait for.
//
// +checklocks:fr.gpu.mu
func (fr *frees) unfinishedFrees(pools func(*Pool) bool) (waits timeline.Waits) {
	for _, f := range fr.pending {
		if pools(f.heap.pool) {
			for _, w := range f.waits {
				waits.Add(w.Stream, w.Epoch)
			}
		}
	}
	return waits
}
