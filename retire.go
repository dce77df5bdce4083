package cistern

import (
	"iter"
	"weak"

	"github.com/cistern-gpu/cistern/internal/vm"
)

// Streams come and go, and nobody says when one goes. What a short-lived stream leaves behind is a lane for each pool it
// allocated from: addresses, an empty heap, gauges that every sum has to visit. So lanes that hold nothing are dissolved
// when there are many; if their stream turns out to live, it gets another.
//
// A stream without lanes that nothing else depends on is forgotten likewise, and its number is given to another stream. The
// program may still have the Stream, and use it: it is found again by its id, or makes itself known, as long as the
// program has it (Device.gone). So there is never more than one Stream for a CUDA stream.
//
// Both are done each time that the number of lanes, or of streams, has doubled: each stream pays for a constant part.

// retireLanes is the number of lanes below which none is dissolved, and of streams below which none is forgotten.
const retireLanes = 128

// retire dissolves the lanes of streams that may be gone and have no block out and no work under way, whose free chunks
// become spare, and forgets streams. The caller holds Device.mu and no lane's lock.
func (d *Device) retire() {
	if len(d.lanes) >= max(d.retireAt, retireLanes) {
		d.dissolveIdle()
		d.retireAt = 2 * len(d.lanes)
	}
	if len(d.byID) >= max(d.forgetAt, retireLanes) {
		d.forgetStreams()
		d.forgetAt = 2 * len(d.byID)
	}
}

func (d *Device) dissolveIdle() {
	d.reap(nil)
	for _, s := range d.spaces {
		if s == nil || s.pool.pinned || s.climbs > 0 || !s.stream.mayBeGone() {
			continue
		}
		s.mu.Lock()
		if s.heap.UsedBlocks == 0 {
			if s.area != nil && s.chunkBytes > 0 && d.onUnmap == nil {
				d.detach(s, everything)
			}
			d.dissolve(s) // unless old mappings or segments are left
		}
		s.mu.Unlock()
	}
	d.dropLanes()
}

// mayBeGone reports whether the stream may have been destroyed, as far as is known here, and the GPU is done with it.
func (t *Stream) mayBeGone() bool {
	if t.durable.Load() || t.perThread || t.capturing.Load() != 0 || t.route.Load() != nil || t.front.Load() != nil {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.poll(t.epoch.Load() - 1) // which gives its events back
	return len(t.ring) == 0
}

// enlist makes a stream of the device known that was forgotten, or is new. What comes to depend on a stream's number calls
// it first. The caller holds Device.mu.
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
	delete(d.gone, t.id)
	d.byID[t.id] = t
}

// liveStreams are the streams that the device knows, by number. The caller holds Device.mu.
func (d *Device) liveStreams() iter.Seq[*Stream] {
	return func(yield func(*Stream) bool) {
		for i, t := range d.streams {
			if int(t.index.Load()) == i && !yield(t) {
				return
			}
		}
	}
}

// forgetStreams forgets the streams that may be gone and that nothing depends on. The caller holds Device.mu.
func (d *Device) forgetStreams() {
	d.markStreams()
	for t := range d.liveStreams() {
		if !t.marked && t.mayBeGone() {
			d.forgetStream(t)
		}
		t.marked = false
	}
	d.streamNumbers.forget(d.hist.oldestNamed())
	clear(d.streams[d.streamNumbers.count:])
	d.streams = d.streams[:d.streamNumbers.count]
	if len(d.gone) >= max(d.goneAt, retireLanes) {
		for id, t := range d.gone {
			if t.Value() == nil {
				delete(d.gone, id)
			}
		}
		d.goneAt = 2 * len(d.gone)
	}
}

func (d *Device) forgetStream(t *Stream) {
	delete(d.byID, t.id)
	d.gone[t.id] = weak.Make(t)
	d.streamNumbers.put(int(t.index.Load()), d.hist.oldestNamed())
	t.index.Store(-1)
	t.waited, t.pruneAt = nil, 0
	t.mu.Lock()
	t.ring = nil
	t.mu.Unlock()
}

// markStreams marks the streams of the device that something depends on: lanes, what they used last that may not be over,
// blocks that were lent to them, frees that wait for them.
func (d *Device) markStreams() {
	for _, s := range d.spaces {
		if s != nil {
			s.stream.marked = true
		}
	}
	for _, id := range d.spares {
		if k := d.chunks.At(id); k.Stream >= 0 {
			if t := d.streams[k.Stream]; !t.durable.Load() && t.isOver(k.Stamp) {
				k.Stream, k.Stamp = -1, 0
			} else {
				t.marked = true
			}
		}
	}
	d.zombies.Filter(func(z *vm.Zombie) bool {
		d.streams[z.Stream].marked = true
		return false
	})
	mark := func(t *Stream) {
		if t != nil && t.dev == d {
			t.marked = true
		}
	}
	for i := range d.uses {
		mark(d.uses[i].stream)
	}
	for i := range d.pending {
		mark(d.pending[i].owner)
		for _, w := range d.pending[i].waits {
			mark(w.stream)
		}
	}
}
