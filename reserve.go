package cistern

// Addresses: what a space reserves for its memory, and gives back once it holds none.

import (
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/heap"
)

// reserve gets addresses for a space: at least n bytes, more with every reservation of the space, so that a space
// that keeps growing has few. The first is a multiple of the device's memory, because moving memory uses addresses
// up until old mappings are gone.
//
// The address space of a GPU has room for 125 reservations of 1 TiB (driver 580, an H200); firstReservation leaves room
// for many spaces.
//
// +checklocks:d.mu
func (d *Device) reserve(s *space, n uint64) error {
	const piece = uint64(1) << regionBits
	up := func(x uint64) uint64 { return (x + piece - 1) / piece * piece }
	first := min(2*d.info.TotalBytes, firstReservation)
	if s.class == quota.Small {
		first /= 16
	}
	want := up(max(2*n, s.area.Reserved(), first))
	least := up(n)
	reclaimed := false
	for {
		p, err := d.drv.AddressReserve(want, piece, 0)
		if err == nil {
			if err := d.a.claim(uint64(p), want, s); err != nil {
				d.drv.AddressFree(p, want)
				return err
			}
			d.areas = append(d.areas, reservation{base: uint64(p), size: want, space: s})
			s.area.AddRange(uint64(p), want)
			s.heap.AddRange(uint64(p), want)
			return nil
		}
		if want > least {
			want = max(least, up(want/2))
		} else if reclaimed || !d.reclaim(s) {
			return d.health.Failed(err)
		} else {
			reclaimed = true
		}
	}
}

// reclaim gives the addresses of spaces back that have no block out, as those of streams that were destroyed, and
// reports whether any went. The caller holds Device.mu and held's lock.
//
// +checklocks:d.mu
func (d *Device) reclaim(held *space) bool {
	before := len(d.areas)
	each := func(f func(*space)) {
		for _, o := range d.spaces {
			if o != nil && o != held && !o.pool.pinned && o.area != nil {
				o.lockBeside(held)
				if o.heap.UsedBlocks == 0 {
					f(o)
				}
				o.unlockBeside(held)
			}
		}
	}
	if d.onUnmap == nil { // else what is mapped stays
		each(func(o *space) { d.detach(o, everything) })
	}
	d.reap(held)
	each(func(o *space) { d.dropRanges(o) })
	return len(d.areas) < before
}

// dropRanges gives the reservations of a space that hold nothing but addresses back to the driver. The caller holds
// Device.mu and the space's lock.
//
// +checklocks:d.mu
func (d *Device) dropRanges(s *space) error {
	if s.area == nil {
		return nil // segments go when they are released
	}
	for i := 0; i < len(s.heap.Ranges()); {
		first := s.heap.Ranges()[i]
		b := *s.heap.At(first)
		if b.State != heap.Hole || s.heap.Next(first) != 0 {
			i++
			continue
		}
		d.a.disown(b.Addr, b.Size) // first: once the driver has them they may be another device's
		if err := d.drv.AddressFree(cuda.Ptr(b.Addr), b.Size); err != nil {
			d.a.claim(b.Addr, b.Size, s) // which succeeded before
			return d.health.Failed(err)
		}
		s.heap.DropRange(first)
		s.area.DropRange(b.Addr)
		for k, r := range d.areas {
			if r.base == b.Addr {
				d.areas = append(d.areas[:k], d.areas[k+1:]...)
				break
			}
		}
	}
	return nil
}

const firstReservation = 1 << 40
