// Package stacks numbers call stacks: equal frames get the same number, so that an event or a block that remembers where
// it came from costs four bytes. What a frame is, an address or anything else of 64 bits, is the caller's business.
//
// A stack that is known already is found without a lock, as nearly all are: programs allocate from a few thousand places.
// Numbers lead to entries, entries to frames, both in slabs without pointers that are never moved and never written
// again, so the garbage collector follows nothing and readers need no order but that of the index's atomic words. One
// mutex, a leaf that is held for no call, orders additions.
//
// The table is bounded by the number of stacks and by their bytes. What does not fit has no number, and is counted.
package stacks

import (
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
)

const (
	// MaxStacks and MaxBytes bound a table: numbers and bytes of frames.
	MaxStacks = 1 << 18
	MaxBytes  = 64 << 20
	// MaxFrames is how many frames of a stack count, innermost first; the others are cut off.
	MaxFrames = 512

	slabFrames  = 8192 // of a slab: 64 KiB
	slabEntries = 4096
	maxSlabs    = MaxBytes / 8 / slabFrames
	minIndex    = 1024
)

// Table numbers stacks from 1. The zero value is ready and holds no memory until it is used.
type Table struct {
	index atomic.Pointer[[]atomic.Uint32] // open addressing by hash: numbers, 0 is none; at most half full

	entries [MaxStacks/slabEntries + 1]atomic.Pointer[[slabEntries]entry]
	frames  [maxSlabs]atomic.Pointer[[slabFrames]uint64]

	full atomic.Uint64 // stacks that got no number

	mu    sync.Mutex
	count atomic.Uint32 // changed under mu
	// +checklocks:mu
	next  uint32        // where frames go, slab × slabFrames + place
	bytes atomic.Uint64 // changed under mu
}

// entry is one stack. It is written before its number is put into the index.
type entry struct {
	hash uint64
	at   uint32 // slab × slabFrames + place
	n    uint32
}

// Usage is what a table holds.
type Usage struct {
	Stacks int    // numbers given
	Bytes  uint64 // of their frames
	Lost   uint64 // times that a stack got no number because the table was full
}

// Usage is what the table holds.
func (t *Table) Usage() Usage {
	return Usage{int(t.count.Load()), t.bytes.Load(), t.full.Load()}
}

// Of is the number of a stack, innermost frame first; 0 for none, and where the table is full.
func (t *Table) Of(frames []uint64) uint32 {
	if len(frames) == 0 {
		return 0
	}
	frames = frames[:min(len(frames), MaxFrames)]
	h := hash(frames)
	if n := t.find(h, frames); n != 0 {
		return n
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if n := t.find(h, frames); n != 0 { // another thread was faster
		return n
	}
	n := t.add(h, frames)
	if n == 0 {
		t.full.Add(1)
	}
	return n
}

// find looks a stack up.
func (t *Table) find(h uint64, frames []uint64) uint32 {
	index := t.index.Load()
	if index == nil {
		return 0
	}
	mask := uint64(len(*index) - 1)
	for i := h & mask; ; i = (i + 1) & mask {
		n := (*index)[i].Load()
		if n == 0 {
			return 0
		}
		if e := t.entry(n); e.hash == h && slices.Equal(t.of(e), frames) {
			return n
		}
	}
}

// add gives a stack a number, 0 where there is no room. The caller holds mu.
//
// +checklocks:t.mu
func (t *Table) add(h uint64, frames []uint64) uint32 {
	if t.count.Load() >= MaxStacks {
		return 0
	}
	slab, place := t.next/slabFrames, t.next%slabFrames
	if place+uint32(len(frames)) > slabFrames { // a stack lies in one slab
		slab, place = slab+1, 0
	}
	if slab >= maxSlabs {
		return 0
	}
	if t.frames[slab].Load() == nil {
		t.frames[slab].Store(new([slabFrames]uint64))
	}
	copy(t.frames[slab].Load()[place:], frames)
	n := t.count.Load() + 1
	if t.entries[n/slabEntries].Load() == nil {
		t.entries[n/slabEntries].Store(new([slabEntries]entry))
	}
	*t.entry(n) = entry{h, slab*slabFrames + place, uint32(len(frames))}
	t.next = slab*slabFrames + place + uint32(len(frames))
	t.bytes.Add(8 * uint64(len(frames)))
	t.count.Store(n)
	t.publish(n, h)
	return n
}

// publish puts a number into the index, a larger one when that is half full. Readers that still search the former one may
// miss the number; then they search again under mu.
func (t *Table) publish(n uint32, h uint64) {
	index := t.index.Load()
	if index == nil || 2*int(n) > len(*index) {
		size := minIndex
		if index != nil {
			size = 2 * len(*index)
		}
		more := make([]atomic.Uint32, size)
		for k := uint32(1); k < n; k++ {
			insert(more, k, t.entry(k).hash)
		}
		insert(more, n, h)
		t.index.Store(&more)
		return
	}
	insert(*index, n, h)
}

func insert(index []atomic.Uint32, n uint32, h uint64) {
	mask := uint64(len(index) - 1)
	i := h & mask
	for index[i].Load() != 0 {
		i = (i + 1) & mask
	}
	index[i].Store(n)
}

// Frames are those of a number, nil for one that was not given. They must not be changed.
func (t *Table) Frames(n uint32) []uint64 {
	if n == 0 || n > t.count.Load() {
		return nil
	}
	f := t.of(t.entry(n))
	return f[:len(f):len(f)]
}

func (t *Table) entry(n uint32) *entry { return &t.entries[n/slabEntries].Load()[n%slabEntries] }

func (t *Table) of(e *entry) []uint64 {
	return t.frames[e.at/slabFrames].Load()[e.at%slabFrames:][:e.n]
}

// hash mixes frames by multiplication to 128 bits, folded (as in wyhash, Wang Yi 2019); the constants are its.
func hash(frames []uint64) uint64 {
	h := uint64(len(frames)) ^ 0xa0761d6478bd642f
	for _, f := range frames {
		hi, lo := bits.Mul64(f^0xe7037ed1a0b428db, h^0x8ebc6af09c88c6e3)
		h = hi ^ lo
	}
	return h
}
