package engine

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine/journal"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/memory"
)

// The live allocations of a pool, and putting a pool back into an earlier state: a program that records several graphs into one
// pool, as branches of a tree, goes back to where a branch began before it records the next.

// Blocks lists the live allocations of the pool in address order. Blocks that were given back and still wait for other streams
// are not among them.
func (p *Pool) Blocks() []memory.Block {
	d := p.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []memory.Block
	for _, s := range d.state.pools.heaps {
		if s == nil || s.pool.owner() != p {
			continue
		}
		s.arena.Lock()
		s.blocks.Each(func(id heap.ID, b *heap.Block) bool {
			if b.State == heap.Used {
				out = append(out, s.describe(id))
			}
			return true
		})
		s.arena.Unlock()
	}
	slices.SortFunc(out, byBase)
	return out
}

func byBase(a, b memory.Block) int          { return cmp.Compare(a.Base, b.Base) }
func toBase(b memory.Block, p cuda.Ptr) int { return cmp.Compare(b.Base, p) }

// describe describes a block. The caller holds Device.mu and the arena's lock.
//
// +checklocks:s.dev.gpu.mu
func (s *streamHeap) describe(id heap.ID) memory.Block {
	b := s.blocks.At(id)
	t := s.streamOf(b)
	return memory.Block{Base: cuda.Ptr(b.Addr), Size: b.Size, Requested: b.Requested, Device: s.dev.id, Pool: s.pool.id, Stream: t.ID(), Handle: t.Handle(),
		Tag: journal.TagOf(b.Tag), Library: journal.LibraryOf(b.Tag), Stack: s.blocks.Stacks.Of(id)}
}

// LargestFree is the largest request that the stream would be met with from this pool without a driver call, in bytes;
// or the size of the largest free block where requests of any size would take one.
func (p *Pool) LargestFree(st *Stream) uint64 {
	largest := func(class int) uint64 {
		s := p.heaps.of(st, class)
		if s == nil {
			return 0
		}
		s.arena.Lock()
		defer s.arena.Unlock()
		return s.blocks.FreeBins.Largest()
	}
	if n := largest(quota.Large); n > smallMax {
		return n
	}
	return min(largest(quota.Small), smallMax)
}

// LargestFree is that of the pool that the stream allocates from.
func (v *Views) LargestFree(st *Stream) uint64 {
	return st.poolOn(v.gpu).LargestFree(st)
}

// Restore makes exactly these the live allocations of the pool, at these addresses, as Blocks listed them before. Live blocks
// that are not listed are freed; listed blocks that are not live are allocated again. Base, Size and Requested, and Stream
// where it is given, identify a block. Tag, Library and Stack are taken over where it is allocated again. The memory at the
// addresses must still be the pool's, as it is where a capture pinned it. After an error nothing has changed.
//
// A block that is allocated again contains the bytes that are there now. A block that is freed is free for the program as after
// Free.
func (p *Pool) Restore(blocks []memory.Block) error {
	d := p.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	d.state.held.regain(nil, p)
	for _, l := range d.state.pools.arenas { // all: the statistics are rebalanced under the same locks
		l.Lock()
		defer l.Unlock()
	}
	r := restore{pool: p}
	if err := r.plan(blocks); err != nil {
		return err
	}
	for _, x := range r.free {
		d.state.frees.free(x.heap, x.block, FreeOptions{})
	}
	for s, list := range r.take {
		for _, id := range s.blocks.Ranges() {
			i, _ := slices.BinarySearchFunc(list, cuda.Ptr(s.blocks.At(id).Addr), toBase)
			for ; id != 0 && i < len(list); id = s.blocks.Next(id) {
				if b := s.blocks.At(id); uint64(list[i].Base)-b.Addr < b.Size {
					id = d.state.frees.takeAt(s, id, list[i])
					i++
				}
			}
		}
	}
	d.state.phys.quota.Rebalance(nil, len(d.state.phys.mem.Spares()))
	return nil
}

// takeAt hands out a block as it was, out of a free block that holds it. The caller holds Device.mu and the arena's lock.
//
// +checklocks:fr.gpu.mu
func (fr *frees) takeAt(s *streamHeap, id heap.ID, x memory.Block) heap.ID {
	id = s.blocks.TakeAt(id, uint64(x.Base), x.Size, x.Requested)
	s.gauges.Alloc(x.Requested, x.Size, s.blocks.FreeBlocks)
	b := s.blocks.At(id)
	b.Tag, b.Capture = journal.Label(x.Tag, x.Library), s.hot.Capture
	s.blocks.Stacks.Set(id, x.Stack)
	fr.gpu.record(s.event(event.Alloc, id, x.Stack, 0))
	return id
}

// restore is what Restore has to do.
type restore struct {
	pool *Pool
	free []heldFree
	take map[*streamHeap][]memory.Block // in address order
}

// plan finds out what Restore has to do, and whether it can be done. The caller holds all locks.
//
// +checklocks:r.pool.dev.gpu.mu
func (r *restore) plan(blocks []memory.Block) error {
	p, d := r.pool, r.pool.dev
	wanted := slices.Clone(blocks)
	slices.SortFunc(wanted, byBase)
	r.take = map[*streamHeap][]memory.Block{}
	cannot := func(b memory.Block, why string) error {
		return fmt.Errorf("pool {%d, %d}: cannot restore %d bytes at %#x: %s", p.id[0], p.id[1], b.Size, uint64(b.Base), why)
	}
	for i, b := range wanted {
		switch {
		case uint64(b.Base)%heap.Align != 0 || b.Size == 0 || b.Size&p.mask != 0 || b.Requested == 0 || b.Requested > b.Size:
			return cannot(b, "no block is like that")
		case b.Tag > memory.MaxTag:
			return cannot(b, fmt.Sprintf("tag %d: the largest is %d", b.Tag, memory.MaxTag))
		case b.Size > maxRequest || i > 0 && wanted[i-1].Base+cuda.Ptr(wanted[i-1].Size) > b.Base:
			return cannot(b, "it overlaps another one")
		}
		s := d.a.heapOf(b.Base)
		if s == nil || s.pool.owner() != p {
			return cannot(b, "the address is not the pool's")
		}
		t, live := s.stream, false
		if id, _, ok := s.blocks.Lookup(uint64(b.Base)); ok {
			have := s.blocks.At(id)
			if live = have.State == heap.Used && have.Size == b.Size && have.Requested == b.Requested; live {
				t = s.streamOf(have)
			}
		}
		if b.Stream != (cuda.StreamID{}) && b.Stream != t.ID() {
			return cannot(b, "its memory is another stream's now")
		}
		if live {
			continue
		}
		r.take[s] = append(r.take[s], b)
	}
	for _, s := range d.state.pools.heaps {
		if s == nil || s.pool.owner() != p {
			continue
		}
		if err := r.planHeap(s, wanted); err != nil {
			return cannot(*err, "its memory is in use, or is not the pool's any more")
		}
	}
	return nil
}

// planHeap plans one stream heap: what is freed there, and whether what is taken lies within what is free then. It returns a
// block that does not.
func (r *restore) planHeap(s *streamHeap, wanted []memory.Block) *memory.Block {
	take := r.take[s]
	end, next := uint64(0), 0 // where the free run so far ends, and the first of take that it does not hold
	fits := make([]bool, len(take))
	s.blocks.Each(func(id heap.ID, b *heap.Block) bool {
		free := b.State == heap.Free
		if b.State == heap.Used {
			k, listed := slices.BinarySearchFunc(wanted, cuda.Ptr(b.Addr), toBase)
			if !listed || wanted[k].Size != b.Size || wanted[k].Requested != b.Requested {
				r.free = append(r.free, heldFree{s, id})
				// Blocks that other streams use, that a capture must not be given, or that are paused are not free at once.
				free = (b.Uses == 0 || s.dev.health.Broken() != nil && len(s.paused) == 0) && (s.hot.Capture == 0 || b.Capture == s.hot.Capture)
			}
		}
		if !free {
			return true
		}
		if b.Addr != end || s.blocks.Prev(id) == 0 || s.blocks.Fit.Whole() {
			next, _ = slices.BinarySearchFunc(take, cuda.Ptr(b.Addr), toBase) // ranges come in any order
		}
		end = b.Addr + b.Size
		for ; next < len(take) && uint64(take[next].Base)+take[next].Size <= end; next++ {
			fits[next] = !s.blocks.Fit.Whole() || take[next].Size == b.Size
		}
		return true
	})
	if i := slices.Index(fits, false); i >= 0 {
		return &take[i]
	}
	return nil
}
