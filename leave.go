package cistern

import (
	"cmp"
	"fmt"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/lockrank"
	"github.com/cistern-gpu/cistern/internal/vm"
)

// How paused memory goes. Contents are copied stretch by stretch, and the memory of each goes as soon as its copies are
// known to be done, while those of later ones are under way: unmapping and releasing would take a tenth of the time that
// copying takes. All page-locked memory is there and all copies are queued before anything goes. Should something fail
// all the same, what went comes back with the contents that were kept. Where nothing is copied, or through a file, which
// may turn out to have no room, everything is unmapped before anything is released.

// stretch is how much memory is copied, and goes, at once: enough that the copies are as fast as one. Tests have less.
var stretch uint64 = stretchMost

const stretchMost = 128 << 20

// batchOut is neighbours among the memory that leaves, about a stretch of it.
type batchOut struct {
	list   []*absence
	pieces []piece    // of contents, as they were when they were placed: others may drop some meanwhile
	done   cuda.Event // recorded behind their copies
}

// stretches cuts a list into parts of about a stretch.
func stretches(list []*absence) (out [][]*absence) {
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
// +checklocks:p.d.mu
// +checklocks:p.d.pausing
func (p *pause) save() (err error) {
	for _, a := range p.leaving {
		a.freed = true // what is free beside may have been used until it was put out of reach
	}
	if err := p.settle(); err != nil {
		return err
	}
	switch p.o.Keep {
	case KeepHost:
		p.batches, p.report.Kept, err = p.d.startCopies(p.leaving)
	case KeepDisk:
		p.report.Kept, err = p.d.saveToFile(p.leaving, p.o.Dir)
	}
	return err
}

// settle waits for all work until no block was given back behind the wait: what used it last must be over as well.
//
// +checklocks:p.d.mu
func (p *pause) settle() error {
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
		if err := d.mayPause(); err != nil {
			return err
		}
		if err := d.waitForAll(); err != nil {
			return err
		}
		d.collect(nil, false)
	}
}

// announce tells whoever wants to know that memory goes. The locks are let go meanwhile.
//
// +checklocks:p.d.mu
func (p *pause) announce(list []*absence) error {
	d := p.d
	if d.onUnmap != nil {
		var runs []run
		for _, a := range list {
			runs = append(runs, a.runs()...)
		}
		p.told = append(p.told, runs...)
		d.tell(d.onUnmap, runs)
	}
	if err := p.settle(); err != nil {
		return err
	}
	return d.health.Broken()
}

// commit unmaps the memory and gives it back. After an error everything is there again, with its contents, but for what
// could not be had again, which is marked as lost.
//
// +checklocks:p.d.mu
// +checklocks:p.d.pausing
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
			d.copied()
			d.mu.Lock()
		}
		d.putEvents(p.batches)
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
// +checklocks:p.d.mu
func (p *pause) commitBatch(b *batchOut) error {
	d := p.d
	d.mu.Unlock()
	err := d.drv.EventSynchronize(d.id, b.done)
	d.mu.Lock()
	if err != nil {
		return fmt.Errorf("pause: saving %d bytes: %w", p.report.Kept, d.health.Failed(err))
	}
	if err := p.announce(b.list); err != nil {
		return err
	}
	for _, a := range b.list {
		if err := d.unmapPaused(a); err != nil {
			return err
		}
		for _, id := range a.chunks {
			k := d.chunks.At(id)
			if k.Mappings != 1 {
				continue // it is mapped elsewhere, too
			}
			if err := d.upstream.Release(k.Handle); err == nil {
				k.Released = true
			} else {
				d.health.Failed(err) // giveBackChunks tries again
			}
		}
	}
	return nil
}

// commitAll unmaps everything. Chunks are not released: as long as they are there, so are their contents. Segments are
// last: they cannot be had again as they were.
//
// +checklocks:p.d.mu
func (p *pause) commitAll() error {
	d := p.d
	if err := p.announce(p.leaving); err != nil {
		return err
	}
	for _, segments := range []bool{false, true} {
		for _, a := range p.leaving {
			if (a.backing != nil) != segments {
				continue
			}
			if err := d.unmapPaused(a); err != nil {
				return err
			}
		}
	}
	return nil
}

// unmapPaused unmaps what is to go, or drops the memory of a segment.
//
// +checklocks:d.mu
func (d *Device) unmapPaused(a *absence) error {
	if a.backing != nil {
		if err := d.unback(a); err != nil {
			return err
		}
	} else if err := d.drv.MemUnmap(cuda.Ptr(a.addr), a.size); err != nil {
		return d.health.Failed(err)
	}
	a.bare = true
	return nil
}

// restore gets back what went. What cannot be had again is lost: it stays paused.
//
// +checklocks:p.d.mu
// +checklocks:p.d.pausing
func (p *pause) restore() (first error) {
	d := p.d
	for _, segments := range []bool{false, true} {
		for _, a := range p.leaving {
			if !a.bare || (a.backing != nil) != segments {
				continue
			}
			load := a.backing != nil
			err := error(nil)
			if a.backing != nil {
				err = d.back(a)
			} else {
				load, err = d.remap(a)
			}
			if err == nil && load {
				if err = d.loadContents([]*absence{a}); err != nil {
					d.dropAgain(a)
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

// remap maps chunks again that were unmapped, new ones for those that were released, and reports whether there are any:
// they lack their contents. After an error nothing is mapped, or it is stuck.
//
// +checklocks:d.mu
func (d *Device) remap(a *absence) (renewed bool, err error) {
	s, at := a.space, a.addr
	mapped := 0
	for _, id := range a.chunks {
		k := d.chunks.At(id)
		if k.Released {
			var h cuda.Handle
			if h, err = d.upstream.Create(k.Size); err != nil {
				break
			}
			e := event.Event{Kind: event.SegmentUnmap, Addr: at, Size: k.Size, Handle: uint64(k.Handle),
				Stream: s.stream.number(), Pool: s.pool.number}
			d.record(e)
			k.Handle, k.Serial, k.Released, renewed = h, d.chunks.NewSerial(), false, true
			e.Kind, e.Handle = event.SegmentMap, uint64(h)
			d.record(e)
		}
		if err = d.drv.MemMap(cuda.Ptr(at), k.Size, k.Handle); err != nil {
			break
		}
		at += k.Size
		mapped++
	}
	if err == nil {
		err = d.setAccess(cuda.Ptr(a.addr), a.size)
	}
	if err != nil {
		d.health.Failed(err)
		d.unmapOrStick(a.addr, at-a.addr, a.chunks[:mapped])
	}
	return renewed, err
}

// dropAgain unmaps what restore got, when the contents could not be copied there.
//
// +checklocks:d.mu
func (d *Device) dropAgain(a *absence) {
	if a.backing == nil {
		d.unmapOrStick(a.addr, a.size, a.chunks)
	} else if !d.unsure.Load() && d.unback(a) != nil {
		d.unback(a) // once more: what stays is there when it is resumed
	}
}

// unback drops the memory of a segment; with the locks let go where that is the user's to do.
//
// +checklocks:d.mu
func (d *Device) unback(a *absence) error {
	if !a.space.pool.foreign {
		if err := a.backing.Unback(cuda.Ptr(a.addr), a.size); err != nil {
			return d.health.Failed(err)
		}
		return nil
	}
	d.mu.Unlock()
	defer d.mu.Lock()
	lockrank.MayCall()
	return a.backing.Unback(cuda.Ptr(a.addr), a.size)
}

// back gets a segment memory again, likewise.
//
// +checklocks:d.mu
func (d *Device) back(a *absence) error {
	if !a.space.pool.foreign {
		if err := a.backing.Back(cuda.Ptr(a.addr), a.size); err != nil {
			return d.health.Failed(err)
		}
		return nil
	}
	d.mu.Unlock()
	defer d.mu.Lock()
	lockrank.MayCall()
	return a.backing.Back(cuda.Ptr(a.addr), a.size)
}

// gone notes that memory is unmapped: it is given back, and counts as paused where blocks are.
//
// +checklocks:p.d.mu
func (p *pause) gone(list []*absence) {
	d := p.d
	bySpace(list, func(s *space, list []*absence) {
		all := s.survey(list, nil)
		for _, a := range list {
			s.lose(a.size)
			if a.backing != nil {
				d.quota.Physical[quota.GroupOf(s.class)].Remove(a.size)
				d.gaveBack(a.size, s.pool.counted)
				d.record(event.Event{Kind: event.SegmentUnmap, Addr: a.addr, Size: a.size, Stream: s.stream.number(), Pool: s.pool.number})
			} else {
				s.area.Set(a.addr, a.size, 0)
				d.giveBackChunks(s, a.addr, a.chunks)
			}
			a.chunks, a.mapped, a.bare, a.busy, a.lost = nil, false, false, false, false
			v := all[a]
			d.quota.Spare -= a.size - v.used
			d.addPaused(s, int64(v.used))
			p.report.Physical += a.size
			p.report.Bytes += v.used
			p.report.Blocks += int64(v.blocks)
			if a.backing == nil {
				d.cutUp(a, v)
			}
		}
	})
}

// giveBackChunks releases chunks that were unmapped at addr and on, unless they are released already; what cannot be
// released is spare.
//
// +checklocks:d.mu
func (d *Device) giveBackChunks(s *space, addr uint64, list []vm.ChunkID) {
	for _, id := range list {
		k := d.chunks.At(id)
		d.record(event.Event{Kind: event.SegmentUnmap, Addr: addr, Size: k.Size, Handle: uint64(k.Handle),
			Stream: s.stream.number(), Pool: s.pool.number})
		addr += k.Size
		k.Mappings--
		if k.Mappings == 0 {
			var err error
			if !k.Released {
				err = d.upstream.Release(k.Handle)
			}
			if err == nil {
				d.quota.Physical[quota.GroupOf(s.class)].Remove(k.Size)
				d.gaveBack(k.Size, true)
				d.chunks.Drop(id)
				continue
			}
			d.health.Failed(err)
		}
		d.quota.Physical[quota.GroupOf(s.class)].Leave(k.Size)
		d.addSpare(id, nil, 0)
	}
}

// rollBack makes everything as it was, but for what a second failure had in the way, which is paused.
//
// +checklocks:p.d.mu
func (p *pause) rollBack() {
	d := p.d
	var lost, there []*absence
	for _, a := range p.leaving {
		if a.lost {
			lost = append(lost, a)
		} else {
			there = append(there, a)
		}
	}
	p.gone(lost)
	p.leaving = there
	if p.told != nil {
		d.tell(d.onMap, p.told)
	}
	d.refill(p.leaving)
	p.report = PauseReport{}
}
