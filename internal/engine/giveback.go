package engine

import (
	"cmp"
	"slices"

	"github.com/cistern-gpu/cistern/internal/engine/phys"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/heap"
)

// Memory that other processes on the device ask for, by the node's broker.

// GiveBack releases memory that nothing uses to the driver until need bytes have gone at least, the largest chunks first, and
// returns how many went. What the device has reserved does not fall below keep. Pinned pools, pools over users' resources,
// streams that are being captured and contents that are being copied keep their memory; while there is an observer of
// unmapping (OnUnmap) all memory stays. What the host knows the GPU to be done with goes first. Where that does not suffice
// GiveBack waits for the GPU once, with no lock held.
func (d *Device) GiveBack(need, keep uint64) (released uint64, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.health.Broken(); err != nil {
		return 0, err
	}
	g := giveBack{d: d, need: need, keep: keep}
	if err = g.releaseIdle(); err == nil && g.missing() > 0 {
		if waits := g.unfinished(); len(waits) > 0 {
			if err = d.await(waits); err == nil {
				err = g.releaseIdle()
			}
		}
	}
	return g.released, err
}

// giveBack is one call of GiveBack. Its methods are called with Device.mu.
type giveBack struct {
	d          *Device
	need, keep uint64
	released   uint64
}

// missing is how much is still to go.
//
// +checklocks:g.d.gpu.mu
func (g *giveBack) missing() uint64 { return min(less(g.need, g.released), g.room()) }

// room is how much may go.
//
// +checklocks:g.d.gpu.mu
func (g *giveBack) room() uint64 { return less(g.d.state.phys.quota.Reserved, g.keep) }

// stays reports whether all memory stays: an observer would have to be notified first, or copies may be under way.
//
// +checklocks:g.d.gpu.mu
func (g *giveBack) stays() bool {
	return g.d.state.observers.onUnmap != nil || g.d.state.phys.offload.Unsure()
}

// releaseIdle releases what nothing uses and the GPU is known to be done with. Device.mu is not let go.
//
// +checklocks:g.d.gpu.mu
func (g *giveBack) releaseIdle() error {
	d := g.d
	if g.stays() {
		return nil
	}
	d.a.turns.Next()
	d.state.frees.collect(nil, false)
	d.state.endings.sweep()
	d.state.mover.unmapReady()
	before := d.state.phys.quota.Returned
	chunks := g.choose(true)
	d.state.mover.takeOut(d.state.policy.plan.sources)
	d.state.policy.plan.letGo()
	d.state.mover.unmapReady()
	n, first := d.state.phys.mem.ReleaseSpares(func(id phys.ChunkID) bool { return chunks[id] })
	d.state.phys.counts.DeviceFrees += n
	g.released += d.state.phys.quota.Returned - before
	first = cmp.Or(first, g.releaseSegments())
	d.state.phys.rebalanceAll(nil, nil)
	return first
}

// releaseSegments releases segments of the engine's own, likewise.
//
// +checklocks:g.d.gpu.mu
func (g *giveBack) releaseSegments() error {
	left, room := g.missing(), g.room()
	if left == 0 {
		return nil
	}
	before := g.d.state.phys.quota.Returned
	_, err := g.d.state.segments.releaseSome(mayGive, func(size uint64) bool {
		if left == 0 || size > room {
			return false
		}
		left, room = less(left, size), room-size
		return true
	}, false)
	g.released += g.d.state.phys.quota.Returned - before
	return err
}

// mayGive reports whether memory of a pool may go: it is the device's own, got by driver calls, and no graph uses it.
//
// +checklocks:p.dev.gpu.mu
func mayGive(p *Pool) bool {
	w, ok := p.backing.(*wholeSegments)
	return !p.pinned && (!ok || w.counted && !w.user)
}

// choose plans to release what is missing, of the chunks that nothing uses: those that the host knows the GPU to be done with,
// or all others. The plan's sources are those that a stream heap has, whose arenas are locked until planner.letGo.
//
// +checklocks:g.d.gpu.mu
func (g *giveBack) choose(over bool) (chosen map[phys.ChunkID]bool) {
	d, p := g.d, &g.d.state.policy.plan
	p.sources, p.found, p.narrow = p.sources[:0], p.found[:0], false
	for _, id := range d.state.phys.mem.Spares() {
		if k := d.state.phys.mem.Chunk(id); over == (k.Mappings == 0) {
			x := source{chunk: id, size: k.Size, stamp: k.Stamp}
			if k.Stream >= 0 {
				x.stream = d.state.streams.all[k.Stream]
			}
			p.found = append(p.found, x)
		}
	}
	for h := range d.state.pools.chunkHeaps() {
		if mayGive(h.s.pool) && h.s.stream.timeline.Capture() == 0 {
			p.hold(h.s, nil)
			h.idle(over)
		}
	}
	p.pick(g.missing(), g.room(), 0, everything>>1)
	chosen = map[phys.ChunkID]bool{}
	for _, x := range p.sources {
		chosen[x.chunk] = true
	}
	return chosen
}

// idle adds the wholly free chunks of a stream heap to what the planner found: those that the host knows the GPU to be done with,
// or all others. The arena's lock is held.
//
// +checklocks:h.s.dev.gpu.mu
func (h *chunkHeap) idle(over bool) {
	d, t := h.s.dev, &h.s.stream.timeline
	p, mem := &d.state.policy.plan, d.state.phys.mem
	h.s.blocks.FreeBins.Each(d.state.phys.upstream.Granularity(), func(id heap.ID, b *heap.Block) bool {
		done := t.IsOver(b.Stamp)
		h.area.Whole(mem, b.Addr, b.Size, func(c phys.ChunkID, k *phys.Chunk) bool {
			if over == (done && k.Mappings == 1) { // with more it stays the driver's until those are undone
				p.found = append(p.found, source{chunk: c, size: k.Size, heap: h, block: id, run: b.Size, stamp: b.Stamp, stream: h.s.stream})
			}
			return true
		})
		return true
	})
}

// takeOut makes chunks spare that stream heaps have, whose arenas are locked since the chunks were found free. Those that are
// spare already stay so.
//
// +checklocks:mv.gpu.mu
func (mv *mover) takeOut(list []source) {
	list = slices.DeleteFunc(list, func(x source) bool { return x.heap == nil })
	slices.SortFunc(list, func(a, b source) int { // as leave wants them
		return cmp.Or(cmp.Compare(a.heap.s.index, b.heap.s.index), cmp.Compare(mv.phys.mem.Chunk(a.chunk).Addr, mv.phys.mem.Chunk(b.chunk).Addr))
	})
	for len(list) > 0 {
		n := slices.IndexFunc(list, func(x source) bool { return x.heap != list[0].heap })
		if n < 0 {
			n = len(list)
		}
		list[0].heap.makeSpare(list[:n])
		list = list[n:]
	}
}

// unfinished is the work to wait for before what is missing can go: the last uses of chunks that nothing uses, and, where those
// do not suffice, what frees and free segments wait for.
//
// +checklocks:g.d.gpu.mu
func (g *giveBack) unfinished() (waits timeline.Waits) {
	d := g.d
	if g.stays() {
		return nil
	}
	chosen, have := g.choose(false), uint64(0)
	d.state.policy.plan.letGo()
	for _, x := range d.state.policy.plan.sources {
		if have += x.size; x.stream != nil {
			waits.AddUnfinished(&x.stream.timeline, x.stamp)
		}
	}
	for _, z := range d.state.phys.mem.Stale.All() {
		if chosen[z.Chunk] && z.Stream >= 0 {
			waits.AddUnfinished(&d.state.streams.all[z.Stream].timeline, z.Epoch)
		}
	}
	if have >= g.missing() {
		return waits
	}
	for h := range d.state.pools.segmentHeaps() {
		s := h.s
		if !mayGive(s.pool) || s.stream.timeline.Capture() != 0 {
			continue
		}
		s.arena.Lock()
		for _, id := range s.blocks.Ranges() {
			if b := s.blocks.At(id); b.State == heap.Free && s.blocks.Next(id) == 0 {
				waits.AddUnfinished(&s.stream.timeline, b.Stamp)
			}
		}
		s.arena.Unlock()
	}
	for _, w := range d.state.frees.unfinishedFrees(mayGive) {
		waits.AddUnfinished(w.Stream, w.Epoch)
	}
	return waits
}
