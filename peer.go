package cistern

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/heap"
)

// EnablePeer makes all memory of the device, held now or got later, accessible to work on another device. Where the two
// cannot reach each other the error is one for which errors.Is(err, cuda.ErrPeerAccessUnsupported) holds. After any
// error it can be asked for again; what the peer may use by then is what it could before, or more.
func (d *Device) EnablePeer(peer cuda.Device) error {
	if peer == d.id {
		return nil
	}
	can, err := d.drv.CanAccessPeer(peer, d.id)
	if err != nil {
		return err
	}
	if !can {
		return fmt.Errorf("device %d cannot use the memory of device %d: %w", peer, d.id, cuda.ErrPeerAccessUnsupported)
	}
	// What cuMemAlloc gives out is opened to a context as a whole, mapped memory range by range.
	if err := d.drv.RetainContext(peer); err != nil {
		return err
	}
	if err := d.drv.EnablePeerAccess(peer, d.id); err != nil && !errors.Is(err, cuda.ErrPeerAccessAlreadyEnabled) {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if slices.Contains(d.access(), peer) {
		return d.eachUpstream((*Pool).openToPeers)
	}
	if err := d.eachUpstream(func(p *Pool) error {
		if r := p.peers(); r != nil {
			return p.openTo(r, peer)
		}
		return nil
	}); err != nil {
		return err
	}
	if slices.Contains(d.access(), peer) { // another thread was faster
		return nil
	}
	runs := slices.Clone(d.arriving)
	for _, s := range d.spaces {
		if s == nil || s.area == nil && (d.single == nil || s.pool.segments != d.single) {
			continue
		}
		s.mu.Lock()
		runs = append(runs, s.mapped()...)
		s.mu.Unlock()
	}
	for _, r := range runs { // nothing is unmapped meanwhile: that takes Device.mu
		if err := d.drv.MemSetAccess(cuda.Ptr(r.addr), r.size, []cuda.Device{peer}); err != nil {
			return err // not kept as this device's: it may be the peer that is broken
		}
	}
	for p, size := range d.foreign {
		if err := d.drv.MemSetAccess(p, size, []cuda.Device{peer}); err != nil {
			return err
		}
	}
	d.devs = append(slices.Clone(d.access()), peer)
	return d.eachUpstream((*Pool).openToPeers) // of pools that came meanwhile
}

// Peers are the devices that EnablePeer was called for.
func (d *Device) Peers() []cuda.Device {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.access()[1:])
}

// access is the devices that may use the memory of this one, itself first.
//
// +checklocks:d.mu
func (d *Device) access() []cuda.Device {
	if len(d.devs) == 0 {
		d.devs = []cuda.Device{d.id}
	}
	return d.devs
}

// setAccess makes newly mapped memory accessible. That a peer is broken is no reason to do without memory here.
//
// +checklocks:d.mu
func (d *Device) setAccess(p cuda.Ptr, size uint64) error {
	devs := d.access()
	err := d.drv.MemSetAccess(p, size, devs)
	if code, ok := codeOf(err); ok && code.Poisons() && len(devs) > 1 && d.drv.MemSetAccess(p, size, devs[:1]) == nil {
		return nil
	}
	return err
}

// run is a contiguous range of mapped memory.
type run struct{ addr, size uint64 }

// mapped lists the memory of a space that is mapped and not on its way out. The caller holds the space's lock.
//
// +checklocks:s.dev.mu
func (s *space) mapped() (runs []run) {
	s.heap.Each(func(id heap.ID, b *heap.Block) bool {
		// A segment on its way out comes back if that fails.
		if b.State == heap.Hole || b.State == heap.Zombie && s.area != nil {
			return true
		}
		if n := len(runs); n > 0 && s.heap.Prev(id) != 0 && runs[n-1].addr+runs[n-1].size == b.Addr {
			runs[n-1].size += b.Size
		} else {
			runs = append(runs, run{b.Addr, b.Size})
		}
		return true
	})
	return s.withAbsences(runs)
}
