package engine

import (
	"errors"
	"fmt"
	"iter"
	"slices"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine/phys"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/views"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/internal/lockrank"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

// wholeSegments is the memory of a pool that gets segments, whole ranges of addresses with their memory, from a resource: one
// of the engine's own, which is driver calls, or a user's. A segment is got for a stream heap, cut into blocks there, and given
// back whole once it is free (segment.go). Nothing of it moves, and no other pool uses it. Such pools are for programs that
// need memory of one origin: from cuMemAlloc, with a single handle, or from a function of their own.
type wholeSegments struct {
	pool    *Pool
	from    resource.Resource
	about   resource.Traits
	name    string // upstreamName
	user    bool   // from is the user's: it is called with no lock held
	local   bool   // it takes the device's own memory
	counted bool   // and that is under the device's limit
	ranged  bool   // it is opened to peers range by range, as chunks are
	noSplit bool   // each block is a segment
	grain   uint64 // sizes of segments are multiples of it

	under  *Pool           // the pool that its segments are blocks of, nil: they are not
	own    resource.Closer // what the engine made to use from; nil: nothing
	peers  resource.Peers  // from, where that is to be opened to other devices; nil: it is not
	opened []cuda.Device   // +checklocks:pool.dev.gpu.mu
}

// segmentSources are the engine's own upstreams of segments on one device. Device.mu guards them.
type segmentSources struct {
	any    bool // a pool was made of segments
	nested bool // one gets them from another pool of the device
	plain  resource.Resource
	single *resource.SingleHandle
}

// newPlainSegments is memory from cuMemAlloc.
//
// +checklocks:p.dev.gpu.mu
func newPlainSegments(p *Pool, noSplit bool) *wholeSegments {
	d := p.dev
	if d.state.segments.sources.plain == nil {
		d.state.segments.sources.plain = resource.Device(d.drv, d.id)
	}
	d.state.segments.sources.any = true
	w := &wholeSegments{pool: p, from: d.state.segments.sources.plain, about: d.state.segments.sources.plain.Traits(), local: true, counted: true,
		noSplit: noSplit, grain: segmentUnit}
	if d.opts.Backend != config.BackendMalloc {
		w.name = w.about.Name
	}
	return w
}

// newSingleSegments is segments of one physical handle each.
//
// +checklocks:p.dev.gpu.mu
func newSingleSegments(p *Pool, noSplit bool) (*wholeSegments, error) {
	d := p.dev
	if err := d.state.phys.virtual(); err != nil {
		return nil, err
	}
	if d.state.segments.sources.single == nil {
		d.state.segments.sources.single = resource.Single(d.drv, d.state.phys.prop, max(d.info.Granularity, segmentUnit), d.state.phys.mem.Access.Set)
	}
	d.state.segments.sources.any = true
	w := &wholeSegments{pool: p, from: d.state.segments.sources.single, about: d.state.segments.sources.single.Traits(), local: true, counted: true, ranged: true,
		noSplit: noSplit, grain: max(segmentUnit, d.info.Granularity)}
	if d.opts.Backend == config.BackendMalloc || !d.opts.SingleHandle {
		w.name = w.about.Name
	}
	return w, nil
}

// newUserSegments is memory from a resource that the pool was given.
//
// +checklocks:p.dev.gpu.mu
func newUserSegments(p *Pool, noSplit bool, u upstream) *wholeSegments {
	d := p.dev
	w := &wholeSegments{pool: p, from: u.from, about: u.traits, name: u.traits.Name, user: true,
		local: u.traits.OnDevice && u.traits.Device == d.id, noSplit: noSplit, grain: max(segmentUnit, u.traits.Align),
		under: u.under, own: u.own}
	nested := u.under != nil && u.under.dev == d // where its memory is counted, and opened as all of the device's
	w.counted = w.local && !nested
	if !nested {
		w.peers, _ = resource.As[resource.Peers](u.from)
	}
	d.state.segments.sources.any, d.state.segments.sources.nested = true, d.state.segments.sources.nested || nested
	return w
}

func (w *wholeSegments) traits() resource.Traits { return w.about }

func (w *wholeSegments) onDevice() bool { return w.local }

func (w *wholeSegments) upstreamName() string { return w.name }

func (w *wholeSegments) memInfo() (free, total uint64, err error) { return w.from.MemInfo() }

func (w *wholeSegments) unit() uint64 {
	if w.noSplit {
		return w.grain
	}
	return heap.Align
}

// alignSlack is none where blocks are segments, which are aligned of themselves.
func (w *wholeSegments) alignSlack(align uint64) uint64 {
	if w.noSplit {
		return 0
	}
	return align - heap.Align
}

func (w *wholeSegments) sizes(n uint64) (usual, least uint64) {
	if w.noSplit {
		return n, wholeUnits(n, w.grain)
	}
	return segmentSize(n, w.grain), wholeUnits(n, w.grain)
}

// segmentSize is the size of the segment that a request of n bytes is cut from: PyTorch's sizes, in the upstream's units.
func segmentSize(n, unit uint64) uint64 {
	if n > smallMax && n < 10<<20 {
		n = 20 << 20
	}
	return wholeUnits(n, unit)
}

func wholeUnits(n, unit uint64) uint64 { return (n + unit - 1) &^ (unit - 1) }

func (w *wholeSegments) over(o *Pool) bool { return w.under == o }

func (w *wholeSegments) newHeap(s *streamHeap) heapBacking {
	if w.noSplit {
		s.blocks.Fit.KeepWhole()
	}
	return &segmentHeap{s, w}
}

// +checklocks:w.pool.dev.gpu.mu
func (w *wholeSegments) openToPeers() error {
	d := w.pool.dev
	for {
		i := slices.IndexFunc(d.state.phys.mem.Access.Devices()[1:], func(x cuda.Device) bool { return !slices.Contains(w.opened, x) })
		if i < 0 || w.peers == nil {
			return nil
		}
		if err := w.openTo(d.state.phys.mem.Access.Devices()[1+i]); err != nil {
			return err
		}
	}
}

// openTo opens the memory to one peer, likewise. That the peer is broken is no reason to do without memory here.
//
// +checklocks:w.pool.dev.gpu.mu
func (w *wholeSegments) openTo(peer cuda.Device) error {
	if w.peers == nil || slices.Contains(w.opened, peer) {
		return nil
	}
	err := w.unlocked(func() error { return w.peers.EnablePeer(peer) })
	if code, ok := codeOf(err); ok && (code.Poisons() || code == cuda.ErrPeerAccessAlreadyEnabled) {
		err = nil
	}
	if err == nil && !slices.Contains(w.opened, peer) {
		w.opened = append(w.opened, peer)
	}
	return err
}

// ended gives the free segments back, which no other pool can use.
//
// +checklocks:w.pool.dev.gpu.mu
func (w *wholeSegments) ended() error {
	d, p := w.pool.dev, w.pool.owner()
	_, err := d.state.segments.release(func(x *Pool) bool { return x.owner() == p }, true)
	d.state.endings.sweep()
	d.state.phys.rebalanceAll(nil, nil)
	return err
}

// +checklocks:w.pool.dev.gpu.mu
func (w *wholeSegments) closeOwn() {
	if w.own != nil {
		d := w.pool.dev
		d.state.pools.unused, w.own = append(d.state.pools.unused, w.own), nil
	}
}

// giveBackOwn does nothing: releaseSegments, the step before, has.
func (w *wholeSegments) giveBackOwn(*reclaimer) (bool, error) { return false, nil }

func (w *wholeSegments) explain(f *views.Failure) { f.Segmented = true }

// unlocked calls a user's resource with Device.mu let go.
//
// +checklocks:w.pool.dev.gpu.mu
func (w *wholeSegments) unlocked(f func() error) error {
	d := w.pool.dev
	d.mu.Unlock()
	defer d.mu.Lock()
	lockrank.MayCall()
	return f()
}

// call asks the upstream for something; a user's with Device.mu let go.
//
// +checklocks:w.pool.dev.gpu.mu
func (w *wholeSegments) call(f func() error) error {
	if w.user {
		return w.failed(w.unlocked(f))
	}
	return w.failed(f())
}

// failed keeps an error of the upstream that breaks the device's context.
func (w *wholeSegments) failed(err error) error {
	d := w.pool.dev
	if err == nil {
		return nil
	}
	if !w.user {
		return d.health.Failed(err)
	}
	var e *cuda.Error
	if errors.As(err, &e) && e.Device == d.id {
		d.health.Failed(err)
	}
	return err
}

// align is what the upstream is asked to align segments to: what blocks have, as far as the upstream promises it.
func (w *wholeSegments) align(want uint64) uint64 {
	if want <= heap.Align && w.about.Align < heap.Align {
		return 0 // it may give more than it promises
	}
	return max(heap.Align, want)
}

// segmentHeap is what a stream heap of such a pool has.
type segmentHeap struct {
	s *streamHeap
	w *wholeSegments
}

// supply gets a new segment.
//
// +checklocks:c.d.gpu.mu
func (h *segmentHeap) supply(c *request) (heap.ID, error) {
	if c.steps.allowed&memory.StageGrow != 0 {
		if id, err := h.grow(c); id != 0 || err != nil {
			return id, err
		}
	}
	if id, err := c.collectForced(); id != 0 || err != nil {
		return id, err
	}
	return c.elsewhere()
}

// grow gets a segment, where no limit is in the way.
//
// +checklocks:c.d.gpu.mu
func (h *segmentHeap) grow(c *request) (heap.ID, error) {
	d, p := c.d, h.s.pool
	grow := c.steps.log.try(memory.StageGrow)
	grow.stop, c.steps.short = stopNot, 0
	size, least := h.w.sizes(c.n)
	if c.tight || !p.mayHold(size) {
		size = least // with nothing for later requests
		if !p.mayHold(size) {
			c.steps.scope.limit = p
		}
	}
	switch {
	case c.steps.scope.limit != nil:
		grow.stop = stopPoolLimit
		return 0, nil
	case h.w.counted && !d.state.phys.quota.MayHold(size):
		grow.stop = stopLimit
		return 0, nil
	}
	c.steps.log.start()
	ptr, err := h.get(c, size)
	switch {
	case err == nil:
		c.steps.log.lap(memory.StageGrow, size)
		h.add(c, ptr, size)
		c.met = memory.StageGrow
	case isOutOfMemory(err):
		c.steps.log.lap(memory.StageGrow, 0)
		c.steps.log.oom, grow.err = err, err
		if h.w.counted && (!h.w.user || !d.state.phys.has(size)) { // else others' memory is of no use: the device is not what ran out
			c.steps.short = size
		}
	default:
		return 0, err
	}
	return c.take(h.s) // also after an error: meanwhile others may have given memory back
}

// get gets a segment and claims its addresses. A user's upstream is called with all locks let go.
//
// +checklocksignore: both locks are let go where the upstream is a user's
func (h *segmentHeap) get(c *request, size uint64) (cuda.Ptr, error) {
	d, s, p, w := c.d, h.s, h.s.pool, h.w
	if w.user {
		if w.counted {
			d.state.phys.quota.InFlight += size
		}
		p.inFlight += size
		s.arena.Unlock()
		d.mu.Unlock()
		defer func() {
			d.mu.Lock()
			s.arena.Lock()
			p.inFlight -= size
			if w.counted {
				d.state.phys.quota.InFlight -= size
			}
		}()
		lockrank.MayCall()
	}
	align := w.align(c.align)
	ptr, err := w.from.Alloc(size, align, s.stream.Handle())
	if err != nil {
		w.failed(err)
		return 0, err
	}
	switch {
	case ptr == 0:
		return 0, cuda.ErrOutOfMemory
	case uint64(ptr)%max(heap.Align, align) != 0:
		err = fmt.Errorf("pool {%d, %d}: its upstream returned %#x, which is not aligned to %d bytes", p.id[0], p.id[1],
			uint64(ptr), max(heap.Align, align))
	default:
		err = d.a.claim(uint64(ptr), size, s)
	}
	if err != nil {
		return 0, errors.Join(err, w.from.Free(ptr, size, align, s.stream.Handle()))
	}
	return ptr, nil
}

// add makes a segment free memory of the stream heap.
//
// +checklocks:c.d.gpu.mu
func (h *segmentHeap) add(c *request, ptr cuda.Ptr, size uint64) {
	d, s := c.d, h.s
	d.state.phys.mem.Ranges.Add(phys.Range{Base: uint64(ptr), Size: size, Owner: s.index, Serial: d.state.phys.mem.NewSerial(), Align: h.w.align(c.align)})
	d.state.phys.got(size, h.w.counted)
	d.state.phys.quota.Physical[quota.GroupOf(s.class)].Add(size)
	s.gain(size)
	d.recordSegment(s, uint64(ptr), size, true, c.by)
	block := s.blocks.Map(s.blocks.AddRange(uint64(ptr), size), uint64(ptr), size, 0)
	if at := (run{uint64(ptr), size}); d.state.observers.onMap != nil {
		c.publish(block, at, 0, []run{at})
	} else {
		s.gauges.SetFree(s.blocks.FreeBlocks, int64(size))
	}
}

// free gives a segment back; Device.mu is let go while a user's upstream is called.
//
// +checklocks:h.s.dev.gpu.mu
func (h *segmentHeap) free(base, size uint64) error {
	s := h.s
	align := s.dev.state.phys.mem.Ranges.Of(s.index, base).Align
	return h.w.call(func() error { return h.w.from.Free(cuda.Ptr(base), size, align, s.stream.Handle()) })
}

// wantsChunks: chunks that go back to the driver make room for segments.
func (h *segmentHeap) wantsChunks(bool) bool { return h.w.local && h.s.dev.state.phys.hasChunks() }

// +checklocks:h.s.dev.gpu.mu
func (h *segmentHeap) freeChunks(only *Pool, need uint64) (bool, error) {
	return h.s.dev.state.mover.releaseChunks(only, need)
}

// freeAddresses gives back addresses that chunks were mapped at, which a segment may lack.
//
// +checklocks:h.s.dev.gpu.mu
func (h *segmentHeap) freeAddresses() bool {
	if !h.w.local {
		return false
	}
	h.s.arena.Lock()
	defer h.s.arena.Unlock()
	return h.s.dev.state.mover.reclaim(h.s)
}

// usable: both kinds of memory can go back to the driver.
//
// +checklocks:h.s.dev.gpu.mu
func (h *segmentHeap) usable() iter.Seq[*streamHeap] {
	d := h.s.dev
	return func(yield func(*streamHeap) bool) {
		for _, o := range d.state.pools.heaps {
			if o != nil && !yield(o) {
				return
			}
		}
	}
}

// detach does nothing: segments go back whole, by releaseSegments.
func (h *segmentHeap) detach(uint64) uint64 { return 0 }

// dropRanges does nothing: addresses go with their segments.
func (h *segmentHeap) dropRanges() error { return nil }

func (h *segmentHeap) succeed(n *streamHeap) heapBacking { return &segmentHeap{n, h.w} }

// +checklocks:h.s.dev.gpu.mu
func (h *segmentHeap) recordInherited(from *streamHeap, addr, size uint64) {
	h.s.dev.recordSegment(from, addr, size, false, origin{})
	h.s.dev.recordSegment(h.s, addr, size, true, origin{})
}

// mapped lists segments that are on their way out as well: they come back if that fails.
//
// +checklocks:h.s.dev.gpu.mu
func (h *segmentHeap) mapped() []run {
	if !h.w.ranged {
		return nil
	}
	return h.s.runs(func(b *heap.Block) bool { return b.State != heap.Unmapped })
}

func (h *segmentHeap) segmentAt(_ cuda.Ptr, base, size uint64) (cuda.Ptr, uint64, error) {
	return cuda.Ptr(base), size, nil
}

// export names the segment that the block lies in: its handle, what it is called in its pool, or the one that cuMemAlloc's memory has
// for others.
//
// +checklocks:e.heap.dev.gpu.mu
func (h *segmentHeap) export(e *Export, _, _ uint64) error {
	d := e.heap.dev
	r, ok := d.state.phys.mem.Ranges.At(uint64(e.Ptr))
	if !ok {
		return &memory.PointerError{Op: "share", Ptr: e.Ptr}
	}
	e.Shared.Offset = uint64(e.Ptr) - r.Base
	if single, ok := resource.As[*resource.SingleHandle](h.w.from); ok && h.w.local {
		if x := single.Handle(cuda.Ptr(r.Base)); x != 0 {
			e.chunk(x, r.Size, r.Serial)
			return e.nameable(h.w.about.Handles)
		}
	}
	if pool, ok := resource.As[*resource.AsyncPool](h.w.from); ok {
		if pool.Traits().Handles&cuda.HandlePosix == 0 {
			return fmt.Errorf("share %#x: its memory is of a stream-ordered pool that was not made with handles=posix: %w",
				uint64(e.Ptr), cuda.ErrNotSupported)
		}
		name, err := d.drv.MemPoolExportPtr(d.id, cuda.Ptr(r.Base))
		if err != nil {
			return fmt.Errorf("share %#x: %w", uint64(e.Ptr), d.health.Failed(err))
		}
		e.chunk(0, r.Size, r.Serial)
		e.pool, e.Shared.Pool = pool.Pool(), name
		return nil
	}
	ipc, err := d.drv.IpcExport(d.id, cuda.Ptr(r.Base))
	if err != nil {
		return fmt.Errorf("share %#x: its memory was not allocated for sharing: %w", uint64(e.Ptr), d.health.Failed(err))
	}
	e.Shared.IPC = ipc
	return nil
}

func (h *segmentHeap) addChunks([]memory.Segment) {}

// choosePaused finds the segments in which something selected lies and nothing else is in use.
//
// +checklocks:p.d.gpu.mu
func (h *segmentHeap) choosePaused(p *pause, no *refusal) {
	s := h.s
	for _, first := range s.blocks.Ranges() {
		x := leaving{heap: s, addr: s.blocks.At(first).Addr, first: first}
		stays, selected := s.paused.over(x.addr) != nil, uint64(0)
		for id := first; id != 0; id = s.blocks.Next(id) {
			b := s.blocks.At(id)
			x.size += b.Size
			switch {
			case p.sel.has(s, b):
				p.heaps[s] = true
				selected += b.Size
			case b.State == heap.Stale:
				stays = true // it is on its way out, or paused
			case b.State != heap.Free:
				stays = true
			}
		}
		if s.paused.over(x.addr) != nil || selected == 0 {
			continue
		}
		name := h.w.about.Name
		res, ok := resource.As[resource.Backing](h.w.from)
		for id := first; id != 0; id = s.blocks.Next(id) {
			b := s.blocks.At(id)
			if !p.sel.has(s, b) {
				continue
			}
			switch { // first what no option allows
			case h.w.about.Registered:
				no.add(b, "pause: memory of pool {%d, %d} (%s) is registered for communication", s.pool.id[0], s.pool.id[1], name)
			case !ok:
				no.add(b, "pause: pool {%d, %d} has memory of %q, which cannot go and leave its addresses", s.pool.id[0], s.pool.id[1], name)
			}
			p.refuse(s, b, no)
		}
		if stays {
			p.report.Shared += selected
			continue
		}
		x.mem = &pausedSegment{h, res}
		p.found = append(p.found, x)
	}
}

// pausedSegment is the memory of a paused range that is a segment, which keeps its addresses.
type pausedSegment struct {
	of  *segmentHeap
	res resource.Backing
}

func (x *pausedSegment) runs(a *pausedRange) []run { return []run{{a.addr, a.size}} }

func (x *pausedSegment) granules(*pausedRange) uint64 { return 1 }

// final is true: the memory cannot be got again as it was.
func (x *pausedSegment) final() bool { return true }

// unmap drops the memory; a user's resource is called with Device.mu let go.
//
// +checklocks:x.of.s.dev.gpu.mu
func (x *pausedSegment) unmap(a *pausedRange) error {
	return x.of.w.call(func() error { return x.res.Unback(cuda.Ptr(a.addr), a.size) })
}

func (x *pausedSegment) release() {}

// restore gets memory again, which lacks its contents; a user's resource is called with Device.mu let go.
//
// +checklocks:x.of.s.dev.gpu.mu
func (x *pausedSegment) restore(a *pausedRange) (renewed bool, err error) {
	return true, x.of.w.call(func() error { return x.res.Back(cuda.Ptr(a.addr), a.size) })
}

func (x *pausedSegment) mapAgain(*pausedRange) error { return nil }

// dropAgain drops the memory. While copies may be under way, or where that fails, it stays and is there on resume.
//
// +checklocks:x.of.s.dev.gpu.mu
func (x *pausedSegment) dropAgain(a *pausedRange) {
	if !x.of.s.dev.state.phys.offload.Unsure() && x.unmap(a) != nil {
		x.unmap(a) // once more
	}
}

// +checklocks:x.of.s.dev.gpu.mu
func (x *pausedSegment) gone(a *pausedRange) { x.takenBack(a) }

// unmapEmpty does nothing: releaseEmpty gives segments back.
func (x *pausedSegment) unmapEmpty(*pausedRange, heap.ID, uint64, uint64) {}

func (x *pausedSegment) cutUp(a *pausedRange, v *survey) ([]*pausedRange, []granuleKind) {
	return []*pausedRange{a}, v.kinds
}

// turn: users' first, as the locks are let go meanwhile.
func (x *pausedSegment) turn() int {
	if x.of.w.user {
		return 0
	}
	return 1
}

// +checklocks:x.of.s.dev.gpu.mu
func (x *pausedSegment) get(a *pausedRange) error {
	_, err := x.restore(a)
	a.lost = err == nil // it has memory that is not counted
	return err
}

// +checklocks:x.of.s.dev.gpu.mu
func (x *pausedSegment) got(a *pausedRange) {
	s, d := x.of.s, x.of.s.dev
	a.bare = false
	d.state.phys.got(a.size, x.of.w.counted)
	d.state.phys.quota.Physical[quota.GroupOf(s.class)].Add(a.size)
	d.record(event.Event{Kind: event.SegmentMap, Addr: a.addr, Size: a.size, Stream: s.stream.number(), Pool: s.pool.number})
}

func (x *pausedSegment) counted() bool { return x.of.w.counted }

// +checklocks:x.of.s.dev.gpu.mu
func (x *pausedSegment) putBack(a *pausedRange) {
	if a.lost && x.unmap(a) != nil {
		x.unmap(a) // once more: what stays is there when it is resumed
	}
	a.lost = false
}

func (x *pausedSegment) pretend() {}

// +checklocks:x.of.s.dev.gpu.mu
func (x *pausedSegment) undo(a *pausedRange) { x.dropAgain(a) }

// +checklocks:x.of.s.dev.gpu.mu
func (x *pausedSegment) takenBack(a *pausedRange) {
	s, d := x.of.s, x.of.s.dev
	d.state.phys.quota.Physical[quota.GroupOf(s.class)].Remove(a.size)
	d.state.phys.gaveBack(a.size, x.of.w.counted)
	d.record(event.Event{Kind: event.SegmentUnmap, Addr: a.addr, Size: a.size, Stream: s.stream.number(), Pool: s.pool.number})
}
