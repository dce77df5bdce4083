package cistern

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/cistern-gpu/cistern/cuda"
)

// The contents of paused memory: what blocks have of it, and nothing else, is copied, asynchronously and on a stream of
// the engine's own that no other orders itself with, to page-locked host memory (vault.go) or through it to a file
// (spill.go), and back.

// piece is what one block had of memory that is paused, in one place.
type piece struct {
	addr, size uint64
	slab       *slab // of the host's memory, from at on; or
	spill      *spill
	at         uint64
	dropped    bool // guarded by Device.mu: the block was freed, or the contents are back
}

// part is a part of a piece as one of its own, in the place of which it comes.
func (p *piece) part(addr, size uint64) *piece {
	return &piece{addr, size, p.slab, p.spill, p.at + addr - p.addr, p.dropped}
}

// forget drops the contents of [addr, addr+size), which is whole blocks' part of the absence. The caller holds Device.mu.
func (a *absence) forget(addr, size uint64) {
	i, _ := slices.BinarySearchFunc(a.pieces, addr, func(p *piece, addr uint64) int {
		if p.addr+p.size <= addr {
			return -1
		}
		return 1
	})
	for ; i < len(a.pieces) && a.pieces[i].addr < addr+size; i++ {
		if p := a.pieces[i]; !p.dropped {
			p.dropped = true
			switch {
			case p.slab != nil:
				p.slab.live -= p.size
			case p.spill != nil:
				p.spill.drop(p.size)
			}
		}
	}
}

// copyStream is the stream on which contents are copied.
//
// +checklocks:d.pausing
func (d *Device) copyStream() (cuda.Stream, error) {
	if d.copies == 0 {
		st, err := d.drv.StreamCreate(d.id, false)
		if err != nil {
			return 0, d.health.Failed(err)
		}
		d.copies = st
	}
	return d.copies, nil
}

// sure is an error while copies of an earlier call may still be under way. The caller holds Device.pausing and Device.mu,
// which is let go meanwhile.
//
// +checklocks:d.mu
// +checklocks:d.pausing
func (d *Device) sure() error {
	if !d.unsure.Load() {
		return nil
	}
	d.mu.Unlock()
	defer d.mu.Lock()
	if err := d.copied(); d.unsure.Load() {
		return d.health.Failed(err)
	}
	return nil
}

// kept is the contents of a list that nobody forgot, as they are now, and their bytes. The caller holds Device.mu.
func kept(list []*absence) (pieces []piece, bytes uint64) {
	for _, a := range list {
		for _, p := range a.pieces {
			if !p.dropped {
				pieces = append(pieces, *p)
				bytes += p.size
			}
		}
	}
	return pieces, bytes
}

// placeContents gives the contents of a list their places.
func placeContents(list []*absence, place func(list []*piece, p *piece) []*piece) {
	for _, a := range list {
		var placed []*piece
		for _, p := range a.pieces {
			if !p.dropped {
				placed = place(placed, p)
			}
		}
		a.pieces = placed
	}
}

// startCopies queues copies of what is kept of memory that is leaving to the host's memory, which is all there when it
// returns, and returns the bytes. There are no batches where nothing is to be copied. Their events are putEvents' to give
// back. The caller holds Device.pausing and Device.mu, which is let go meanwhile.
//
// +checklocks:d.mu
// +checklocks:d.pausing
func (d *Device) startCopies(list []*absence) (batches []batchOut, total uint64, err error) {
	if _, total = kept(list); total == 0 {
		return nil, 0, nil
	}
	if err := d.sure(); err != nil {
		return nil, 0, err
	}
	placeContents(list, d.vault.place)
	total = 0 // blocks may have been freed meanwhile
	for _, part := range stretches(list) {
		pieces, n := kept(part)
		batches = append(batches, batchOut{list: part, pieces: pieces})
		total += n
	}
	d.mu.Unlock()
	defer d.mu.Lock()
	stop := d.vault.fill()
	for i := range batches {
		b := &batches[i]
		if err = d.queueCopies(b.pieces, true); err == nil {
			b.done, err = d.timeline.Event()
		}
		if err == nil {
			err = d.drv.EventRecord(d.id, b.done, d.copies)
		}
		if err != nil {
			break
		}
	}
	if err = cmp.Or(err, stop()); err != nil {
		d.health.Failed(err)
		d.copied() // nothing may be under way behind a failure
		d.putEvents(batches)
		return nil, 0, fmt.Errorf("pause: saving %d bytes: %w", total, err)
	}
	return batches, total, nil
}

// putEvents gives the events of batches back.
func (d *Device) putEvents(batches []batchOut) {
	for i := range batches {
		if b := &batches[i]; b.done != 0 {
			d.timeline.PutEvent(b.done)
			b.done = 0
		}
	}
}

// saveToFile copies what is kept of memory that is leaving to a file, and returns the bytes. The caller holds
// Device.pausing and Device.mu, which is let go meanwhile.
//
// +checklocks:d.mu
// +checklocks:d.pausing
func (d *Device) saveToFile(list []*absence, dir string) (uint64, error) {
	if _, total := kept(list); total == 0 {
		return 0, nil
	}
	if err := d.sure(); err != nil {
		return 0, err
	}
	where, err := newSpill(dir)
	if err != nil {
		return 0, fmt.Errorf("pause: %w", err)
	}
	placeContents(list, func(list []*piece, p *piece) []*piece { return append(list, where.place(p)) })
	all, total := kept(list)
	defer holdFiles(all)()
	d.mu.Unlock()
	defer d.mu.Lock()
	if err := d.spillOut(all); err != nil {
		return 0, fmt.Errorf("pause: saving %d bytes: %w", total, err)
	}
	return total, nil
}

// byPlace tells contents in the host's memory from those in files.
func byPlace(all []piece) (host, disk []piece) {
	for _, p := range all {
		if p.spill != nil {
			disk = append(disk, p)
		} else {
			host = append(host, p)
		}
	}
	return host, disk
}

// loadContents copies the contents of memory that is there again. They are kept: refill drops them. The caller holds
// Device.pausing and Device.mu, which is let go meanwhile.
//
// +checklocks:d.mu
// +checklocks:d.pausing
func (d *Device) loadContents(list []*absence) error {
	all, _ := kept(list)
	host, disk := byPlace(all)
	defer holdFiles(disk)()
	d.mu.Unlock()
	defer d.mu.Lock()
	var err error
	if len(host) > 0 {
		if err = d.queueCopies(host, false); err != nil {
			d.health.Failed(err)
		}
		err = cmp.Or(err, d.awaitCopies())
	}
	if err == nil && len(disk) > 0 {
		err = d.spillIn(disk)
	}
	return err
}

// queueCopies copies pieces to the host's memory, or from there, as few copies as there can be. Memory that is still
// being made is waited for. No lock but Device.pausing is needed.
//
// +checklocks:d.pausing
func (d *Device) queueCopies(pieces []piece, out bool) error {
	st, err := d.copyStream()
	if err != nil {
		return err
	}
	for i := 0; i < len(pieces); {
		x := pieces[i]
		for i++; i < len(pieces); i++ {
			y := &pieces[i]
			if y.slab != x.slab || y.addr != x.addr+x.size || y.at != x.at+x.size {
				break
			}
			x.size += y.size
		}
		base, err := x.slab.wait()
		if err != nil {
			return err
		}
		dst, src := base+cuda.Ptr(x.at), cuda.Ptr(x.addr)
		if !out {
			dst, src = src, dst
		}
		if err := d.drv.MemcpyAsync(d.id, dst, src, x.size, st); err != nil {
			return err
		}
	}
	return nil
}

// awaitCopies is copied, and takes note of a broken context.
//
// +checklocks:d.pausing
func (d *Device) awaitCopies() error {
	err := d.copied()
	if err != nil {
		d.health.Failed(err)
	}
	return err
}

// copied waits for the copies. Should the driver refuse to, it is asked again, now and before any memory is unmapped or
// page-locked memory goes or serves another pause. The caller holds Device.pausing and nothing else, if not Device.mu.
//
// +checklocks:d.pausing
func (d *Device) copied() error {
	if d.copies == 0 {
		return nil
	}
	var first error
	for range 3 {
		d.timeline.CountWait()
		err := d.drv.StreamSynchronize(d.id, d.copies)
		if err == nil {
			d.unsure.Store(false)
			return first
		}
		first = cmp.Or(first, err)
	}
	d.unsure.Store(true)
	return first
}
