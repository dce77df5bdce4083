package cistern

import "math/bits"

// numbers gives small numbers to what comes and goes: streams, pools, spaces. A number that is free again is given to the
// next one, the lowest first, so a table by number is never longer than the most entries that there were at a time.
type numbers struct {
	count int      // every number below is taken or free
	free  []uint64 // a bit for each number below count: it is free
	low   int      // the words of free before this one are 0
}

func (n *numbers) take() int {
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

func (n *numbers) put(i int) {
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

// named are numbers by which events name streams, or pools. The number of one that is gone is given to another only when
// no event that can still be read has it.
type named struct {
	numbers
	last []uint64 // by number: the last event that has it, as history counts them; 0 none
	gone []int    // from head: numbers of what is gone that events have, in the order in which it went
	head int
}

// take gives a number. oldest is the oldest event that can be read.
func (n *named) take(oldest uint64) int {
	n.forget(oldest)
	i := n.numbers.take()
	if i == len(n.last) {
		n.last = append(n.last, 0)
	}
	n.last[i] = 0
	return i
}

// put takes a number back.
func (n *named) put(i int, oldest uint64) {
	n.gone = append(n.gone, i)
	n.forget(oldest)
}

// forget makes the numbers free of what went and is in no event that can be read.
func (n *named) forget(oldest uint64) {
	for ; n.head < len(n.gone) && n.last[n.gone[n.head]] < oldest; n.head++ {
		n.numbers.put(n.gone[n.head])
	}
	n.last = n.last[:n.count]
	if 2*n.head >= len(n.gone) {
		n.gone, n.head = n.gone[:copy(n.gone, n.gone[n.head:])], 0
	}
}

// note says that an event has a number, which may be none.
func (n *named) note(i uint32, event uint64) {
	if int(i) < len(n.last) {
		n.last[i] = event
	}
}
