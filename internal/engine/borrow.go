package engine

import (
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/memory"
)

// Free memory between live blocks of other streams cannot move, but a request can borrow a free block where it lies. This is
// tried last before functions are called for memory, because the chunk cannot move until the host knows that the borrower is
// done: the block is given back as one that is freed in the order of another stream (FreeOn).
//
// The borrower of a block is the entry of its list of uses that is marked as such.

// borrow hands out a part of the smallest free block that will do, of another stream's memory in the same pool; first of
// the request's size class. The arena of the block stays locked until handOut has been there. The caller holds Device.mu and
// the arena's lock.
//
// +checklocks:c.d.gpu.mu
func (c *request) borrow() (heap.ID, error) {
	s := c.s
	if c.steps.allowed&memory.StageLend == 0 || c.order != streamOrdered || s.stream.timeline.Capture() != 0 || s.hot.Capture != 0 || s.pool.pinned || s.stream.timeline.Queue.PerThread() {
		return 0, nil
	}
	c.steps.log.try(memory.StageLend)
	for _, own := range [2]bool{true, false} {
		for _, o := range c.d.state.pools.heaps {
			if o == nil || o.pool != s.pool || o.arena == s.arena || own != (o.class == s.class) || o.hot.Capture != 0 {
				continue
			}
			o.arena.Lock()
			if id, err := c.borrowFrom(o); id != 0 {
				c.met, c.from = memory.StageLend, o
				return id, nil
			} else if err != nil {
				o.arena.Unlock()
				return 0, err
			}
			o.arena.Unlock()
		}
	}
	return 0, nil
}

// borrowFrom is borrow for one stream heap, whose lock the caller has.
//
// +checklocks:c.d.gpu.mu
func (c *request) borrowFrom(o *streamHeap) (heap.ID, error) {
	d, s, n := c.d, c.s, c.s.pool.round(c.size)
	best, at, size := heap.ID(0), uint64(0), uint64(0)
	o.blocks.FreeBins.Each(n, func(id heap.ID, b *heap.Block) bool {
		from := (b.Addr + max(c.align, 1) - 1) &^ (max(c.align, 1) - 1)
		if from+n > b.Addr+b.Size || o.blocks.Fit.Whole() && (b.Size != n || from != b.Addr) {
			return true
		}
		if (best == 0 || b.Size < size) && d.state.policy.orderable(c, o.stream, b.Stamp) {
			best, at, size = id, from, b.Size
		}
		return true
	})
	if best == 0 {
		return 0, nil
	}
	if stamp := o.blocks.At(best).Stamp; !o.stream.timeline.IsOver(stamp) {
		if err := s.stream.timeline.WaitFor(&o.stream.timeline, stamp); timeline.Unordered(err) {
			return 0, nil
		} else if err != nil {
			return 0, err
		}
	}
	id := o.blocks.TakeAt(best, at, n, c.size)
	o.blocks.At(id).Uses = d.state.frees.uses.borrowedBy(s.stream)
	return id, nil
}

// streamOf is the stream that a block was handed out to.
//
// +checklocks:s.dev.gpu.mu
func (s *streamHeap) streamOf(b *heap.Block) *Stream {
	if b.Uses != 0 {
		if t := s.dev.state.frees.uses.borrower(b.Uses); t != nil {
			return t
		}
	}
	return s.stream
}
