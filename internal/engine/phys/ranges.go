package phys

import (
	"slices"

	"github.com/cistern-gpu/cistern/cuda"
)

// Range is a range of addresses that is the device's: reserved for chunks, or a segment.
type Range struct {
	Base, Size uint64
	Owner      int32  // index of the owning stream heap
	Serial     uint64 // of a segment: never reused, nor a chunk's
	Align      uint64 // of a segment: the alignment that it was requested with
}

// Ranges are the ranges of a device, in the order in which they were added.
type Ranges struct {
	list []Range
}

// Add adds a range.
func (r *Ranges) Add(x Range) { r.list = append(r.list, x) }

// Of is the owner's range that begins at base. A segment that is a block of another pool may begin where that one's does.
func (r *Ranges) Of(owner int32, base uint64) Range { return r.list[r.index(owner, base)] }

// Drop forgets the owner's range that begins at base.
func (r *Ranges) Drop(owner int32, base uint64) {
	i := r.index(owner, base)
	r.list = slices.Delete(r.list, i, i+1)
}

func (r *Ranges) index(owner int32, base uint64) int {
	return slices.IndexFunc(r.list, func(x Range) bool { return x.Base == base && x.Owner == owner })
}

// At is the range that an address lies in: the outermost, which was added first.
func (r *Ranges) At(addr uint64) (Range, bool) {
	for _, x := range r.list {
		if addr-x.Base < x.Size {
			return x, true
		}
	}
	return Range{}, false
}

// All are the ranges.
func (r *Ranges) All() []Range { return r.list }

// Bytes is the sum of their sizes.
func (r *Ranges) Bytes() (n uint64) {
	for i := range r.list {
		n += r.list[i].Size
	}
	return n
}

// Reserve reserves want bytes of addresses, or fewer where the device has no room for that: always a multiple of unit, at
// least the given least.
func (m *Memory) Reserve(want, least, unit uint64) (base, size uint64, err error) {
	up := func(x uint64) uint64 { return (x + unit - 1) / unit * unit }
	for want, least = up(want), up(least); ; want = max(least, up(want/2)) {
		p, err := m.health.Driver.AddressReserve(want, unit, 0)
		if err == nil {
			return uint64(p), want, nil
		}
		if want <= least {
			return 0, 0, m.health.Failed(err)
		}
	}
}

// FreeAddresses gives reserved addresses back, in which nothing is mapped.
func (m *Memory) FreeAddresses(base, size uint64) error {
	return m.health.Failed(m.health.Driver.AddressFree(cuda.Ptr(base), size))
}
