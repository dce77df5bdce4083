package engine

import (
	"cmp"

	"github.com/cistern-gpu/cistern/internal/engine/phys"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/memory"
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
	if d.offload.Unsure() {
		d.pausing.Lock()
		_ = d.offload.Await()
		d.pausing.Unlock()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.health.Broken() != nil {
		d.collect(nil, false)
		return nil // bookkeeping only: the driver would refuse
	}
	r := reclaimer{d: d, log: attempts{drv: d.drv}, allowed: memory.AllStages,
		scope: scope{pools: chosen, only: only, chunks: d.hasChunks(), need: everything}}
	first := r.giveAllBack()
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
	for h := range d.chunkHeaps() {
		s := h.s
		if s.pool.pinned || only != nil && s.pool != only || have >= need {
			continue
		}
		s.arena.Lock()
		have += h.detach(need - have)
		s.arena.Unlock()
	}
	// What must be over before the spares can go: their old mappings, and the work that used them last.
	var waits timeline.Waits
	for _, z := range d.mem.Stale.All() {
		if z.Stream >= 0 {
			waits.Add(&d.streams[z.Stream].timeline, z.Epoch)
		}
	}
	any := d.mem.Stale.Len() > 0
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

// detach makes wholly free chunks of a stream heap spare, all or until they have need bytes: they belong to no stream heap, and their
// old mappings are stale mappings. It returns their bytes. The caller holds Device.mu and the arena's lock.
//
// +checklocks:h.s.dev.mu
func (h *chunkHeap) detach(need uint64) (have uint64) {
	s, d := h.s, h.s.dev
	p := &d.plan
	p.found = p.found[:0]
	s.blocks.EachFree(d.upstream.Granularity(), func(id heap.ID, b *heap.Block) bool {
		h.area.Whole(d.mem, b.Addr, b.Size, func(k phys.ChunkID, ch *phys.Chunk) bool {
			p.found = append(p.found, source{chunk: k, block: id, stamp: b.Stamp})
			have += ch.Size
			return have < need
		})
		return have < need
	})
	record := d.onUnmap == nil // an observer finds memory mapped until it is told
	var last takenOut
	for _, x := range p.found {
		if record {
			k := d.mem.Chunk(x.chunk)
			d.recordLeft(s, k.Addr, k)
		}
		h.leave(&last, x.block, x.chunk, record)
		d.mem.AddSpare(x.chunk, s.stream.index.Load(), x.stamp)
	}
	return have
}

// releaseSpares gives the spare chunks that are mapped nowhere back to the driver, and reports whether any went.
//
// +checklocks:d.mu
func (d *Device) releaseSpares() (any bool, first error) {
	n, first := d.mem.ReleaseSpares()
	d.counts.DeviceFrees += n
	return n > 0, first
}
