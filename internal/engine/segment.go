package engine

import (
	"cmp"
	"fmt"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/phys"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

// Pools that are made of segments: whole ranges of addresses with their memory, which are got for a stream heap, cut into
// blocks there, and given back as a whole. Nothing of them moves, and no other pool uses them. They are for those who
// need memory as somebody else makes it: cuMemAlloc, a single handle, a function of the user's.

// segmentUnit is the unit of segment sizes in bytes.
const segmentUnit = 2 << 20

// NewPoolWith creates a private pool of the memory that the options say. An upstream is opened to the peers that the device
// has.
func (d *Device) NewPoolWith(id memory.PoolID, o config.PoolOptions) (*Pool, error) {
	u, err := d.newUpstream(o.Upstream)
	if err != nil {
		return nil, fmt.Errorf("pool {%d, %d}: %w", id[0], id[1], err)
	}
	spill, err := d.newUpstream(o.Spill)
	if err != nil {
		u.drop(d)
		return nil, fmt.Errorf("pool {%d, %d}: spill: %w", id[0], id[1], err)
	}
	p, err := d.newPool(id, o, u, spill)
	if err != nil {
		u.drop(d)
		spill.drop(d)
	}
	return p, err
}

func (d *Device) newPool(id memory.PoolID, o config.PoolOptions, u, spill upstream) (*Pool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.pools[id] != nil {
		return nil, fmt.Errorf("device %d: pool {%d, %d} exists", d.id, id[0], id[1])
	}
	p, err := d.addPool(id, o, u)
	if err != nil {
		return nil, err
	}
	if spill.from != nil {
		p.addSpill(spill)
	}
	if err := p.openToPeers(); err != nil {
		for _, x := range p.parts() {
			x.own = nil // the caller's
		}
		p.onEnd = nil
		d.end(p)
		return nil, fmt.Errorf("pool {%d, %d}: %w", id[0], id[1], err)
	}
	return p, nil
}

// addPool makes a pool. The caller holds Device.mu, or is the first to have the device.
//
// +checklocks:d.mu
func (d *Device) addPool(id memory.PoolID, o config.PoolOptions, u upstream) (*Pool, error) {
	p := &Pool{dev: d, id: id, noSplit: o.NoSplit, mask: heap.Align - 1, unit: segmentUnit, onEnd: o.OnEnd,
		limit: o.Limit, onDevice: true, counted: true,
		traits: resource.Traits{Name: "virtual", Device: d.id, OnDevice: true, DeviceAccessible: true, Align: heap.Align}}
	switch {
	case u.from != nil && o.Kind != config.PoolDefault:
		return nil, fmt.Errorf("pool {%d, %d}: segments of the user's are not of another kind as well", id[0], id[1])
	case u.from != nil:
		p.setUpstream(u)
	case o.Kind == config.PoolMalloc || o.Kind == config.PoolDefault && d.opts.Backend == config.BackendMalloc:
		if d.plain == nil {
			d.plain = resource.Device(d.drv, d.id)
		}
		p.segments, p.traits = d.plain, d.plain.Traits()
	case o.Kind == config.PoolSingleHandle || o.Kind == config.PoolDefault && (d.opts.SingleHandle || o.NoSplit):
		if err := d.virtual(); err != nil {
			return nil, err
		}
		if d.single == nil {
			d.single = resource.Single(d.drv, d.prop, max(d.info.Granularity, segmentUnit), d.mem.Access.Set)
		}
		p.segments, p.traits = d.single, d.single.Traits()
		p.unit = max(segmentUnit, d.info.Granularity)
	case o.Kind != config.PoolDefault:
		return nil, fmt.Errorf("pool {%d, %d}: kind %d is none", id[0], id[1], o.Kind)
	}
	if o.NoSplit {
		p.mask = p.unit - 1
	}
	if o.OnOutOfMemory != nil {
		p.ask = &callback{f: o.OnOutOfMemory}
	}
	if p.segments != nil {
		d.segmented = true
	}
	d.pools[id] = p
	d.enter(p)
	return p, nil
}

// addSpill gives the pool a hidden one of segments of the spill's, under the same name.
//
// +checklocks:p.dev.mu
func (p *Pool) addSpill(u upstream) {
	d := p.dev
	q := &Pool{dev: d, id: p.id, noSplit: p.noSplit, mask: heap.Align - 1, parent: p}
	q.setUpstream(u)
	if q.noSplit {
		q.mask = q.unit - 1
	}
	d.enter(q)
	d.segmented = true
	p.spill = q
}

// virtual finds out, once, which physical memory the device has for mapping.
//
// +checklocks:d.mu
func (d *Device) virtual() error {
	if !d.info.VMM {
		return fmt.Errorf("device %d (%s) has no virtual memory management: use backend:malloc", d.id, d.info.Name)
	}
	if d.probed {
		return nil
	}
	handles, err := d.drv.ProbeHandles(d.id)
	if err != nil {
		return d.health.Failed(err)
	}
	d.probed, d.prop = true, cuda.MemProp{Device: d.id, Handles: handles, RDMA: d.info.RDMA}
	return nil
}

// growSegment is the stages of a pool of segments that do not wait: a new segment, and collecting frees by force. A
// user's upstream is called with all locks let go.
//
// +checklocks:c.d.mu
func (c *request) growSegment() (heap.ID, error) {
	d, s := c.d, c.s
	if c.allowed&memory.StageGrow != 0 {
		grow := c.log.try(memory.StageGrow)
		grow.stop = stopNot
		size := s.pool.segmentSize(c.n)
		if c.tight || !s.pool.mayHold(size) {
			size = s.pool.whole(c.n) // with nothing for later requests
			if !s.pool.mayHold(size) {
				c.scope.limit = s.pool
			}
		}
		switch {
		case c.scope.limit != nil:
			grow.stop = stopPoolLimit
		case s.pool.counted && !d.quota.MayHold(size):
			grow.stop = stopLimit
		default:
			c.log.start()
			ptr, err := c.segment(size)
			if err == nil {
				c.log.lap(memory.StageGrow, size)
				c.addSegment(ptr, size)
				c.met = memory.StageGrow
			} else if isOutOfMemory(err) {
				c.log.lap(memory.StageGrow, 0)
				c.log.oom, grow.err = err, err
			} else {
				return 0, err
			}
			if err == nil || s.pool.userUpstream { // meanwhile others may have given memory back
				if id, err := c.take(s); id != 0 || err != nil {
					return id, err
				}
			}
		}
	}
	if c.order == streamOrdered && c.collect(true) {
		if id, err := c.take(s); id != 0 || err != nil {
			c.met = memory.StageCollect
			return id, err
		}
	}
	return c.elsewhere()
}

// segmentSize is the size of the segment that a request of n bytes is cut from: PyTorch's sizes, in the upstream's units.
func (p *Pool) segmentSize(n uint64) uint64 {
	switch {
	case p.noSplit:
		return n
	case n > smallMax && n < 10<<20:
		return p.whole(20 << 20)
	}
	return p.whole(n)
}

// whole rounds up to whole units of segments.
func (p *Pool) whole(n uint64) uint64 { return (n + p.unit - 1) &^ (p.unit - 1) }

// addSegment makes a segment free memory of the request's stream heap.
//
// +checklocks:c.d.mu
func (c *request) addSegment(ptr cuda.Ptr, size uint64) {
	d, s := c.d, c.s
	d.mem.Ranges.Add(phys.Range{Base: uint64(ptr), Size: size, Owner: s.index, Serial: d.mem.NewSerial(), Align: s.pool.align(c.align)})
	d.got(size, s.pool.counted)
	d.quota.Physical[quota.GroupOf(s.class)].Add(size)
	s.gain(size)
	d.recordSegment(s, uint64(ptr), size, true, c.by)
	block := s.blocks.Map(s.blocks.AddRange(uint64(ptr), size), uint64(ptr), size, 0)
	if at := (run{uint64(ptr), size}); d.onMap != nil {
		c.publish(block, at, 0, []run{at})
	} else {
		s.gauges.SetFree(s.blocks.FreeBlocks, int64(size))
	}
}

// freeSegment is a segment that is wholly free, and out of everybody's reach until it was given back or cached again.
type freeSegment struct {
	heap  *streamHeap
	first heap.ID
	run
	stamp uint64
}

// releaseSegments gives the segments that are wholly free back to where they came from, of the pools chosen and not
// pinned: all of them if it may wait, else those that the GPU is known to be done with. The caller holds Device.mu and
// nothing else; it is let go while the GPU is waited for and users' upstreams are called, and what is to be released is
// out of everybody's reach meanwhile. It reports whether any went.
//
// +checklocks:d.mu
func (d *Device) releaseSegments(chosen func(*Pool) bool, mayWait bool) (bool, error) {
	d.collect(nil, false)
	if d.offload.Unsure() {
		return false, nil // Trim finds out
	}
	failed := d.releaseEmpty()
	list, waits := d.takeFreeSegments(chosen, mayWait)
	if len(list) == 0 {
		return false, failed
	}
	waited := d.await(waits)
	failed = cmp.Or(waited, failed)
	done := func(v *freeSegment) bool { return waited == nil && v.heap.stream.timeline.IsOver(v.stamp) }
	var ready []run
	over := make([]bool, len(list))
	for i := range list {
		if over[i] = done(&list[i]); over[i] {
			ready = append(ready, list[i].run)
		}
	}
	d.publish(d.onUnmap, ready)
	any := false
	for i := range list {
		v := &list[i]
		gone := false
		if over[i] {
			err := d.giveSegmentBack(v)
			failed = cmp.Or(failed, err)
			gone = err == nil
		}
		d.quota.Spare -= v.size
		if gone {
			any = true
			d.segmentGone(v)
		} else { // nothing is lost
			v.heap.arena.Lock()
			v.heap.blocks.Map(v.heap.blocks.Reap(v.first), v.addr, v.size, v.stamp)
			v.heap.gauges.SetFree(v.heap.blocks.FreeBlocks, int64(v.size))
			v.heap.arena.Unlock()
		}
	}
	return any, failed
}

// takeFreeSegments puts the segments out of reach that releaseSegments is to give back, and returns what has to be waited for.
//
// +checklocks:d.mu
func (d *Device) takeFreeSegments(chosen func(*Pool) bool, mayWait bool) (list []freeSegment, waits timeline.Waits) {
	for _, s := range d.heaps {
		if s == nil || s.area != nil || s.pool.pinned || !chosen(s.pool) || s.stream.timeline.Capture() != 0 {
			continue
		}
		s.arena.Lock()
		for _, id := range s.blocks.Ranges() {
			b := s.blocks.At(id)
			if b.State != heap.Free || s.blocks.Next(id) != 0 || !mayWait && !s.stream.timeline.IsOver(b.Stamp) {
				continue
			}
			v := freeSegment{heap: s, first: id, run: run{b.Addr, b.Size}, stamp: b.Stamp}
			s.blocks.Unmap(id, b.Addr, b.Size)
			s.gauges.SetFree(s.blocks.FreeBlocks, -int64(v.size))
			d.quota.Spare += v.size
			list = append(list, v)
			if v.stamp > 0 {
				waits.Add(&s.stream.timeline, v.stamp)
			}
		}
		s.arena.Unlock()
	}
	return list, waits
}

// giveSegmentBack gives a segment to its upstream. After an error everything is as before.
//
// +checklocks:d.mu
func (d *Device) giveSegmentBack(v *freeSegment) error {
	d.a.disown(v.addr, v.size) // first: once the driver has it it may be another device's
	err := d.freeSegment(v.heap, v.addr, v.size)
	if err != nil {
		d.a.claim(v.addr, v.size, v.heap) // which succeeded before
		d.publish(d.onMap, []run{v.run})
	}
	return err
}

// segmentGone forgets a segment that was given back.
//
// +checklocks:d.mu
func (d *Device) segmentGone(v *freeSegment) {
	s := v.heap
	s.arena.Lock()
	s.blocks.DropRange(s.blocks.Reap(v.first))
	s.lose(v.size)
	s.arena.Unlock()
	d.recordSegment(s, v.addr, v.size, false, origin{})
	d.mem.Ranges.Drop(s.index, v.addr)
	d.quota.Physical[quota.GroupOf(s.class)].Remove(v.size)
	d.gaveBack(v.size, s.pool.counted)
}
