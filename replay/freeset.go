package replay

// freeEntry is one free block in a freeSet.
type freeEntry struct {
	size, addr uint64
	block      int32
}

func (a freeEntry) less(size, addr uint64, block int32) bool {
	return a.size < size || a.size == size && (a.addr < addr || a.addr == addr && a.block < block)
}

// maxLeaf is the number of entries at which a leaf is halved: 128 entries are 3 KiB, a move of half of them costs
// less than a miss in a tree of single nodes.
const maxLeaf = 128

// freeSet holds free blocks in the order of (size, address, number): the order in which a caching allocator looks for the
// best fit. The number tells blocks apart that a file says lie at the same address. It is a list of sorted leaves, searched
// by halves twice; populations of a few hundred, the usual case, lie in one or two leaves.
type freeSet struct {
	leaves [][]freeEntry // none empty
	n      int
}

// freePos is a position in a freeSet. It is invalidated by any change.
type freePos struct{ leaf, i int }

func (s *freeSet) len() int { return s.n }

// seek is the position of the first entry not less than (size, addr, block); leaf == len(s.leaves) is the end.
func (s *freeSet) seek(size, addr uint64, block int32) freePos {
	lo, hi := 0, len(s.leaves)
	for lo < hi {
		m := int(uint(lo+hi) >> 1)
		if l := s.leaves[m]; l[len(l)-1].less(size, addr, block) {
			lo = m + 1
		} else {
			hi = m
		}
	}
	if lo == len(s.leaves) {
		return freePos{lo, 0}
	}
	l := s.leaves[lo]
	a, b := 0, len(l)
	for a < b {
		m := int(uint(a+b) >> 1)
		if l[m].less(size, addr, block) {
			a = m + 1
		} else {
			b = m
		}
	}
	return freePos{lo, a}
}

func (s *freeSet) end(p freePos) bool      { return p.leaf >= len(s.leaves) }
func (s *freeSet) at(p freePos) *freeEntry { return &s.leaves[p.leaf][p.i] }

func (s *freeSet) next(p freePos) freePos {
	if p.i++; p.i == len(s.leaves[p.leaf]) {
		return freePos{p.leaf + 1, 0}
	}
	return p
}

// prev is the position before p, which must not be the first.
func (s *freeSet) prev(p freePos) freePos {
	if p.i > 0 {
		return freePos{p.leaf, p.i - 1}
	}
	return freePos{p.leaf - 1, len(s.leaves[p.leaf-1]) - 1}
}

func (s *freeSet) insert(size, addr uint64, block int32) {
	e := freeEntry{size, addr, block}
	s.n++
	p := s.seek(size, addr, block)
	if s.end(p) {
		if p.leaf == 0 {
			s.leaves = append(s.leaves, append(s.first(), e))
			return
		}
		p.leaf--
		p.i = len(s.leaves[p.leaf])
	}
	l := s.leaves[p.leaf]
	if len(l) == maxLeaf {
		right := append(make([]freeEntry, 0, maxLeaf), l[maxLeaf/2:]...)
		s.leaves = append(s.leaves, nil)
		copy(s.leaves[p.leaf+2:], s.leaves[p.leaf+1:])
		s.leaves[p.leaf], s.leaves[p.leaf+1] = l[:maxLeaf/2], right
		if p.i > maxLeaf/2 {
			p = freePos{p.leaf + 1, p.i - maxLeaf/2}
		}
		l = s.leaves[p.leaf]
	}
	l = append(l, freeEntry{})
	copy(l[p.i+1:], l[p.i:])
	l[p.i] = e
	s.leaves[p.leaf] = l
}

// first is an empty leaf for a set without one: that of the last time, since sets of one block come and go.
func (s *freeSet) first() []freeEntry {
	if cap(s.leaves) > 0 {
		return s.leaves[:1][0][:0]
	}
	return make([]freeEntry, 0, 4) // most streams have few
}

func (s *freeSet) removeAt(p freePos) {
	s.n--
	l := s.leaves[p.leaf]
	copy(l[p.i:], l[p.i+1:])
	l = l[:len(l)-1]
	s.leaves[p.leaf] = l
	if len(l) == 0 {
		copy(s.leaves[p.leaf:], s.leaves[p.leaf+1:])
		last := len(s.leaves) - 1
		s.leaves[last] = l // kept for first
		s.leaves = s.leaves[:last]
	}
}

// remove takes out the entry (size, addr, block), which must be there.
func (s *freeSet) remove(size, addr uint64, block int32) {
	p := s.seek(size, addr, block)
	if s.end(p) || *s.at(p) != (freeEntry{size, addr, block}) {
		panic("replay: a free block is not in its set")
	}
	s.removeAt(p)
}

// blocks are the blocks in order, copied, so that the set may change while they are visited.
func (s *freeSet) blocks() []int32 {
	out := make([]int32, 0, s.n)
	for _, l := range s.leaves {
		for _, e := range l {
			out = append(out, e.block)
		}
	}
	return out
}
