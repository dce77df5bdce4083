package engine

import (
	"slices"

	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/views"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/memory"
)

// Snapshot lists all physical memory of the device and what is in it, and the blocks whose memory is paused: the sizes of
// the segments add up to the reserved and the paused bytes, those of the used and pending blocks to the active bytes.
func (v *Views) Snapshot() []memory.Segment {
	v.gpu.mu.Lock()
	defer v.gpu.mu.Unlock()
	return v.usage.snapshot()
}

// Record is all memory of the device, and the newest events that led to it, at most n of them.
func (v *Views) Record(n int) memory.Record {
	v.gpu.mu.Lock()
	defer v.gpu.mu.Unlock()
	events, lost := v.gpu.journal.Newest(n)
	r := memory.Record{Events: events, Lost: lost, Segments: v.usage.snapshot(), Pools: slices.Clone(v.pools.names)}
	for _, t := range v.streams.all {
		r.Streams = append(r.Streams, memory.Stream{ID: t.ID(), Handle: t.Handle()})
	}
	return r
}

// snapshot is Snapshot. The caller holds Device.mu and nothing else.
//
// +checklocks:us.gpu.mu
func (us *usage) snapshot() []memory.Segment {
	out := us.segmentsOf(func(*streamHeap) bool { return true })
	for _, id := range us.phys.mem.Spares() {
		k := us.phys.mem.Chunk(id)
		g := memory.Segment{Size: k.Size, Stream: int(k.Stream), Large: true, Chunks: []memory.Chunk{{Handle: k.Handle, Size: k.Size}}, Blocks: []memory.SegmentBlock{{Size: k.Size}}}
		if k.Stream >= 0 {
			g.Handle = us.streams.all[k.Stream].Handle()
		}
		out = append(out, g)
	}
	return out
}

// SnapshotPool lists the physical memory that is mapped for one pool. Spare chunks belong to none.
func (v *Views) SnapshotPool(id memory.PoolID) []memory.Segment {
	v.gpu.mu.Lock()
	defer v.gpu.mu.Unlock()
	return v.usage.segmentsOf(func(s *streamHeap) bool { return s.pool.id == id })
}

// segmentsOf lists the segments of the stream heaps that are wanted.
//
// +checklocks:us.gpu.mu
func (us *usage) segmentsOf(wanted func(*streamHeap) bool) (out []memory.Segment) {
	for _, s := range us.pools.heaps {
		if s != nil && wanted(s) {
			s.arena.Lock()
			out = append(out, s.segments()...)
			s.arena.Unlock()
		}
	}
	return out
}

// segments lists the memory of a stream heap. The caller holds Device.mu and the arena's lock.
//
// +checklocks:s.dev.gpu.mu
func (s *streamHeap) segments() []memory.Segment {
	l := views.Segments{Of: memory.Segment{Stream: int(s.stream.index.Load()), Handle: s.stream.Handle(), Pool: s.pool.id, Number: s.pool.number,
		Large: quota.GroupOf(s.class) == quota.GroupLarge}}
	s.blocks.Each(func(id heap.ID, b *heap.Block) bool {
		if b.State != heap.Unmapped && (b.State != heap.Stale || s.paused.inTransit(b.Addr)) {
			l.Add(b, s.blocks.Stacks.Of(id), s.paused.missing(b), s.blocks.Prev(id) == 0)
		}
		return true
	})
	s.backing.addChunks(l.List)
	return l.List
}

// Usage is the allocated and the reserved bytes: the two figures of Stats that cost least.
func (v *Views) Usage() (allocated, reserved uint64) {
	v.gpu.mu.Lock()
	defer v.gpu.mu.Unlock()
	for _, s := range v.pools.heaps {
		if s != nil {
			s.arena.Lock()
			allocated += uint64(s.gauges.Now()[quota.Allocated])
			s.arena.Unlock()
		}
	}
	return allocated, v.phys.quota.Total()
}

// Streams are the streams that the device knows, by index: what Segment.Stream and event.Event.Stream refer to. The index of a
// stream that may have been destroyed is given to another in time, but not while the history names it, nor what History.Take
// returned last.
func (v *Views) Streams() []*Stream {
	v.gpu.mu.Lock()
	defer v.gpu.mu.Unlock()
	return slices.Clone(v.streams.all)
}

// Pools are the names of the pools by number: what event.Event.Pool refers to. The number of a pool that is gone is given to
// another as that of a stream is.
func (v *Views) Pools() []memory.PoolID {
	v.gpu.mu.Lock()
	defer v.gpu.mu.Unlock()
	return slices.Clone(v.pools.names)
}
