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

// trim is Trim for one pool; nil is all. Memory that released pools left belongs to the default pool here.
func (d *Device) trim(only *Pool) error {
	chosen := func(p *Pool) bool {
		p = p.owner()
		return only == nil || p == only || only == d.pool0 && p.released
	}
	if d.state.phys.offload.Unsure() {
		d.state.paused.mu.Lock()
		_ = d.state.phys.offload.Await()
		d.state.paused.mu.Unlock()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.health.Broken() != nil {
		d.state.frees.collect(nil, false)
		return nil // bookkeeping only: the driver would refuse
	}
	r := reclaimer{d: d, log: attempts{drv: d.drv}, allowed: memory.AllStages,
		scope: scope{pools: chosen, only: only, chunks: d.state.phys.hasChunks(), need: everything}}
	first := r.giveAllBack()
	d.state.endings.sweep()
	d.state.phys.rebalanceAll(nil, nil)
	return first
}

// everything is more than there is.
const everything = ^uint64(0)

// releaseChunks gives free chunks back to the driver, of one pool or (nil) of all that are not pinned, until at least
// need bytes have gone. The caller holds Device.mu and nothing else; it is let go while the GPU is waited for.
// It reports whether any went.
//
// +checklocks:mv.gpu.mu
func (mv *mover) releaseChunks(only *Pool, need uint64) (bool, error) {
	_, first := mv.detachChunks(only, need)
	any, err := mv.phys.releaseSpares()
	return any, cmp.Or(first, err)
}

// detachChunks makes free chunks spare, mapped nowhere, likewise. It reports whether there was anything to unmap.
//
// +checklocks:mv.gpu.mu
func (mv *mover) detachChunks(only *Pool, need uint64) (bool, error) {
	have := mv.phys.quota.Spare
	for h := range mv.pools.chunkHeaps() {
		s := h.s
		if s.pool.pinned || only != nil && s.pool != only || have >= need {
			continue
		}
		s.arena.Lock()
		have += h.detach(need - have)
		s.arena.Unlock()
	}
	mv.phys.rebalanceAll(nil, nil)
	// The spares can go once their old mappings and the work that used them last are over.
	var waits timeline.Waits
	for _, z := range mv.phys.mem.Stale.All() {
		if z.Stream >= 0 {
			waits.Add(&mv.streams.all[z.Stream].timeline, z.Epoch)
		}
	}
	any := mv.phys.mem.Stale.Len() > 0
	err := mv.gpu.await(waits)
	mv.unmapReady()
	return any, err
}

// await waits until the host knows the epochs to be over, except of streams that are being captured. The caller holds
// Device.mu and nothing else; it is let go meanwhile.
//
// +checklocks:g.mu
func (g *gpu) await(waits timeline.Waits) error {
	g.a.turns.Next()
	if len(waits) == 0 || g.health.Broken() != nil {
		return nil
	}
	g.mu.Unlock()
	defer g.mu.Lock()
	return g.timeline.Sync(waits)
}

// detach makes wholly free chunks of a stream heap spare, all or until they have need bytes: they belong to no stream heap, and
// their old mappings are stale mappings. It returns their bytes. The caller holds Device.mu and the arena's lock, and has the
// sums taken (rebalanceAll) when it is done.
//
// +checklocks:h.s.dev.gpu.mu
func (h *chunkHeap) detach(need uint64) (have uint64) {
	s, d := h.s, h.s.dev
	p := &d.state.policy.plan
	p.found = p.found[:0]
	s.blocks.FreeBins.Each(d.state.phys.upstream.Granularity(), func(id heap.ID, b *heap.Block) bool {
		h.area.Whole(d.state.phys.mem, b.Addr, b.Size, func(k phys.ChunkID, ch *phys.Chunk) bool {
			p.found = append(p.found, source{chunk: k, block: id, stamp: b.Stamp})
			have += ch.Size
			return have < need
		})
		return have < need
	})
	h.makeSpare(p.found)
	return have
}

// makeSpare makes chunks spare that detach, or giveBack, found wholly free. The arena's lock was held since.
//
// +checklocks:h.s.dev.gpu.mu
func (h *chunkHeap) makeSpare(found []source) {
	s, d := h.s, h.s.dev
	record, bytes := d.state.observers.onUnmap == nil, uint64(0) // an observer finds memory mapped until it is notified
	var last takenOut
	for _, x := range found {
		k := d.state.phys.mem.Chunk(x.chunk)
		if bytes += k.Size; record {
			d.state.mover.recordLeft(s, k.Addr, k)
		}
		h.leave(&last, x.block, x.chunk, record)
		d.state.phys.mem.AddSpare(x.chunk, s.stream.index.Load(), x.stamp)
	}
	s.arena.Quota.Spared(s.class, len(found), bytes)
}

// releaseSpares gives the spare chunks that are mapped nowhere back to the driver, and reports whether any went.
//
// +checklocks:ph.gpu.mu
func (ph *physical) releaseSpares() (any bool, first error) {
	n, first := ph.mem.ReleaseSpares(func(phys.ChunkID) bool { return true })
	ph.counts.DeviceFrees += n
	return n > 0, first
}
