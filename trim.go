package cistern

import (
	"cmp"

	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/internal/vm"
)

// Trim gives the free memory of every pool of the device that is not pinned back to the driver. It waits, with no lock
// held, for the GPU to be done with it, except where a capture under way forbids that: such memory stays.
func (d *Device) Trim() error { return d.trim(nil) }

// trim is Trim for one pool; nil is all. What released pools left belongs to the default pool here.
func (d *Device) trim(only *Pool) error {
	chosen := func(p *Pool) bool {
		p = p.owner()
		return only == nil || p == only || only == d.pool0 && p.released
	}
	if d.unsure.Load() {
		d.pausing.Lock()
		d.copied()
		d.pausing.Unlock()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.health.Broken() != nil {
		d.collect(nil, false)
		return nil // bookkeeping only: the driver would refuse
	}
	d.unstick()
	var waits timeline.Waits
	for _, f := range d.pending {
		if chosen(f.space.pool) {
			for _, w := range f.waits {
				waits.Add(w.Stream, w.Epoch)
			}
		}
	}
	first := d.await(waits)
	d.collect(nil, false)
	if d.segmented {
		for again := true; again; again = again && d.nested && only == nil { // what goes may be a segment of another pool then
			var err error
			again, err = d.releaseSegments(chosen, true)
			first = cmp.Or(first, err)
		}
	}
	if d.upstream != nil {
		if only == d.pool0 {
			d.sweep() // makes the chunks spare that released pools left
		}
		_, err := d.releaseChunks(only, everything)
		first = cmp.Or(first, err)
	}
	_, err := d.trimUpstreams(chosen)
	first = cmp.Or(first, err)
	d.sweep()
	d.rebalanceAll(nil, nil)
	return first
}

// everything is more than there is.
const everything = ^uint64(0)

// releaseChunks gives free chunks back to the driver, of one pool or (nil) of all that are not pinned, until at least
// need bytes have gone. The caller holds Device.mu and nothing else; it is let go while the GPU is waited for.
// It reports whether any went.
//
// +checklocks:d.mu
func (d *Device) releaseChunks(only *Pool, need uint64) (bool, error) {
	_, first := d.detachChunks(only, need)
	any, err := d.releaseSpares()
	return any, cmp.Or(first, err)
}

// detachChunks makes free chunks spare, mapped nowhere, likewise. It reports whether there was anything to unmap.
//
// +checklocks:d.mu
func (d *Device) detachChunks(only *Pool, need uint64) (bool, error) {
	have := d.quota.Spare
	for _, s := range d.spaces {
		if s == nil || s.area == nil || s.pool.pinned || only != nil && s.pool != only || have >= need {
			continue
		}
		s.mu.Lock()
		have += d.detach(s, need-have)
		s.mu.Unlock()
	}
	// What must be over before the spares can go: their old mappings, and the work that used them last.
	var waits timeline.Waits
	d.zombies.Filter(func(z *vm.Zombie) bool {
		waits.Add(&d.streams[z.Stream].timeline, z.Epoch)
		return false
	})
	any := d.zombies.Len() > 0
	err := d.await(waits)
	d.unmapReady()
	return any, err
}

// await waits until the host knows the epochs to be over, except of streams that are being captured. The caller holds
// Device.mu and nothing else; it is let go meanwhile.
//
// +checklocks:d.mu
func (d *Device) await(waits timeline.Waits) error {
	d.a.turns.Next()
	if len(waits) == 0 || d.health.Broken() != nil {
		return nil
	}
	d.mu.Unlock()
	defer d.mu.Lock()
	return d.timeline.Sync(waits)
}

// detach makes wholly free chunks of a space spare, all or until they have need bytes: they belong to nobody, and their
// old mappings are zombies. It returns their bytes. The caller holds Device.mu and the space's lock.
//
// +checklocks:d.mu
func (d *Device) detach(s *space, need uint64) (have uint64) {
	p := &d.plan
	p.found = p.found[:0]
	s.heap.EachFree(d.upstream.Granularity(), func(id heap.ID, b *heap.Block) bool {
		s.area.Whole(&d.chunks, b.Addr, b.Size, func(k vm.ChunkID, ch *vm.Chunk) bool {
			p.found = append(p.found, source{chunk: k, block: id, stamp: b.Stamp})
			have += ch.Size
			return have < need
		})
		return have < need
	})
	record := d.onUnmap == nil // who wants to know before memory is unmapped is to find it mapped until then
	var last takenOut
	for _, x := range p.found {
		if record {
			k := d.chunks.At(x.chunk)
			d.recordLeft(s, k.Addr, k)
		}
		d.leave(&last, s, x.block, x.chunk, record)
		d.addSpare(x.chunk, s.stream, x.stamp)
	}
	return have
}

// releaseSpares gives the spare chunks that are mapped nowhere back to the driver, and reports whether any went.
//
// +checklocks:d.mu
func (d *Device) releaseSpares() (any bool, first error) {
	keep := d.spares[:0]
	for _, id := range d.spares {
		k := d.chunks.At(id)
		if k.Mappings > 0 {
			keep = append(keep, id)
			continue
		}
		if err := d.upstream.Release(k.Handle); err != nil {
			d.health.Failed(err)
			if first == nil {
				first = err
			}
			keep = append(keep, id)
			continue
		}
		d.quota.Spare -= k.Size
		d.quota.Physical[quota.GroupLarge].Remove(k.Size)
		d.gaveBack(k.Size, true)
		d.chunks.Drop(id)
		any = true
	}
	d.spares = keep
	return any, first
}
