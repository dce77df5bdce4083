package engine

import (
	"fmt"
	"iter"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine/phys"
	"github.com/cistern-gpu/cistern/internal/engine/views"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

// mappedChunks is the memory of a pool whose stream heaps reserve addresses and map chunks there, physical handles that can
// move to any other such pool. A request is met with chunks that are free elsewhere, or new ones (move.go); free chunks are
// unmapped and become spare, or go back to the driver (trim.go).
type mappedChunks struct{ pool *Pool }

func (m *mappedChunks) traits() resource.Traits {
	return resource.Traits{Name: "virtual", Device: m.pool.dev.id, OnDevice: true, DeviceAccessible: true, Align: heap.Align}
}

func (m *mappedChunks) onDevice() bool { return true }

// upstreamName is "", as the default pool of a device that makes chunks is made of them.
func (m *mappedChunks) upstreamName() string { return "" }

func (m *mappedChunks) memInfo() (free, total uint64, err error) {
	return m.pool.dev.drv.MemInfo(m.pool.dev.id)
}

func (m *mappedChunks) unit() uint64 { return heap.Align }

func (m *mappedChunks) alignSlack(align uint64) uint64 { return align - heap.Align }

func (m *mappedChunks) sizes(n uint64) (usual, least uint64) {
	n = segmentSize(n, segmentUnit)
	return n, n
}

func (m *mappedChunks) over(*Pool) bool { return false }

func (m *mappedChunks) newHeap(s *streamHeap) heapBacking {
	return &chunkHeap{s, phys.NewArea(m.pool.dev.state.phys.upstream.Granularity())}
}

// openToPeers does nothing: chunks are opened range by range, as they are mapped.
func (m *mappedChunks) openToPeers() error { return nil }

// ended leaves the chunks to other pools.
//
// +checklocks:m.pool.dev.gpu.mu
func (m *mappedChunks) ended() error {
	d := m.pool.dev
	if d.state.observers.onUnmap != nil {
		d.state.mover.unmapReady() // else it could not be used
	}
	if spill := m.pool.spill; spill != nil {
		return spill.backing.ended()
	}
	return nil
}

func (m *mappedChunks) closeOwn() {}

// giveBackOwn makes the free chunks of the pool spare: they stay the device's.
//
// +checklocks:r.d.gpu.mu
func (m *mappedChunks) giveBackOwn(r *reclaimer) (bool, error) {
	if !r.scope.chunks {
		return false, nil
	}
	return r.measured(func() (bool, error) {
		before := m.pool.reserved
		_, err := r.d.state.mover.detachChunks(m.pool, everything)
		return m.pool.reserved < before, err
	})
}

func (m *mappedChunks) explain(*views.Failure) {}

// chunkHeap is what a stream heap of such a pool has: addresses, and the chunks mapped there.
type chunkHeap struct {
	s    *streamHeap
	area *phys.Area
}

// supply maps free chunks from elsewhere, and new ones.
//
// +checklocks:c.d.gpu.mu
func (h *chunkHeap) supply(c *request) (heap.ID, error) {
	m := chunkRequest{c, h}
	// First without chunks of other pools, then with them.
	id, err := m.obtain(c.steps.allowed&(memory.StageRemap|memory.StageGrow), false)
	if id != 0 || err != nil {
		return id, err
	}
	if id, err = c.collectForced(); id != 0 || err != nil {
		return id, err
	}
	if id, err = m.obtain(c.steps.allowed&(memory.StageRemap|memory.StageGrow|memory.StageLend), true); id != 0 || err != nil {
		return id, err
	}
	return c.elsewhere()
}

// wantsChunks: chunks move by themselves, unless observers must be notified before they are unmapped. Within the pool's own
// limit they are made spare where segments may need the memory.
//
// +checklocks:h.s.dev.gpu.mu
func (h *chunkHeap) wantsChunks(limited bool) bool {
	d := h.s.dev
	return d.state.observers.onUnmap != nil || limited && d.state.segments.sources.any
}

// freeChunks makes chunks spare, which a request here finds.
//
// +checklocks:h.s.dev.gpu.mu
func (h *chunkHeap) freeChunks(only *Pool, need uint64) (bool, error) {
	return h.s.dev.state.mover.detachChunks(only, need)
}

func (h *chunkHeap) freeAddresses() bool { return false }

// usable: segments do not move, so only chunks may come here.
//
// +checklocks:h.s.dev.gpu.mu
func (h *chunkHeap) usable() iter.Seq[*streamHeap] {
	d := h.s.dev
	return func(yield func(*streamHeap) bool) {
		for o := range d.state.pools.chunkHeaps() {
			if !yield(o.s) {
				return
			}
		}
	}
}

// succeed leaves the old stream heap with no addresses.
//
// +checklocks:h.s.dev.gpu.mu
func (h *chunkHeap) succeed(n *streamHeap) heapBacking {
	x := &chunkHeap{n, h.area}
	h.area = phys.NewArea(h.s.dev.state.phys.upstream.Granularity())
	return x
}

// +checklocks:h.s.dev.gpu.mu
func (h *chunkHeap) recordInherited(from *streamHeap, addr, size uint64) {
	s, d := h.s, h.s.dev
	h.area.Whole(d.state.phys.mem, addr, size, func(_ phys.ChunkID, k *phys.Chunk) bool {
		d.state.mover.recordLeft(from, k.Addr, k)
		d.record(event.Event{Kind: event.SegmentMap, Addr: k.Addr, Size: k.Size, Handle: uint64(k.Handle),
			Stream: s.stream.number(), Pool: s.pool.number})
		return true
	})
}

// mapped leaves out stale mappings, which are on their way out.
//
// +checklocks:h.s.dev.gpu.mu
func (h *chunkHeap) mapped() []run {
	return h.s.runs(func(b *heap.Block) bool { return b.State != heap.Unmapped && b.State != heap.Stale })
}

func (h *chunkHeap) segmentAt(p cuda.Ptr, _, _ uint64) (cuda.Ptr, uint64, error) {
	return 0, 0, fmt.Errorf("%#x lies in mapped chunks, not in a segment (pools of segments, ipc:legacy and "+
		"single_handle:true have those): %w", uint64(p), cuda.ErrNotSupported)
}

// export names the chunks that a block lies on.
//
// +checklocks:e.heap.dev.gpu.mu
func (h *chunkHeap) export(e *Export, addr, size uint64) error {
	d := e.heap.dev
	for p := addr; p < addr+size; {
		c := d.state.phys.mem.Chunk(h.area.At(p))
		if p == addr {
			e.Shared.Offset = addr - c.Addr
		}
		e.chunk(c.Handle, c.Size, c.Serial)
		p = c.Addr + c.Size
	}
	return e.nameable(d.state.phys.prop.Handles)
}

// +checklocks:h.s.dev.gpu.mu
func (h *chunkHeap) addChunks(list []memory.Segment) {
	for i := range list {
		g := &list[i]
		h.area.Whole(h.s.dev.state.phys.mem, g.Addr, g.Size, func(_ phys.ChunkID, k *phys.Chunk) bool {
			g.Chunks = append(g.Chunks, memory.Chunk{Handle: k.Handle, Size: k.Size})
			return true
		})
	}
}

// choosePaused finds the chunks in which something selected lies and nothing else is in use; and, of a pool of captured graphs
// that is paused as such, those that are wholly free.
//
// +checklocks:p.d.gpu.mu
func (h *chunkHeap) choosePaused(p *pause, no *refusal) {
	s, d := h.s, p.d
	var last *pausedChunks // of the memory found last
	var at struct {        // the chunk that is looked at
		id       phys.ChunkID
		first    heap.ID
		stays    bool
		selected uint64 // bytes
	}
	flush := func() {
		if at.id == 0 {
			return
		}
		k := d.state.phys.mem.Chunk(at.id)
		switch {
		case at.stays:
			p.report.Shared += at.selected
		case at.selected > 0 || s.pool.pinned && p.sel.Tag == 0 && p.o.Captured:
			if n := len(p.found) - 1; last != nil && p.found[n].addr+p.found[n].size == k.Addr && p.found[n].size+k.Size <= stretch {
				p.found[n].size += k.Size
				last.chunks = append(last.chunks, at.id)
			} else {
				last = &pausedChunks{h, []phys.ChunkID{at.id}}
				p.found = append(p.found, leaving{heap: s, addr: k.Addr, size: k.Size, first: at.first, mem: last})
			}
		}
		at.id = 0
	}
	granularity := d.state.phys.upstream.Granularity()
	for _, id := range s.blocks.Ranges() {
		for ; id != 0; id = s.blocks.Next(id) {
			b := s.blocks.At(id)
			if b.State == heap.Unmapped || b.State == heap.Stale {
				continue
			}
			selected, has := p.sel.has(s, b), false
			for a := b.Addr; a < b.Addr+b.Size; {
				c := h.area.At(a)
				if c == 0 { // paused already
					a = a/granularity*granularity + granularity
					continue
				}
				has = true
				k := d.state.phys.mem.Chunk(c)
				if at.id != c {
					flush()
					at.id, at.first, at.stays, at.selected = c, id, false, 0
				}
				if selected {
					at.selected += min(b.Addr+b.Size, k.Addr+k.Size) - max(b.Addr, k.Addr)
				} else if b.State != heap.Free {
					at.stays = true
				}
				a = k.Addr + k.Size
			}
			if selected {
				p.heaps[s] = true
				if has {
					p.refuse(s, b, no)
				}
			}
		}
		flush()
	}
}

// pausedChunks is the memory of a paused range whose chunks were unmapped and released. Resuming makes others.
type pausedChunks struct {
	of     *chunkHeap
	chunks []phys.ChunkID // while it is mapped: in address order
}

// runs is its memory, piece by piece as it is made.
//
// +checklocks:c.of.s.dev.gpu.mu
func (c *pausedChunks) runs(a *pausedRange) (out []run) {
	at := a.addr
	for _, id := range c.chunks {
		n := c.of.s.dev.state.phys.mem.Chunk(id).Size
		out = append(out, run{at, n})
		at += n
	}
	return out
}

// +checklocks:c.of.s.dev.gpu.mu
func (c *pausedChunks) granules(a *pausedRange) uint64 {
	return a.size / c.of.s.dev.state.phys.upstream.Granularity()
}

// final is false: while the chunks are there, so are their contents.
func (c *pausedChunks) final() bool { return false }

// +checklocks:c.of.s.dev.gpu.mu
func (c *pausedChunks) unmap(a *pausedRange) error {
	return c.of.s.dev.state.phys.mem.Unmap(a.addr, c.chunks)
}

// +checklocks:c.of.s.dev.gpu.mu
func (c *pausedChunks) release() {
	mem := c.of.s.dev.state.phys.mem
	for _, id := range c.chunks {
		if mem.Chunk(id).Mappings == 0 { // else it is mapped elsewhere, too
			mem.Release(id) // giveBack tries again
		}
	}
}

// restore maps chunks again that were unmapped, new ones for those that were released, and reports whether there are any:
// they lack their contents. After an error nothing is mapped but what cannot be undone now.
//
// +checklocks:c.of.s.dev.gpu.mu
func (c *pausedChunks) restore(a *pausedRange) (renewed bool, err error) {
	s, d, at := c.of.s, c.of.s.dev, a.addr
	for _, id := range c.chunks {
		k := d.state.phys.mem.Chunk(id)
		if k.Released {
			e := event.Event{Kind: event.SegmentUnmap, Addr: at, Size: k.Size, Handle: uint64(k.Handle),
				Stream: s.stream.number(), Pool: s.pool.number}
			if err = d.state.phys.mem.Renew(id); err != nil {
				return renewed, err
			}
			renewed = true
			d.record(e)
			e.Kind, e.Handle = event.SegmentMap, uint64(k.Handle)
			d.record(e)
		}
		at += k.Size
	}
	return renewed, c.mapAgain(a)
}

// mapAgain maps the chunks. After an error nothing is mapped but what cannot be undone now.
//
// +checklocks:c.of.s.dev.gpu.mu
func (c *pausedChunks) mapAgain(a *pausedRange) error {
	mem := c.of.s.dev.state.phys.mem
	left, err := mem.Map(a.addr, c.chunks)
	mem.Defer(a.addr, left)
	return err
}

// dropAgain unmaps the chunks, or has that done later.
//
// +checklocks:c.of.s.dev.gpu.mu
func (c *pausedChunks) dropAgain(a *pausedRange) {
	d := c.of.s.dev
	if d.state.phys.offload.Unsure() || d.state.phys.mem.Unmap(a.addr, c.chunks) != nil { // while copies may be under way nothing is unmapped
		d.state.phys.mem.Defer(a.addr, c.chunks)
	}
}

// +checklocks:c.of.s.dev.gpu.mu
func (c *pausedChunks) gone(a *pausedRange) {
	c.of.area.Set(a.addr, a.size, 0)
	c.giveBack(a)
}

// giveBack releases the chunks of a paused range, which were unmapped; what cannot be released is spare.
//
// +checklocks:c.of.s.dev.gpu.mu
func (c *pausedChunks) giveBack(a *pausedRange) {
	s, d, addr := c.of.s, c.of.s.dev, a.addr
	for _, id := range c.chunks {
		k := d.state.phys.mem.Chunk(id)
		d.record(event.Event{Kind: event.SegmentUnmap, Addr: addr, Size: k.Size, Handle: uint64(k.Handle),
			Stream: s.stream.number(), Pool: s.pool.number})
		addr += k.Size
	}
	c.putBack(a)
}

// unmapEmpty makes an unmapped range of the granules in which the stale mapping [lo, lo+n) lies and no block does any more.
//
// +checklocks:c.of.s.dev.gpu.mu
func (c *pausedChunks) unmapEmpty(a *pausedRange, z heap.ID, lo, n uint64) {
	s, d := c.of.s, c.of.s.dev
	if s.pool.pinned {
		return
	}
	h, g := s.blocks, d.state.phys.upstream.Granularity()
	from, to := lo/g*g, (lo+n+g-1)/g*g
	for id := h.Prev(z); id != 0; id = h.Prev(id) {
		b := h.At(id)
		if b.Addr+b.Size <= from {
			break
		}
		if b.State != heap.Stale {
			from += g
			break
		}
	}
	for id := h.Next(z); id != 0; id = h.Next(id) {
		b := h.At(id)
		if b.Addr >= to {
			break
		}
		if b.State != heap.Stale {
			to -= g
			break
		}
	}
	if from >= to {
		return
	}
	for h.At(z).Addr > from {
		z = h.Prev(z)
	}
	h.ReapPart(z, from, to-from)
	var parts []*pausedRange
	if from > a.addr {
		parts = append(parts, c.part(a, a.addr, from))
	}
	if to < a.end() {
		parts = append(parts, c.part(a, to, a.end()))
	}
	s.paused.replace(a, parts...)
}

// part is a part of a paused range that has no memory, as one of its own.
func (c *pausedChunks) part(a *pausedRange, from, to uint64) *pausedRange {
	return &pausedRange{heap: a.heap, addr: from, size: to - from, mem: &pausedChunks{of: c.of}, live: a.live,
		contents: a.contents.Part(from, to)}
}

// cutUp replaces a paused range that has no memory by parts, of granules of the same kind each, and returns them with their
// kinds. Granules that no block lies in become unmapped ranges, except in pools of captured graphs.
//
// +checklocks:c.of.s.dev.gpu.mu
func (c *pausedChunks) cutUp(a *pausedRange, v *survey) (parts []*pausedRange, kinds []granuleKind) {
	s, g := a.heap, a.size/uint64(len(v.kinds))
	first := v.first
	for i := 0; i < len(v.kinds); {
		k := i
		for k < len(v.kinds) && v.kinds[k] == v.kinds[i] {
			k++
		}
		from, to := a.addr+uint64(i)*g, a.addr+uint64(k)*g
		switch {
		case v.kinds[i] != granuleFree || s.pool.pinned:
			x := a
			if from > a.addr || to < a.end() {
				x = c.part(a, from, to)
			}
			parts, kinds = append(parts, x), append(kinds, v.kinds[i])
		default:
			for b := s.blocks.At(first); b.Addr+b.Size <= from; b = s.blocks.At(first) {
				first = s.blocks.Next(first)
			}
			first = s.blocks.ReapPart(first, from, to-from)
		}
		i = k
	}
	s.paused.replace(a, parts...)
	return parts, kinds
}

// turn is the last: no lock is let go from then on.
func (c *pausedChunks) turn() int { return 2 }

// get makes chunks: fewer and larger ones than there may have been, as they cost by number.
//
// +checklocks:c.of.s.dev.gpu.mu
func (c *pausedChunks) get(a *pausedRange) error {
	s, d := c.of.s, c.of.s.dev
	for at := a.addr; at < a.end(); {
		id, err := d.state.phys.mem.Create(d.state.paused.resumeChunk(s.class, a.end()-at))
		if err != nil {
			return err
		}
		d.state.phys.counts.DeviceAllocs++
		d.state.phys.mem.Assign(at, s.index, s.class, id)
		c.chunks = append(c.chunks, id)
		at += d.state.phys.mem.Chunk(id).Size
	}
	return nil
}

// got lists the chunks at their addresses; they are mapped later.
//
// +checklocks:c.of.s.dev.gpu.mu
func (c *pausedChunks) got(a *pausedRange) {
	s, d, at := c.of.s, c.of.s.dev, a.addr
	a.bare = true
	for _, id := range c.chunks {
		k := d.state.phys.mem.Chunk(id)
		c.of.area.Set(at, k.Size, id)
		d.record(event.Event{Kind: event.SegmentMap, Addr: at, Size: k.Size, Handle: uint64(k.Handle),
			Stream: s.stream.number(), Pool: s.pool.number})
		at += k.Size
	}
}

func (c *pausedChunks) counted() bool { return true }

// +checklocks:c.of.s.dev.gpu.mu
func (c *pausedChunks) putBack(*pausedRange) {
	d := c.of.s.dev
	for _, id := range c.chunks {
		if d.state.phys.mem.GiveBack(id) {
			d.state.phys.counts.DeviceFrees++
		}
	}
	c.chunks = nil
}

// +checklocks:c.of.s.dev.gpu.mu
func (c *pausedChunks) pretend() {
	for _, id := range c.chunks {
		if k := c.of.s.dev.state.phys.mem.Chunk(id); k.Mappings == 0 {
			k.Mappings = 1
		}
	}
}

// undo does nothing: takenBack does all.
func (c *pausedChunks) undo(*pausedRange) {}

// +checklocks:c.of.s.dev.gpu.mu
func (c *pausedChunks) takenBack(a *pausedRange) {
	c.of.area.Set(a.addr, a.size, 0)
	if !a.bare {
		c.dropAgain(a)
	}
	c.giveBack(a)
}
