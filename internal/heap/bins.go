package heap

import "math/bits"

// Bins are lists of the blocks of one state, by size, in two levels. What the hot path calls gets the records from its caller,
// who has loaded them already.
type Bins struct {
	first  uint64 // bit i: some list of level i is not empty
	second [levels]uint32
	heads  [levels * subdivisions]ID
	slab   *slab
}

const (
	subdivisions = 32
	subBits      = 5
	unitBits     = 9                           // log2(Align)
	levels       = 48 - unitBits - subBits + 1 // blocks up to 2^48 bytes
	// scanLimit bounds how many blocks of a bin are looked at. Larger values find tighter fits among blocks that
	// differ by less than 3 %; replays of the recorded traces do not change beyond 16.
	scanLimit = 16
	// Small blocks are many and each look costs a cache miss, while a tight fit among them saves little: of those
	// below quickBelow bytes, the first of the same size or the best of quickLimit is taken.
	quickBelow = 256 << 10
	quickLimit = 4
)

// binOf is the bin of a size: exact below 32 units, then 32 to a power of two.
func binOf(size uint64) uint16 {
	u := size >> unitBits
	if u < subdivisions {
		return uint16(u)
	}
	l := uint(bits.Len64(u)) - 1 - subBits
	i := (l+1)<<subBits | uint(u>>l)&(subdivisions-1)
	if i >= levels*subdivisions {
		i = levels*subdivisions - 1
	}
	return uint16(i)
}

func (b *Bins) push(blocks []Block, id ID) {
	x := &blocks[id]
	i := binOf(x.Size)
	x.bin = i
	head := b.heads[i]
	x.binPrev, x.binNext = 0, head
	if head != 0 {
		blocks[head].binPrev = id
	} else {
		b.first |= 1 << (i >> subBits)
		b.second[i>>subBits] |= 1 << (i & (subdivisions - 1))
	}
	b.heads[i] = id
}

func (b *Bins) remove(blocks []Block, id ID) {
	x := &blocks[id]
	if x.binNext != 0 {
		blocks[x.binNext].binPrev = x.binPrev
	}
	if x.binPrev != 0 {
		blocks[x.binPrev].binNext = x.binNext
		return
	}
	i := x.bin
	b.heads[i] = x.binNext
	if x.binNext == 0 {
		b.second[i>>subBits] &^= 1 << (i & (subdivisions - 1))
		if b.second[i>>subBits] == 0 {
			b.first &^= 1 << (i >> subBits)
		}
	}
}

// after is the first non-empty bin at or above i, or -1.
func (b *Bins) after(i int) int {
	if i >= levels*subdivisions {
		return -1
	}
	l := i >> subBits
	if m := b.second[l] >> (i & (subdivisions - 1)); m != 0 {
		return i + bits.TrailingZeros32(m)
	}
	m := b.first >> (l + 1)
	if l+1 >= 64 || m == 0 {
		return -1
	}
	l += 1 + bits.TrailingZeros64(m)
	return l<<subBits + bits.TrailingZeros32(b.second[l])
}

// fit finds the smallest block of at least n bytes that the scan limit allows, the lowest address among equals.
func (b *Bins) fit(blocks []Block, n uint64) ID {
	for i := b.after(int(binOf(n))); i >= 0; i = b.after(i + 1) {
		var best ID
		var bestSize, bestAddr uint64
		limit := scanLimit
		if n < quickBelow {
			limit = quickLimit
		}
		for id := b.heads[i]; id != 0 && limit > 0; id, limit = blocks[id].binNext, limit-1 {
			x := &blocks[id]
			if x.Size < n {
				continue
			}
			if n < quickBelow && x.Size == n {
				return id
			}
			if best == 0 || x.Size < bestSize || x.Size == bestSize && x.Addr < bestAddr {
				best, bestSize, bestAddr = id, x.Size, x.Addr
			}
		}
		if best != 0 {
			return best
		}
	}
	// Every block of a higher bin fits, so what is left are blocks of the request's own bin behind the scan limit.
	for id := b.heads[binOf(n)]; id != 0; id = blocks[id].binNext {
		if blocks[id].Size >= n {
			return id
		}
	}
	return 0
}

// exact finds a block of n bytes.
func (b *Bins) exact(blocks []Block, n uint64) ID {
	for id := b.heads[binOf(n)]; id != 0; id = blocks[id].binNext {
		if blocks[id].Size == n {
			return id
		}
	}
	return 0
}

// Each calls f for every block of at least n bytes, from large bins to small ones, until it returns false. f must not change
// the heap.
func (b *Bins) Each(n uint64, f func(ID, *Block) bool) {
	blocks := b.slab.blocks
	low := int(binOf(n))
	for i := len(b.heads) - 1; i >= low; i-- {
		if b.second[i>>subBits] == 0 {
			i &^= subdivisions - 1 // an empty level
			continue
		}
		for id := b.heads[i]; id != 0; {
			x := &blocks[id]
			next := x.binNext
			if x.Size >= n && !f(id, x) {
				return
			}
			id = next
		}
	}
}

// Largest is the size of the largest block in bytes, 0 where there is none.
func (b *Bins) Largest() uint64 {
	if b.first == 0 {
		return 0
	}
	l := 63 - bits.LeadingZeros64(b.first)
	i := l<<subBits + 31 - bits.LeadingZeros32(b.second[l])
	var size uint64
	blocks := b.slab.blocks
	for id := b.heads[i]; id != 0; id = blocks[id].binNext {
		size = max(size, blocks[id].Size)
	}
	return size
}

// carve takes a block out of its bin and cuts out [addr, addr+size); what is left of it on either side goes back to
// the bins. The result is in no bin.
func (b *Bins) carve(id ID, addr, size uint64) ID {
	s := b.slab
	b.remove(s.blocks, id)
	if left := addr - s.blocks[id].Addr; left > 0 {
		rest := s.split(id, left)
		b.push(s.blocks, id)
		id = rest
	}
	if s.blocks[id].Size > size {
		rest := s.split(id, size)
		b.push(s.blocks, rest)
	}
	return id
}

// merge joins a block that is in no bin with its neighbours of the same state and puts the result into its bin. joined is how
// many these were.
func (b *Bins) merge(id ID) (merged ID, joined int) {
	s := b.slab
	x := &s.blocks[id]
	if p := x.prev; p != 0 && s.blocks[p].State == x.State {
		b.remove(s.blocks, p)
		s.absorb(p, id)
		joined++
		id, x = p, &s.blocks[p]
	}
	if n := x.next; n != 0 && s.blocks[n].State == x.State {
		b.remove(s.blocks, n)
		s.absorb(id, n)
		joined++
	}
	b.push(s.blocks, id)
	return id, joined
}

// Fit is which of the free blocks that are large enough a request gets. The zero value is the smallest.
type Fit struct {
	// MinRest, when not 0, makes Take avoid blocks of which it would leave less than this many bytes, because that
	// little is of no use to anybody, unless that is a small part of the request (restPart) or there is no other.
	MinRest uint64
	whole   bool // MinRest is larger than any rest, and nothing is taken instead
}

// restPart: a rest of up to 1/restPart (2 %) of the request is small.
const restPart = 50

// KeepWhole makes Take leave no rest from now on: only a block of the very size will do.
func (f *Fit) KeepWhole() { f.whole, f.MinRest = true, ^uint64(0) }

// Whole reports whether KeepWhole was called.
func (f *Fit) Whole() bool { return f.whole }

// avoid is the block that Take takes instead of one that would leave less than MinRest, 0 if it takes none.
func (f *Fit) avoid(from *Bins, blocks []Block, id ID, n, rest uint64) ID {
	switch {
	case rest == 0:
	case f.whole:
		return from.exact(blocks, n)
	case rest > n/restPart:
		if other := from.fit(blocks, n+f.MinRest); other != 0 {
			return other
		}
	}
	return id
}
