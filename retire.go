package cistern

import (
	"iter"
	"weak"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/internal/vm"
)

// Streams come and go, and nobody says when one goes. What a short-lived stream leaves behind is a lane for each pool it
// allocated from: addresses, an empty heap, gauges that every sum has to visit. So lanes that hold nothing are dissolved
// when there are many; if their stream turns out to live, it gets another. Where their memory cannot become spare, as it is
// made of segments or registered elsewhere (OnUnmap), new streams of the pool inherit them.
//
// A stream without lanes that nothing else depends on is forgotten likewise, and its number is given to another stream. The
// program may still have the Stream, and use it: it is found again by its id, or makes itself known, as long as the
// program has it (Device.gone). So there is never more than one Stream for a CUDA stream.
//
// Both are done each time that the number of lanes, or of streams, has doubled, or half of the lanes were inherited: each
// stream pays for a constant part.

// retireLanes is the number of lanes below which none is dissolved, and of streams below which none is forgotten.
const retireLanes = 128

// retire dissolves the lanes of streams that may be gone and have no block out and no work under way, whose free chunks
// become spare, and forgets streams. The caller holds Device.mu and no lane's lock; it is let go while the GPU is waited for.
//
// +checklocks:d.mu
func (d *Device) retire() {
	if n := len(d.lanes); n >= max(d.retireAt, retireLanes) || d.inherited > n/2 {
		if n >= retireLanes {
			d.endThreads()
		}
		d.dissolveIdle()
		d.retireAt, d.inherited = 2*len(d.lanes), 0
	}
	if len(d.byID) >= max(d.forgetAt, retireLanes) {
		d.forgetStreams()
		d.forgetAt = 2 * len(d.byID)
	}
}

// endThreads makes known that the GPU is done with what idle lanes of per-thread streams have free, as their threads may have
// ended. Nothing can be recorded on such a stream, so one wait for the context covers them all. The caller holds Device.mu and
// no lane's lock; it is let go meanwhile.
//
// +checklocks:d.mu
func (d *Device) endThreads() {
	var waits timeline.Waits
	for _, s := range d.spaces {
		if s == nil || !s.stream.timeline.PerThread() || s.pool.pinned || s.climbs > 0 {
			continue
		}
		s.mu.Lock()
		if epoch := s.stream.timeline.Epoch(); s.heap.UsedBlocks == 0 && !s.over() {
			waits = append(waits, timeline.Wait{Stream: &s.stream.timeline, Epoch: epoch})
		}
		s.mu.Unlock()
	}
	d.await(waits) // on error they stay
}

// dissolveIdle dissolves the lanes that it can, and lists those that new streams may inherit. The caller holds Device.mu and no
// lane's lock.
//
// +checklocks:d.mu
func (d *Device) dissolveIdle() {
	var idle []*space
	for _, s := range d.spaces {
		if s == nil || s.pool.pinned || s.climbs > 0 || !s.stream.mayBeGone() {
			continue
		}
		s.mu.Lock()
		if s.heap.UsedBlocks == 0 && (!s.stream.timeline.PerThread() || s.over()) {
			idle = append(idle, s)
			if s.area != nil && s.chunkBytes > 0 && d.onUnmap == nil {
				d.detach(s, everything)
			}
		}
		s.mu.Unlock()
	}
	d.reap(nil)
	for _, p := range d.byNumber {
		if p != nil {
			p.idle = nil
		}
	}
	for _, s := range idle {
		s.mu.Lock()
		// Old mappings may be left, or segments.
		if first := s.lane.spaces[0]; !d.dissolve(s) && s.chunkBytes > 0 && (first == s || first == nil) {
			s.pool.idle = append(s.pool.idle, s.lane)
		}
		s.mu.Unlock()
	}
	d.dropLanes()
}

// inherit gives a stream without a lane in the pool one that another stream left behind, if there is one, with all that is
// free there: the GPU is done with it. The caller holds Device.mu and no lane's lock.
//
// +checklocks:p.dev.mu
func (p *Pool) inherit(st *Stream) {
	for class := range quota.NumClasses {
		if p.spaceFor(st, class) != nil {
			return
		}
	}
	for len(p.idle) > 0 {
		l := p.idle[len(p.idle)-1]
		p.idle = p.idle[:len(p.idle)-1]
		l.mu.Lock()
		ok := l.leftBehind()
		for class, s := range l.spaces {
			if ok && s != nil {
				l.spaces[class] = s.succeed(st)
			}
		}
		l.mu.Unlock()
		if ok {
			p.dev.inherited++
			return
		}
	}
}

// leftBehind reports whether a lane belongs to a stream that may be gone, and has nothing but free memory that the GPU is
// done with. The caller holds Device.mu and the lane's lock.
//
// +checklocksignore: a lane does not name its device
func (l *lane) leftBehind() bool {
	if l.refs == 0 {
		return false
	}
	for _, s := range l.spaces {
		if s == nil {
			continue
		}
		if s.climbs > 0 || s.capture != 0 || s.pool.pinned || len(s.absent) > 0 || !s.stream.mayBeGone() || !s.over() {
			return false
		}
	}
	return true
}

// over reports whether a space has nothing but free memory that the GPU is done with. The caller holds Device.mu and the
// space's lock.
func (s *space) over() bool {
	over := true
	s.heap.Each(func(_ heap.ID, b *heap.Block) bool {
		over = b.State == heap.Hole || b.State == heap.Free && s.stream.timeline.IsOver(b.Stamp)
		return over
	})
	return over
}

// succeed is a space of another stream in the place of this one, which is left empty for those who may still have it. The
// caller holds Device.mu and the lane's lock.
//
// +checklocks:s.dev.mu
func (s *space) succeed(st *Stream) *space {
	d, p := s.dev, s.pool
	n := &space{lane: s.lane, dev: d, pool: p, stream: st, class: s.class, index: s.index, heap: s.heap, area: s.area,
		gauges: s.gauges, chunkBytes: s.chunkBytes}
	s.heap, s.chunkBytes = heap.New(), 0
	if s.area != nil {
		s.area = vm.NewArea(d.upstream.Granularity())
	}
	d.spaces[n.index] = n
	p.unlist(s)
	p.list(n)
	n.heap.EachFree(heap.Align, func(_ heap.ID, b *heap.Block) bool {
		b.Stamp = 0
		return true
	})
	for i := range d.areas {
		if r := &d.areas[i]; r.space == s {
			r.space = n
			d.a.disown(r.base, r.size)
			d.a.claim(r.base, r.size, n) // which succeeded before
		}
	}
	d.recordInherited(s, n)
	return n
}

// recordInherited tells the history that the memory of a space is another stream's.
//
// +checklocks:d.mu
func (d *Device) recordInherited(s, n *space) {
	if !d.health.Recording() {
		return
	}
	n.heap.EachFree(heap.Align, func(_ heap.ID, b *heap.Block) bool {
		if n.area == nil {
			d.recordSegment(s, b.Addr, b.Size, false, origin{})
			d.recordSegment(n, b.Addr, b.Size, true, origin{})
			return true
		}
		n.area.Whole(&d.chunks, b.Addr, b.Size, func(_ vm.ChunkID, k *vm.Chunk) bool {
			d.recordLeft(s, k.Addr, k)
			d.record(event.Event{Kind: event.SegmentMap, Addr: k.Addr, Size: k.Size, Handle: uint64(k.Handle),
				Stream: n.stream.number(), Pool: n.pool.number})
			return true
		})
		return true
	})
}

// mayBeGone reports whether the stream may have been destroyed, as far as is known here, and the GPU is done with it.
func (t *Stream) mayBeGone() bool {
	if t.timeline.Durable() || t.timeline.Capture() != 0 || t.route.Load() != nil || t.timeline.Front() != nil {
		return false
	}
	return t.timeline.Idle()
}

// enlist makes a stream of the device known that was forgotten, or is new. What comes to depend on a stream's number calls
// it first.
//
// +checklocks:d.mu
func (d *Device) enlist(t *Stream) {
	if t.dev != d || t.index.Load() >= 0 {
		return
	}
	i := d.streamNumbers.take(d.hist.oldestNamed())
	if i == len(d.streams) {
		d.streams = append(d.streams, nil)
	}
	d.streams[i] = t
	t.index.Store(int32(i))
	delete(d.gone, t.ID())
	d.byID[t.ID()] = t
}

// liveStreams are the streams that the device knows, by number.
//
// +checklocks:d.mu
func (d *Device) liveStreams() iter.Seq[*Stream] {
	return func(yield func(*Stream) bool) {
		for i, t := range d.streams {
			if int(t.index.Load()) == i && !yield(t) {
				return
			}
		}
	}
}

// forgetStreams forgets the streams that may be gone and that nothing depends on.
//
// +checklocks:d.mu
func (d *Device) forgetStreams() {
	d.markStreams()
	for t := range d.liveStreams() {
		if !t.timeline.Marked && t.mayBeGone() {
			d.forgetStream(t)
		}
		t.timeline.Marked = false
	}
	d.streamNumbers.forget(d.hist.oldestNamed())
	clear(d.streams[d.streamNumbers.count:])
	d.streams = d.streams[:d.streamNumbers.count]
	if len(d.gone) >= max(d.goneAt, retireLanes) {
		kept := map[cuda.StreamID]weak.Pointer[Stream]{} // a new one, as a map never shrinks
		for id, t := range d.gone {
			if t.Value() != nil {
				kept[id] = t
			}
		}
		d.gone, d.goneAt = kept, 2*len(kept)
	}
}

// +checklocks:d.mu
func (d *Device) forgetStream(t *Stream) {
	delete(d.byID, t.ID())
	d.gone[t.ID()] = weak.Make(t)
	d.streamNumbers.put(int(t.index.Load()), d.hist.oldestNamed())
	t.index.Store(-1)
	t.timeline.Forget()
}

// markStreams marks the streams of the device that something depends on: lanes, what they used last that may not be over,
// blocks that were lent to them, frees that wait for them.
//
// +checklocks:d.mu
func (d *Device) markStreams() {
	for _, s := range d.spaces {
		if s != nil {
			s.stream.timeline.Marked = true
		}
	}
	for _, id := range d.spares {
		if k := d.chunks.At(id); k.Stream >= 0 {
			if t := d.streams[k.Stream]; !t.timeline.Durable() && t.timeline.IsOver(k.Stamp) {
				k.Stream, k.Stamp = -1, 0
			} else {
				t.timeline.Marked = true
			}
		}
	}
	d.zombies.Filter(func(z *vm.Zombie) bool {
		d.streams[z.Stream].timeline.Marked = true
		return false
	})
	mark := func(t *Stream) {
		if t != nil && t.dev == d {
			t.timeline.Marked = true
		}
	}
	for i := range d.uses {
		mark(d.uses[i].stream)
	}
	for i := range d.pending {
		mark(d.pending[i].owner)
		for _, w := range d.pending[i].waits {
			if w.Stream.Device() == d.timeline {
				w.Stream.Marked = true
			}
		}
	}
}
