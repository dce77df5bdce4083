package engine

import (
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/phys"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/heap"
)

// Addresses: which stream heap they belong to, what a stream heap reserves for its memory, and what is given back.

// heapOf is the stream heap that an address belongs to; nil if the address is not the allocator's.
func (a *Allocator) heapOf(p cuda.Ptr) *streamHeap { return a.addresses.Find(uint64(p)) }

// SegmentBase finds the segment in which the live allocation that starts at p lies: the range that the upstream handed out,
// of the innermost upstream where pools are over pools. It fails with cuda.ErrNotSupported where the memory is chunks, which
// are mapped into a larger range one by one.
func (a *Allocator) SegmentBase(p cuda.Ptr) (base cuda.Ptr, size uint64, err error) {
	if _, err := a.Base(p); err != nil {
		return 0, 0, err
	}
	c := a.addresses.Claim(uint64(p)) // which the live allocation keeps
	for c.Under != nil {
		c = c.Under
	}
	return c.Owner.backing.segmentAt(p, c.Base, c.Size)
}

// claim makes [base, base+size) known as the stream heap's, disown undoes it. Only a pool that gets its memory from another
// pool may have addresses that are that one's.
func (a *Allocator) claim(base, size uint64, s *streamHeap) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.addresses.Add(base, size, s, func(o *streamHeap) bool { return s.pool.backing.over(o.pool.owner()) })
}

func (a *Allocator) disown(base, size uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.addresses.Remove(base, size)
}

// reserve gets addresses for a stream heap: at least n bytes, more with every reservation of the stream heap, so that a stream
// heap that keeps growing has few. The first is a multiple of the device's memory, because moving memory uses addresses
// up until old mappings are gone.
//
// The address space of a GPU has room for 125 reservations of 1 TiB (driver 580, an H200); firstReservation leaves room
// for many stream heaps.
//
// +checklocks:h.s.dev.gpu.mu
func (h *chunkHeap) reserve(n uint64) error {
	s, d := h.s, h.s.dev
	first := min(2*d.info.TotalBytes, firstReservation)
	if s.class == quota.Small {
		first /= 16
	}
	base, size, err := d.state.phys.mem.Reserve(max(2*n, h.area.Reserved(), first), n, phys.RegionBytes)
	if err != nil && d.state.mover.reclaim(s) {
		base, size, err = d.state.phys.mem.Reserve(n, n, phys.RegionBytes)
	}
	if err != nil {
		return err
	}
	if err := d.a.claim(base, size, s); err != nil {
		d.state.phys.mem.FreeAddresses(base, size)
		return err
	}
	d.state.phys.mem.Ranges.Add(phys.Range{Base: base, Size: size, Owner: s.index})
	h.area.AddRange(base, size)
	s.blocks.AddRange(base, size)
	return nil
}

const firstReservation = 1 << 40

// reclaim gives back the addresses of stream heaps that have no used block, such as those of streams that were destroyed. It
// reports whether any went. The caller holds Device.mu and held's lock.
//
// +checklocks:mv.gpu.mu
func (mv *mover) reclaim(held *streamHeap) bool {
	before := len(mv.phys.mem.Ranges.All())
	each := func(f func(*chunkHeap)) {
		for h := range mv.pools.chunkHeaps() {
			if o := h.s; o != held && !o.pool.pinned {
				o.lockBeside(held)
				if o.blocks.UsedBlocks == 0 {
					f(h)
				}
				o.unlockBeside(held)
			}
		}
	}
	if mv.observers.onUnmap == nil { // else what is mapped stays
		each(func(h *chunkHeap) { h.detach(everything) })
	}
	mv.reap(held)
	each(func(h *chunkHeap) { h.dropRanges() })
	return len(mv.phys.mem.Ranges.All()) < before
}

// dropRanges gives the reservations of a stream heap that hold nothing but addresses back to the driver. The caller holds
// Device.mu and the arena's lock.
//
// +checklocks:h.s.dev.gpu.mu
func (h *chunkHeap) dropRanges() error {
	s, d := h.s, h.s.dev
	for i := 0; i < len(s.blocks.Ranges()); {
		first := s.blocks.Ranges()[i]
		b := *s.blocks.At(first)
		if b.State != heap.Unmapped || s.blocks.Next(first) != 0 {
			i++
			continue
		}
		d.a.disown(b.Addr, b.Size) // first: once the driver has them they may be another device's
		if err := d.state.phys.mem.FreeAddresses(b.Addr, b.Size); err != nil {
			d.a.claim(b.Addr, b.Size, s) // which succeeded before
			return err
		}
		s.blocks.DropRange(first)
		h.area.DropRange(b.Addr)
		d.state.phys.mem.Ranges.Drop(s.index, b.Addr)
	}
	return nil
}
