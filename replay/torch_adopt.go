package replay

import (
	"sort"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

// adopter is a policy that can begin in the state that the recorded allocator was in at the first event.
type adopter interface {
	// adopt takes over Trace.InitialSegments and returns the address of each block of Trace.Initial; false when it
	// cannot, and then the blocks are allocated like others.
	adopt() (addrs []uint64, ok bool)
}

// adopt is adopter.adopt. It serves PyTorch's model with the recorded settings over a trace that began mid-run: the
// free ranges between the blocks of a segment are what PyTorch cached, since it merges neighbours. The ages of cached
// blocks are not in a trace; all begin at 0.
func (t *torch) adopt() ([]uint64, bool) {
	tr := t.env.Plan.Trace
	if len(tr.InitialSegments) == 0 {
		return nil, false
	}
	addrs := make([]uint64, len(tr.Initial))
	live := make([]int32, len(tr.Initial)) // block numbers in address order
	for i, b := range tr.Initial {
		addrs[i], live[i] = b.Addr, int32(i)
	}
	sort.Slice(live, func(i, j int) bool { return addrs[live[i]] < addrs[live[j]] })
	segs := append([]recording.Segment(nil), tr.InitialSegments...)
	sort.Slice(segs, func(i, j int) bool { return segs[i].Addr < segs[j].Addr })
	inside := make([][]int32, len(segs)) // the live blocks of each segment
	rest := live
	var total, end uint64
	for i, s := range segs {
		if s.Addr < end || s.Addr > 1<<62 || s.Size == 0 || s.Size >= maxRequest || s.Expandable && s.Size%smallSegment != 0 {
			return nil, false
		}
		at := s.Addr
		end = s.Addr + s.Size
		n := 0
		for ; n < len(rest) && addrs[rest[n]] < end; n++ {
			b := &tr.Initial[rest[n]]
			if b.Addr < at || b.Size == 0 || b.Size > end-b.Addr {
				return nil, false
			}
			at = b.Addr + b.Size
		}
		inside[i], rest = rest[:n], rest[n:]
		total += s.Size
	}
	// Blocks that lie in no segment, or segments that the limit does not allow: the state cannot be taken over.
	if len(rest) > 0 || t.limit > 0 && total > t.limit {
		return nil, false
	}
	slack := t.env.Plan.slack(live, segs, inside)
	for i := range segs {
		t.adoptSegment(&segs[i], inside[i], slack)
	}
	t.nextAddr = t.env.Plan.addressesAbove()
	return addrs, true
}

// adoptSegment takes over a segment with its live blocks, in address order.
func (t *torch) adoptSegment(s *recording.Segment, live []int32, slack []uint64) {
	pool := int32(2 * s.Pool)
	if s.Large {
		pool++
	}
	prev, next, rng := int32(-1), int32(-1), int32(-1)
	if s.Expandable {
		prev, next, rng = t.adoptRange(s, pool)
	}
	t.grow(s.Size)
	put := func(addr, size uint64, used bool) int32 {
		i := t.newBlock(torchBlock{addr: addr, size: size, prev: prev, next: next, pool: pool, rng: rng,
			stream: s.Stream, mapped: true, used: used})
		if prev >= 0 {
			t.blocks[prev].next = i
		}
		if next >= 0 {
			t.blocks[next].prev = i
		}
		prev = i
		return i
	}
	at, last := s.Addr, int32(-1)
	gap := func(end uint64) {
		switch size := end - at; {
		case end <= at:
		case s.Large && !s.Expandable && size <= smallSize && last >= 0:
			// PyTorch does not split off so little from a large block: it belongs to the block before, whose size the
			// file did not say.
			t.blocks[last].size += size
			t.allocated += size
		default:
			t.cache(put(at, size, false))
		}
	}
	for _, n := range live {
		b := &t.env.Plan.Trace.Initial[n]
		gap(b.Addr)
		last = put(b.Addr, b.Size+slack[n], true)
		t.of[n] = last
		t.allocated += b.Size + slack[n]
		at = b.Addr + b.Size + slack[n]
	}
	gap(s.Addr + s.Size)
	kind := event.SegmentAlloc
	if s.Expandable {
		kind = event.SegmentMap
	}
	t.emit(kind, s.Addr, s.Size, prev)
}

// slack is by how much the blocks of Trace.Initial are larger than the file says. It says the rounded request of a
// block that is freed later, not what PyTorch left it because the rest was too small to split off: up to 1 MiB, in
// native large segments. Where such a block is followed by free memory, the record shows where that begins once
// something is placed there.
func (p *Plan) slack(live []int32, segs []recording.Segment, inside [][]int32) []uint64 {
	initial := p.Trace.Initial
	out := make([]uint64, len(initial))
	top := make([]uint64, len(initial)) // end of the segment that a block lies in
	known := make([]bool, len(initial)) // does not lie in a native large segment, is freed, or its slack is found
	open := 0
	for i, s := range segs {
		for _, n := range inside[i] {
			known[n] = !s.Large || s.Expandable
			top[n] = s.Addr + s.Size
			if !known[n] {
				open++
			}
		}
	}
	for i := range p.Trace.Events {
		if open == 0 {
			break
		}
		e := &p.Trace.Events[i]
		n := p.Block[i]
		switch e.Kind {
		case event.FreeCompleted:
			if n >= 0 && int(n) < len(initial) && !known[n] {
				known[n] = true
				open--
			}
		case event.Alloc:
			at := sort.Search(len(live), func(j int) bool { return initial[live[j]].Addr > e.Addr }) - 1
			if at < 0 || known[live[at]] {
				continue
			}
			b := &initial[live[at]]
			if end := b.Addr + b.Size; e.Addr >= end && e.Addr-end <= smallSize {
				out[live[at]] = min(e.Addr, top[live[at]]) - end
				known[live[at]] = true
				open--
			}
		}
	}
	return out
}

// adoptRange finds the range of addresses that a mapped part s belongs to, or begins one with it: a snapshot shows the
// parts only, and PyTorch has one range for each stream and pool, mapped from its beginning. It returns the unmapped
// neighbours that s is to be put between.
func (t *torch) adoptRange(s *recording.Segment, pool int32) (prev, next, rng int32) {
	list := t.use(pool).unmapped[s.Stream]
	for _, i := range list {
		b := t.blocks[i]
		if b.addr <= s.Addr && s.Addr+s.Size <= b.addr+b.size {
			t.removeUnmapped(i)
			prev, next = b.prev, b.next
			if gap := s.Addr - b.addr; gap > 0 {
				t.blocks[i].size = gap
				t.insertUnmapped(i)
				prev = i
			} else {
				t.dropBlock(i)
			}
			if tail := b.addr + b.size - (s.Addr + s.Size); tail > 0 {
				j := t.newBlock(torchBlock{addr: s.Addr + s.Size, size: tail, prev: -1, next: next, pool: pool,
					rng: b.rng, stream: s.Stream})
				if next >= 0 {
					t.blocks[next].prev = j
				}
				t.insertUnmapped(j)
				next = j
			}
			return prev, next, b.rng
		}
	}
	r := t.newRange(pool, s.Addr, s.Size)
	tail := t.newBlock(torchBlock{addr: s.Addr + s.Size, size: r.size - s.Size, prev: -1, next: -1, pool: pool,
		rng: int32(len(t.ranges) - 1), stream: s.Stream})
	t.insertUnmapped(tail)
	return -1, tail, int32(len(t.ranges) - 1)
}
