package cistern

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/heap"
)

// allocSlow meets a request that the hot path could not, rung by rung. See Rungs for the order.
func (p *Pool) allocSlow(size, n uint64, st *Stream, by origin) (cuda.Ptr, error) {
	c := climb{n: n, size: size, by: by}
	return p.request(&c, st)
}

// request has a request climb the ladder.
func (p *Pool) request(c *climb, st *Stream) (cuda.Ptr, error) {
	d := p.dev
	if err := d.health.Broken(); err != nil {
		return 0, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.a.turns.Next()
	c.d, c.rungs = d, d.opts.Ladder|RungFit
	if c.size > maxRequest {
		c.try(RungFit)
		return 0, c.fail(p, st)
	}
	if d.dissolving {
		if d.segmented {
			d.releaseSegments(func(x *Pool) bool { return x.released }, false)
		}
		d.sweep()
	}
	if d.onUnmap != nil && d.zombies.Len() > 0 {
		d.unmapReady() // of pools that ended, or from before anybody wanted to know
	}
	if p.spaceFor(st, d.classOf(c.n)) == nil {
		d.retire()
	}
	ptr, err := c.climb(p, st)
	if ptr == 0 && err == nil && p.spill != nil && c.rungs&RungSpill != 0 {
		ptr, err = c.spill(p, st)
	}
	if ptr == 0 && err == nil {
		err = c.fail(p, st)
	}
	return ptr, err
}

// climb takes the rungs up to, and without, the last. It returns null and no error where there is no memory. The caller
// holds Device.mu and nothing else; it is let go meanwhile.
//
// +checklocks:c.d.mu
func (c *climb) climb(p *Pool, st *Stream) (cuda.Ptr, error) {
	d := c.d
	s, err := p.space(st, d.classOf(c.n))
	if err != nil {
		return 0, err
	}
	c.s = s
	s.climbs++
	s.mu.Lock()
	defer func() {
		if c.strict {
			d.regain(s, nil)
		}
		s.climbs--
		s.mu.Unlock()
	}()
	for {
		c.oom = nil
		if err := p.sort(st); err != nil {
			return 0, err
		}
		if c.host && s.capture != 0 {
			return 0, fmt.Errorf("memory in the host's order for stream %d: %w", st.ID().ID, timeline.ErrCapturing)
		}
		id, err := c.run()
		if id != 0 {
			return d.handOut(c, id), nil
		}
		again := false
		if err == nil {
			// Nothing is left but what waits, what other streams have free between live blocks, and what calls out.
			again, err = c.unlocked()
		}
		if err == nil && !again {
			if id, err = c.borrow(); id != 0 {
				return d.handOut(c, id), nil
			}
		}
		if err == nil && !again {
			again = c.callOut()
		}
		if err == nil && again {
			continue
		}
		d.rebalanceAll(s, nil)
		if err == nil {
			// What was got for the request, and is of no use to it now, may serve other processes.
			if any, _ := d.releaseSpares(); any {
				d.rebalanceAll(s, nil)
			}
		}
		return 0, err
	}
}

// fail ends the ladder. The caller holds Device.mu and nothing else.
//
// +checklocks:c.d.mu
func (c *climb) fail(p *Pool, st *Stream) error {
	d := c.d
	d.counts.OOMs++
	err := d.outOfMemory(p, c)
	err.Stream, err.Handle = st.ID(), st.Handle()
	d.enlist(st)
	d.record(event.Event{Kind: event.OOM, Addr: err.DriverHas, Size: c.n, Stream: st.number(), Pool: p.number,
		Tag: uint16(c.by.label), Library: libraryOf(c.by.label), Stack: c.by.stack, Thread: c.by.thread})
	return err
}

// climb is one request on the ladder.
type climb struct {
	ladder
	s       *space
	n       uint64 // rounded bytes, and what the alignment may take beyond
	size    uint64 // bytes asked for
	align   uint64 // 0: as every block is
	by      origin
	host    bool // in the host's order: waits is to be waited for before the block is used
	strict  bool // and the stream cannot be waited for: only what the GPU is known to be done with will do
	waits   timeline.Waits
	rungs   Rungs // those that are allowed
	oom     error // what the upstream said, nil when the limit was in the way
	trimmed bool  // memory was given back for it
	room    int   // steps of makeRoom that were taken
	asked   bool  // the pool's own function was
	called  bool  // others' functions were
	spilled bool  // it is met from the pool's spill
	waited  bool
	told    waiter // for others who are telling of memory
	alone   bool   // no other stream can be waited for
	tight   bool   // a segment of just the size will do
	full    bool   // the pool's own limit is in the way
	emptied bool   // what the pool has free was given back for that
	met     Rungs  // the rung that met the request
	from    *space // the space the block is in: s, or under pressure another of the same pool and stream
}

// run goes up the rungs that need no lock to be let go. It returns a block, or an error that is not out of memory, or
// neither. The caller holds Device.mu and the space's lock.
//
// +checklocks:c.d.mu
func (c *climb) run() (heap.ID, error) {
	d, s := c.d, c.s
	c.from = s
	c.full = false
	c.waits = c.waits[:0]
	c.pass++
	c.try(RungFit)
	c.collect(false)
	if len(d.heldBack) > 0 {
		d.regain(s, nil)
	}
	if c.host {
		if err := c.mustWait(); err != nil {
			return 0, err
		}
	}
	if id, err := c.take(s); id != 0 || err != nil {
		c.met = RungFit
		return id, err
	}
	d.reap(s)
	if s.pool.segments != nil {
		return c.growSegment()
	}
	// First without robbing other pools; then with.
	id, err := c.obtain(c.rungs&(RungRemap|RungGrow), false)
	if id != 0 || err != nil {
		return id, err
	}
	if !c.host && c.collect(true) {
		if id, err := c.take(s); id != 0 || err != nil {
			c.met = RungCollect
			return id, err
		}
	}
	if id, err = c.obtain(c.rungs&(RungRemap|RungGrow|RungLend), true); id != 0 || err != nil {
		return id, err
	}
	return c.elsewhere()
}

// collect completes frees that waited for other streams, if there are any, and reports whether any was completed.
//
// +checklocks:c.d.mu
func (c *climb) collect(force bool) bool {
	d := c.d
	if !d.health.Waiting() || c.rungs&RungCollect == 0 {
		return false
	}
	c.try(RungCollect)
	c.start()
	before := d.collected
	any := d.collect(c.s, force)
	c.lap(RungCollect, d.collected-before)
	return any
}

// elsewhere looks for a free block in the other size classes of the same pool and stream: what a class keeps to itself
// is no reason to fail.
//
// +checklocks:c.d.mu
func (c *climb) elsewhere() (heap.ID, error) {
	if c.rungs&RungLend == 0 {
		return 0, nil
	}
	c.try(RungLend)
	for class := range quota.NumClasses {
		o := c.s.pool.spaceFor(c.s.stream, class)
		if o == nil || o == c.s {
			continue
		}
		if id, err := c.take(o); id != 0 || err != nil { // the lane is ours
			c.met, c.from = RungLend, o
			return id, err
		}
	}
	return 0, nil
}

// take hands out a free block of a space of the request's lane, if one fits.
//
// +checklocks:c.d.mu
func (c *climb) take(s *space) (heap.ID, error) {
	if c.host || c.align != 0 {
		return c.choose(s)
	}
	return s.heap.Take(c.n, c.size), nil
}

// choose hands out a free block of a space of the request's lane, or a part of it that is aligned as the request wants. In the
// host's order it is of those whose last use is known best; of these the smallest that fits. The caller holds Device.mu
// and the lane's lock.
//
// +checklocks:c.d.mu
func (c *climb) choose(s *space) (heap.ID, error) {
	t, n := s.stream, s.pool.round(c.size)
	from := func(b *heap.Block) uint64 { return (b.Addr + max(c.align, 1) - 1) &^ (max(c.align, 1) - 1) }
	best, rank, size := heap.ID(0), timeline.Done, uint64(0)
	s.heap.EachFree(n, func(id heap.ID, b *heap.Block) bool {
		at := from(b)
		if at+n > b.Addr+b.Size || s.heap.Whole() && (b.Size != n || at != b.Addr) {
			return true
		}
		k := timeline.Done
		if c.host {
			k = t.timeline.Progress(b.Stamp)
		}
		if best == 0 || k < rank || k == rank && b.Size < size {
			best, rank, size = id, k, b.Size
		}
		return true
	})
	if best == 0 {
		return 0, nil
	}
	if rank == timeline.Running {
		t.timeline.SetEager()
	}
	if stamp := s.heap.At(best).Stamp; rank != timeline.Done {
		c.waits.Add(&t.timeline, stamp)
	}
	return s.heap.TakeAt(best, from(s.heap.At(best)), n, c.size), nil
}

// handOut completes a request that was met: statistics, history.
//
// +checklocks:d.mu
func (d *Device) handOut(c *climb, id heap.ID) cuda.Ptr {
	s := c.from
	b := s.heap.At(id)
	s.gauges.Alloc(c.size, b.Size, s.heap.FreeBlocks)
	b.Tag, b.Capture = c.by.label, s.capture
	s.heap.SetStack(id, c.by.stack)
	addr := cuda.Ptr(b.Addr)
	if c.called || c.asked {
		c.met = RungCallback
	} else if c.trimmed {
		c.met = RungLend
	}
	if c.met&(RungLend|RungCallback) != 0 {
		d.counts.Retries++
	}
	if c.spilled {
		c.met = RungSpill
	}
	d.counts.count(c.met)
	if d.health.Recording() {
		if c.met != RungFit {
			d.record(event.Event{Kind: event.Retry, Size: c.n, Stream: c.s.stream.number(), Pool: s.pool.number, Flags: uint8(c.met),
				Stack: c.by.stack, Thread: c.by.thread})
		}
		d.record(s.event(event.Alloc, id, c.by.stack, c.by.thread))
	}
	switch {
	case s.lane != c.s.lane:
		d.counts.Borrows++
		d.rebalanceAll(c.s, s)
		s.mu.Unlock()
	case c.met == RungFit:
		d.rebalance(s, nil)
	default:
		d.rebalanceAll(s, nil) // other lanes may have changed as well
	}
	return addr
}

// unlocked takes the steps that wait: for memory that is free but for work that is still queued, and for cached segments
// and chunks that are given back. It lets all locks go meanwhile, and reports whether the ladder should start over.
//
// +checklocks:c.d.mu
func (c *climb) unlocked() (again bool, err error) {
	d := c.d
	if !c.waited && c.rungs&RungCollect != 0 {
		c.waited = true
		if waits := d.unfinished(c.s); len(waits) > 0 {
			c.try(RungCollect).asked++
			c.start()
			c.s.mu.Unlock()
			err = d.await(waits)
			c.s.mu.Lock()
			c.lap(RungCollect, 0)
			return true, err
		}
	}
	if (d.segmented || d.onUnmap != nil) && c.rungs&RungLend != 0 {
		if again, err = c.makeRoom(); again || err != nil {
			return again, err
		}
	}
	if p := c.s.pool; !c.tight && p.segments != nil && p.whole(c.n) < p.segmentSize(c.n) {
		c.tight = true
		return true, nil
	}
	if len(d.telling) > 0 { // what another thread got or gives back may do
		c.told.waitFor(d.telling[0])
		if c.told.left(time.Now()) > 0 {
			c.s.mu.Unlock()
			d.awaitTold(&c.told)
			c.s.mu.Lock()
			return true, nil
		}
	}
	return false, nil
}

// callOut calls the pool's own function, then others', and reports whether the ladder should start over.
//
// +checklocks:c.d.mu
func (c *climb) callOut() (again bool) {
	d := c.d
	if c.rungs&RungCallback == 0 {
		return false
	}
	if ask := c.s.pool.ask; ask != nil && !c.asked {
		c.asked = true
		again = c.call([]*callback{ask})
	}
	if len(d.callbacks) > 0 && !again && !c.called && !c.full {
		c.called = true
		again = c.call(d.callbacks)
	}
	return again
}

// call asks functions whether they can give memory back, with no lock held, and reports whether any did. Then everything is
// tried anew.
//
// +checklocks:c.d.mu
func (c *climb) call(list []*callback) (any bool) {
	c.s.mu.Unlock()
	any = c.ask(list, c.n)
	c.s.mu.Lock()
	if any {
		c.waited, c.emptied, c.room = false, false, 0
	}
	return any
}

// ask calls functions, and reports whether any gave memory back. The caller holds Device.mu and nothing else; it is let go
// meanwhile.
//
// +checklocks:l.d.mu
func (l *ladder) ask(list []*callback, need uint64) (any bool) {
	s := l.try(RungCallback)
	before := l.d.idle()
	l.start()
	for _, x := range slices.Clone(list) {
		s.asked++
		if l.d.callOne(x, need) {
			s.gave++
			any = true
		}
	}
	l.lap(RungCallback, 0)
	s.gained += less(l.d.idle(), before)
	return any
}

// spill has a request that nothing else met climb the ladder of the pool's spill. The caller holds Device.mu and nothing
// else; it is let go meanwhile.
//
// +checklocks:c.d.mu
func (c *climb) spill(p *Pool, st *Stream) (cuda.Ptr, error) {
	s := c.try(RungSpill)
	c.start()
	x := climb{ladder: ladder{d: c.d}, n: p.spill.round(c.size), size: c.size, by: c.by, rungs: c.rungs, spilled: true, trimmed: c.trimmed,
		asked: c.asked, called: c.called, host: c.host, align: c.align}
	if c.align != 0 && !p.noSplit {
		x.n += c.align - heap.Align
	}
	ptr, err := x.climb(p.spill, st)
	c.lap(RungSpill, 0)
	c.waits, s.err = x.waits, x.oom
	if err != nil {
		return 0, fmt.Errorf("pool {%d, %d} has no memory, and its spill: %w", p.id[0], p.id[1], err)
	}
	if x.oom != nil {
		c.oom = errors.Join(c.oom, x.oom)
	}
	return ptr, nil
}

// outOfMemory is the error that ends the ladder. The caller holds Device.mu and nothing else.
//
// +checklocks:d.mu
func (d *Device) outOfMemory(p *Pool, c *climb) *OutOfMemoryError {
	e := &OutOfMemoryError{Device: d.id, Pool: p.id, Requested: c.size, Need: c.n, Tag: tagOf(c.by.label), Library: libraryOf(c.by.label), Reserved: d.quota.Total(),
		Elsewhere: d.quota.Elsewhere, Cached: d.quota.Spare, Limit: d.quota.Limit, Tried: c.tried, Off: AllRungs &^ c.rungs, Cause: c.oom,
		Pools: d.poolUsage(nil), Upstream: p.upstreamName(), host: !p.onDevice,
		Paused: uint64(d.quota.Paused[quota.GroupAll].Current)}
	if p.spill == nil {
		e.Off &^= RungSpill
	}
	if c.full {
		e.PoolLimit, e.PoolHolds = p.limit, p.reserved
	}
	e.Stack, e.Thread, e.Stacks = c.by.stack, c.by.thread, d.stackUsage()
	if d.tagged.Load() {
		e.Tags = d.tagUsage()
	}
	if d.labelled.Load() {
		e.Libraries = d.libraryUsage()
	}
	if !p.onDevice {
		e.Other = d.quota.Spare
	}
	if c.s != nil {
		c.s.mu.Lock()
		e.Largest = c.s.heap.Largest()
		c.s.mu.Unlock()
	}
	for _, s := range d.spaces {
		if s == nil {
			continue
		}
		s.mu.Lock()
		e.Allocated += uint64(s.gauges.Now()[quota.Allocated])
		e.Pending += uint64(s.gauges.Now()[quota.ActiveBytes] - s.gauges.Now()[quota.Allocated])
		e.Cached += s.heap.FreeBytes
		if !s.pool.sameMemory(p) {
			e.Other += s.heap.FreeBytes
		} else if s.pool.pinned && s.pool != p {
			e.Pinned += s.heap.FreeBytes
		}
		s.mu.Unlock()
	}
	if free, total, err := d.drv.MemInfo(d.id); err == nil {
		e.DriverHas, e.DriverTotal = free, total
	}
	e.Steps = c.report(e, p, c.rungs)
	return e
}

// isOutOfMemory tells the error that the ladder is for from those it passes on.
func isOutOfMemory(err error) bool { return errors.Is(err, cuda.ErrOutOfMemory) }
