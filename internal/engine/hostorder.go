package engine

import (
	"errors"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/heap"
)

// Host-ordered memory (AllocOptions.HostOrder), for libraries that do not say on which stream they use it: the block is handed
// out when the host knows that the GPU is done with it. Memory that is known to be done goes first, then memory behind a
// recorded event, which is waited for. Last is memory that was freed since the stream's last event: an event is recorded behind
// it now, and from then on at each of the stream's frees.

// allocHost hands out host-ordered memory.
func (p *Pool) allocHost(size uint64, st *Stream, by origin) (cuda.Ptr, error) {
	if size == 0 {
		return 0, nil
	}
	ptr, waits, err := p.obtain(request{n: p.round(size), size: size, by: by, order: hostOrdered}, st)
	if err != nil {
		return 0, err
	}
	for _, w := range waits {
		// The block is out, so it is not handed out meanwhile.
		if err := w.Stream.Sync(w.Epoch); err != nil {
			return 0, errors.Join(err, p.dev.a.Free(ptr))
		}
	}
	return ptr, nil
}

// mustWait finds out whether the request's stream can be waited for, which it cannot while it is being captured. The
// caller holds Device.mu and the arena's lock.
//
// +checklocks:c.d.gpu.mu
func (c *request) mustWait() error {
	t := c.s.stream
	err := t.timeline.Queue.Usable()
	if errors.Is(err, timeline.ErrCapturing) || errors.Is(err, timeline.ErrPerThread) && c.d.timeline.Gate().Announced() {
		c.order, c.alone = doneOnly, true
		c.d.state.held.holdBusy(c.s)
	} else if err != nil && !timeline.Unordered(err) {
		return err
	}
	return nil
}

// holdBusy puts the free blocks of an arena out of reach that the GPU is not known to be done with, until regain. The caller
// holds Device.mu and the arena's lock.
//
// +checklocks:hl.gpu.mu
func (hl *heldFrees) holdBusy(s *streamHeap) {
	n := len(hl.all)
	for class := range quota.NumClasses {
		o := s.pool.heaps.of(s.stream, class)
		if o == nil {
			continue
		}
		o.blocks.FreeBins.Each(heap.Align, func(id heap.ID, b *heap.Block) bool {
			if o.stream.timeline.Progress(b.Stamp) != timeline.Done {
				hl.all = append(hl.all, heldFree{o, id})
			}
			return true
		})
	}
	for _, f := range hl.all[n:] {
		f.heap.blocks.Hold(f.block)
	}
}

// awaitPlan notes the work to wait for before the memory about to be mapped, and the free blocks that it merges with, are used.
//
// +checklocks:c.d.gpu.mu
func (c *request) awaitPlan(at place, total uint64) {
	s := c.s
	c.waits = c.waits[:0]
	add := func(t *Stream, stamp uint64) {
		if t != nil && t.timeline.Progress(stamp) != timeline.Done {
			c.waits.Add(&t.timeline, stamp)
		}
	}
	for _, x := range c.d.state.policy.plan.sources {
		add(x.stream, x.stamp)
	}
	// It merges with what it touches, also where the request does not need that.
	whole := s.blocks.At(at.unmapped).Size == total
	for i, id := range [2]heap.ID{s.blocks.Prev(at.unmapped), s.blocks.Next(at.unmapped)} {
		if touches := whole || at.atEnd == (i == 1); touches && id != 0 && s.blocks.At(id).State == heap.Free {
			add(s.stream, s.blocks.At(id).Stamp)
		}
	}
}
