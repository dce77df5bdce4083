package engine

import (
	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/internal/engine/arena"
	"github.com/cistern-gpu/cistern/internal/engine/phys"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/memory"
)

// The choice among spare chunks and those that lie free elsewhere.

// planner holds what one move is made of; its slices are reused.
type planner struct {
	found   []source
	sources []source
	chunks  []phys.ChunkID // of the sources
	held    []*arena.Arena // locked since their chunks were found free, until they have moved
	narrow  bool           // a free chunk was left that is larger than the room for it
}

// hold locks the arena of o until letGo, unless that is held's, whose lock the caller has, or held already.
func (p *planner) hold(o, held *streamHeap) {
	if held.in(o.arena) || o.arena.Planned {
		return
	}
	o.arena.Lock()
	o.arena.Planned = true
	p.held = append(p.held, o.arena)
}

func (p *planner) letGo() {
	for _, l := range p.held {
		l.Planned = false
		l.Unlock()
	}
	p.held = p.held[:0]
}

// source is a chunk that is available.
type source struct {
	chunk phys.ChunkID
	size  uint64
	from  uint64     // where it was mapped, once it has left
	heap  *chunkHeap // where it is mapped and free; nil for a spare or new chunk
	block heap.ID    // the free block it lies in
	run   uint64     // size of that block
	stamp uint64     // epoch of its last free on its stream
	// stream used it last; nil for new memory
	stream *Stream
}

// gather chooses free chunks to move, at most what is needed or little more, and returns their bytes: spare chunks first, then
// those of the request's stream heap, of its stream, of its pool, and of other pools.
//
// +checklocks:m.c.d.gpu.mu
func (m *chunkRequest) gather(at place, stages memory.Stages, pressure bool) (have uint64) {
	c, d, s := m.c, m.c.d, m.h.s
	p, over := &d.state.policy.plan, d.state.policy.overshoot(s.class, pressure)
	pick := func() (enough bool) {
		have = p.pick(at.need, at.room, have, over)
		p.found = p.found[:0]
		return have >= at.need
	}
	heaps := func(wanted func(*streamHeap) bool) (enough bool) {
		for o := range d.state.pools.chunkHeaps() {
			if wanted(o.s) {
				o.offers(c, 0)
			}
		}
		return pick()
	}
	p.found = p.found[:0]
	if d.state.mover.offerSpares(c); pick() {
		return have
	}
	before := have
	if stages&memory.StageRemap != 0 {
		if !s.pool.pinned {
			if m.h.offers(c, at.joins); pick() ||
				heaps(func(o *streamHeap) bool { return o != s && o.pool == s.pool && o.stream == s.stream }) ||
				heaps(func(o *streamHeap) bool { return o.pool == s.pool && o.stream != s.stream }) {
				return have
			}
		}
		c.steps.log.found(memory.StageRemap, have-before)
	}
	before = have
	if stages&memory.StageLend != 0 {
		heaps(func(o *streamHeap) bool { return o.pool != s.pool })
		c.steps.log.found(memory.StageLend, have-before)
	}
	return have
}

// offerSpares lists the spare chunks.
//
// +checklocks:mv.gpu.mu
func (mv *mover) offerSpares(c *request) {
	for _, id := range mv.phys.mem.Spares() {
		k := mv.phys.mem.Chunk(id)
		if k.Mappings > 0 && mv.observers.onUnmap != nil {
			continue
		}
		var t *Stream
		if k.Stream >= 0 {
			t = mv.streams.all[k.Stream]
		}
		if mv.policy.orderable(c, t, k.Stamp) {
			mv.policy.plan.found = append(mv.policy.plan.found, source{chunk: id, size: k.Size, stamp: k.Stamp, stream: t})
		}
	}
}

// offers lists the wholly free chunks of a stream heap, except those of one block.
//
// +checklocks:c.d.gpu.mu
func (h *chunkHeap) offers(c *request, except heap.ID) {
	d, o := c.d, h.s
	if o.pool.pinned || o.held == 0 {
		return
	}
	// Held until the move is done: once it were let go, another thread could be handed what was found free.
	d.state.policy.plan.hold(o, c.s)
	p := &d.state.policy.plan
	o.blocks.FreeBins.Each(d.state.phys.upstream.Granularity(), func(id heap.ID, b *heap.Block) bool {
		if id == except || !d.state.policy.orderable(c, o.stream, b.Stamp) {
			return true
		}
		h.area.Whole(d.state.phys.mem, b.Addr, b.Size, func(k phys.ChunkID, ch *phys.Chunk) bool {
			p.found = append(p.found, source{chunk: k, size: ch.Size, heap: h, block: id, run: b.Size, stamp: b.Stamp, stream: o.stream})
			return true
		})
		return true
	})
}

// orderable reports whether memory last used on a stream, until the epoch, may be used by the request's stream: by
// stream order, by host order, or by an event that the options allow to wait for. A capture gets host order only.
func (po *policy) orderable(c *request, t *Stream, epoch uint64) bool {
	to := c.s.stream
	if t == nil || t == to && to.timeline.Capture() == 0 && c.order != doneOnly {
		return true
	}
	if t.timeline.IsOver(epoch) {
		return true
	}
	if epoch >= t.timeline.Epoch() && (po.gpu.opts.CrossStream == config.CrossStreamReady || to.timeline.Capture() != 0 || c.alone) && t.timeline.CloseLate() == nil && t.timeline.IsOver(epoch) {
		return true // an epoch that is not closed is never seen to be over
	}
	if t.timeline.Capture() != 0 || to.timeline.Capture() != 0 || t.timeline.Queue.PerThread() || to.timeline.Queue.PerThread() || c.alone {
		return false
	}
	return po.gpu.opts.CrossStream == config.CrossStreamWait
}

// pick adds sources from found, the largest first, until there are need bytes: handles cost by number, not by size. Of
// equal chunks those in smaller free blocks go first, which leaves large blocks whole. A last chunk may be larger
// than what is missing by up to over bytes if there is room.
func (p *planner) pick(need, room, have, over uint64) uint64 {
	if have >= need {
		return have
	}
	f := p.found
	for i := len(f)/2 - 1; i >= 0; i-- {
		sink(f, i)
	}
	before := have
	larger := source{} // the smallest chunk so far that is larger than what is missing; size 0 is none
	tail := -1         // where in sources the chunks smaller than that begin
	for len(f) > 0 && have < need {
		x := f[0]
		f[0] = f[len(f)-1]
		f = f[:len(f)-1]
		sink(f, 0)
		if x.size > need-have {
			larger, tail = x, len(p.sources)
			before = have
			continue
		}
		p.sources = append(p.sources, x)
		have += x.size
	}
	if larger.size == 0 || have >= need && len(p.sources)-tail <= 1 {
		return have
	}
	// One chunk that is larger than what is missing at that point, in place of several smaller ones or of none at all.
	if before+larger.size > room {
		p.narrow = true
	} else if before+larger.size-need <= over {
		p.sources = append(p.sources[:tail], larger)
		have = before + larger.size
	}
	return have
}

// before is the order in which pick takes sources.
func (a *source) before(b *source) bool {
	if a.size != b.size {
		return a.size > b.size
	}
	if a.run != b.run {
		return a.run < b.run
	}
	return a.chunk < b.chunk
}

// sink restores a binary heap below i. Few of many sources are taken, so they are not sorted.
func sink(f []source, i int) {
	if i >= len(f) {
		return
	}
	x, at := f[i], i
	for c := 2*i + 1; c < len(f); c = 2*at + 1 {
		if c+1 < len(f) && f[c+1].before(&f[c]) {
			c++
		}
		if !f[c].before(&x) {
			break
		}
		f[at] = f[c]
		at = c
	}
	if at != i {
		f[at] = x
	}
}
