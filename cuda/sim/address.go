package sim

import (
	"slices"

	"github.com/cistern-gpu/cistern/cuda"
)

// spaceBase is the lowest address: high enough that no small number is a valid pointer.
const spaceBase = 1 << 40

// leafPages is how many pages one leaf of the page table covers.
const leafPages = 4096

// space is the process's device address space: free gaps, reservations, and a page table from addresses to mappings.
// Protected by Driver.mu.
type space struct {
	page   uint64 // bytes, the granularity
	top    uint64 // first address beyond
	high   uint64 // first address beyond all that was ever taken
	gaps   []gap  // free, in rising order, not touching one another
	resv   []*reservation
	leaves []*leaf // by address, nil where nothing is mapped
	spare  *leaf   // the one dropped last, which is all nil
}

type gap struct{ lo, hi uint64 }

// leaf is a part of the page table; it is dropped when its last page goes.
type leaf struct {
	used  int
	pages [leafPages]*mapping
}

// reservation is a range from AddressReserve.
type reservation struct {
	base, size uint64
	mapped     uint64 // bytes
}

func (s *space) init(size, page uint64) {
	size -= size % page
	s.page = page
	s.top = spaceBase + size
	s.gaps = []gap{{spaceBase, s.top}}
	s.leaves = make([]*leaf, (size/page+leafPages-1)/leafPages)
}

// take finds room for size bytes: at hint if that is free and aligned, else first fit. 0 means there is none.
func (s *space) take(size, align, hint uint64) uint64 {
	if hint != 0 && hint%align == 0 && hint+size > hint {
		i, _ := slices.BinarySearchFunc(s.gaps, hint, func(g gap, at uint64) int {
			if g.hi <= at {
				return -1
			}
			return 1
		})
		if i < len(s.gaps) && s.gaps[i].lo <= hint && hint+size <= s.gaps[i].hi {
			s.carve(i, hint, size)
			return hint
		}
	}
	for i, g := range s.gaps {
		at := (g.lo + align - 1) / align * align
		if at >= g.lo && at < g.hi && g.hi-at >= size {
			s.carve(i, at, size)
			return at
		}
	}
	return 0
}

// carve takes [at, at+size) out of gap i.
func (s *space) carve(i int, at, size uint64) {
	s.high = max(s.high, at+size)
	g := s.gaps[i]
	left, right := gap{g.lo, at}, gap{at + size, g.hi}
	switch {
	case left.lo == left.hi && right.lo == right.hi:
		s.gaps = slices.Delete(s.gaps, i, i+1)
	case left.lo == left.hi:
		s.gaps[i] = right
	case right.lo == right.hi:
		s.gaps[i] = left
	default:
		s.gaps[i] = left
		s.gaps = slices.Insert(s.gaps, i+1, right)
	}
}

// give returns [lo, lo+size) to the gaps.
func (s *space) give(lo, size uint64) {
	hi := lo + size
	i, _ := slices.BinarySearchFunc(s.gaps, lo, func(g gap, at uint64) int {
		if g.lo < at {
			return -1
		}
		return 1
	})
	left := i > 0 && s.gaps[i-1].hi == lo
	right := i < len(s.gaps) && s.gaps[i].lo == hi
	switch {
	case left && right:
		s.gaps[i-1].hi = s.gaps[i].hi
		s.gaps = slices.Delete(s.gaps, i, i+1)
	case left:
		s.gaps[i-1].hi = hi
	case right:
		s.gaps[i].lo = lo
	default:
		s.gaps = slices.Insert(s.gaps, i, gap{lo, hi})
	}
}

// at is the index of the first reservation that ends after the address.
func (s *space) at(addr uint64) int {
	i, _ := slices.BinarySearchFunc(s.resv, addr, func(r *reservation, at uint64) int {
		if r.base+r.size <= at {
			return -1
		}
		return 1
	})
	return i
}

// reservation is the one that holds all of [lo, lo+size), or nil.
func (s *space) reservation(lo, size uint64) *reservation {
	i := s.at(lo)
	if i == len(s.resv) {
		return nil
	}
	if r := s.resv[i]; r.base <= lo && size <= r.size && lo-r.base <= r.size-size {
		return r
	}
	return nil
}

// find is the mapping of the page that holds the address, or nil.
func (s *space) find(addr uint64) *mapping {
	if addr < spaceBase || addr >= s.top {
		return nil
	}
	n := (addr - spaceBase) / s.page
	l := s.leaves[n/leafPages]
	if l == nil {
		return nil
	}
	return l.pages[n%leafPages]
}

// set enters m for all pages of [lo, lo+size), or nil to clear them.
func (s *space) set(lo, size uint64, m *mapping) {
	n := (lo - spaceBase) / s.page
	for end := n + size/s.page; n < end; n++ {
		l := s.leaves[n/leafPages]
		if l == nil {
			if l, s.spare = s.spare, nil; l == nil {
				l = &leaf{}
			}
			s.leaves[n/leafPages] = l
		}
		p := &l.pages[n%leafPages]
		switch {
		case *p == nil && m != nil:
			l.used++
		case *p != nil && m == nil:
			l.used--
		}
		*p = m
		if l.used == 0 {
			s.leaves[n/leafPages], s.spare = nil, l
		}
	}
}

// AddressReserve reserves addresses, at the hint where that is free, else at the lowest place that fits. align must
// be 0 or a power of two.
func (d *Driver) AddressReserve(size, align uint64, hint cuda.Ptr) (cuda.Ptr, error) {
	d.mu.Lock()
	defer d.leave()
	if err := d.begin(callMemAddressReserve, noDevice, size, d.costs.MemAddressReserve(size)); err != nil {
		return 0, err
	}
	gran := d.opt.Granularity
	if size == 0 || size%gran != 0 || align&(align-1) != 0 || uint64(hint)%gran != 0 {
		return 0, d.errorOf(callMemAddressReserve, noDevice, size, cuda.ErrInvalidValue)
	}
	p := d.space.take(size, max(align, gran), uint64(hint))
	if p == 0 {
		return 0, d.errorOf(callMemAddressReserve, noDevice, size, cuda.ErrOutOfMemory)
	}
	d.space.resv = slices.Insert(d.space.resv, d.space.at(p), &reservation{base: p, size: size})
	d.note(recReserve, 0, p, size, nil, 0)
	return cuda.Ptr(p), nil
}

// AddressFree gives back a whole reservation in which nothing is mapped.
func (d *Driver) AddressFree(p cuda.Ptr, size uint64) error {
	d.mu.Lock()
	defer d.leave()
	if err := d.begin(callMemAddressFree, noDevice, size, d.costs.MemAddressFree(size)); err != nil {
		return err
	}
	i := d.space.at(uint64(p))
	if i == len(d.space.resv) || d.space.resv[i].base != uint64(p) || d.space.resv[i].size != size ||
		d.space.resv[i].mapped != 0 {
		return d.errorOf(callMemAddressFree, noDevice, size, cuda.ErrInvalidValue)
	}
	d.space.resv = slices.Delete(d.space.resv, i, i+1)
	d.space.give(uint64(p), size)
	d.note(recUnreserve, 0, uint64(p), size, nil, 0)
	return nil
}
