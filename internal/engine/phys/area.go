package phys

import "slices"

// Area says which chunk is mapped at which address of one owner.
type Area struct {
	granularity uint64
	ranges      []addresses
}

// addresses is one reserved range. slots has an entry for each granule up to the highest address used so far: the
// chunk that is mapped there, whichever part of it.
type addresses struct {
	base, size uint64
	slots      []ChunkID
}

// NewArea returns an area without addresses; granularity in bytes.
func NewArea(granularity uint64) *Area { return &Area{granularity: granularity} }

// AddRange adds reserved addresses.
func (a *Area) AddRange(base, size uint64) {
	a.ranges = append(a.ranges, addresses{base: base, size: size})
}

// DropRange forgets a range.
func (a *Area) DropRange(base uint64) {
	a.ranges = slices.DeleteFunc(a.ranges, func(r addresses) bool { return r.base == base })
}

// Reserved is the sum of the ranges in bytes of address space.
func (a *Area) Reserved() uint64 {
	var n uint64
	for i := range a.ranges {
		n += a.ranges[i].size
	}
	return n
}

func (a *Area) rangeOf(addr uint64) *addresses {
	for i := range a.ranges {
		if r := &a.ranges[i]; addr-r.base < r.size {
			return r
		}
	}
	return nil
}

// At is the chunk mapped at addr, 0 when none is.
func (a *Area) At(addr uint64) ChunkID {
	r := a.rangeOf(addr)
	if r == nil {
		return 0
	}
	if i := (addr - r.base) / a.granularity; i < uint64(len(r.slots)) {
		return r.slots[i]
	}
	return 0
}

// Set notes that the chunk (0: nothing) is mapped at [addr, addr+size).
func (a *Area) Set(addr, size uint64, id ChunkID) {
	r := a.rangeOf(addr)
	i := (addr - r.base) / a.granularity
	n := size / a.granularity
	for uint64(len(r.slots)) < i+n {
		r.slots = append(r.slots, 0)
	}
	for k := range r.slots[i : i+n] {
		r.slots[i+uint64(k)] = id
	}
}

// Whole calls f for every chunk that lies wholly within [addr, addr+size), which must be mapped throughout, in address
// order, until it returns false.
func (a *Area) Whole(m *Memory, addr, size uint64, f func(ChunkID, *Chunk) bool) {
	end := addr + size
	p := (addr + a.granularity - 1) / a.granularity * a.granularity
	for p < end {
		id := a.At(p)
		if id == 0 {
			p += a.granularity
			continue
		}
		c := m.Chunk(id)
		if c.Addr+c.Size > end {
			return
		}
		if c.Addr >= addr && !f(id, c) {
			return
		}
		p = c.Addr + c.Size
	}
}
