package engine

import (
	"slices"
	"sort"

	"github.com/cistern-gpu/cistern/internal/engine/offload"
	"github.com/cistern-gpu/cistern/internal/heap"
)

// pausedRange is a range of a stream heap's addresses whose memory is paused, or on its way out or back: whole granules, or a
// segment. The blocks in it are in use (or wait for other streams), and between them lie stale mappings: addresses that
// are not handed out. A block may lie in several, and partly in memory that is there. Where no block lies any more the addresses
// become an unmapped range; but not in pools of captured graphs, which use free memory as well, so that it comes back with the rest.
//
// reserved + paused = active + inactive holds at every moment, as paused is what blocks that are not free lack.
type pausedRange struct {
	heap       *streamHeap
	addr, size uint64
	contents   offload.Contents // of its blocks; none where they were dropped
	// busy: a pause or resume of it is under way, so it is not cut up, nor put back.
	busy bool
	// mapped: there is memory, still or again, and counted, though out of reach: that of blocks counts as active, the rest
	// among the spare bytes.
	mapped bool
	bare   bool // nothing is mapped there any more, or yet, though it counts so: it is on its way
	freed  bool // a block was given back while it was mapped
	lost   bool // its memory could not be allocated again
	live   int  // of a segment: blocks in it
	mem    pausedBacking
}

func (a *pausedRange) end() uint64 { return a.addr + a.size }

// clip is the part of a range that lies in it.
func (a *pausedRange) clip(addr, size uint64) (lo, n uint64) {
	lo, hi := max(addr, a.addr), min(addr+size, a.end())
	if lo >= hi {
		return lo, 0
	}
	return lo, hi - lo
}

// pausedRanges are the paused ranges of one stream heap, in address order.
type pausedRanges []*pausedRange

// from is the index of the first that ends behind addr.
func (l pausedRanges) from(addr uint64) int {
	return sort.Search(len(l), func(i int) bool { return l[i].end() > addr })
}

// over is the one that addr lies in, nil where there is none.
func (l pausedRanges) over(addr uint64) *pausedRange {
	if i := l.from(addr); i < len(l) && l[i].addr <= addr {
		return l[i]
	}
	return nil
}

func (l *pausedRanges) add(a *pausedRange) { *l = slices.Insert(*l, l.from(a.addr), a) }

// replace puts parts of a paused range into its place.
func (l *pausedRanges) replace(a *pausedRange, parts ...*pausedRange) {
	i := l.from(a.addr)
	*l = slices.Replace(*l, i, i+1, parts...)
}

// in is those that the range has a part in. The caller must not change them meanwhile.
func (l pausedRanges) in(addr, size uint64) pausedRanges {
	i := l.from(addr)
	k := i
	for k < len(l) && l[k].addr < addr+size {
		k++
	}
	return l[i:k]
}

// missing is how many bytes of a block have no memory.
func (l pausedRanges) missing(b *heap.Block) (n uint64) {
	if len(l) == 0 || b.State != heap.Used && b.State != heap.Pending {
		return 0
	}
	for _, a := range l.in(b.Addr, b.Size) {
		if !a.mapped {
			_, k := a.clip(b.Addr, b.Size)
			n += k
		}
	}
	return n
}

// noteParked notes that a block was given back while other streams may use it.
func (l pausedRanges) noteParked(b *heap.Block) {
	for _, a := range l.in(b.Addr, b.Size) {
		a.freed = a.mapped
	}
}

// add notes that blocks of a stream heap lost memory, or got it back.
//
// +checklocks:pr.gpu.mu
func (pr *pausedMemory) add(s *streamHeap, bytes int64) {
	s.pausedBytes += bytes
	pr.phys.quota.AddPaused(s.class, bytes)
}

// eachPaused calls f for every part of a block that lies in a paused range of the list, which is in address order, block by
// block of the stream heap. f must not change the heap but for the block.
func (s *streamHeap) eachPaused(list []*pausedRange, f func(a *pausedRange, id heap.ID, b *heap.Block, lo, n uint64)) {
	if len(list) == 0 {
		return
	}
	s.blocks.Each(func(id heap.ID, b *heap.Block) bool {
		if b.State == heap.Unmapped {
			return true
		}
		i := sort.Search(len(list), func(i int) bool { return list[i].end() > b.Addr })
		for ; i < len(list) && list[i].addr < b.Addr+b.Size; i++ {
			lo, n := list[i].clip(b.Addr, b.Size)
			f(list[i], id, b, lo, n)
		}
		return true
	})
}

// survey is what lies in a paused range.
type survey struct {
	first  heap.ID // the block in which it begins
	used   uint64  // bytes that blocks have of it
	blocks int     // that begin in it, or in no paused range of the survey before it
	kinds  []granuleKind
}

// granuleKind is what lies in a granule of a paused range, or in a segment.
type granuleKind uint8

const (
	granuleFree     granuleKind = iota // no block
	granuleLive                        // blocks
	granuleSelected                    // and one that is selected
)

// survey looks at every block of the stream heap for what lies in paused ranges, which are in address order; sel may be nil. The
// caller holds the arena's lock.
func (s *streamHeap) survey(list []*pausedRange, sel *Selection) map[*pausedRange]*survey {
	out := map[*pausedRange]*survey{}
	for _, a := range list {
		out[a] = &survey{kinds: make([]granuleKind, a.mem.granules(a))}
	}
	last := heap.ID(0)
	s.eachPaused(list, func(a *pausedRange, id heap.ID, b *heap.Block, lo, n uint64) {
		v := out[a]
		if v.first == 0 {
			v.first = id
		}
		if b.State == heap.Stale {
			return
		}
		v.used += n
		if id != last {
			v.blocks++
		}
		last = id
		kind := granuleLive
		if sel != nil && sel.has(s, b) {
			kind = granuleSelected
		}
		g := a.size / uint64(len(v.kinds))
		for i := (lo - a.addr) / g; i <= (lo+n-1-a.addr)/g; i++ {
			v.kinds[i] = max(v.kinds[i], kind)
		}
	})
	return out
}

// decommit is what a free does where memory is paused: [addr, addr+size) of block id, which is free (or held) by now,
// becomes a stale mapping wherever it lies in a paused range, and its contents there are forgotten. It returns the bytes that are no
// free memory. The caller holds Device.mu and the arena's lock.
//
// +checklocks:pr.gpu.mu
func (pr *pausedMemory) decommit(s *streamHeap, id heap.ID, addr, size uint64, held bool) (gone uint64) {
	type hit struct {
		a     *pausedRange
		stale heap.ID
		lo, n uint64
	}
	var hits []hit
	start := id
	for _, a := range s.paused.in(addr, size) {
		lo, n := a.clip(addr, size)
		for b := s.blocks.At(id); b.Addr+b.Size <= lo; b = s.blocks.At(id) {
			id = s.blocks.Next(id)
		}
		id = s.blocks.Unmap(id, lo, n)
		hits = append(hits, hit{a, id, lo, n})
		gone += n
		a.live--
		if a.mapped {
			pr.phys.quota.Spare += n
			a.freed = true
		} else {
			pr.add(s, -int64(n))
		}
		a.contents.Drop(lo, n)
	}
	if held { // what is left of it is apart from other free blocks
		for x := start; x != 0 && s.blocks.At(x).Addr < addr+size; x = s.blocks.Next(x) {
			if s.blocks.At(x).State == heap.Held {
				pr.held.all = append(pr.held.all, heldFree{s, x})
			}
		}
	}
	for _, x := range hits {
		if !x.a.busy {
			x.a.mem.unmapEmpty(x.a, x.stale, x.lo, x.n)
		}
	}
	return gone
}

// blockOver finds the block that an address lies in, whatever it is. It looks at every block before it.
func (s *streamHeap) blockOver(addr uint64) (id heap.ID) {
	s.blocks.Each(func(x heap.ID, b *heap.Block) bool {
		if addr-b.Addr < b.Size {
			id = x
			return false
		}
		return true
	})
	return id
}

// compact makes unmapped ranges of the granules of paused ranges, all of one stream heap, that no block lies in. The caller
// holds Device.mu and the arena's lock.
//
// +checklocks:pr.gpu.mu
func (pr *pausedMemory) compact(s *streamHeap, list []*pausedRange) {
	all := s.survey(list, nil)
	for _, a := range list {
		if !a.busy {
			a.mem.cutUp(a, all[a])
		}
	}
}

// refill makes memory that is out of reach ordinary memory again: what no block has of it is free, and the blocks are
// marked no more, unless they lack memory elsewhere. The caller holds Device.mu and no arena's lock.
//
// +checklocks:pr.gpu.mu
func (pr *pausedMemory) refill(list []*pausedRange) {
	byHeap(list, func(s *streamHeap, list []*pausedRange) { pr.refillHeap(s, list) })
}

// byHeap calls f for each stream heap's part of the list, with the arena's lock.
func byHeap(list []*pausedRange, f func(s *streamHeap, list []*pausedRange)) {
	for len(list) > 0 {
		s := list[0].heap
		n := 1
		for n < len(list) && list[n].heap == s {
			n++
		}
		s.arena.Lock()
		f(s, list[:n])
		s.arena.Unlock()
		list = list[n:]
	}
}

// +checklocks:pr.gpu.mu
func (pr *pausedMemory) refillHeap(s *streamHeap, list []*pausedRange) {
	done := map[*pausedRange]bool{}
	for _, a := range list {
		done[a] = true
	}
	s.paused = slices.DeleteFunc(s.paused, func(a *pausedRange) bool { return done[a] })
	type gap struct {
		stale           heap.ID
		lo, size, stamp uint64
	}
	var gaps []gap
	s.eachPaused(list, func(_ *pausedRange, id heap.ID, b *heap.Block, lo, n uint64) {
		if b.State == heap.Stale {
			gaps = append(gaps, gap{id, lo, n, b.Stamp})
		} else if len(s.paused.in(b.Addr, b.Size)) == 0 {
			b.Uses &^= heap.Paused
		}
	})
	// Backwards: a stale mapping may reach into what stays away, and what is cut off at its end has a new name.
	for i := len(gaps) - 1; i >= 0; i-- {
		x := gaps[i]
		free := s.blocks.Map(s.blocks.ReapPart(x.stale, x.lo, x.size), x.lo, x.size, x.stamp)
		if s.hot.Capture != 0 && !s.stream.timeline.IsOver(x.stamp) { // a pause that failed
			s.blocks.Hold(free)
			pr.held.all = append(pr.held.all, heldFree{s, free})
		}
		s.gauges.SetFree(s.blocks.FreeBlocks, int64(x.size))
		pr.phys.quota.Spare -= x.size
	}
	for _, a := range list {
		a.contents.Drop(a.addr, a.size)
	}
}

// compactAll makes unmapped ranges of what is free of paused memory in pools that captured graphs used until now. The caller holds
// Device.mu and no arena's lock.
//
// +checklocks:pr.gpu.mu
func (pr *pausedMemory) compactAll(pools []*Pool) {
	for _, s := range pr.pools.heaps {
		if s != nil && slices.Contains(pools, s.pool) && len(s.paused) > 0 {
			s.arena.Lock()
			pr.compact(s, slices.Clone(s.paused))
			s.arena.Unlock()
		}
	}
}

// releaseEmpty gives back segments that have no memory and in which no block is left. The caller holds Device.mu and
// nothing else; it is let go while users' upstreams are called.
//
// +checklocks:sg.gpu.mu
func (sg *segments) releaseEmpty() (first error) {
	if sg.gpu.health.Broken() != nil || sg.phys.offload.Unsure() {
		return nil
	}
	type empty struct {
		*pausedRange
		of *segmentHeap
	}
	var list []empty
	for h := range sg.pools.segmentHeaps() {
		if h.s.pool.pinned {
			continue
		}
		for _, a := range h.s.paused { // changed by holders of Device.mu only
			if a.live == 0 && !a.busy {
				a.busy = true
				list = append(list, empty{a, h})
			}
		}
	}
	for _, a := range list {
		s := a.heap
		sg.gpu.a.disown(a.addr, a.size)
		err := a.of.free(a.addr, a.size)
		if a.busy = false; err != nil {
			sg.gpu.a.claim(a.addr, a.size, s) // which succeeded before
			if first == nil {
				first = err
			}
			continue
		}
		s.arena.Lock()
		s.blocks.DropRange(s.blocks.ReapPart(s.blockOver(a.addr), a.addr, a.size))
		s.paused.replace(a.pausedRange)
		s.arena.Unlock()
		sg.gpu.recordSegment(s, a.addr, a.size, false, origin{})
		sg.phys.mem.Ranges.Drop(s.index, a.addr)
	}
	return first
}

// inTransit reports whether an address that is not handed out has memory that is on its way out or back.
func (l pausedRanges) inTransit(addr uint64) bool {
	a := l.over(addr)
	return a != nil && a.mapped && !a.bare
}

// correct makes the mapped ranges from those that the blocks have: without paused ranges, and with those that are on their way
// out or back.
func (l pausedRanges) correct(runs []run) []run {
	if len(l) == 0 {
		return runs
	}
	var out []run
	for _, r := range runs {
		for _, a := range l.in(r.addr, r.size) {
			lo, n := a.clip(r.addr, r.size)
			if lo > r.addr {
				out = append(out, run{r.addr, lo - r.addr})
			}
			r = run{lo + n, r.addr + r.size - lo - n}
		}
		if r.size > 0 {
			out = append(out, r)
		}
	}
	for _, a := range l {
		if a.mapped && !a.bare {
			out = append(out, run{a.addr, a.size})
		}
	}
	return out
}

// end gives back what only pausing needs. No block is paused.
func (pr *pausedMemory) end() error {
	pr.mu.Lock()
	defer pr.mu.Unlock()
	return pr.phys.offload.Close()
}
