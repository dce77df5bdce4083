package cistern

// Streams come and go, and nobody says when one goes. What a short-lived stream leaves behind is a lane for each pool it
// allocated from: addresses, an empty heap, gauges that every sum has to visit. So lanes that hold nothing are dissolved
// when there are many; if their stream turns out to live, it gets another.

// retireLanes is the number of lanes below which none is dissolved.
const retireLanes = 128

// retire dissolves the lanes of streams that may be gone and have no block out and no work under way, whose free chunks
// become spare. It looks for them each time that the number of lanes has doubled. The caller holds Device.mu and no
// lane's lock.
func (d *Device) retire() {
	if len(d.lanes) < max(d.retireAt, retireLanes) {
		return
	}
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
	d.retireAt = 2 * len(d.lanes)
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
