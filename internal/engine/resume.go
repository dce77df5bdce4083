package engine

import (
	"fmt"
	"slices"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/offload"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/memory"
)

// Resuming: new physical memory for all that is to come back is allocated first, all of it or none. Mapped memory is out of
// reach until the contents are there.

// Resume gives selected blocks that are paused their memory and their contents again, at the same addresses; blocks that share
// a granule (2 MiB) with them come back with them there. The memory is sought as a request's is: from the driver, then from the
// cache, then by the callbacks. When that fails everything is paused as before, contents included; an *OutOfMemoryError says
// what is missing.
func (d *Device) Resume(sel Selection) (memory.PauseReport, error) {
	return resumeSelected(d, sel, false)
}

// resumeSelected resumes; quiet: no function of the program is called.
func resumeSelected(d *Device, sel Selection, quiet bool) (memory.PauseReport, error) {
	if err := sel.of(d); err != nil {
		return memory.PauseReport{}, err
	}
	var granted grants
	defer granted.done(d.id) // when no lock is held
	r := &resume{reclaimer: reclaimer{d: d, log: attempts{drv: d.drv}, allowed: d.opts.Stages | memory.StageFit}, sel: sel, quiet: quiet}
	if quiet {
		r.allowed &^= memory.StageCallback
	}
	return resumeLocked(r, &granted)
}

// resumeLocked takes the locks and resumes, and returns what the node granted as well.
func resumeLocked(r *resume, granted *grants) (memory.PauseReport, error) {
	d := r.d
	d.state.paused.mu.Lock()
	defer d.state.paused.mu.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.health.Broken(); err != nil {
		return memory.PauseReport{}, err
	}
	d.a.turns.Next()
	if err := d.state.paused.sure(); err != nil {
		return memory.PauseReport{}, err
	}
	d.state.mover.reap(nil)
	allocs := d.state.phys.counts.DeviceAllocs
	defer func() { // also if a function that is called panics
		*granted = r.grants
		granted.grew(d, allocs)
	}()
	for {
		r.plan()
		if len(r.coming) == 0 {
			return memory.PauseReport{}, nil
		}
		r.log.start()
		err := mayCall(r)
		if err == nil {
			err = r.getMemory()
		}
		r.log.lap(memory.StageGrow, 0)
		if err != nil {
			r.putBack()
		} else {
			d.state.phys.rebalanceAll(nil, nil)
			if err = r.fill(); err == nil {
				d.state.phys.rebalanceAll(nil, nil)
				return r.report, nil
			}
		}
		if !isOutOfMemory(err) || r.copying {
			d.state.phys.rebalanceAll(nil, nil)
			return memory.PauseReport{}, err
		}
		again, giveErr := r.reclaim()
		if giveErr != nil {
			d.state.phys.rebalanceAll(nil, nil)
			return memory.PauseReport{}, giveErr
		}
		if !again {
			d.state.phys.rebalanceAll(nil, nil)
			return memory.PauseReport{}, r.outOfMemory(err)
		}
	}
}

// resume is one call of Resume. Its methods are called with pausedMemory.mu and Device.mu.
type resume struct {
	reclaimer
	sel       Selection
	quiet     bool           // no function of the program is called
	coming    []*pausedRange // in address order within a stream heap
	need      uint64         // bytes of them
	asking    []*Pool        // those with a function of their own
	copying   bool           // it was the copying that failed
	published []run
	report    memory.PauseReport
}

// plan finds what is to come back: granules in which a selected block lies; segments likewise; and of a pool of captured
// graphs, if anything of it is selected, what is free as well.
//
// +checklocks:r.d.gpu.mu
func (r *resume) plan() {
	d := r.d
	r.coming, r.need, r.report = nil, 0, memory.PauseReport{}
	pools := map[*Pool]bool{} // of captured graphs: all that is free comes back
	surveys := map[*streamHeap]map[*pausedRange]*survey{}
	for _, s := range d.state.pools.heaps {
		if s == nil || len(s.paused) == 0 || !r.sel.mayHave(s) {
			continue
		}
		s.arena.Lock()
		surveys[s] = s.survey(s.paused, &r.sel)
		s.arena.Unlock()
		for _, v := range surveys[s] {
			if r.sel.Tag == 0 || slices.Contains(v.kinds, granuleSelected) {
				pools[s.pool] = s.pool.pinned
			}
		}
	}
	for _, s := range d.state.pools.heaps {
		all := surveys[s]
		if s == nil || all == nil {
			continue
		}
		s.arena.Lock()
		for _, a := range slices.Clone(s.paused) {
			v := all[a]
			if v == nil || a.busy {
				continue
			}
			parts, kinds := a.mem.cutUp(a, v)
			for i, x := range parts {
				if kinds[i] == granuleSelected || kinds[i] == granuleFree && pools[s.pool] {
					x.busy = true
					r.coming = append(r.coming, x)
					r.need += x.size
				}
			}
		}
		s.arena.Unlock()
	}
}

// getMemory gets the memory of all that is to come back, and counts it. After an error nothing has any, or it is putBack's
// to take it.
//
// +checklocks:r.d.gpu.mu
// +checklocks:r.d.state.paused.mu
func (r *resume) getMemory() error {
	if err := r.mayGet(); err != nil {
		return err
	}
	for turn := range getTurns {
		for _, a := range r.coming {
			if a.mem.turn() != turn {
				continue
			}
			if err := a.mem.get(a); err != nil {
				return err
			}
		}
	}
	byHeap(r.coming, func(s *streamHeap, list []*pausedRange) {
		all := s.survey(list, nil)
		for _, a := range list {
			r.got(s, a, all[a])
		}
	})
	return nil
}

// mayGet looks whether limits, or what the device has, are in the way of what is to come back.
//
// +checklocks:r.d.gpu.mu
func (r *resume) mayGet() error {
	d := r.d
	r.log.pass++
	grow := r.log.try(memory.StageGrow)
	grow.stop = stopNot
	r.scope.limit, r.asking, r.short = nil, nil, 0
	needs, onDevice := map[*Pool]uint64{}, uint64(0)
	for _, a := range r.coming {
		needs[a.heap.pool] += a.size
		if a.mem.counted() {
			onDevice += a.size
		}
	}
	for p, n := range needs {
		if o := p.owner(); o.ask != nil && !slices.Contains(r.asking, o) {
			r.asking = append(r.asking, o)
		}
		if !p.mayHold(n) {
			r.scope.limit, grow.stop = p, stopPoolLimit
			return errOverLimit
		}
	}
	if !d.state.phys.quota.MayHold(onDevice) {
		grow.stop = stopLimit
		return errOverLimit
	}
	r.short = onDevice
	if onDevice > 0 && d.state.phys.lacks(onDevice) {
		grow.stop = stopLacks
		return cuda.ErrOutOfMemory
	}
	return nil
}

// got counts the memory that a paused range has again.
//
// +checklocks:r.d.gpu.mu
func (r *resume) got(s *streamHeap, a *pausedRange, v *survey) {
	d := r.d
	a.mapped, a.lost = true, false
	s.gain(a.size)
	a.mem.got(a)
	d.state.paused.add(s, -int64(v.used))
	d.state.phys.quota.Spare += a.size - v.used
	r.report.Blocks += int64(v.blocks)
	r.report.Bytes += v.used
	r.report.Physical += a.size
}

// errOverLimit is the cause where a limit is in the way and no driver call failed.
var errOverLimit = fmt.Errorf("the limit is in the way: %w", cuda.ErrOutOfMemory)

// resumeChunk is the size of the next chunk for a range of which so much is left: the largest, as mapping costs by number, but
// half of that for small blocks, among which large chunks are the more seldom wholly free. Where memory is short it is no
// larger than for new memory: one block that stays keeps all of its chunk from others.
//
// +checklocks:pr.gpu.mu
func (pr *pausedMemory) resumeChunk(class int, left uint64) uint64 {
	g := pr.phys.upstream.Granularity()
	size := max(g, pr.gpu.opts.ChunkMax/g*g)
	if class == quota.Small {
		size = max(g, size/2/g*g)
	}
	return min(left, size, pr.policy.mostChunk())
}

// putBack takes what getMemory got before it failed, none of which is counted but chunks as held.
//
// +checklocks:r.d.gpu.mu
func (r *resume) putBack() {
	for _, final := range []bool{false, true} {
		for _, a := range r.coming {
			if a.mem.final() == final {
				a.mem.putBack(a)
			}
		}
	}
	for _, a := range r.coming {
		a.busy = false
	}
	byHeap(r.coming, r.d.state.paused.compact) // blocks may have been freed meanwhile
	r.coming = nil
}

// mayCall fails where a function of the program would have to be called quietly.
//
// +checklocks:r.d.gpu.mu
func mayCall(r *resume) error {
	if !r.quiet {
		return nil
	}
	return r.d.state.observers.observed("resume")
}

// reclaim gives memory back for what is to come, with the locks let go where that waits or calls out, and reports whether to
// try again.
//
// +checklocks:r.d.gpu.mu
// +checklocks:r.d.state.paused.mu
func (r *resume) reclaim() (again bool, err error) {
	r.scope.pools = func(p *Pool) bool {
		return !r.quiet || mayGive(p) // +checklocksignore: called with Device.mu, as all filters
	}
	r.scope.chunks, r.scope.need = r.d.state.phys.hasChunks(), r.need
	if mayComeLate(&r.reclaimer) && r.unlocked(awaitGrant) {
		return true, nil
	}
	if again, err = r.giveBack(); again || err != nil {
		return again, err
	}
	var own []*callback
	for _, p := range r.asking {
		own = append(own, p.ask)
	}
	if len(own)+len(r.d.state.callbacks.all) > 0 && r.unlocked(func(s *reclaimer) bool { return s.callOut(own, r.need) }) {
		return true, nil
	}
	return r.unlocked(askNode), nil
}

// unlocked takes a step with pausedMemory.mu let go: functions that it calls may pause other memory.
//
// +checklocks:r.d.gpu.mu
// +checklocks:r.d.state.paused.mu
func (r *resume) unlocked(step func(*reclaimer) bool) bool {
	d := r.d
	d.mu.Unlock()
	d.state.paused.mu.Unlock()
	d.mu.Lock()
	defer d.mu.Lock() // these, the last first, also if a function that is called panics
	defer d.state.paused.mu.Lock()
	defer d.mu.Unlock()
	return step(&r.reclaimer)
}

// outOfMemory is the error that ends the stages.
//
// +checklocks:r.d.gpu.mu
// +checklocks:r.d.state.paused.mu
func (r *resume) outOfMemory(cause error) error {
	d := r.d
	d.state.phys.counts.OOMs++
	p := r.sel.Pool
	if p == nil {
		p = d.pool0
	}
	r.log.oom = nil
	if cause != errOverLimit {
		r.log.oom = cause
		if s := r.log.of(memory.StageGrow); s.stop == stopNot {
			s.err = cause
		}
	}
	if r.scope.limit != nil {
		p = r.scope.limit
	}
	return fmt.Errorf("resume: everything stays paused: %w", d.state.usage.outOfMemory(p, &r.reclaimer, failed{need: r.need, requested: r.need, by: origin{label: r.sel.Tag}}))
}

// fill maps the memory, copies the contents back, notifies the observer and lets the memory be used. After an error all is
// paused as before.
//
// +checklocks:r.d.gpu.mu
// +checklocks:r.d.state.paused.mu
func (r *resume) fill() error {
	d := r.d
	all := offload.NewBatch(contentsOf(r.coming))
	defer d.state.phys.offload.Release(all)
	err := r.mapAndCopy()
	if err == nil {
		err = mayCall(r)
	}
	if err == nil && d.state.observers.onMap != nil {
		for _, a := range r.coming {
			r.published = append(r.published, a.mem.runs(a)...)
		}
		d.state.observers.publish(d.state.observers.onMap, r.published)
	}
	if err == nil {
		d.mu.Unlock()
		err = d.state.phys.offload.LoadFiles(all)
		d.mu.Lock()
		r.copying = true
	}
	if err == nil || d.health.Broken() != nil { // what is broken has no contents any more
		r.report.Kept = all.Bytes
		r.pretend()
		d.state.paused.refill(r.coming)
		return err
	}
	if r.copying {
		err = fmt.Errorf("resume: everything stays paused: copying %d bytes back: %w", all.Bytes, err)
	}
	r.takeBack()
	return err
}

// mapAndCopy maps chunks, and has the contents of each stretch on their way while the next is mapped. When it returns no copy
// is under way, unless the store is unsure.
//
// +checklocks:r.d.gpu.mu
// +checklocks:r.d.state.paused.mu
func (r *resume) mapAndCopy() error {
	d := r.d
	queued := false
	var err error
	for _, part := range stretches(r.coming) {
		for _, a := range part {
			if a.bare {
				if err = a.mem.mapAgain(a); err != nil {
					break
				}
				a.bare = false
			}
		}
		if err != nil {
			break
		}
		b := offload.NewBatch(contentsOf(part))
		some := false
		d.mu.Unlock()
		some, err = d.state.phys.offload.QueueLoad(b)
		d.mu.Lock()
		d.state.phys.offload.Release(b)
		queued = queued || some
		if err != nil {
			r.copying = true
			break
		}
	}
	if queued {
		d.mu.Unlock()
		late := d.state.phys.offload.Await()
		d.mu.Lock()
		if err == nil && late != nil {
			err, r.copying = late, true
		}
	}
	return err
}

// pretend notes all memory as mapped on a broken device, which does not report what is mapped.
//
// +checklocks:r.d.gpu.mu
func (r *resume) pretend() {
	for _, a := range r.coming {
		a.mem.pretend()
		a.bare = false
	}
}

// takeBack undoes everything, so that it is as before. Contents that were copied are still where they were.
//
// +checklocks:r.d.gpu.mu
func (r *resume) takeBack() {
	d := r.d
	if r.published != nil {
		d.state.observers.publish(d.state.observers.onUnmap, r.published)
		r.published = nil
	}
	for _, a := range r.coming {
		a.mem.undo(a)
	}
	byHeap(r.coming, func(s *streamHeap, list []*pausedRange) {
		all := s.survey(list, nil)
		for _, a := range list {
			s.lose(a.size)
			a.mem.takenBack(a)
			a.mapped, a.bare, a.busy = false, false, false
			d.state.phys.quota.Spare -= a.size - all[a].used
			d.state.paused.add(s, int64(all[a].used))
			a.mem.cutUp(a, all[a])
		}
	})
}
