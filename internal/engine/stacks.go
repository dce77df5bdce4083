package engine

import (
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/journal"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/internal/lockrank"
	"github.com/cistern-gpu/cistern/memory"
)

// Where requests come from. A stack is a number in one table of the allocator's (package internal/stacks). Requests name it
// (AllocOptions.Stack), and so do events. While stacks are kept, blocks remember it beside their record in the heap, so that it
// costs nothing otherwise. Blocks with a stack never go into magazines that C code takes from.

// Stacks are the numbered stacks of requests.
type Stacks struct {
	a       *Allocator
	table   journal.Stacks
	keeping lockrank.Mutex // held while devices learn that blocks keep stacks; before Allocator.mu
}

// Of is the number of a stack, innermost frame first, for AllocOptions.Stack: the same for the same frames, and 0 for none or
// when the table is full (Table). The caller decides what frames mean. The table's lock is a leaf, and a stack that is known is
// found without it.
func (sk *Stacks) Of(frames []uint64) uint32 { return sk.table.Of(frames) }

// Frames are the frames of a stack, nil for a number that Of did not give. They must not be changed.
func (sk *Stacks) Frames(n uint32) []uint64 { return sk.table.Frames(n) }

// Table is the size of the table of stacks.
func (sk *Stacks) Table() memory.StackTable { return memory.StackTable(sk.table.Usage()) }

// Keep has blocks of all devices remember the stacks of their requests from now on, or stops that and forgets them.
func (sk *Stacks) Keep(on bool) {
	sk.keeping.Lock()
	defer sk.keeping.Unlock()
	// Devices are not asked under a.mu, which comes after theirs when they reserve addresses. A device that is starting has
	// been published by now, and one that starts later sees kept.
	sk.a.mu.Lock()
	sk.a.kept = on
	sk.a.mu.Unlock()
	sk.a.started(func(d *Device) error {
		d.History.setStacks(on)
		return nil
	})
}

func (h *History) setStacks(on bool) {
	h.gpu.mu.Lock()
	defer h.gpu.mu.Unlock()
	h.usage.keepStacks = on
	for _, s := range h.pools.heaps {
		if s != nil {
			s.arena.Lock()
			s.blocks.Stacks.Keep(on)
			s.arena.Unlock()
		}
	}
}

// StackUsage adds up the live blocks by stack, the most bytes first; nil while stacks are not kept. It looks at every
// block.
func (v *Views) StackUsage() []memory.StackUse {
	v.gpu.mu.Lock()
	defer v.gpu.mu.Unlock()
	return v.usage.byStack()
}

// byStack is StackUsage. The caller holds Device.mu and nothing else.
//
// +checklocks:us.gpu.mu
func (us *usage) byStack() []memory.StackUse {
	if !us.keepStacks {
		return nil
	}
	return us.sum(func(s *streamHeap, id heap.ID, _ *heap.Block) uint32 { return s.blocks.Stacks.Of(id) }).Stacks()
}

// FreeOptions say more of a free.
type FreeOptions struct {
	// Stream is that of FreeOn, nil: as Free.
	Stream *Stream
	// Stack and Thread are those of the free, for the history; 0 is unknown. Without a stack the history names the one that the
	// block remembers.
	Stack, Thread uint32
}

// FreeWith is Free with options.
func (a *Allocator) FreeWith(p cuda.Ptr, o FreeOptions) error {
	if p == 0 {
		return nil
	}
	s := a.heapOf(p)
	if s == nil {
		return &memory.PointerError{Op: "free", Ptr: p}
	}
	if (o.Stream == nil || o.Stream == s.stream) && !s.dev.health.Recording() {
		return s.freePtr(p, o.Stream)
	}
	return s.freeSlow(p, o)
}
