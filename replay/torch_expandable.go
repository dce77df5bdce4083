package replay

import (
	"cmp"
	"slices"

	"github.com/cistern-gpu/cistern/event"
)

// torchRange is an ExpandableSegment: a range of addresses, larger than the device, into which pages are mapped.
type torchRange struct {
	base, size uint64
	page       uint64 // bytes of a physical handle
}

// growable is the size that a free block counts with in the search for the best fit: its own and that of the unmapped
// addresses behind it.
func (t *torch) growable(i int32) uint64 {
	b := &t.blocks[i]
	if b.next >= 0 && !t.blocks[b.next].mapped {
		return b.size + t.blocks[b.next].size
	}
	return b.size
}

// expand is try_allocate_expandable_block: the block at the lowest address where the request fits, its pages mapped,
// taken out of the cache.
func (t *torch) expand(r request) int32 {
	i := t.findExpandable(r)
	if !t.blocks[i].mapped {
		t.mapBlock(i, min(t.blocks[i].size, r.size))
	}
	for t.blocks[i].size < r.size {
		// A free block, then unmapped addresses: what is mapped there merges with the free block before.
		next := t.blocks[i].next
		t.mapBlock(next, min(r.size-t.blocks[i].size, t.blocks[next].size))
		i = next
	}
	t.uncache(i)
	return i
}

// findExpandable is find_expandable_block: the first block of the lowest run of free and unmapped blocks that has room for
// the request; a new range where there is none.
func (t *torch) findExpandable(r request) int32 {
	for _, c := range t.pools[r.pool].unmapped[r.stream] {
		if prev := t.blocks[c].prev; prev >= 0 && !t.blocks[prev].used {
			c = prev
		}
		var size uint64
		t.search(1)
		for j := c; j >= 0 && !t.blocks[j].used && size < r.size; j = t.blocks[j].next {
			size += t.blocks[j].size
			t.search(1)
		}
		if size >= r.size {
			return c
		}
	}
	rng := t.newRange(r.pool, 0, r.size)
	t.count(callAddressReserve, t.costs.MemAddressReserve(rng.size))
	i := t.newBlock(torchBlock{addr: rng.base, size: rng.size, prev: -1, next: -1, pool: r.pool,
		rng: int32(len(t.ranges) - 1), stream: r.stream})
	t.insertUnmapped(i)
	return i
}

// newRange makes the range of addresses of a pool and stream, for at least size bytes, at base unless that is 0.
func (t *torch) newRange(pool int32, base, size uint64) torchRange {
	page := t.conf.LargeSegment
	if t.pools[pool].small {
		page = smallSegment
	}
	device := max(uint64(rangeDevice), t.limit, t.env.Plan.PeakLive, size)
	size = (device + device/8 + page - 1) / page * page
	if base == 0 {
		base = t.place(size, event.SegmentMap)
	}
	t.ranges = append(t.ranges, torchRange{base: base, size: size, page: page})
	return t.ranges[len(t.ranges)-1]
}

// mapBlock is map_block: it maps pages for at least size bytes at the start of unmapped block i, which becomes a
// cached block, merged with its free neighbours.
func (t *torch) mapBlock(i int32, size uint64) {
	b := t.blocks[i]
	rng := t.ranges[b.rng]
	pages := (size + rng.page - 1) / rng.page
	addr, size := b.addr, pages*rng.page
	t.mapHandles(int(pages), rng.page)
	t.removeUnmapped(i)
	t.blocks[i].mapped = true
	if size < b.size {
		rest := t.newBlock(torchBlock{addr: b.addr + size, size: b.size - size, prev: i, next: b.next, pool: b.pool,
			rng: b.rng, stream: b.stream})
		if b.next >= 0 {
			t.blocks[b.next].prev = rest
		}
		t.blocks[i].next, t.blocks[i].size = rest, size
		t.insertUnmapped(rest)
	}
	t.merge(i, t.blocks[i].prev)
	t.merge(i, t.blocks[i].next)
	t.cache(i)
	t.emit(event.SegmentMap, addr, size, i)
}

// unmapBlock is unmap_block: it unmaps the whole pages inside cached block i, after waiting for the stream, since
// unmapping does not wait. What lies on pages shared with neighbours stays cached.
func (t *torch) unmapBlock(i int32) {
	b := t.blocks[i]
	rng := t.ranges[b.rng]
	first := (b.addr - rng.base + rng.page - 1) / rng.page
	last := (b.addr + b.size - rng.base) / rng.page
	if first >= last {
		return
	}
	t.streamSync()
	t.unmapHandles(int(last-first), rng.page)
	addr, size := rng.base+first*rng.page, (last-first)*rng.page
	t.uncache(i)
	if before := addr - b.addr; before > 0 {
		j := t.newBlock(torchBlock{addr: b.addr, size: before, prev: b.prev, next: i, pool: b.pool, rng: b.rng,
			stream: b.stream, mapped: true})
		if b.prev >= 0 {
			t.blocks[b.prev].next = j
		}
		t.blocks[i].prev = j
		t.cache(j)
	}
	if after := b.addr + b.size - (addr + size); after > 0 {
		j := t.newBlock(torchBlock{addr: addr + size, size: after, prev: i, next: b.next, pool: b.pool, rng: b.rng,
			stream: b.stream, mapped: true})
		if b.next >= 0 {
			t.blocks[b.next].prev = j
		}
		t.blocks[i].next = j
		t.cache(j)
	}
	blk := &t.blocks[i]
	blk.addr, blk.size, blk.mapped = addr, size, false
	t.merge(i, blk.prev)
	t.merge(i, t.blocks[i].next)
	t.insertUnmapped(i)
	t.emit(event.SegmentUnmap, addr, size, i)
}

// dropRange gives back a range of which nothing is mapped or used any more.
func (t *torch) dropRange(i int32) {
	t.count(callAddressFree, t.costs.MemAddressFree(t.blocks[i].size))
	t.removeUnmapped(i)
	t.dropBlock(i)
}

// unmappedAt is the place of block i among the unmapped blocks of its stream: in the order of addresses, and of numbers
// where a file says that two lie at the same address.
func (t *torch) unmappedAt(list []int32, i int32) int {
	at, _ := slices.BinarySearchFunc(list, i, func(j, i int32) int {
		return cmp.Or(cmp.Compare(t.blocks[j].addr, t.blocks[i].addr), cmp.Compare(j, i))
	})
	return at
}

func (t *torch) insertUnmapped(i int32) {
	b := &t.blocks[i]
	list := &t.use(b.pool).unmapped[b.stream]
	*list = slices.Insert(*list, t.unmappedAt(*list, i), i)
}

func (t *torch) removeUnmapped(i int32) {
	b := &t.blocks[i]
	list := &t.use(b.pool).unmapped[b.stream]
	at := t.unmappedAt(*list, i)
	*list = slices.Delete(*list, at, at+1)
}
