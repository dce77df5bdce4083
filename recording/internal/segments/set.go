// Package segments has sets of segments, and makes segments for traces that have none.
package segments

import (
	"math"
	"slices"

	"github.com/cistern-gpu/cistern/internal/leaves"
	"github.com/cistern-gpu/cistern/recording"
)

// Set is a set of segments that do not overlap, in address order.
type Set struct {
	list leaves.List[recording.Segment]
}

// seek is the place of the first segment at or above addr.
func (t *Set) seek(addr uint64) leaves.Pos {
	return t.list.Search(func(s *recording.Segment) bool { return s.Addr >= addr })
}

// At is the segment that addr lies in, or nil. It may be changed, but for its address.
func (t *Set) At(addr uint64) *recording.Segment { return t.Overlapping(addr, 1) }

// Below is the last segment that begins below addr, or nil.
func (t *Set) Below(addr uint64) *recording.Segment { return t.before(t.seek(addr)) }

// before is the segment before a place, or nil.
func (t *Set) before(p leaves.Pos) *recording.Segment {
	if p, ok := t.list.Before(p); ok {
		return t.list.At(p)
	}
	return nil
}

// Overlapping is a segment that has a byte of [addr, addr+size), or nil.
func (t *Set) Overlapping(addr, size uint64) *recording.Segment {
	p := t.seek(addr)
	if s := t.list.At(p); s != nil && s.Addr-addr < size {
		return s
	}
	if s := t.before(p); s != nil && addr-s.Addr < s.Size {
		return s
	}
	return nil
}

// Insert adds s, which overlaps nothing.
func (t *Set) Insert(s recording.Segment) { t.list.Insert(t.seek(s.Addr), s) }

// Remove takes out the segment that begins at addr.
func (t *Set) Remove(addr uint64) {
	p := t.seek(addr)
	if s := t.list.At(p); s != nil && s.Addr == addr {
		t.list.Delete(p)
	}
}

// Cut takes [addr, addr+size) out of the expandable segments that have bytes of it, and returns how many bytes they
// had.
func (t *Set) Cut(addr, size uint64) (had uint64) {
	stop := endOf(addr, size) // a file may say anything
	size = stop - addr
	for size-had > 0 {
		s := t.Overlapping(addr, size)
		if s == nil || !s.Expandable {
			return had
		}
		from, to := max(s.Addr, addr), min(endOf(s.Addr, s.Size), stop)
		had += to - from
		rest := *s
		rest.Blocks = nil
		t.Remove(rest.Addr)
		if from > rest.Addr {
			low := rest
			low.Size = from - rest.Addr
			t.Insert(low)
		}
		if end := endOf(rest.Addr, rest.Size); end > to {
			high := rest
			high.Addr, high.Size = to, end-to
			t.Insert(high)
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

// Join adds the expandable range s, as part of a neighbour of the same stream and pool where it touches one.
func (t *Set) Join(s recording.Segment) {
	if p := t.Below(s.Addr); p != nil && p.Expandable && p.Addr+p.Size == s.Addr && p.Stream == s.Stream && p.Pool == s.Pool {
		s.Addr, s.Size, s.Large, s.Stack = p.Addr, p.Size+s.Size, p.Large, p.Stack
		t.Remove(p.Addr)
	}
	if n := t.list.At(t.seek(s.Addr + s.Size)); n != nil && n.Expandable && n.Addr == s.Addr+s.Size && n.Stream == s.Stream && n.Pool == s.Pool {
		s.Size += n.Size
		s.Large = n.Large
		t.Remove(n.Addr)
	}
	t.Insert(s)
}

// Len is how many segments the set has.
func (t *Set) Len() int { return t.list.Len() }

// All is the set as one list in address order.
func (t *Set) All() []recording.Segment {
	if t.list.Len() == 0 {
		return nil
	}
	out := make([]recording.Segment, 0, t.list.Len())
	for s := range t.list.All() {
		out = append(out, *s)
	}
	return out
}

const (
	SegmentSize = 80      // bytes of a Segment in memory
	BlockSize   = 40      // and of a Block
	Small       = 2 << 20 // PyTorch's kSmallBuffer: segments up to this size hold small blocks
)

// Spare says whether a segment is a spare chunk, be it placed or not.
func Spare(s *recording.Segment) bool {
	return s.Addr == 0 || s.Addr-recording.VirtualBase < recording.VirtualBase && !slices.ContainsFunc(s.Blocks, func(b recording.Block) bool { return b.State != recording.Inactive })
}
