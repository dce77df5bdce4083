package cistern

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/vm"
)

// Resuming: new physical memory for all that is to come back is got first, all of it or none; what is mapped is out of
// everybody's reach until the contents are there.

// Resume gives selected blocks that are paused their memory and their contents again, at the same addresses; blocks that
// share a granule (2 MiB) with them come back with them there. The memory is sought as a request's is: from the driver,
// then from what is cached, then by the callbacks. When it fails everything is paused as before, contents included; an
// *OutOfMemoryError says what is missing. What is not paused is left alone.
func (d *Device) Resume(sel Selection) (PauseReport, error) {
	if err := d.selects(sel); err != nil {
		return PauseReport{}, err
	}
	d.pausing.Lock()
	defer d.pausing.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.health.Broken(); err != nil {
		return PauseReport{}, err
	}
	d.a.turns.Next()
	if err := d.sure(); err != nil {
		return PauseReport{}, err
	}
	d.unstick()
	r := &resume{ladder: ladder{d: d, resuming: true}, sel: sel}
	for {
		r.plan()
		if len(r.coming) == 0 {
			return PauseReport{}, nil
		}
		r.start()
		err := r.getMemory()
		r.lap(RungGrow, 0)
		if err != nil {
			r.putBack()
		} else {
			d.rebalanceAll(nil, nil)
			if err = r.fill(); err == nil {
				d.rebalanceAll(nil, nil)
				return r.report, nil
			}
		}
		if !isOutOfMemory(err) || r.copying {
			d.rebalanceAll(nil, nil)
			return PauseReport{}, err
		}
		again, trimErr := r.climb()
		if trimErr != nil {
			d.rebalanceAll(nil, nil)
			return PauseReport{}, trimErr
		}
		if !again {
			d.rebalanceAll(nil, nil)
			return PauseReport{}, r.outOfMemory(err)
		}
	}
}

// resume is one call of Resume. Its methods are called with Device.pausing and Device.mu.
type resume struct {
	ladder
	sel     Selection
	coming  []*absence // in address order within a space
	need    uint64     // bytes of them
	step    int        // of the ladder
	asking  []*Pool    // those with a function of their own
	called  bool       // functions were
	copying bool       // it was the copying that failed
	full    *Pool      // whose own limit is in the way
	told    []run
	report  PauseReport
}

// plan finds what is to come back: granules in which a selected block lies; segments likewise; and of a pool of captured
// graphs, if anything of it is selected, what is free as well.
//
// +checklocks:r.d.mu
func (r *resume) plan() {
	d := r.d
	r.coming, r.need, r.report = nil, 0, PauseReport{}
	pools := map[*Pool]bool{} // of captured graphs: all that is free comes back
	surveys := map[*space]map[*absence]*survey{}
	for _, s := range d.spaces {
		if s == nil || len(s.absent) == 0 || !r.sel.mayHave(s) {
			continue
		}
		s.mu.Lock()
		surveys[s] = s.survey(s.absent, &r.sel)
		s.mu.Unlock()
		for _, v := range surveys[s] {
			if r.sel.Tag == 0 || slices.Contains(v.kinds, granuleSelected) {
				pools[s.pool] = s.pool.pinned
			}
		}
	}
	for _, s := range d.spaces {
		all := surveys[s]
		if s == nil || all == nil {
			continue
		}
		s.mu.Lock()
		for _, a := range slices.Clone(s.absent) {
			v := all[a]
			if v == nil || a.busy {
				continue
			}
			parts, kinds := []*absence{a}, v.kinds
			if a.backing == nil {
				parts, kinds = d.cutUp(a, v)
			}
			for i, x := range parts {
				if kinds[i] == granuleSelected || kinds[i] == granuleFree && pools[s.pool] {
					x.busy = true
					r.coming = append(r.coming, x)
					r.need += x.size
				}
			}
		}
		s.mu.Unlock()
	}
}

// getMemory gets the memory of all that is to come back, and counts it. After an error nothing has any, or it is putBack's
// to take it.
//
// +checklocks:r.d.mu
// +checklocks:r.d.pausing
func (r *resume) getMemory() error {
	d := r.d
	var chunks, segments []*absence
	onDevice := uint64(0)
	for _, a := range r.coming {
		if a.backing != nil {
			segments = append(segments, a)
		} else {
			chunks = append(chunks, a)
		}
		if a.backing == nil || a.space.pool.counted {
			onDevice += a.size
		}
	}
	r.pass++
	grow := r.try(RungGrow)
	grow.stop = stopNot
	r.full = nil
	needs := map[*Pool]uint64{}
	for _, a := range r.coming {
		needs[a.space.pool] += a.size
	}
	r.asking = nil
	for p, n := range needs {
		if o := p.owner(); o.ask != nil && !slices.Contains(r.asking, o) {
			r.asking = append(r.asking, o)
		}
		if !p.mayHold(n) {
			r.full, grow.stop = p, stopPoolLimit
			return errOverLimit
		}
	}
	if !d.quota.MayHold(onDevice) {
		grow.stop = stopLimit
		return errOverLimit
	}
	if onDevice > 0 && d.lacks(onDevice) {
		grow.stop = stopLacks
		return cuda.ErrOutOfMemory
	}
	// Users' upstreams first: the locks are let go meanwhile.
	for _, foreign := range []bool{true, false} {
		for _, a := range segments {
			if a.space.pool.foreign != foreign {
				continue
			}
			if err := d.back(a); err != nil {
				return err
			}
			a.lost = true // it has memory that is not counted
		}
	}
	if err := d.createFor(chunks); err != nil {
		return err
	}
	bySpace(r.coming, func(s *space, list []*absence) {
		all := s.survey(list, nil)
		for _, a := range list {
			v := all[a]
			a.mapped, a.lost, a.bare = true, false, a.backing == nil
			s.gain(a.size)
			if a.backing != nil {
				d.got(a.size, s.pool.counted)
				d.quota.Physical[quota.GroupOf(s.class)].Add(a.size)
				d.record(event.Event{Kind: event.SegmentMap, Addr: a.addr, Size: a.size, Stream: s.stream.number(), Pool: s.pool.number})
			} else {
				at := a.addr
				for _, id := range a.chunks {
					k := d.chunks.At(id)
					k.Addr, k.Owner, k.Stamp, k.Stream = at, s.index, 0, -1
					s.area.Set(at, k.Size, id)
					d.record(event.Event{Kind: event.SegmentMap, Addr: at, Size: k.Size, Handle: uint64(k.Handle),
						Stream: s.stream.number(), Pool: s.pool.number})
					at += k.Size
				}
			}
			d.addPaused(s, -int64(v.used))
			d.quota.Spare += a.size - v.used
			r.report.Blocks += int64(v.blocks)
			r.report.Bytes += v.used
			r.report.Physical += a.size
		}
	})
	return nil
}

// errOverLimit stands for what is no failure of the driver's.
var errOverLimit = fmt.Errorf("the limit is in the way: %w", cuda.ErrOutOfMemory)

// createFor makes the chunks for absences: fewer and larger ones than there may have been, as they cost by number.
//
// +checklocks:d.mu
func (d *Device) createFor(list []*absence) error {
	for _, a := range list {
		for left := a.size; left > 0; {
			size := d.resumeChunk(a.space.class, left)
			h, err := d.upstream.Create(size)
			if err != nil {
				return d.health.Failed(err)
			}
			a.chunks = append(a.chunks, d.chunks.Add(h, size, 0))
			d.got(size, true)
			d.quota.Physical[quota.GroupOf(a.space.class)].Add(size)
			left -= size
		}
	}
	return nil
}

// resumeChunk is the size of the next chunk for a range of which so much is left: the largest, as mapping costs by
// number, but half of that for small blocks, among which large chunks are the more seldom wholly free; and no larger than
// new memory is got in where little can be held, or little is left: one block that stays keeps all of its chunk from others.
//
// +checklocks:d.mu
func (d *Device) resumeChunk(class int, left uint64) uint64 {
	g := d.upstream.Granularity()
	size := max(g, d.opts.ChunkMax/g*g)
	if class == quota.Small {
		size = max(g, size/2/g*g)
	}
	return min(left, size, d.mostChunk())
}

// mapBack maps the chunks of an absence.
//
// +checklocks:d.mu
func (d *Device) mapBack(a *absence) error {
	at := a.addr
	for _, id := range a.chunks {
		k := d.chunks.At(id)
		if err := d.drv.MemMap(cuda.Ptr(at), k.Size, k.Handle); err != nil {
			return d.health.Failed(err)
		}
		k.Mappings++
		at += k.Size
	}
	if err := d.setAccess(cuda.Ptr(a.addr), a.size); err != nil {
		return d.health.Failed(err)
	}
	a.bare = false
	return nil
}

// putBack takes what getMemory got before it failed, none of which is counted but chunks as held.
//
// +checklocks:r.d.mu
func (r *resume) putBack() {
	d := r.d
	for _, a := range r.coming {
		if a.backing == nil {
			d.takeChunks(a)
		}
	}
	for _, a := range r.coming {
		if a.lost {
			if d.unback(a) != nil {
				d.unback(a) // once more: what stays is there when it is resumed
			}
			a.lost = false
		}
	}
	for _, a := range r.coming {
		a.busy = false
	}
	bySpace(r.coming, d.thin) // blocks may have been freed meanwhile
	r.coming = nil
}

// takeChunks unmaps and releases the chunks of an absence, of which the first may be mapped.
//
// +checklocks:d.mu
func (d *Device) takeChunks(a *absence) {
	n, mapped := 0, uint64(0)
	for _, id := range a.chunks {
		k := d.chunks.At(id)
		if k.Mappings > 0 {
			n++
			mapped += k.Size
		} else {
			k.Mappings++ // for giveBackChunks
		}
	}
	d.unmapOrStick(a.addr, mapped, a.chunks[:n])
	d.giveBackChunks(a.space, a.addr, a.chunks)
	a.chunks = nil
}

// unmapOrStick unmaps chunks, which giveBackChunks is to have. What cannot be unmapped is stuck, and becomes spare there.
//
// +checklocks:d.mu
func (d *Device) unmapOrStick(addr, size uint64, chunks []vm.ChunkID) {
	if size == 0 {
		return
	}
	err := errUnsure
	if !d.unsure.Load() {
		err = d.drv.MemUnmap(cuda.Ptr(addr), size)
	}
	if err == nil {
		return
	}
	d.health.Failed(err)
	for _, id := range chunks {
		d.chunks.At(id).Mappings++
	}
	d.stuck = append(d.stuck, stuckMapping{addr, size, slices.Clone(chunks)})
	d.unstick()
}

// stuckMapping is what could not be unmapped when a pause or a resume failed: its chunks are spare, and its addresses cannot be mapped
// until it goes.
type stuckMapping struct {
	addr, size uint64
	chunks     []vm.ChunkID
}

var errUnsure = errors.New("copies may be under way")

// unstick tries again to unmap.
//
// +checklocks:d.mu
func (d *Device) unstick() {
	d.stuck = slices.DeleteFunc(d.stuck, func(x stuckMapping) bool {
		if d.health.Broken() != nil || d.unsure.Load() || d.drv.MemUnmap(cuda.Ptr(x.addr), x.size) != nil {
			return false
		}
		for _, id := range x.chunks {
			d.chunks.At(id).Mappings--
		}
		return true
	})
}

// climb goes up the ladder, with the locks let go where it waits or calls out, and reports whether to try again.
//
// +checklocks:r.d.mu
// +checklocks:r.d.pausing
func (r *resume) climb() (again bool, err error) {
	d := r.d
	rungs := d.opts.Ladder
	if p := r.full; p != nil && !p.pinned && rungs&RungLend != 0 {
		r.try(RungLend)
		r.start()
		returned, spare := d.quota.Returned, d.quota.Spare
		defer func() { r.lap(RungLend, d.quota.Returned-returned+less(d.quota.Spare, spare)) }()
		held := p.reserved
		if p.segments != nil {
			_, err = d.releaseSegments(func(x *Pool) bool { return x == p }, true)
		} else {
			_, err = d.detachChunks(p, everything)
		}
		return p.reserved < held, err
	}
	for r.full == nil && r.step < 5 {
		r.step++
		if r.step <= 4 && rungs&RungLend == 0 || r.step == 5 && (rungs&RungCallback == 0 || r.called) {
			continue
		}
		r.start()
		returned, collected := d.quota.Returned, d.collected
		step := r.step
		switch step {
		case 1:
			if d.segmented {
				again, err = d.releaseSegments(func(*Pool) bool { return true }, true)
				asked, more := d.trimUpstreams(func(*Pool) bool { return true })
				again, err = again || asked, cmp.Or(err, more)
				if d.single != nil {
					more, _ := d.single.Settle() // what fails again is tried again
					again = again || more
				}
			}
		case 2:
			if d.upstream != nil {
				again, err = d.releaseChunks(nil, r.need)
			}
		case 3:
			var waits timeline.Waits
			for _, f := range d.pending {
				for _, w := range f.waits {
					waits.Add(w.Stream, w.Epoch)
				}
			}
			err = d.await(waits)
			d.collect(nil, false)
		case 4:
			if d.upstream != nil {
				again, err = d.releaseChunks(nil, everything)
			}
		case 5:
			again = r.call()
		}
		if step <= 4 {
			r.try(RungLend)
			r.lap(RungLend, d.quota.Returned-returned+d.collected-collected)
		}
		if again || err != nil {
			return again, err
		}
	}
	return false, nil
}

// call asks functions whether they can give memory back, with no lock held: those of the pools that are resumed, then all
// others'. It reports whether any did.
//
// +checklocks:r.d.mu
// +checklocks:r.d.pausing
func (r *resume) call() (any bool) {
	d := r.d
	var list []*callback
	for _, p := range r.asking {
		list = append(list, p.ask)
	}
	list = append(list, d.callbacks...)
	if len(list) == 0 {
		return false
	}
	d.mu.Unlock()
	d.pausing.Unlock() // what is called may pause something else
	d.mu.Lock()
	any = r.ask(list, r.need)
	d.mu.Unlock()
	d.pausing.Lock()
	d.mu.Lock()
	if any {
		r.step = 0
		r.called = true
	}
	return any
}

// outOfMemory is the error that ends the ladder.
//
// +checklocks:r.d.mu
// +checklocks:r.d.pausing
func (r *resume) outOfMemory(cause error) error {
	d := r.d
	d.counts.OOMs++
	p := r.sel.Pool
	if p == nil {
		p = d.pool0
	}
	c := &climb{ladder: r.ladder, n: r.need, size: r.need, by: origin{label: r.sel.Tag}, rungs: d.opts.Ladder | RungFit}
	if cause != errOverLimit {
		c.oom = cause
		if s := c.of(RungGrow); s.stop == stopNot {
			s.err = cause
		}
	}
	if r.full != nil {
		p, c.full = r.full, true
	}
	return fmt.Errorf("resume: everything stays paused: %w", d.outOfMemory(p, c))
}

// fill maps the memory, copies the contents back, tells of it and lets it be used. After an error all is paused as before.
//
// +checklocks:r.d.mu
// +checklocks:r.d.pausing
func (r *resume) fill() error {
	d := r.d
	all, kept := kept(r.coming)
	_, disk := byPlace(all)
	defer holdFiles(disk)()
	err := r.mapAndCopy()
	if err == nil && d.onMap != nil {
		for _, a := range r.coming {
			r.told = append(r.told, a.runs()...)
		}
		d.tell(d.onMap, r.told)
	}
	if err == nil && len(disk) > 0 {
		d.mu.Unlock()
		err = d.spillIn(disk)
		d.mu.Lock()
		r.copying = true
	}
	if err == nil || d.health.Broken() != nil { // what is broken has no contents any more
		r.report.Kept = kept
		r.pretend()
		d.refill(r.coming)
		return err
	}
	if r.copying {
		err = fmt.Errorf("resume: everything stays paused: copying %d bytes back: %w", kept, err)
	}
	r.takeBack()
	return err
}

// mapAndCopy maps chunks, and has the contents of each stretch on their way while the next is mapped. When it returns no
// copy is under way, unless the device is unsure of that.
//
// +checklocks:r.d.mu
// +checklocks:r.d.pausing
func (r *resume) mapAndCopy() error {
	d := r.d
	queued := false
	var err error
	for _, part := range stretches(r.coming) {
		for _, a := range part {
			if a.bare {
				if err = d.mapBack(a); err != nil {
					break
				}
			}
		}
		if err != nil {
			break
		}
		all, _ := kept(part)
		host, _ := byPlace(all)
		if len(host) == 0 {
			continue
		}
		queued = true
		d.mu.Unlock()
		err = d.queueCopies(host, false)
		d.mu.Lock()
		if err != nil {
			d.health.Failed(err)
			r.copying = true
			break
		}
	}
	if queued {
		d.mu.Unlock()
		late := d.awaitCopies()
		d.mu.Lock()
		if err == nil && late != nil {
			err, r.copying = late, true
		}
	}
	return err
}

// pretend makes the books of a broken device say that all is mapped: it would not say what is.
//
// +checklocks:r.d.mu
func (r *resume) pretend() {
	for _, a := range r.coming {
		for _, id := range a.chunks {
			if k := r.d.chunks.At(id); k.Mappings == 0 {
				k.Mappings = 1
			}
		}
		a.bare = false
	}
}

// takeBack undoes everything, that it is as before. Contents that were copied are still where they were.
//
// +checklocks:r.d.mu
func (r *resume) takeBack() {
	d := r.d
	if r.told != nil {
		d.tell(d.onUnmap, r.told)
		r.told = nil
	}
	for _, a := range r.coming {
		// Where copies may be under way it keeps its memory, and has it when it is resumed.
		if a.backing != nil && !d.unsure.Load() && d.unback(a) != nil {
			d.unback(a)
		}
	}
	bySpace(r.coming, func(s *space, list []*absence) {
		all := s.survey(list, nil)
		for _, a := range list {
			s.lose(a.size)
			if a.backing != nil {
				d.quota.Physical[quota.GroupOf(s.class)].Remove(a.size)
				d.gaveBack(a.size, s.pool.counted)
			} else {
				s.area.Set(a.addr, a.size, 0)
				d.takeChunks(a)
			}
			a.mapped, a.bare, a.busy = false, false, false
			d.quota.Spare -= a.size - all[a].used
			d.addPaused(s, int64(all[a].used))
			if a.backing == nil {
				d.cutUp(a, all[a])
			}
		}
	})
}
