package engine

import (
	"cmp"
	"fmt"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/internal/engine/offload"
	"github.com/cistern-gpu/cistern/memory"
)

// How paused memory goes. Contents are copied stretch by stretch. The memory of each stretch goes as soon as its copies are
// known to be done, while those of later ones are under way: unmapping and releasing would add a tenth of the copying time. All
// page-locked memory is there and all copies are queued before anything goes. If a step fails all the same, the memory comes
// back with the contents that were kept. Where nothing is copied, or through a file, which may turn out to have no room,
// everything is unmapped before anything is released.

// stretch is how much memory is copied, and goes, at once: enough that the copies are as fast as one. Tests have less.
var stretch uint64 = stretchMost

const stretchMost = 128 << 20

// batchOut is neighbours among the memory that leaves, about a stretch of it.
type batchOut struct {
	list     []*pausedRange
	contents *offload.Batch
}

// contentsOf is the contents of a list.
func contentsOf(list []*pausedRange) (out []*offload.Contents) {
	for _, a := range list {
		out = append(out, &a.contents)
	}
	return out
}

// stretches cuts a list into parts of about a stretch.
func stretches(list []*pausedRange) (out [][]*pausedRange) {
	bytes, from := uint64(0), 0
	for i, a := range list {
		if bytes += a.size; bytes >= stretch || i == len(list)-1 {
			out = append(out, list[from:i+1])
			bytes, from = 0, i+1
		}
	}
	return out
}

// save waits until nothing uses the memory and saves its contents, or begins to where that is done while memory goes. The
// locks are let go meanwhile.
//
// +checklocks:p.d.gpu.mu
// +checklocks:p.d.state.paused.mu
func (p *pause) save() (err error) {
	for _, a := range p.leaving {
		a.freed = true // what is free beside may have been used until it was put out of reach
	}
	if err := p.drain(); err != nil {
		return err
	}
	if offload.Bytes(contentsOf(p.leaving)) == 0 {
		return nil
	}
	if err := p.d.state.paused.sure(); err != nil {
		return err
	}
	if p.o.Keep == config.KeepDisk {
		return p.saveToFile()
	}
	return p.startCopies()
}

// sure waits for copies that an earlier call could not wait for, and is an error while that fails. Device.mu is let go
// meanwhile.
//
// +checklocks:pr.gpu.mu
// +checklocks:pr.mu
func (pr *pausedMemory) sure() error {
	if !pr.phys.offload.Unsure() {
		return nil
	}
	pr.gpu.mu.Unlock()
	defer pr.gpu.mu.Lock()
	return pr.phys.offload.Ready()
}

// startCopies queues copies to host memory, a batch for each stretch. The lock is let go meanwhile.
//
// +checklocks:p.d.gpu.mu
// +checklocks:p.d.state.paused.mu
func (p *pause) startCopies() error {
	d := p.d
	d.state.phys.offload.PlaceInHost(contentsOf(p.leaving))
	var all []*offload.Batch
	for _, part := range stretches(p.leaving) {
		b := offload.NewBatch(contentsOf(part))
		all = append(all, b)
		p.batches = append(p.batches, batchOut{part, b})
		p.report.Kept += b.Bytes
	}
	d.mu.Unlock()
	err := d.state.phys.offload.Save(all)
	d.mu.Lock()
	if err != nil {
		d.state.phys.offload.Release(all...)
		return fmt.Errorf("pause: saving %d bytes: %w", p.report.Kept, err)
	}
	return nil
}

// saveToFile copies contents to a file. The lock is let go meanwhile.
//
// +checklocks:p.d.gpu.mu
// +checklocks:p.d.state.paused.mu
func (p *pause) saveToFile() error {
	d := p.d
	f, err := offload.NewFile(p.o.Dir)
	if err != nil {
		return fmt.Errorf("pause: %w", err)
	}
	f.Place(contentsOf(p.leaving))
	b := offload.NewBatch(contentsOf(p.leaving))
	f.Close()
	defer d.state.phys.offload.Release(b)
	d.mu.Unlock()
	err = d.state.phys.offload.SaveToFile(b)
	d.mu.Lock()
	if err != nil {
		return fmt.Errorf("pause: saving %d bytes: %w", b.Bytes, err)
	}
	p.report.Kept = b.Bytes
	return nil
}

// load copies contents back to memory that is there again. They stay in the store until refill drops them. The lock is let go
// meanwhile.
//
// +checklocks:pr.gpu.mu
// +checklocks:pr.mu
func (pr *pausedMemory) load(a *pausedRange) error {
	b := offload.NewBatch(contentsOf([]*pausedRange{a}))
	defer pr.phys.offload.Release(b)
	pr.gpu.mu.Unlock()
	defer pr.gpu.mu.Lock()
	return pr.phys.offload.Load(b)
}

// drain waits for all work until no block was given back behind the wait: what used it last must be over as well.
//
// +checklocks:p.d.gpu.mu
func (p *pause) drain() error {
	d := p.d
	for {
		behind := false
		for _, a := range p.leaving {
			behind = behind || a.freed
			a.freed = false
		}
		if !behind {
			return nil
		}
		if err := d.state.paused.mayPause(); err != nil {
			return err
		}
		if err := d.state.paused.waitForAll(); err != nil {
			return err
		}
		d.state.frees.collect(nil, false)
	}
}

// announce notifies the observer, if there is one, that memory goes. The locks are let go meanwhile.
//
// +checklocks:p.d.gpu.mu
func (p *pause) announce(list []*pausedRange) error {
	d := p.d
	if p.quiet { // one may have come while the lock was let go
		if err := d.state.observers.observed("pause"); err != nil {
			return err
		}
	}
	if d.state.observers.onUnmap != nil {
		var runs []run
		for _, a := range list {
			runs = append(runs, a.mem.runs(a)...)
		}
		p.published = append(p.published, runs...)
		d.state.observers.publish(d.state.observers.onUnmap, runs)
	}
	if err := p.drain(); err != nil {
		return err
	}
	return d.health.Broken()
}

// commit unmaps the memory and gives it back. After an error everything is there again, with its contents, except memory that
// could not be allocated again, which is marked as lost.
//
// +checklocks:p.d.gpu.mu
// +checklocks:p.d.state.paused.mu
func (p *pause) commit() (err error) {
	d := p.d
	if p.batches != nil {
		for i := range p.batches {
			if err = p.commitBatch(&p.batches[i]); err != nil {
				break
			}
		}
		if err != nil { // nothing may be under way behind it
			d.mu.Unlock()
			_ = d.state.phys.offload.Await()
			d.mu.Lock()
		}
		for _, b := range p.batches {
			d.state.phys.offload.Release(b.contents)
		}
	} else {
		err = p.commitAll()
	}
	if err != nil {
		return cmp.Or(p.restore(), err)
	}
	p.gone(p.leaving)
	return nil
}

// commitBatch waits for copies and has the memory go that they are of.
//
// +checklocks:p.d.gpu.mu
func (p *pause) commitBatch(b *batchOut) error {
	d := p.d
	d.mu.Unlock()
	err := d.state.phys.offload.Saved(b.contents)
	d.mu.Lock()
	if err != nil {
		return fmt.Errorf("pause: saving %d bytes: %w", p.report.Kept, err)
	}
	if err := p.announce(b.list); err != nil {
		return err
	}
	for _, a := range b.list {
		if err := a.unmap(); err != nil {
			return err
		}
		a.mem.release()
	}
	return nil
}

// commitAll unmaps everything. Chunks are not released: as long as they are there, so are their contents. Segments are last,
// because their contents are lost with the memory.
//
// +checklocks:p.d.gpu.mu
func (p *pause) commitAll() error {
	if err := p.announce(p.leaving); err != nil {
		return err
	}
	for _, final := range []bool{false, true} {
		for _, a := range p.leaving {
			if a.mem.final() != final {
				continue
			}
			if err := a.unmap(); err != nil {
				return err
			}
		}
	}
	return nil
}

// unmap has the memory go.
func (a *pausedRange) unmap() error {
	if err := a.mem.unmap(a); err != nil {
		return err
	}
	a.bare = true
	return nil
}

// restore gets back the memory that went. Memory that cannot be allocated again is lost: it stays paused.
//
// +checklocks:p.d.gpu.mu
// +checklocks:p.d.state.paused.mu
func (p *pause) restore() (first error) {
	d := p.d
	for _, final := range []bool{false, true} {
		for _, a := range p.leaving {
			if !a.bare || a.mem.final() != final {
				continue
			}
			renewed, err := a.mem.restore(a)
			if err == nil && renewed {
				if err = d.state.paused.load(a); err != nil {
					a.mem.dropAgain(a)
				}
			}
			if err != nil {
				a.lost, first = true, cmp.Or(first, err)
				continue
			}
			a.bare = false
		}
	}
	if first != nil {
		first = fmt.Errorf("pause failed, and some memory stays paused: %w", first)
	}
	return first
}

// gone notes that memory is unmapped: it is given back, and counts as paused where blocks are.
//
// +checklocks:p.d.gpu.mu
func (p *pause) gone(list []*pausedRange) {
	d := p.d
	byHeap(list, func(s *streamHeap, list []*pausedRange) {
		all := s.survey(list, nil)
		for _, a := range list {
			s.lose(a.size)
			a.mem.gone(a)
			a.mapped, a.bare, a.busy, a.lost = false, false, false, false
			v := all[a]
			d.state.phys.quota.Spare -= a.size - v.used
			d.state.paused.add(s, int64(v.used))
			p.report.Physical += a.size
			p.report.Bytes += v.used
			p.report.Blocks += int64(v.blocks)
			a.mem.cutUp(a, v)
		}
	})
}

// rollBack makes everything as it was. Memory that a second failure keeps from coming back stays paused.
//
// +checklocks:p.d.gpu.mu
func (p *pause) rollBack() {
	d := p.d
	var lost, there []*pausedRange
	for _, a := range p.leaving {
		if a.lost {
			lost = append(lost, a)
		} else {
			there = append(there, a)
		}
	}
	p.gone(lost)
	p.leaving = there
	if p.published != nil {
		d.state.observers.publish(d.state.observers.onMap, p.published)
	}
	d.state.paused.refill(p.leaving)
	p.report = memory.PauseReport{}
}
