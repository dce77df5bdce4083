package journal

import "math/bits"

// Numbers gives small numbers to what comes and goes: streams, pools, stream heaps. A number that is free again is given to the
// next one, the lowest first, so a table by number is never longer than the most entries that there were at a time.
type Numbers struct {
	count int      // every number below is taken or free
	free  []uint64 // a bit for each number below count: it is free
	low   int      // the words of free before this one are 0
}

// Count is how long a table by number must be: every number below is taken or free.
func (n *Numbers) Count() int { return n.count }

// Take gives a number.
func (n *Numbers) Take() int {
	for ; n.low < len(n.free); n.low++ {
		if w := n.free[n.low]; w != 0 {
			n.free[n.low] = w & (w - 1)
			return n.low*64 + bits.TrailingZeros64(w)
		}
	}
	if n.count == 64*len(n.free) {
		n.free = append(n.free, 0)
	}
	n.low = len(n.free)
	n.count++
	return n.count - 1
}

// Put takes a number back.
func (n *Numbers) Put(i int) {
	n.free[i/64] |= 1 << (i % 64)
	n.low = min(n.low, i/64)
	for n.count > 0 {
		last := n.count - 1
		bit := uint64(1) << (last % 64)
		if n.free[last/64]&bit == 0 {
			break
		}
		n.free[last/64] &^= bit
		n.count = last
		n.free = n.free[:(last+63)/64]
	}
}
