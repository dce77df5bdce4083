package trace

import (
	"math"
	"sort"
)

// segset is a set of segments that do not overlap, in address order: leaves of at most leafMax, so that a million
// insertions stay cheap.
type segset struct {
	leaves [][]Segment
	n      int
}

const leafMax = 256

// seek finds the first segment at or above addr: leaf and index, which may be one past the last leaf.
func (t *segset) seek(addr uint64) (int, int) {
	l := sort.Search(len(t.leaves), func(i int) bool {
		leaf := t.leaves[i]
		return leaf[len(leaf)-1].Addr >= addr
	})
	if l == len(t.leaves) {
		return l, 0
	}
	leaf := t.leaves[l]
	return l, sort.Search(len(leaf), func(i int) bool { return leaf[i].Addr >= addr })
}

// at is the segment that addr lies in, or nil. It may be changed, but for its address.
func (t *segset) at(addr uint64) *Segment {
	l, i := t.seek(addr)
	if l < len(t.leaves) && t.leaves[l][i].Addr == addr {
		return &t.leaves[l][i]
	}
	s := t.before(l, i)
	if s != nil && addr-s.Addr < s.Size {
		return s
	}
	return nil
}

// before is the segment before position (l, i), or nil.
func (t *segset) before(l, i int) *Segment {
	if l < len(t.leaves) && i > 0 {
		return &t.leaves[l][i-1]
	}
	if l > 0 {
		leaf := t.leaves[l-1]
		return &leaf[len(leaf)-1]
	}
	return nil
}

// overlapping is a segment that has a byte of [addr, addr+size), or nil.
func (t *segset) overlapping(addr, size uint64) *Segment {
	l, i := t.seek(addr)
	if l < len(t.leaves) && t.leaves[l][i].Addr-addr < size {
		return &t.leaves[l][i]
	}
	if s := t.before(l, i); s != nil && addr-s.Addr < s.Size {
		return s
	}
	return nil
}

// insert adds s, which overlaps nothing.
func (t *segset) insert(s Segment) {
	t.n++
	l, i := t.seek(s.Addr)
	if l == len(t.leaves) {
		if l == 0 {
			t.leaves = append(t.leaves, []Segment{s})
			return
		}
		l--
		i = len(t.leaves[l])
	}
	leaf := append(t.leaves[l], Segment{})
	copy(leaf[i+1:], leaf[i:])
	leaf[i] = s
	t.leaves[l] = leaf
	if len(leaf) < leafMax {
		return
	}
	half := append([]Segment(nil), leaf[leafMax/2:]...)
	t.leaves[l] = leaf[:leafMax/2]
	t.leaves = append(t.leaves, nil)
	copy(t.leaves[l+2:], t.leaves[l+1:])
	t.leaves[l+1] = half
}

// remove takes out the segment that begins at addr.
func (t *segset) remove(addr uint64) {
	l, i := t.seek(addr)
	if l == len(t.leaves) || t.leaves[l][i].Addr != addr {
		return
	}
	t.n--
	leaf := t.leaves[l]
	copy(leaf[i:], leaf[i+1:])
	leaf[len(leaf)-1] = Segment{}
	t.leaves[l] = leaf[:len(leaf)-1]
	if len(leaf) == 1 {
		t.leaves = append(t.leaves[:l], t.leaves[l+1:]...)
	}
}

// cut takes [addr, addr+size) out of the expandable segments that have bytes of it, and returns how many bytes they
// had.
func (t *segset) cut(addr, size uint64) (had uint64) {
	stop := endOf(addr, size) // a file may say anything
	size = stop - addr
	for size-had > 0 {
		s := t.overlapping(addr, size)
		if s == nil || !s.Expandable {
			return had
		}
		from, to := max(s.Addr, addr), min(endOf(s.Addr, s.Size), stop)
		had += to - from
		rest := *s
		rest.Blocks = nil
		t.remove(rest.Addr)
		if from > rest.Addr {
			low := rest
			low.Size = from - rest.Addr
			t.insert(low)
		}
		if end := endOf(rest.Addr, rest.Size); end > to {
			high := rest
			high.Addr, high.Size = to, end-to
			t.insert(high)
		}
	}
	return had
}

// endOf is the first address behind a range, or the last that there is.
func endOf(addr, size uint64) uint64 {
	if end := addr + size; end >= addr {
		return end
	}
	return math.MaxUint64
}

// join adds the expandable range s, as part of a neighbour of the same stream and pool where it touches one.
func (t *segset) join(s Segment) {
	l, i := t.seek(s.Addr)
	if p := t.before(l, i); p != nil && p.Expandable && p.Addr+p.Size == s.Addr && p.Stream == s.Stream && p.Pool == s.Pool {
		s.Addr, s.Size, s.Large, s.Stack = p.Addr, p.Size+s.Size, p.Large, p.Stack
		t.remove(p.Addr)
	}
	if l, i = t.seek(s.Addr + s.Size); l < len(t.leaves) {
		n := t.leaves[l][i]
		if n.Expandable && n.Addr == s.Addr+s.Size && n.Stream == s.Stream && n.Pool == s.Pool {
			s.Size += n.Size
			s.Large = n.Large
			t.remove(n.Addr)
		}
	}
	t.insert(s)
}

// all is the set as one list in address order.
func (t *segset) all() []Segment {
	if t.n == 0 {
		return nil
	}
	out := make([]Segment, 0, t.n)
	for _, leaf := range t.leaves {
		out = append(out, leaf...)
	}
	return out
}
