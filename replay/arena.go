package replay

import (
	"fmt"

	"github.com/cistern-gpu/cistern/event"
)

// arena is segments cut into blocks, with free lists: what the simpler models have in common. Free blocks belong to
// lists; neighbours merge within a segment and a list.
type arena struct {
	blocks []arenaBlock
	unused []int32
	of     []int32 // block number → index in blocks, -1 where it has none
	lists  []freeSet
	next   uint64 // where the next segment lies
}

type arenaBlock struct {
	addr, size uint64
	prev, next int32 // neighbours in the segment, -1 is none
	list       int32
	free       bool
}

func newArena(blocks, lists int) arena {
	a := arena{of: make([]int32, blocks), lists: make([]freeSet, lists), next: firstAddr}
	for i := range a.of {
		a.of[i] = -1
	}
	return a
}

func (a *arena) newBlock(b arenaBlock) int32 {
	if n := len(a.unused); n > 0 {
		i := a.unused[n-1]
		a.unused = a.unused[:n-1]
		a.blocks[i] = b
		return i
	}
	a.blocks = append(a.blocks, b)
	return int32(len(a.blocks) - 1)
}

// segment makes a segment of one used block.
func (a *arena) segment(size uint64) int32 {
	addr := a.next
	a.next += (size + smallSegment - 1) / smallSegment * smallSegment
	return a.newBlock(arenaBlock{addr: addr, size: size, prev: -1, next: -1})
}

// take is the best fit in a list, cut down to size, or -1. The rest stays in the list.
func (a *arena) take(list int32, size uint64) int32 {
	s := &a.lists[list]
	at := s.seek(size, 0, 0)
	if s.end(at) {
		return -1
	}
	i := s.at(at).block
	s.removeAt(at)
	a.blocks[i].free = false
	a.cut(i, size, list)
	return i
}

// cut splits used block i so that it has size bytes; the rest goes to a list.
func (a *arena) cut(i int32, size uint64, list int32) {
	b := a.blocks[i]
	if b.size == size {
		return
	}
	rest := a.newBlock(arenaBlock{addr: b.addr + size, size: b.size - size, prev: i, next: b.next})
	if b.next >= 0 {
		a.blocks[b.next].prev = rest
	}
	a.blocks[i].next, a.blocks[i].size = rest, size
	a.give(rest, list)
}

// give puts used block i into a list, merged with free neighbours of the same list. It returns the merged block.
func (a *arena) give(i, list int32) int32 {
	if p := a.blocks[i].prev; p >= 0 && a.blocks[p].free && a.blocks[p].list == list {
		i = a.join(p, i)
	}
	if n := a.blocks[i].next; n >= 0 && a.blocks[n].free && a.blocks[n].list == list {
		i = a.join(i, n)
	}
	b := &a.blocks[i]
	b.free, b.list = true, list
	a.lists[list].insert(b.size, b.addr, i)
	return i
}

// join makes neighbours left and right one used block, left.
func (a *arena) join(left, right int32) int32 {
	for _, i := range []int32{left, right} {
		if b := &a.blocks[i]; b.free {
			a.lists[b.list].remove(b.size, b.addr, i)
			b.free = false
		}
	}
	l, r := &a.blocks[left], &a.blocks[right]
	l.size += r.size
	l.next = r.next
	if l.next >= 0 {
		a.blocks[l.next].prev = left
	}
	a.unused = append(a.unused, right)
	return left
}

// whole reports whether block i is a whole segment.
func (a *arena) whole(i int32) bool { return a.blocks[i].prev < 0 && a.blocks[i].next < 0 }

// drop forgets free block i, which must be a whole segment.
func (a *arena) drop(i int32) {
	b := &a.blocks[i]
	a.lists[b.list].remove(b.size, b.addr, i)
	b.free = false
	a.unused = append(a.unused, i)
}

// used is the block of a number, for a free.
func (a *arena) used(b int) (int32, error) {
	i := a.of[b]
	if i < 0 {
		return 0, fmt.Errorf("block %d is free already", b)
	}
	a.of[b] = -1
	return i, nil
}

// emitSegment tells of a segment event.
func (env *Env) emitSegment(kind event.Kind, addr, size uint64, stream, pool uint32) {
	if env.Emit != nil {
		env.Emit(event.Event{Kind: kind, Addr: addr, Size: size, Stream: stream, Pool: pool})
	}
}

func roundUp(size, to uint64) uint64 { return (size + to - 1) / to * to }
