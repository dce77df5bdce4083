package cistern

import (
	"cmp"
	"slices"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/heap"
)

// Where requests come from. A stack is a number in one table of the allocator's (package internal/stacks): requests name
// it (AllocOptions.Stack), events tell it, and, while stacks are kept, blocks remember it beside their record in the heap,
// so that nothing is paid for it otherwise. Blocks with a stack never go into trays that C code takes from.

// StackOf is the number of a stack, innermost frame first, for AllocOptions.Stack: the same for the same frames, and 0 for
// none or when the table is full (StackTable). What frames mean is the caller's business. The table's lock is a leaf, and
// a stack that is known is found without it.
func (a *Allocator) StackOf(frames []uint64) uint32 { return a.stacks.Of(frames) }

// StackFrames are the frames of a stack, nil for a number that StackOf did not give. They must not be changed.
func (a *Allocator) StackFrames(n uint32) []uint64 { return a.stacks.Frames(n) }

// StackTable is what the table of stacks holds.
type StackTable struct {
	Stacks int
	Bytes  uint64 // of frames
	// Lost counts how often a stack had no number because the table was full: it holds up to 2^18 stacks of together
	// 64 MiB.
	Lost uint64
}

// StackTable is what the table of stacks holds.
func (a *Allocator) StackTable() StackTable { return StackTable(a.stacks.Usage()) }

// KeepStacks has blocks of all devices remember the stacks of their requests from now on, or stops that and forgets them.
func (a *Allocator) KeepStacks(on bool) {
	a.keeping.Lock()
	defer a.keeping.Unlock()
	// Devices are not asked under a.mu, which comes after theirs when they reserve addresses: who is starting one has
	// published it now, and who starts one later sees kept.
	a.mu.Lock()
	a.kept = on
	a.mu.Unlock()
	a.started(func(d *Device) error {
		d.setStacks(on)
		return nil
	})
}

func (d *Device) setStacks(on bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.keepStacks = on
	for _, s := range d.spaces {
		if s != nil {
			s.mu.Lock()
			s.heap.KeepStacks(on)
			s.mu.Unlock()
		}
	}
}

// StackUse is what the live blocks of one stack add up to.
type StackUse struct {
	Stack     uint32 // 0: of blocks whose stack is not known
	Blocks    int64
	Requested uint64 // bytes asked for
	Allocated uint64 // rounded
	Paused    uint64 // of Allocated: without physical memory
}

// StackUsage adds up the live blocks by stack, the most bytes first; nil while stacks are not kept. It looks at every
// block.
func (d *Device) StackUsage() []StackUse {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.stackUsage()
}

// stackUsage is StackUsage. The caller holds Device.mu and nothing else.
//
// +checklocks:d.mu
func (d *Device) stackUsage() []StackUse {
	if !d.keepStacks {
		return nil
	}
	var out []StackUse
	for n, u := range d.usage(func(s *space, id heap.ID, _ *heap.Block) uint32 { return s.heap.Stack(id) }) {
		out = append(out, StackUse{n, u.Blocks, u.Requested, u.Allocated, u.Paused})
	}
	slices.SortFunc(out, func(a, b StackUse) int {
		return cmp.Or(cmp.Compare(b.Allocated, a.Allocated), cmp.Compare(a.Stack, b.Stack))
	})
	return out
}

// FreeOptions say more of a free.
type FreeOptions struct {
	// Stream is that of FreeOn, nil: as Free.
	Stream *Stream
	// Stack and Thread are those who give the block back, for the history; 0 is unknown. Without a stack the history tells
	// the one that the block remembers.
	Stack, Thread uint32
}

// FreeWith is Free with options.
func (a *Allocator) FreeWith(p cuda.Ptr, o FreeOptions) error {
	if p == 0 {
		return nil
	}
	s := a.spaceOf(p)
	if s == nil {
		return &PointerError{Op: "free", Ptr: p}
	}
	if (o.Stream == nil || o.Stream == s.stream) && !s.dev.health.Recording() {
		return s.freePtr(p, o.Stream)
	}
	return s.freeSlow(p, o)
}
