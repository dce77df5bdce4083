package cistern

import (
	"cmp"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/internal/vm"
)

// Trim gives the free memory of every pool of the device that is not pinned back to the driver. It waits, with no lock
// held, for the GPU to be done with it, except where a capture under way forbids that: such memory stays.
func (d *Device) Trim() error { return d.trim(nil) }

// trim is Trim for one pool; nil is all.
func (d *Device) trim(only *Pool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.poisoned() != nil {
		d.collect(nil, false)
		return nil // bookkeeping only: the driver would refuse
	}
	var waits []wait
	for _, f := range d.pending {
		if only == nil || f.space.pool == only {
			for _, w := range f.waits {
				waits = later(waits, w.stream, w.epoch)
			}
		}
	}
	first := d.await(waits)
	d.collect(nil, false)
	if d.segment != nil {
		_, err := d.releaseSegments(only)
		d.sweep()
		d.settleAll(nil, nil)
		return cmp.Or(first, err)
	}
	for _, s := range d.spaces {
		if s == nil || s.pool.pinned || only != nil && s.pool != only {
			continue
		}
		s.mu.Lock()
		d.detach(s)
		s.mu.Unlock()
	}
	// What must be over before the spares can go: their old mappings, and the work that used them last.
	waits = waits[:0]
	d.zombies.Filter(func(z *vm.Zombie) bool {
		waits = later(waits, d.streams[z.Stream], z.Epoch)
		return false
	})
	first = cmp.Or(first, d.await(waits))
	d.reap(nil)
	first = cmp.Or(first, d.releaseSpares())
	d.sweep()
	d.settleAll(nil, nil)
	return first
}

// later adds an epoch to what must be over, one entry for each stream.
func later(waits []wait, t *Stream, epoch uint64) []wait {
	for i := range waits {
		if waits[i].stream == t {
			waits[i].epoch = max(waits[i].epoch, epoch)
			return waits
		}
	}
	return append(waits, wait{t, epoch})
}

// await waits until the host knows the epochs to be over, except of streams that are being captured. The caller holds
// Device.mu and nothing else; it is let go meanwhile.
func (d *Device) await(waits []wait) error {
	d.a.turn.Add(1)
	if len(waits) == 0 || d.poisoned() != nil {
		return nil
	}
	d.mu.Unlock()
	defer d.a.turn.Add(1)
	defer d.mu.Lock()
	var first error
	for _, w := range waits {
		err := w.stream.settle(w.epoch)
		if o := w.stream.dev; o != d && o.poisoned() != nil {
			continue // the work of a broken peer is over
		}
		if err != nil && !ownReason(err) {
			first = cmp.Or(first, err)
		}
	}
	return first
}

// detach makes the wholly free chunks of a space spare: they belong to nobody, and their old mappings are zombies. The
// caller holds Device.mu and the space's lock.
func (d *Device) detach(s *space) {
	p := &d.plan
	p.found = p.found[:0]
	s.heap.EachFree(d.upstream.Granularity(), func(id heap.ID, b *heap.Block) bool {
		s.area.Whole(&d.chunks, b.Addr, b.Size, func(k vm.ChunkID, _ *vm.Chunk) bool {
			p.found = append(p.found, source{chunk: k, block: id, stamp: b.Stamp})
			return true
		})
		return true
	})
	for _, x := range p.found {
		d.leave(s, x.block, x.chunk)
		d.addSpare(x.chunk, s.stream, x.stamp)
	}
}

// releaseSpares gives the spare chunks that are mapped nowhere back to the driver.
func (d *Device) releaseSpares() error {
	var first error
	keep := d.spares[:0]
	for _, id := range d.spares {
		k := d.chunks.At(id)
		if k.Mappings > 0 {
			keep = append(keep, id)
			continue
		}
		if err := d.upstream.Release(k.Handle); err != nil {
			d.failed(err)
			if first == nil {
				first = err
			}
			keep = append(keep, id)
			continue
		}
		d.spareBytes -= k.Size
		d.held[groupLarge].take(k.Size)
		d.gaveBack(k.Size)
		d.chunks.Drop(id)
	}
	d.spares = keep
	return first
}

// Backend malloc: segments.

// growSegment is the rungs of backend malloc that need no waiting: collecting frees by force, and a new segment.
func (c *climb) growSegment() (heap.ID, error) {
	d, s := c.d, c.s
	if c.rungs&RungGrow != 0 {
		c.tried |= RungGrow
		size := segmentSize(c.n)
		if d.limit == 0 || d.reservedBytes+size <= d.limit {
			ptr, err := d.segment.Alloc(size)
			if err == nil {
				return c.addSegment(ptr, size)
			}
			c.oom = d.failed(err)
			if !isOutOfMemory(err) {
				return 0, err
			}
		}
	}
	if d.waiting.Load() && c.rungs&RungCollect != 0 && d.collect(s, true) {
		if id := s.heap.Take(c.n, c.size); id != 0 {
			c.met = RungCollect
			return id, nil
		}
	}
	return c.elsewhere(), nil
}

// segmentSize is the size of the segment that a request of n bytes is cut from: PyTorch's sizes.
func segmentSize(n uint64) uint64 {
	switch {
	case n <= smallMax:
		return 2 << 20
	case n < 10<<20:
		return 20 << 20
	}
	return (n + 2<<20 - 1) &^ (2<<20 - 1)
}

func (c *climb) addSegment(ptr cuda.Ptr, size uint64) (heap.ID, error) {
	d, s := c.d, c.s
	if err := d.a.claim(uint64(ptr), size, s); err != nil {
		d.segment.Free(ptr, size)
		return 0, err
	}
	d.areas = append(d.areas, reservation{uint64(ptr), size, s})
	d.got(size)
	d.held[groupOf(s.class)].add(size)
	s.chunkBytes += size
	hole := s.heap.AddRange(uint64(ptr), size)
	block := s.heap.Map(hole, uint64(ptr), size, 0)
	s.gauges.setFree(s.heap.FreeBlocks, int64(size))
	d.recordSegment(s, uint64(ptr), size, true)
	s.heap.TakeBlock(block, c.n, c.size)
	c.met = RungGrow
	return block, nil
}

// releaseSegments gives the segments that are wholly free back to the driver, of one pool or (nil) of all that are not
// pinned. The caller holds Device.mu and nothing else; it is let go while the GPU is waited for, and what is to be
// released is out of everybody's reach meanwhile. It reports whether any went.
func (d *Device) releaseSegments(only *Pool) (bool, error) {
	type victim struct {
		space *space
		first heap.ID
		base  uint64
		size  uint64
		stamp uint64
	}
	var victims []victim
	var waits []wait
	d.collect(nil, false)
	for _, s := range d.spaces {
		if s == nil || s.pool.pinned || only != nil && s.pool != only || s.stream.capturing.Load() != 0 {
			continue
		}
		s.mu.Lock()
		for _, id := range s.heap.Ranges() {
			b := s.heap.At(id)
			if b.State != heap.Free || s.heap.Next(id) != 0 {
				continue
			}
			v := victim{s, id, b.Addr, b.Size, b.Stamp}
			s.heap.Unmap(id, b.Addr, b.Size)
			s.gauges.setFree(s.heap.FreeBlocks, -int64(v.size))
			d.spareBytes += v.size
			victims = append(victims, v)
			if v.stamp > 0 {
				waits = later(waits, s.stream, v.stamp)
			}
		}
		s.mu.Unlock()
	}
	if len(victims) == 0 {
		return false, nil
	}
	first := d.await(waits)
	any := false
	for _, v := range victims {
		d.spareBytes -= v.size
		s := v.space
		err := first
		if !s.stream.isOver(v.stamp) && err == nil {
			err = errCapturing
		}
		if err == nil {
			d.a.disown(v.base, v.size) // first: once the driver has it it may be another device's
			if err = d.segment.Free(cuda.Ptr(v.base), v.size); err != nil {
				d.a.claim(v.base, v.size, s) // which succeeded before
				first = d.failed(err)
			}
		}
		if err != nil { // nothing is lost: it is cached again
			s.mu.Lock()
			s.heap.Map(s.heap.Reap(v.first), v.base, v.size, v.stamp)
			s.gauges.setFree(s.heap.FreeBlocks, int64(v.size))
			s.mu.Unlock()
			continue
		}
		any = true
		s.mu.Lock()
		s.heap.DropRange(s.heap.Reap(v.first))
		s.chunkBytes -= v.size
		s.mu.Unlock()
		d.recordSegment(s, v.base, v.size, false)
		for i, r := range d.areas {
			if r.base == v.base {
				d.areas = append(d.areas[:i], d.areas[i+1:]...)
				break
			}
		}
		d.held[groupOf(s.class)].take(v.size)
		d.gaveBack(v.size)
	}
	return any, first
}
