package engine

import (
	"iter"
	"weak"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/heap"
)

// Streams come and go, and CUDA does not report when one goes. A short-lived stream leaves behind an arena for each pool it
// allocated from: addresses, an empty heap, gauges that every sum has to visit. So arenas that hold nothing are dissolved when
// there are many; if their stream turns out to live, it gets another. Where their memory cannot become spare (segments, or
// memory registered through OnUnmap), new streams of the pool inherit them.
//
// A stream without arenas that nothing else depends on is forgotten likewise, and its number is given to another stream. As
// long as the program has the Stream, it is found again by its id, or makes itself known (streamTable.gone). So there is never
// more than one Stream for a CUDA stream.
//
// Both are done each time that the number of arenas, or of streams, has doubled, or half of the arenas were inherited: each
// stream pays for a constant part.

// retireArenas is the number of arenas below which none is dissolved, and of streams below which none is forgotten.
const retireArenas = 128

// retire dissolves the arenas of streams that may be gone and have no block out and no work under way, whose free chunks
// become spare, and forgets streams. The caller holds Device.mu and no arena's lock; it is let go while the GPU is waited for.
//
// +checklocks:en.gpu.mu
func (en *endings) retire() {
	if n := len(en.pools.arenas); n >= max(en.pools.retireAt, retireArenas) || en.pools.inherited > n/2 {
		if n >= retireArenas {
			en.endThreads()
		}
		en.dissolveIdle()
		en.pools.retireAt, en.pools.inherited = 2*len(en.pools.arenas), 0
	}
	if len(en.streams.byID) >= max(en.streams.forgetAt, retireArenas) {
		en.forgetStreams()
		en.streams.forgetAt = 2 * len(en.streams.byID)
	}
}

// endThreads makes known that the GPU is done with what idle arenas of per-thread streams have free, as their threads may have
// ended. Nothing can be recorded on such a stream, so one wait for the context covers them all. The caller holds Device.mu and
// no arena's lock; it is let go meanwhile.
//
// +checklocks:en.gpu.mu
func (en *endings) endThreads() {
	var waits timeline.Waits
	for _, s := range en.pools.heaps {
		if s == nil || !s.stream.timeline.Queue.PerThread() || s.pool.pinned || s.requestsUnderWay > 0 {
			continue
		}
		s.arena.Lock()
		if epoch := s.stream.timeline.Epoch(); s.blocks.UsedBlocks == 0 && !s.over() {
			waits = append(waits, timeline.Wait{Stream: &s.stream.timeline, Epoch: epoch})
		}
		s.arena.Unlock()
	}
	en.gpu.await(waits) // on error they stay
}

// dissolveIdle dissolves the arenas that it can, and lists those that new streams may inherit. The caller holds Device.mu and no
// arena's lock.
//
// +checklocks:en.gpu.mu
func (en *endings) dissolveIdle() {
	var idle []*streamHeap
	spared := uint64(0)
	for _, s := range en.pools.heaps {
		if s == nil || s.pool.pinned || s.requestsUnderWay > 0 || !s.stream.mayBeGone() {
			continue
		}
		s.arena.Lock()
		if s.blocks.UsedBlocks == 0 && (!s.stream.timeline.Queue.PerThread() || s.over()) {
			idle = append(idle, s)
			if s.held > 0 && en.observers.onUnmap == nil {
				spared += s.backing.detach(everything)
			}
		}
		s.arena.Unlock()
	}
	en.mover.reap(nil)
	for _, p := range en.pools.byNumber {
		if p != nil {
			p.idle = nil
		}
	}
	for _, s := range idle {
		s.arena.Lock()
		// Old mappings may be left, or segments.
		if first := s.pool.heaps.of(s.stream, quota.Small); !en.dissolve(s) && s.held > 0 && (first == s || first == nil) {
			s.pool.idle = append(s.pool.idle, s.stream)
		}
		s.arena.Unlock()
	}
	en.dropArenas()
	if spared > 0 {
		en.phys.rebalanceAll(nil, nil)
	}
}

// inherit gives a stream without an arena in the pool one that another stream left behind, if there is one, with all that is
// free there: the GPU is done with it. The caller holds Device.mu and no arena's lock.
//
// +checklocks:en.gpu.mu
func (en *endings) inherit(p *Pool, st *Stream) {
	if p.heaps.arenaOf(st) != nil {
		return
	}
	for len(p.idle) > 0 {
		left := p.idle[len(p.idle)-1]
		p.idle = p.idle[:len(p.idle)-1]
		l := p.heaps.arenaOf(left)
		if l == nil {
			continue
		}
		l.Lock()
		ok := en.leftBehind(p, left)
		for class := range quota.NumClasses {
			if s := p.heaps.of(left, class); ok && s != nil {
				s.succeed(st)
			}
		}
		l.Unlock()
		if ok {
			en.pools.inherited++
			return
		}
	}
}

// leftBehind reports whether a stream may be gone, and its arena in the pool has nothing but free memory that the GPU is done
// with. The caller holds Device.mu and the arena's lock.
//
// +checklocks:en.gpu.mu
func (en *endings) leftBehind(p *Pool, st *Stream) bool {
	for class := range quota.NumClasses {
		s := p.heaps.of(st, class)
		if s == nil {
			continue
		}
		if s.requestsUnderWay > 0 || s.hot.Capture != 0 || p.pinned || len(s.paused) > 0 || !st.mayBeGone() || !s.over() {
			return false
		}
	}
	return true
}

// over reports whether a stream heap has nothing but free memory that the GPU is done with. The caller holds Device.mu and the
// stream heap's lock.
func (s *streamHeap) over() bool {
	over := true
	s.blocks.Each(func(_ heap.ID, b *heap.Block) bool {
		over = b.State == heap.Unmapped || b.State == heap.Free && s.stream.timeline.IsOver(b.Stamp)
		return over
	})
	return over
}

// succeed puts a stream heap of another stream in the place of this one, which is left empty for callers that may still have
// it. The caller holds Device.mu and the arena's lock.
//
// +checklocks:s.dev.gpu.mu
func (s *streamHeap) succeed(st *Stream) {
	d, p := s.dev, s.pool
	empty := heap.New()
	n := &streamHeap{arena: s.arena, hot: s.hot.Succeed(&st.timeline, empty), dev: d, pool: p, stream: st, class: s.class, index: s.index,
		blocks: s.blocks, gauges: s.gauges, held: s.held}
	n.backing = s.backing.succeed(n)
	s.blocks, s.held = empty, 0
	d.state.pools.heaps[n.index] = n
	p.heaps.remove(s)
	d.state.pools.list(n)
	for _, r := range d.state.phys.mem.Ranges.All() {
		if r.Owner == s.index { // and n's
			d.a.disown(r.Base, r.Size)
			d.a.claim(r.Base, r.Size, n) // which succeeded before
		}
	}
	d.state.endings.recordInherited(s, n)
}

// recordInherited records that the memory of a stream heap is another stream's.
//
// +checklocks:en.gpu.mu
func (en *endings) recordInherited(s, n *streamHeap) {
	if !en.gpu.health.Recording() {
		return
	}
	n.blocks.FreeBins.Each(heap.Align, func(_ heap.ID, b *heap.Block) bool {
		n.backing.recordInherited(s, b.Addr, b.Size)
		return true
	})
}

// mayBeGone reports whether the stream may have been destroyed, as far as is known here, and the GPU is done with it.
func (t *Stream) mayBeGone() bool {
	if t.timeline.Queue.Durable() || t.timeline.Capture() != 0 || t.route.Load() != nil || t.timeline.Magazine() != nil {
		return false
	}
	return t.timeline.Idle()
}

// enlist makes a stream known to the device that was forgotten, or is new. It is called before anything comes to depend on the
// stream's number.
//
// +checklocks:ss.gpu.mu
func (ss *streamTable) enlist(t *Stream) {
	if t.gpu != ss.gpu || t.index.Load() >= 0 {
		return
	}
	i := ss.gpu.journal.Streams.Take()
	if i == len(ss.all) {
		ss.all = append(ss.all, nil)
	}
	ss.all[i] = t
	t.index.Store(int32(i))
	delete(ss.gone, t.ID())
	ss.byID[t.ID()] = t
}

// live are the streams that the device knows, by number.
//
// +checklocks:ss.gpu.mu
func (ss *streamTable) live() iter.Seq[*Stream] {
	return func(yield func(*Stream) bool) {
		for i, t := range ss.all {
			if int(t.index.Load()) == i && !yield(t) {
				return
			}
		}
	}
}

// forgetStreams forgets the streams that may be gone and that nothing depends on.
//
// +checklocks:en.gpu.mu
func (en *endings) forgetStreams() {
	en.markStreams()
	for t := range en.streams.live() {
		if !t.timeline.Marked && t.mayBeGone() {
			en.streams.forget(t)
		}
		t.timeline.Marked = false
	}
	en.gpu.journal.Streams.Forget()
	n := en.gpu.journal.Streams.Count()
	clear(en.streams.all[n:])
	en.streams.all = en.streams.all[:n]
	if len(en.streams.gone) >= max(en.streams.goneAt, retireArenas) {
		kept := map[cuda.StreamID]weak.Pointer[Stream]{} // a new one, as a map never shrinks
		for id, t := range en.streams.gone {
			if t.Value() != nil {
				kept[id] = t
			}
		}
		en.streams.gone, en.streams.goneAt = kept, 2*len(kept)
	}
}

// +checklocks:ss.gpu.mu
func (ss *streamTable) forget(t *Stream) {
	delete(ss.byID, t.ID())
	ss.gone[t.ID()] = weak.Make(t)
	ss.gpu.journal.Streams.Put(int(t.index.Load()))
	t.index.Store(-1)
	t.timeline.Forget()
}

// markStreams marks the streams of the device that something depends on: arenas, what they used last that may not be over,
// blocks that they borrowed, frees that wait for them.
//
// +checklocks:en.gpu.mu
func (en *endings) markStreams() {
	for _, s := range en.pools.heaps {
		if s != nil {
			s.stream.timeline.Marked = true
		}
	}
	for _, id := range en.phys.mem.Spares() {
		if k := en.phys.mem.Chunk(id); k.Stream >= 0 {
			if t := en.streams.all[k.Stream]; !t.timeline.Queue.Durable() && t.timeline.IsOver(k.Stamp) {
				k.Stream, k.Stamp = -1, 0
			} else {
				t.timeline.Marked = true
			}
		}
	}
	for _, z := range en.phys.mem.Stale.All() {
		if z.Stream >= 0 {
			en.streams.all[z.Stream].timeline.Marked = true
		}
	}
	mark := func(t *Stream) {
		if t != nil && t.gpu == en.gpu {
			t.timeline.Marked = true
		}
	}
	for i := range en.frees.uses.entries {
		mark(en.frees.uses.entries[i].stream)
	}
	for i := range en.frees.pending {
		mark(en.frees.pending[i].owner)
		for _, w := range en.frees.pending[i].waits {
			if w.Stream.Device() == en.gpu.timeline {
				w.Stream.Marked = true
			}
		}
	}
}
