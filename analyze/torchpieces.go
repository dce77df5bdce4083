package analyze

import (
	"slices"
	"sort"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/leaves"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/replay"
)

// The free blocks of PyTorch's allocator that a request may use, from what a recording has of them.

// Constants of c10/cuda/CUDACachingAllocator.cpp (torch 2.11), in bytes.
const (
	torchSmallSize    = 1 << 20 // kSmallSize: the largest request of the small pools; no large block is cut for a smaller rest
	torchSmallSegment = 2 << 20 // kSmallBuffer
)

// torchSizes are PyTorch's rules of rounding, under the settings of a run.
type torchSizes struct{ replay.TorchConf }

// usable reports whether get_free_block may take a cached block of size bytes for a request that is not larger.
func (c *torchSizes) usable(size, block uint64) bool {
	if block < c.MaxSplit {
		return size < c.MaxSplit
	}
	return size >= block && size-block < c.MaxNonSplitRound
}

// torchSegment is a segment, or a mapped range of an expandable one, with the blocks handed out of it in address order.
type torchSegment struct {
	extent
	used leaves.List[extent]
}

// torchSegments are those segments in state s, which is that after event i, that a request may use: of its stream, pool and
// class of sizes. What the blocks cover is in no event. It is followed from the start, since PyTorch leaves a block the rest
// of the one that it was cut from if that is too small to be used.
func torchSegments(t *recording.Trace, i int, s *state, c *torchSizes, stream, pool uint32, small bool) []*torchSegment {
	var segments []*torchSegment
	for g := range s.segments.All() {
		if g.stream == stream && g.pool == pool && (g.expandable || (g.size <= torchSmallSegment) == small) {
			segments = append(segments, &torchSegment{extent: *g})
		}
	}
	at := func(addr uint64) *torchSegment {
		k := sort.Search(len(segments), func(k int) bool { return segments[k].end() > addr })
		if k == len(segments) || segments[k].addr > addr {
			return nil
		}
		return segments[k]
	}
	for k := range t.Initial {
		b := &t.Initial[k]
		if g := at(b.Addr); g != nil && b.State != recording.Inactive {
			g.use(extent{addr: b.Addr, size: max(b.Size, c.BlockSize(b.Requested))})
		}
	}
	for k := range t.Events[:i+1] {
		e := &t.Events[k]
		g := at(e.Addr)
		if g == nil || e.Kind == event.OOM {
			continue
		}
		switch e.Kind {
		case event.Alloc:
			g.use(extent{addr: e.Addr, size: g.cut(e.Addr, c.BlockSize(e.Size), c)})
		case event.FreeCompleted:
			g.drop(e.Addr)
		case event.SegmentAlloc:
			if e.Addr == g.addr { // an earlier segment lay here
				g.used = leaves.List[extent]{}
			}
		}
	}
	return slices.DeleteFunc(segments, func(g *torchSegment) bool {
		first := g.used.At(g.find(0))
		return g.expandable && first != nil && (first.size <= torchSmallSize) != small
	})
}

// find is the place of the first block that lies at addr or behind it.
func (g *torchSegment) find(addr uint64) leaves.Pos {
	return g.used.Search(func(b *extent) bool { return b.addr >= addr })
}

func (g *torchSegment) use(b extent) {
	g.drop(b.addr) // an event lost by the recorder may have left a block here
	g.used.Insert(g.find(b.addr), b)
}

func (g *torchSegment) drop(addr uint64) {
	p := g.find(addr)
	if b := g.used.At(p); b != nil && b.addr == addr {
		g.used.Delete(p)
	}
}

// cut is what a block of size bytes at addr covers: should_split, for the free block that begins there.
func (g *torchSegment) cut(addr, size uint64, c *torchSizes) uint64 {
	if g.expandable || g.size <= torchSmallSegment {
		return size
	}
	end := g.end()
	if next := g.used.At(g.find(addr + 1)); next != nil {
		end = next.addr
	}
	if whole := end - addr; whole > size && (size >= c.MaxSplit || whole-size <= torchSmallSize) {
		return whole
	}
	return size
}

// free calls visit with each free block, in address order.
func (g *torchSegment) free(visit func(addr, size uint64)) {
	at := g.addr
	for b := range g.used.All() {
		if b.addr > at {
			visit(at, b.addr-at)
		}
		at = max(at, b.end())
	}
	if end := g.end(); end > at {
		visit(at, end-at)
	}
}

// largestUsable is the largest free block of segments that a request of size bytes may use, of those smaller than it; ok is
// false where one is not, and so ought to have met it.
func largestUsable(segments []*torchSegment, size uint64, c *torchSizes) (largest uint64, ok bool) {
	ok = true
	for _, g := range segments {
		g.free(func(_, n uint64) {
			switch {
			case n < size && (n < c.MaxSplit) == (size < c.MaxSplit):
				largest = max(largest, n)
			case n >= size && c.usable(size, n):
				ok = false
			}
		})
	}
	return largest, ok
}

// growable is the largest request that expandable segments could meet by mapping room bytes of free device memory
// (try_allocate_expandable_block): pages are mapped in the lowest run of free and unmapped addresses that has room for it, and
// what is free at the edges of the run counts with them. The addresses above all that is mapped have no end here.
func growable(segments []*torchSegment, room, page uint64) uint64 {
	pages := room / page * page
	best, passed := uint64(0), uint64(0) // passed: requests up to it go to a run before
	for k, g := range segments {
		_, run := g.edges()
		met := run + pages
		if k+1 < len(segments) {
			next := segments[k+1]
			unmapped := next.addr - g.end()
			after, _ := next.edges()
			run += unmapped + after
			if pages >= unmapped {
				met = run
			}
		}
		if met > passed {
			best = max(best, met)
		}
		passed = max(passed, run)
	}
	return max(best, pages)
}

// edges are the free bytes at both ends.
func (g *torchSegment) edges() (first, last uint64) {
	g.free(func(addr, size uint64) {
		if addr == g.addr {
			first = size
		}
		if addr+size == g.end() {
			last = size
		}
	})
	return first, last
}
