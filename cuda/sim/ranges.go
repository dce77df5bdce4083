package sim

import "slices"

// ranges is the use of the bytes [lo, hi) of one chunk by work that the host may not have seen complete: disjoint
// spans in rising order. Uses that the host has seen come before whatever is queued later, and are dropped. Where
// there are many spans all the same, the range is halved, again and again, so that inserting stays cheap.
type ranges struct {
	lo, hi  uint64
	spans   []span
	pruneAt int
	halves  *[2]ranges // in place of spans
}

// leafSpans is how many spans are kept in one slice, and joinSpans under how many two halves become one again.
const (
	leafSpans = 256
	joinSpans = 32
)

// span has the last uses of the bytes [lo, hi).
type span struct {
	lo, hi uint64
	write  mark
	reads  []mark // since write, one per rank
}

// touch checks work m, which comes after what seen covers, against the uses of [lo, hi) so far, and makes it the last
// one. It returns the first use that is neither before m nor a read beside a read.
func (r *ranges) touch(lo, hi uint64, m mark, read bool, seen, host vector) (conflict mark, bad bool) {
	if len(r.spans) == 1 && !read { // a chunk that is used whole
		if s := &r.spans[0]; s.lo == lo && s.hi == hi && len(s.reads) == 0 && seen.covers(s.write) {
			s.write = m
			return conflict, false
		}
	}
	if r.halves == nil && len(r.spans) >= max(r.pruneAt, 16) {
		r.prune(host)
		r.pruneAt = 2 * len(r.spans)
		if len(r.spans) > leafSpans {
			r.halve()
		}
	}
	if h := r.halves; h != nil {
		for i := range h {
			from, to := max(lo, h[i].lo), min(hi, h[i].hi)
			if from >= to {
				continue
			}
			if c, b := h[i].touch(from, to, m, read, seen, host); b && !bad {
				conflict, bad = c, b
			}
		}
		if h[0].halves == nil && h[1].halves == nil && len(h[0].spans)+len(h[1].spans) <= joinSpans {
			r.spans = append(h[0].spans, h[1].spans...)
			r.halves = nil
		}
		return conflict, bad
	}
	i, _ := slices.BinarySearchFunc(r.spans, lo, func(s span, at uint64) int {
		if s.hi <= at {
			return -1
		}
		return 1
	})
	j := i
	for ; j < len(r.spans) && r.spans[j].lo < hi; j++ {
		s := &r.spans[j]
		if bad {
			continue
		}
		if !seen.covers(s.write) {
			conflict, bad = s.write, true
		}
		if read {
			continue
		}
		for _, rd := range s.reads {
			if !bad && !seen.covers(rd) {
				conflict, bad = rd, true
			}
		}
	}
	if read {
		r.addRead(i, j, lo, hi, m)
	} else {
		r.setWrite(i, j, lo, hi, m)
	}
	return conflict, bad
}

// halve splits the range, and spans that lie across its middle.
func (r *ranges) halve() {
	mid := r.lo + (r.hi-r.lo)/2
	h := &[2]ranges{{lo: r.lo, hi: mid}, {lo: mid, hi: r.hi}}
	for _, s := range r.spans {
		if s.lo < mid {
			left := s
			left.hi = min(s.hi, mid)
			h[0].spans = append(h[0].spans, left)
		}
		if s.hi > mid {
			s.reads = slices.Clone(s.reads)
			s.lo = max(s.lo, mid)
			h[1].spans = append(h[1].spans, s)
		}
	}
	r.spans, r.halves = nil, h
}

// setWrite makes m the only use of [lo, hi), which spans i to j overlap.
func (r *ranges) setWrite(i, j int, lo, hi uint64, m mark) {
	var buf [3]span
	out := buf[:0]
	if i < j && r.spans[i].lo < lo {
		s := r.spans[i]
		s.hi = lo
		out = append(out, s)
	}
	out = append(out, span{lo: lo, hi: hi, write: m})
	if i < j && r.spans[j-1].hi > hi {
		s := r.spans[j-1]
		s.lo = hi
		s.reads = slices.Clone(s.reads) // the left part may hold the same array
		out = append(out, s)
	}
	if len(out) == j-i {
		copy(r.spans[i:j], out)
		return
	}
	r.spans = slices.Replace(r.spans, i, j, out...)
}

// addRead adds m to the readers of [lo, hi), which spans i to j overlap.
func (r *ranges) addRead(i, j int, lo, hi uint64, m mark) {
	if j == i+1 && r.spans[i].lo == lo && r.spans[i].hi == hi {
		r.spans[i].read(m)
		return
	}
	var out []span
	at := lo
	for _, s := range r.spans[i:j] {
		if s.lo > at {
			out = append(out, span{lo: at, hi: s.lo, reads: []mark{m}})
		}
		if s.lo < lo {
			left := s
			left.hi = lo
			left.reads = slices.Clone(s.reads)
			out = append(out, left)
			s.lo = lo
		}
		var right span
		if s.hi > hi {
			right = s
			right.lo = hi
			right.reads = slices.Clone(s.reads)
			s.hi = hi
		}
		s.read(m)
		out = append(out, s)
		if right.hi != 0 {
			out = append(out, right)
		}
		at = s.hi
	}
	if at < hi {
		out = append(out, span{lo: at, hi: hi, reads: []mark{m}})
	}
	r.spans = slices.Replace(r.spans, i, j, out...)
}

// read notes a read; a later read of the same rank stands for the earlier ones.
func (s *span) read(m mark) {
	for k := range s.reads {
		if s.reads[k].rank == m.rank {
			s.reads[k] = m
			return
		}
	}
	s.reads = append(s.reads, m)
}

// prune drops what the host has seen complete.
func (r *ranges) prune(host vector) {
	r.spans = slices.DeleteFunc(r.spans, func(s span) bool {
		if !host.covers(s.write) {
			return false
		}
		for _, m := range s.reads {
			if !host.covers(m) {
				return false
			}
		}
		return true
	})
}
