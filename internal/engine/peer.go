package engine

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/heap"
)

// Enable makes all memory of the device, present and future, accessible to work on another device. Where the two cannot reach
// each other the error is one for which errors.Is(err, cuda.ErrPeerAccessUnsupported) holds. After any error Enable can be
// called again; the peer may use by then what it could before, or more.
func (pe *Peers) Enable(peer cuda.Device) error {
	if peer == pe.gpu.id {
		return nil
	}
	can, err := pe.gpu.drv.CanAccessPeer(peer, pe.gpu.id)
	if err != nil {
		return err
	}
	if !can {
		return fmt.Errorf("device %d cannot use the memory of device %d: %w", peer, pe.gpu.id, cuda.ErrPeerAccessUnsupported)
	}
	// Memory from cuMemAlloc is opened to a context as a whole, mapped memory range by range.
	if err := pe.gpu.drv.RetainContext(peer); err != nil {
		return err
	}
	if err := pe.gpu.drv.EnablePeerAccess(peer, pe.gpu.id); err != nil && !errors.Is(err, cuda.ErrPeerAccessAlreadyEnabled) {
		return err
	}
	pe.gpu.mu.Lock()
	defer pe.gpu.mu.Unlock()
	if slices.Contains(pe.phys.mem.Access.Devices(), peer) {
		return pe.pools.openUpstreams((*wholeSegments).openToPeers)
	}
	if err := pe.pools.openUpstreams(func(w *wholeSegments) error { return w.openTo(peer) }); err != nil {
		return err
	}
	if slices.Contains(pe.phys.mem.Access.Devices(), peer) { // another thread was faster
		return nil
	}
	runs := slices.Clone(pe.phys.arriving)
	for _, s := range pe.pools.heaps {
		if s != nil {
			s.arena.Lock()
			runs = append(runs, s.backing.mapped()...)
			s.arena.Unlock()
		}
	}
	for _, r := range runs { // nothing is unmapped meanwhile: that takes Device.mu
		if err := pe.gpu.drv.MemSetAccess(cuda.Ptr(r.addr), r.size, []cuda.Device{peer}); err != nil {
			return err // not kept as this device's: it may be the peer that is broken
		}
	}
	for p, size := range pe.imports.imported {
		if err := pe.gpu.drv.MemSetAccess(p, size, []cuda.Device{peer}); err != nil {
			return err
		}
	}
	for p, size := range pe.imports.readOnly {
		if err := pe.gpu.drv.MemSetReadOnly(p, size, []cuda.Device{peer}); err != nil {
			return err
		}
	}
	for _, pool := range pe.imports.pooled {
		if err := pe.gpu.drv.MemPoolSetAccess(pe.gpu.id, pool, []cuda.Device{peer}); err != nil {
			return err
		}
	}
	pe.phys.mem.Access.Add(peer)
	return pe.pools.openUpstreams((*wholeSegments).openToPeers) // of pools that came meanwhile
}

// openUpstreams opens the users' upstreams of the device's pools, and returns the first error. Device.mu is let go meanwhile.
//
// +checklocks:pt.gpu.mu
func (pt *poolTable) openUpstreams(open func(*wholeSegments) error) (first error) {
	for _, w := range pt.userSegments() {
		first = cmp.Or(first, open(w))
	}
	return first
}

// List is the devices that Enable was called for.
func (pe *Peers) List() []cuda.Device {
	pe.gpu.mu.Lock()
	defer pe.gpu.mu.Unlock()
	return slices.Clone(pe.phys.mem.Access.Devices()[1:])
}

// run is a contiguous range of mapped memory.
type run struct{ addr, size uint64 }

// runs lists the memory of a stream heap in the blocks that are mapped. The caller holds the arena's lock.
//
// +checklocks:s.dev.gpu.mu
func (s *streamHeap) runs(mapped func(*heap.Block) bool) (runs []run) {
	s.blocks.Each(func(id heap.ID, b *heap.Block) bool {
		if !mapped(b) {
			return true
		}
		if n := len(runs); n > 0 && s.blocks.Prev(id) != 0 && runs[n-1].addr+runs[n-1].size == b.Addr {
			runs[n-1].size += b.Size
		} else {
			runs = append(runs, run{b.Addr, b.Size})
		}
		return true
	})
	return s.paused.correct(runs)
}
