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
func (d *Device) copyStream() (cuda.Stream, error) {
	if d.copies == 0 {
		st, err := d.drv.StreamCreate(d.id, false)
		if err != nil {
			return 0, d.failed(err)
		}
		d.copies = st
	}
	return d.copies, nil
}

// sure is an error while copies of an earlier call may still be under way. The caller holds Device.pausing and Device.mu,
// which is let go meanwhile.
func (d *Device) sure() error {
	if !d.unsure.Load() {
		return nil
	}
	d.mu.Unlock()
	defer d.mu.Lock()
	if err := d.copied(); d.unsure.Load() {
		return d.failed(err)
	}
	return nil
}

// saveContents copies what is kept of memory that is leaving, and returns the bytes. The caller holds Device.pausing and
// Device.mu, which is let go meanwhile.
func (d *Device) saveContents(list []*absence, o PauseOptions) (uint64, error) {
	total := uint64(0)
	for _, a := range list {
		for _, p := range a.pieces {
			if !p.dropped {
				total += p.size
			}
		}
	}
	if total == 0 {
		return 0, nil
	}
	if err := d.sure(); err != nil {
		return 0, err
	}
	var where *spill
	var err error
	if o.Keep == KeepDisk {
		if where, err = newSpill(o.Dir); err != nil {
			return 0, fmt.Errorf("pause: %w", err)
		}
	}
	var all []piece
	for _, a := range list {
		var placed []*piece
		for _, p := range a.pieces {
			switch {
			case p.dropped:
				continue
			case where != nil:
				placed = append(placed, where.place(p))
			default:
				placed = d.vault.place(placed, p)
			}
		}
		a.pieces = placed
		for _, p := range placed {
			all = append(all, *p) // others may drop pieces meanwhile
		}
	}
	defer holdFiles(all)()
	d.mu.Unlock()
	defer d.mu.Lock()
	if where != nil {
		err = d.spillOut(all)
	} else {
		err = d.copyAll(all, true)
	}
	if err != nil {
		return 0, fmt.Errorf("pause: saving %d bytes: %w", total, err)
	}
	return total, nil
}

// loadContents copies the contents of memory that is coming back, and returns the bytes. They are kept: refill drops them.
// The caller holds Device.pausing and Device.mu, which is let go meanwhile.
func (d *Device) loadContents(list []*absence) (uint64, error) {
	total := uint64(0)
	var host, disk []piece
	for _, a := range list {
		for _, p := range a.pieces {
			switch {
			case p.dropped:
				continue
			case p.spill != nil:
				disk = append(disk, *p)
			default:
				host = append(host, *p)
			}
			total += p.size
		}
	}
	if total == 0 {
		return 0, nil
	}
	defer holdFiles(disk)()
	d.mu.Unlock()
	defer d.mu.Lock()
	err := d.copyAll(host, false)
	if err == nil && len(disk) > 0 {
		err = d.spillIn(disk)
	}
	if err != nil {
		return 0, fmt.Errorf("resume: everything stays paused: copying %d bytes back: %w", total, err)
	}
	return total, nil
}

// copyAll copies pieces to the host's memory, or from there, as few copies as there can be. What of that memory is new is
// made meanwhile. No lock but Device.pausing is held.
func (d *Device) copyAll(pieces []piece, out bool) (err error) {
	if len(pieces) == 0 {
		return nil
	}
	st, err := d.copyStream()
	if err != nil {
		return err
	}
	stop := d.vault.fill()
	defer func() {
		err = cmp.Or(err, stop())
	}()
	for i := 0; i < len(pieces) && err == nil; {
		x := pieces[i]
		for i++; i < len(pieces); i++ {
			y := &pieces[i]
			if y.slab != x.slab || y.addr != x.addr+x.size || y.at != x.at+x.size {
				break
			}
			x.size += y.size
		}
		var base cuda.Ptr
		if base, err = x.slab.wait(); err != nil {
			break
		}
		dst, src := base+cuda.Ptr(x.at), cuda.Ptr(x.addr)
		if !out {
			dst, src = src, dst
		}
		err = d.drv.MemcpyAsync(d.id, dst, src, x.size, st)
	}
	if sync := d.copied(); err == nil { // in any case: nothing may be under way behind a failure
		err = sync
	}
	if err != nil {
		d.failed(err)
	}
	return err
}

// copied waits for the copies. Should the driver refuse to, it is asked again, now and before any memory is unmapped or
// page-locked memory goes or serves another pause. The caller holds Device.pausing and nothing else, if not Device.mu.
func (d *Device) copied() error {
	if d.copies == 0 {
		return nil
	}
	var first error
	for range 3 {
		d.syncs.Add(1)
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
