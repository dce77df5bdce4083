package cistern

import (
	"cmp"
	"fmt"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/resource"
)

// Pools that are made of segments: whole ranges of addresses with their memory, which are got for a space, cut into
// blocks there, and given back as a whole. Nothing of them moves, and no other pool uses them. They are for those who
// need memory as somebody else makes it: cuMemAlloc, a single handle, a function of the user's.

// PoolKind is what a pool is made of.
type PoolKind uint8

const (
	PoolDefault      PoolKind = iota // what the device's options say: chunks, with backend vmm
	PoolMalloc                       // segments from cuMemAlloc, which cudaIpcGetMemHandle accepts
	PoolSingleHandle                 // segments that are one physical handle each
)

// PoolOptions say what a pool is made of. The zero value is the device's default.
type PoolOptions struct {
	Kind PoolKind
	// Upstream is where the pool's segments come from; Kind must be PoolDefault then. It is called with no lock held and
	// may use the allocator. What it hands out counts as reserved; where Traits().OnDevice, under the device's limit too.
	Upstream resource.Resource
	// NoSplit makes each block a segment of its own, which is reused only by requests that need a segment of that size.
	// With chunks, which have no segments, it means PoolSingleHandle.
	NoSplit bool
	// Limit bounds the memory that the pool may hold, in bytes; 0 is no limit of its own. A request beyond it is met with
	// what the pool has free, whatever the device has.
	Limit uint64
	// Spill is where a request's memory comes from when nothing else can meet it (RungSpill); nil is nowhere. It is called
	// as Upstream is. What comes from it belongs to the pool like all else, and is not under the pool's limit.
	Spill resource.Resource
	// OnOutOfMemory is asked, with no lock held, before the device's callbacks: it reports whether it gave memory back.
	// It must not allocate from this pool. Nil is nobody.
	OnOutOfMemory func(need uint64) bool
	// OnEnd is called, on a goroutine of its own, when the pool was released and holds nothing of its upstream's and its
	// spill's any more: who made those can close them.
	OnEnd func()
}

// segmentUnit is the unit of segment sizes in bytes.
const segmentUnit = 2 << 20

// NewPoolWith creates a private pool of the memory that the options say. An upstream is opened to the peers that the device
// has.
func (d *Device) NewPoolWith(id PoolID, o PoolOptions) (*Pool, error) {
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

func (d *Device) newPool(id PoolID, o PoolOptions, u, spill upstream) (*Pool, error) {
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
func (d *Device) addPool(id PoolID, o PoolOptions, u upstream) (*Pool, error) {
	p := &Pool{dev: d, id: id, noSplit: o.NoSplit, mask: heap.Align - 1, unit: segmentUnit, onEnd: o.OnEnd,
		limit: o.Limit, onDevice: true, counted: true,
		traits: resource.Traits{Name: "virtual", Device: d.id, OnDevice: true, DeviceAccessible: true, Align: heap.Align}}
	switch {
	case u.from != nil && o.Kind != PoolDefault:
		return nil, fmt.Errorf("pool {%d, %d}: segments of the user's are not of another kind as well", id[0], id[1])
	case u.from != nil:
		p.setUpstream(u)
	case o.Kind == PoolMalloc || o.Kind == PoolDefault && d.opts.Backend == BackendMalloc:
		if d.plain == nil {
			d.plain = resource.Device(d.drv, d.id)
		}
		p.segments, p.traits = d.plain, d.plain.Traits()
	case o.Kind == PoolSingleHandle || o.Kind == PoolDefault && (d.opts.SingleHandle || o.NoSplit):
		if err := d.virtual(); err != nil {
			return nil, err
		}
		if d.single == nil {
			d.single = resource.Single(d.drv, d.prop, max(d.info.Granularity, segmentUnit), d.setAccess)
		}
		p.segments, p.traits = d.single, d.single.Traits()
		p.unit = max(segmentUnit, d.info.Granularity)
	case o.Kind != PoolDefault:
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

// growSegment is the rungs of a pool of segments that do not wait: a new segment, and collecting frees by force. A
// user's upstream is called with all locks let go.
//
// +checklocks:c.d.mu
func (c *climb) growSegment() (heap.ID, error) {
	d, s := c.d, c.s
	if c.rungs&RungGrow != 0 {
		grow := c.try(RungGrow)
		grow.stop = stopNot
		size := s.pool.segmentSize(c.n)
		if c.tight || !s.pool.mayHold(size) {
			size = s.pool.whole(c.n) // with nothing for later requests
			c.full = !s.pool.mayHold(size)
		}
		switch {
		case c.full:
			grow.stop = stopPoolLimit
		case s.pool.counted && !d.quota.MayHold(size):
			grow.stop = stopLimit
		default:
			c.start()
			ptr, err := c.segment(size)
			if err == nil {
				c.lap(RungGrow, size)
				c.addSegment(ptr, size)
				c.met = RungGrow
			} else if isOutOfMemory(err) {
				c.lap(RungGrow, 0)
				c.oom, grow.err = err, err
			} else {
				return 0, err
			}
			if err == nil || s.pool.foreign { // meanwhile others may have given memory back
				if id, err := c.take(s); id != 0 || err != nil {
					return id, err
				}
			}
		}
	}
	if !c.host && c.collect(true) {
		if id, err := c.take(s); id != 0 || err != nil {
			c.met = RungCollect
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

// addSegment makes a segment free memory of the request's space.
//
// +checklocks:c.d.mu
func (c *climb) addSegment(ptr cuda.Ptr, size uint64) {
	d, s := c.d, c.s
	d.areas = append(d.areas, reservation{uint64(ptr), size, s, d.chunks.NewSerial(), s.pool.align(c.align)})
	d.got(size, s.pool.counted)
	d.quota.Physical[quota.GroupOf(s.class)].Add(size)
	s.gain(size)
	d.recordSegment(s, uint64(ptr), size, true, c.by)
	block := s.heap.Map(s.heap.AddRange(uint64(ptr), size), uint64(ptr), size, 0)
	if at := (run{uint64(ptr), size}); d.onMap != nil {
		c.introduce(block, at, 0, []run{at})
	} else {
		s.gauges.SetFree(s.heap.FreeBlocks, int64(size))
	}
}

// makeRoom gives cached memory back where a segment is in the way of the request, or a chunk in the way of a segment:
// the free segments of all pools; then, for a segment, as many bytes of free chunks as it needs; then all; then addresses
// that chunks were mapped at. Where memory must be told of before it is unmapped, so that it cannot move, it does the same
// for a request that is met with chunks, which then finds them spare. Where the pool's own limit is in the way only the
// pool's memory goes. It reports whether anything went. The caller holds Device.mu and the space's lock; both are let go
// meanwhile.
//
// +checklocks:c.d.mu
func (c *climb) makeRoom() (bool, error) {
	d := c.d
	c.try(RungLend)
	c.start()
	returned, spare := d.quota.Returned, d.quota.Spare
	any, err := c.release()
	c.lap(RungLend, d.quota.Returned-returned+less(d.quota.Spare, spare))
	return any, err
}

// +checklocks:c.d.mu
func (c *climb) release() (bool, error) {
	d, p := c.d, c.s.pool
	if c.full {
		if c.emptied {
			return false, nil
		}
		c.emptied = true
		c.s.mu.Unlock()
		defer c.s.mu.Lock()
		if d.nested { // first what pools over this one have free, which are blocks here
			if any, err := d.releaseSegments(func(x *Pool) bool { return x.under == p }, true); any || err != nil {
				c.emptied = err != nil
				return any, err
			}
		}
		if p.segments != nil {
			any, err := d.releaseSegments(func(x *Pool) bool { return x == p }, true)
			c.trimmed = c.trimmed || any
			return any, err
		}
		return d.detachChunks(p, everything)
	}
	for c.room < 4 {
		c.room++
		var any bool
		var err error
		c.s.mu.Unlock()
		switch {
		case c.room == 1:
			if any, err = d.releaseSegments(p.sameMemory, true); any && d.nested {
				c.room-- // what went may be a segment of another pool now
			}
			asked, more := d.trimUpstreams(p.sameMemory)
			any, err = any || asked, cmp.Or(err, more)
			if d.single != nil {
				more, _ := d.single.Settle() // what fails again is tried again
				any = any || more
			}
		case d.upstream == nil || c.s.area != nil && d.onUnmap == nil || !p.onDevice:
		case c.room == 2 && c.s.area != nil:
			any, err = d.detachChunks(nil, c.s.pool.segmentSize(c.n))
		case c.room == 2:
			any, err = d.releaseChunks(nil, c.s.pool.segmentSize(c.n))
		case c.room == 3:
			any, err = d.releaseChunks(nil, everything)
		}
		c.s.mu.Lock()
		if c.room == 4 && c.s.area == nil && p.onDevice {
			any = d.reclaim(c.s)
		}
		c.trimmed = c.trimmed || any
		if any || err != nil {
			return any, err
		}
	}
	return false, nil
}

// releaseSegments gives the segments that are wholly free back to where they came from, of the pools chosen and not
// pinned: all of them if it may wait, else those that the GPU is known to be done with. The caller holds Device.mu and
// nothing else; it is let go while the GPU is waited for and users' upstreams are called, and what is to be released is
// out of everybody's reach meanwhile. It reports whether any went.
//
// +checklocks:d.mu
func (d *Device) releaseSegments(chosen func(*Pool) bool, mayWait bool) (bool, error) {
	type victim struct {
		space *space
		first heap.ID
		base  uint64
		size  uint64
		stamp uint64
		ready bool // the GPU is done with it
	}
	var victims []victim
	var waits timeline.Waits
	d.collect(nil, false)
	if d.unsure.Load() {
		return false, nil // Trim finds out
	}
	hollow := d.releaseHollow()
	for _, s := range d.spaces {
		if s == nil || s.area != nil || s.pool.pinned || !chosen(s.pool) || s.stream.timeline.Capture() != 0 {
			continue
		}
		s.mu.Lock()
		for _, id := range s.heap.Ranges() {
			b := s.heap.At(id)
			if b.State != heap.Free || s.heap.Next(id) != 0 || !mayWait && !s.stream.timeline.IsOver(b.Stamp) {
				continue
			}
			v := victim{space: s, first: id, base: b.Addr, size: b.Size, stamp: b.Stamp}
			s.heap.Unmap(id, b.Addr, b.Size)
			s.gauges.SetFree(s.heap.FreeBlocks, -int64(v.size))
			d.quota.Spare += v.size
			victims = append(victims, v)
			if v.stamp > 0 {
				waits.Add(&s.stream.timeline, v.stamp)
			}
		}
		s.mu.Unlock()
	}
	if len(victims) == 0 {
		return false, hollow
	}
	first := d.await(waits)
	var ready []run
	for i := range victims {
		v := &victims[i]
		if v.ready = first == nil && v.space.stream.timeline.IsOver(v.stamp); v.ready {
			ready = append(ready, run{v.base, v.size})
		}
	}
	d.tell(d.onUnmap, ready)
	any := false
	failed := cmp.Or(first, hollow)
	for _, v := range victims {
		s := v.space
		err := first
		if v.ready {
			d.a.disown(v.base, v.size) // first: once the driver has it it may be another device's
			if err = d.freeSegment(s, v.base, v.size); err != nil {
				d.a.claim(v.base, v.size, s) // which succeeded before
				failed = cmp.Or(failed, err)
				d.tell(d.onMap, []run{{v.base, v.size}})
			}
		} else if err == nil {
			err = timeline.ErrCapturing
		}
		d.quota.Spare -= v.size
		if err != nil { // nothing is lost: it is cached again
			s.mu.Lock()
			s.heap.Map(s.heap.Reap(v.first), v.base, v.size, v.stamp)
			s.gauges.SetFree(s.heap.FreeBlocks, int64(v.size))
			s.mu.Unlock()
			continue
		}
		any = true
		s.mu.Lock()
		s.heap.DropRange(s.heap.Reap(v.first))
		s.lose(v.size)
		s.mu.Unlock()
		d.recordSegment(s, v.base, v.size, false, origin{})
		for i, r := range d.areas {
			if r.base == v.base {
				d.areas = append(d.areas[:i], d.areas[i+1:]...)
				break
			}
		}
		d.quota.Physical[quota.GroupOf(s.class)].Remove(v.size)
		d.gaveBack(v.size, s.pool.counted)
	}
	return any, failed
}
