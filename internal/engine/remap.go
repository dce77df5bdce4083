package engine

import (
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine/phys"
	"github.com/cistern-gpu/cistern/internal/heap"
)

// The mapping of planned chunks, and the end of old mappings.

// move maps the planned sources into the stream heap and returns the free block that results, whose free bytes are still to
// be counted, where they were mapped, and until when the stream heap's stream uses them. Every driver call that can fail comes
// before the first change of the engine's own state, and those made are undone when a later one fails.
//
// +checklocks:m.c.d.gpu.mu
func (m *chunkRequest) move(at place, total uint64) (block heap.ID, mapped run, stamp uint64, err error) {
	c, d, p, s := m.c, m.c.d, &m.c.d.state.policy.plan, m.h.s
	unmapped := s.blocks.At(at.unmapped)
	mapped = run{unmapped.Addr, total}
	if at.atEnd {
		mapped.addr += unmapped.Size - total
	}
	if c.order != streamOrdered {
		c.awaitPlan(at, total)
	}
	if stamp, err = m.orderSources(); err != nil {
		return 0, run{}, 0, err
	}
	p.chunks = p.chunks[:0]
	for i := range p.sources {
		p.chunks = append(p.chunks, p.sources[i].chunk)
	}
	if left, err := d.state.phys.mem.Map(mapped.addr, p.chunks); err != nil {
		d.state.mover.keepMapped(s, at.unmapped, mapped.addr, left)
		return 0, run{}, 0, err
	}
	// From here on nothing fails.
	m.takeOver(mapped.addr)
	return s.blocks.Map(at.unmapped, mapped.addr, total, stamp), mapped, stamp, nil
}

// orderSources orders the request's stream behind the last uses of the planned sources, and returns until when its stream
// uses them.
//
// +checklocks:m.c.d.gpu.mu
func (m *chunkRequest) orderSources() (stamp uint64, err error) {
	c, p, s := m.c, &m.c.d.state.policy.plan, m.h.s
	waited := false
	for i := range p.sources {
		x := &p.sources[i]
		switch {
		case x.stream == nil, s.hot.Capture != 0, c.order == doneOnly: // given only what is known to be free
		case x.stream == s.stream:
			stamp = max(stamp, x.stamp)
		default:
			if err := s.stream.timeline.WaitFor(&x.stream.timeline, x.stamp); err != nil {
				return 0, err
			}
			stamp, waited = s.stream.timeline.Epoch(), true
		}
	}
	if waited {
		s.stream.timeline.Freed() // what of it stays free may be wanted when the stream is gone, whatever is freed until then
	}
	return stamp, nil
}

// keepMapped keeps addresses out of use where chunks stay mapped that were not wanted after all: they are stale mappings.
//
// +checklocks:mv.gpu.mu
func (mv *mover) keepMapped(s *streamHeap, unmapped heap.ID, addr uint64, left []phys.ChunkID) {
	for _, id := range left {
		size := mv.phys.mem.Chunk(id).Size
		z := s.blocks.Unmap(s.blocks.Map(unmapped, addr, size, 0), addr, size)
		mv.phys.mem.Stale.Push(phys.StaleMapping{Addr: addr, Chunk: id, Block: int32(z), Owner: s.index, Stream: s.stream.index.Load(),
			Published: phys.Published, Recorded: true})
		unmapped = s.blocks.Next(z)
		addr += size
	}
}

// takeOver makes the planned sources, which are mapped from addr on, chunks of the request's stream heap.
//
// +checklocks:m.c.d.gpu.mu
func (m *chunkRequest) takeOver(addr uint64) {
	c, d, p, s := m.c, m.c.d, &m.c.d.state.policy.plan, m.h.s
	var last takenOut
	for i := range p.sources {
		if x := &p.sources[i]; x.heap != nil {
			x.from = d.state.phys.mem.Chunk(x.chunk).Addr
			x.heap.leave(&last, x.block, x.chunk, true)
			d.state.phys.counts.Remaps++
		}
	}
	d.state.phys.mem.Assign(addr, s.index, s.class, p.chunks...)
	for i := range p.sources {
		x := &p.sources[i]
		k := d.state.phys.mem.Chunk(x.chunk)
		m.h.area.Set(k.Addr, k.Size, x.chunk)
		s.gain(k.Size)
		d.record(event.Event{Kind: event.SegmentMap, Addr: k.Addr, Size: k.Size, Handle: uint64(k.Handle),
			Stream: s.stream.number(), Pool: s.pool.number, Stack: c.by.stack, Thread: c.by.thread})
		if x.heap != nil {
			d.state.mover.recordLeft(x.heap.s, x.from, k)
		}
	}
}

// takenOut is the chunk that leave took out before. A block can have a hundred thousand chunks, which leave in the order of
// their addresses: what is left of it is not searched from its beginning for each.
type takenOut struct {
	heap  *chunkHeap
	block heap.ID // that the chunk lay in
	left  heap.ID // the stale mapping in its place
}

// leave takes a wholly free chunk out of a stream heap: its mapping there becomes a stale mapping. near is the free block that
// it lay in, or what is left of it; recorded says that the caller records the event. The caller holds Device.mu and has held
// the arena's lock since the chunk was found free, and since the call before with the same last.
//
// +checklocks:h.s.dev.gpu.mu
func (h *chunkHeap) leave(last *takenOut, near heap.ID, id phys.ChunkID, recorded bool) {
	o, d := h.s, h.s.dev
	k := d.state.phys.mem.Chunk(id)
	block := near
	if last.heap == h && last.block == near && o.blocks.At(last.left).Addr < k.Addr {
		block = last.left
	}
	for b := o.blocks.At(block); k.Addr >= b.Addr+b.Size; b = o.blocks.At(block) {
		block = o.blocks.Next(block) // chunks that left before it have cut the block up
	}
	stamp := o.blocks.At(block).Stamp
	z := o.blocks.Unmap(block, k.Addr, k.Size)
	*last = takenOut{h, near, z}
	h.area.Set(k.Addr, k.Size, 0)
	o.lose(k.Size)
	o.gauges.SetFree(o.blocks.FreeBlocks, -int64(k.Size))
	d.state.phys.mem.Leave(id, int32(z), o.stream.index.Load(), stamp, recorded)
	if t := o.stream; stamp >= t.timeline.Epoch() && t.timeline.Capture() == 0 {
		t.timeline.CloseLate() // so that the end of the epoch can be seen; on error the reaper tries again
	}
}

// recordLeft records that a chunk is not at addr of a stream heap any more. It does so at once, not when the old mapping is
// undone, which is not used until then. So the history and Snapshot agree on what is mapped at every moment.
//
// +checklocks:mv.gpu.mu
func (mv *mover) recordLeft(o *streamHeap, addr uint64, k *phys.Chunk) {
	mv.gpu.record(event.Event{Kind: event.SegmentUnmap, Addr: addr, Size: k.Size, Handle: uint64(k.Handle),
		Stream: o.stream.number(), Pool: o.pool.number})
}

// reap unmaps the stale mappings whose work is done. The caller holds Device.mu and held's lock.
//
// +checklocks:mv.gpu.mu
func (mv *mover) reap(held *streamHeap) {
	if mv.phys.mem.Stale.Len() == 0 || mv.gpu.health.Broken() != nil || mv.phys.offload.Unsure() {
		return
	}
	for _, z := range mv.phys.mem.Reap(mv.staleOver()) {
		if z.Owner < 0 {
			continue
		}
		o := mv.pools.heaps[z.Owner]
		o.lockBeside(held)
		if !z.Recorded {
			mv.recordLeft(o, z.Addr, mv.phys.mem.Chunk(z.Chunk))
		}
		o.blocks.Reap(heap.ID(z.Block))
		o.unlockBeside(held)
	}
}

// staleOver is a function that reports of stale mappings, the oldest first, whether they may be unmapped.
//
// +checklocks:mv.gpu.mu
func (mv *mover) staleOver() func(phys.StaleMapping) bool {
	var busy *Stream
	var from uint64
	return func(z phys.StaleMapping) bool {
		if z.Stream < 0 {
			return true
		}
		t := mv.streams.all[z.Stream]
		if t == busy && z.Epoch >= from {
			return false
		}
		if !t.timeline.IsOver(z.Epoch) {
			if z.Epoch >= t.timeline.Epoch() && t.timeline.Capture() == 0 {
				t.timeline.CloseLate()
			}
			busy, from = t, z.Epoch
			return false
		}
		// Else it is unmapReady's.
		return z.Published == phys.Published || z.Published == phys.Unpublished && mv.observers.onUnmap == nil
	}
}
