package cistern

import (
	"fmt"

	"github.com/cistern-gpu/cistern/cuda"
)

// Who owns an address. The table is read without a lock by every free; what it points to is replaced, never changed.

const (
	addressBits = 48 // virtual addresses of CUDA devices up to and including Hopper lie below 2^47
	regionBits  = 32
)

// region says who owns the addresses of one 4 GiB piece: one space, or a list of ranges in address order.
type region struct {
	space  *space
	claim  *claim // of space
	ranges []owned
}

// claim is a range that a space has: a reservation, or a segment. Where the segment is a block of another pool, that one's
// claim is under it, and holds again when this one ends.
type claim struct {
	base, size uint64
	space      *space
	under      *claim
}

// owned is a range, or a part of one, that a claim is the last on.
type owned struct {
	base, end uint64
	space     *space
	claim     *claim
}

// spaceOf finds the space that an address belongs to, nil when it is none of ours.
func (a *Allocator) spaceOf(p cuda.Ptr) *space {
	i := uint64(p) >> regionBits
	if i >= uint64(len(a.regions)) {
		return nil
	}
	r := a.regions[i].Load()
	if r == nil {
		return nil
	}
	if r.space != nil {
		return r.space
	}
	return r.find(uint64(p))
}

func (r *region) find(p uint64) *space {
	lo, hi := 0, len(r.ranges)
	for lo < hi {
		if m := (lo + hi) / 2; r.ranges[m].end <= p {
			lo = m + 1
		} else {
			hi = m
		}
	}
	if lo < len(r.ranges) && r.ranges[lo].base <= p {
		return r.ranges[lo].space
	}
	return nil
}

// SegmentBase finds the segment in which the live allocation that starts at p lies: the range that the upstream handed out,
// of the innermost upstream where pools are over pools. It fails with cuda.ErrNotSupported where the memory is chunks, which
// are mapped into a larger range one by one.
func (a *Allocator) SegmentBase(p cuda.Ptr) (base cuda.Ptr, size uint64, err error) {
	if _, err := a.Base(p); err != nil {
		return 0, 0, err
	}
	c := a.claimOf(uint64(p))
	for c.under != nil {
		c = c.under
	}
	if c.space.area != nil {
		return 0, 0, fmt.Errorf("%#x lies in mapped chunks, not in a segment (pools of segments, ipc:legacy and "+
			"single_handle:true have those): %w", uint64(p), cuda.ErrNotSupported)
	}
	return cuda.Ptr(c.base), c.size, nil
}

// claimOf is the claim that holds for an address, which a live allocation keeps.
func (a *Allocator) claimOf(p uint64) *claim {
	i := p >> regionBits
	for _, x := range a.regions[i].Load().list(i) {
		if x.base <= p && p < x.end {
			return x.claim
		}
	}
	return nil
}

// list is who owns what of the i-th region.
func (r *region) list(i uint64) []owned {
	switch {
	case r == nil:
		return nil
	case r.space != nil:
		return []owned{{i << regionBits, (i + 1) << regionBits, r.space, r.claim}}
	}
	return r.ranges
}

// newRegion is the region of a list; nil where nobody owns anything.
func newRegion(i uint64, list []owned) *region {
	if len(list) == 0 {
		return nil
	}
	if x := list[0]; len(list) == 1 && x.base == i<<regionBits && x.end == (i+1)<<regionBits {
		return &region{space: x.space, claim: x.claim}
	}
	return &region{ranges: list}
}

// claim makes [base, base+size) known as the space's, disown undoes it. Reservations are whole pieces of 4 GiB and
// get a region each; segments share regions. Only a pool that gets its memory from another pool may have what that one has
// already.
func (a *Allocator) claim(base, size uint64, s *space) error {
	if base>>addressBits != 0 || (base+size-1)>>addressBits != 0 {
		return fmt.Errorf("address %#x lies above the %d bits that the allocator can look up", base+size-1, addressBits)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	first, last := base>>regionBits, (base+size-1)>>regionBits
	// A user's upstream may hand out anything, memory of this allocator among it.
	for i := first; i <= last; i++ {
		for _, x := range a.regions[i].Load().list(i) {
			if x.base < base+size && base < x.end && (s.pool.under == nil || x.space.pool.owner() != s.pool.under) {
				return fmt.Errorf("[%#x, %#x) is the allocator's already", base, base+size)
			}
		}
	}
	c := &claim{base: base, size: size, space: s}
	for i := first; i <= last; i++ {
		from, to := max(base, i<<regionBits), min(base+size, (i+1)<<regionBits)
		var next []owned
		put := false
		place := func() {
			if !put {
				next, put = append(next, owned{from, to, s, c}), true
			}
		}
		for _, x := range a.regions[i].Load().list(i) {
			if x.base >= to {
				place()
			}
			if x.end <= from || x.base >= to {
				next = append(next, x)
				continue
			}
			c.under = x.claim // a block lies within one range
			if x.base < from {
				next = append(next, owned{x.base, from, x.space, x.claim})
			}
			place()
			if to < x.end {
				next = append(next, owned{to, x.end, x.space, x.claim})
			}
		}
		place()
		a.regions[i].Store(newRegion(i, next))
	}
	return nil
}

func (a *Allocator) disown(base, size uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := base >> regionBits; i <= (base+size-1)>>regionBits; i++ {
		var next []owned
		for _, x := range a.regions[i].Load().list(i) {
			if x.base < base+size && base < x.end {
				if x.claim = x.claim.under; x.claim == nil {
					continue
				}
				x.space = x.claim.space
			}
			if n := len(next); n > 0 && next[n-1].claim == x.claim { // parts of one range again
				next[n-1].end = x.end
				continue
			}
			next = append(next, x)
		}
		a.regions[i].Store(newRegion(i, next))
	}
}
