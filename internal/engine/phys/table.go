package phys

import (
	"fmt"
	"sync/atomic"
)

const (
	addressBits = 48 // virtual addresses of CUDA devices up to and including Hopper lie below 2^47
	// RegionBytes is the unit of the table: reservations that are multiples of it are found with one load.
	RegionBytes = 1 << regionBits
	regionBits  = 32
)

// Table finds the owner of an address. Every free reads it without a lock; what it points to is replaced, never changed. Add
// and Remove are called by one goroutine at a time.
type Table[Owner any] struct {
	regions [1 << (addressBits - regionBits)]atomic.Pointer[region[Owner]]
}

// region is one piece of the address space: one owner has all of it, or there is a list of ranges in address order.
type region[Owner any] struct {
	owner  *Owner
	claim  *Claim[Owner] // of owner
	ranges []part[Owner]
}

// Claim is a range that an owner has: a reservation, or a segment. Where the segment is a block of another pool, the claim of
// that one is under it, and holds again when this one ends.
type Claim[Owner any] struct {
	Base, Size uint64
	Owner      *Owner
	Under      *Claim[Owner]
}

// part is a range, or a part of one, of which claim is the last.
type part[Owner any] struct {
	base, end uint64
	owner     *Owner
	claim     *Claim[Owner]
}

// Find is the owner of an address, nil when there is none.
func (t *Table[Owner]) Find(p uint64) *Owner {
	i := p >> regionBits
	if i >= uint64(len(t.regions)) {
		return nil
	}
	r := t.regions[i].Load()
	if r == nil {
		return nil
	}
	if r.owner != nil {
		return r.owner
	}
	return r.find(p)
}

func (r *region[Owner]) find(p uint64) *Owner {
	lo, hi := 0, len(r.ranges)
	for lo < hi {
		if m := (lo + hi) / 2; r.ranges[m].end <= p {
			lo = m + 1
		} else {
			hi = m
		}
	}
	if lo < len(r.ranges) && r.ranges[lo].base <= p {
		return r.ranges[lo].owner
	}
	return nil
}

// Claim is the last claim on an address, nil when there is none.
func (t *Table[Owner]) Claim(p uint64) *Claim[Owner] {
	i := p >> regionBits
	if i >= uint64(len(t.regions)) {
		return nil
	}
	for _, x := range t.regions[i].Load().list(i) {
		if x.base <= p && p < x.end {
			return x.claim
		}
	}
	return nil
}

// list is the parts of the i-th region.
func (r *region[Owner]) list(i uint64) []part[Owner] {
	switch {
	case r == nil:
		return nil
	case r.owner != nil:
		return []part[Owner]{{i << regionBits, (i + 1) << regionBits, r.owner, r.claim}}
	}
	return r.ranges
}

// newRegion is the region of a list; nil where there is no owner.
func newRegion[Owner any](i uint64, list []part[Owner]) *region[Owner] {
	if len(list) == 0 {
		return nil
	}
	if x := list[0]; len(list) == 1 && x.base == i<<regionBits && x.end == (i+1)<<regionBits {
		return &region[Owner]{owner: x.owner, claim: x.claim}
	}
	return &region[Owner]{ranges: list}
}

// Add makes [base, base+size) known as the owner's, until Remove. Reservations are whole regions and get one each; segments
// share regions. It fails where a part of the range has another owner, unless the new range lies within one of that owner's
// and may be over it.
func (t *Table[Owner]) Add(base, size uint64, owner *Owner, mayBeOver func(*Owner) bool) error {
	if base>>addressBits != 0 || (base+size-1)>>addressBits != 0 {
		return fmt.Errorf("address %#x lies above the %d bits that the allocator can look up", base+size-1, addressBits)
	}
	first, last := base>>regionBits, (base+size-1)>>regionBits
	// A user's upstream may hand out anything, memory of this allocator among it.
	for i := first; i <= last; i++ {
		for _, x := range t.regions[i].Load().list(i) {
			if x.base < base+size && base < x.end && !mayBeOver(x.owner) {
				return fmt.Errorf("[%#x, %#x) is already in use by the allocator", base, base+size)
			}
		}
	}
	c := &Claim[Owner]{Base: base, Size: size, Owner: owner}
	for i := first; i <= last; i++ {
		t.regions[i].Store(newRegion(i, c.over(t.regions[i].Load().list(i), i)))
	}
	return nil
}

// over is the list of the i-th region with a new claim over what is there.
func (c *Claim[Owner]) over(list []part[Owner], i uint64) (next []part[Owner]) {
	from, to := max(c.Base, i<<regionBits), min(c.Base+c.Size, (i+1)<<regionBits)
	put := false
	place := func() {
		if !put {
			next, put = append(next, part[Owner]{from, to, c.Owner, c}), true
		}
	}
	for _, x := range list {
		if x.base >= to {
			place()
		}
		if x.end <= from || x.base >= to {
			next = append(next, x)
			continue
		}
		c.Under = x.claim // a block lies within one range
		if x.base < from {
			next = append(next, part[Owner]{x.base, from, x.owner, x.claim})
		}
		place()
		if to < x.end {
			next = append(next, part[Owner]{to, x.end, x.owner, x.claim})
		}
	}
	place()
	return next
}

// Remove ends the last claim on [base, base+size).
func (t *Table[Owner]) Remove(base, size uint64) {
	for i := base >> regionBits; i <= (base+size-1)>>regionBits; i++ {
		var next []part[Owner]
		for _, x := range t.regions[i].Load().list(i) {
			if x.base < base+size && base < x.end {
				if x.claim = x.claim.Under; x.claim == nil {
					continue
				}
				x.owner = x.claim.Owner
			}
			if n := len(next); n > 0 && next[n-1].claim == x.claim { // parts of one range again
				next[n-1].end = x.end
				continue
			}
			next = append(next, x)
		}
		t.regions[i].Store(newRegion(i, next))
	}
}
