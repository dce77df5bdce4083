package sim

import (
	"time"

	"github.com/cistern-gpu/cistern/cuda"
)

// chunk is physical memory. It lives until its handle is released and its last mapping is gone.
type chunk struct {
	serial  uint64      // never reused
	handle  cuda.Handle // 0 once released, and for cuMemAlloc memory
	refs    int         // of the handle beyond the first: imports of what this driver exported
	other   bool        // another driver's memory, which takes none of this one's
	slot    uint32
	size    uint64
	prop    cuda.MemProp
	maps    int
	uses    ranges     // with CheckOrder
	data    *contents  // nil until something is written
	windows []*window  // parts whose uses and contents other drivers share
	file    *chunkFile // with the contents, once it was exported or imported
}

// region is memory that comes and goes as one: a mapping, or a small block in a slab.
type region struct {
	base, size uint64
	seq        uint64        // of the map or alloc that made it, never reused
	busy       time.Duration // until when queued work uses it
	uses       []mark        // the last use by each rank, with CheckOrder
}

// mapping is a range of pages backed by the whole of a chunk.
type mapping struct {
	region
	chunk  *chunk
	pages  uint64       // bytes of pages; region.size is what may be used of them
	access uint64       // a bit for each device that may use it
	locked uint64       // of these, those that may only read it
	resv   *reservation // nil for cuMemAlloc memory
	slab   *slab        // for small cuMemAlloc blocks, whose regions are in it
	arena  *arena       // for memory of a pool, whose regions are in it
	pooled *pool        // for memory of an imported pool
}

// MemCreate makes physical memory.
func (d *Driver) MemCreate(size uint64, prop cuda.MemProp) (cuda.Handle, error) {
	d.mu.Lock()
	defer d.leave()
	if err := d.begin(callMemCreate, prop.Device, size, 0); err != nil {
		return 0, err
	}
	fail := func(code cuda.Code) (cuda.Handle, error) {
		return 0, d.errorOf(callMemCreate, prop.Device, size, code)
	}
	if code := d.poisoned(prop.Device); code != cuda.Success {
		return fail(code)
	}
	missing := prop.Handles &^ d.opt.Handles
	switch {
	case size == 0 || size%d.opt.Granularity != 0 || prop.Location > cuda.LocationHostNUMA:
		return fail(cuda.ErrInvalidValue)
	case missing&cuda.HandleFabric != 0:
		return fail(cuda.ErrNotPermitted) // what machines without the fabric manager's blessing answer
	case missing != 0 || prop.RDMA && !d.opt.RDMA:
		return fail(cuda.ErrNotSupported)
	}
	if prop.Location == cuda.LocationHostNUMA && prop.NUMANode != hostNode {
		return fail(cuda.ErrInvalidDevice)
	}
	c, code := d.newChunk(size, prop)
	if code != cuda.Success {
		d.charge(callMemCreate, d.costs.MemCreateFails(d.devices[prop.Device].available()))
		return fail(code)
	}
	d.giveHandle(c)
	if prop.Location == cuda.LocationHostNUMA {
		d.charge(callMemCreate, d.costs.HostNUMACreate(size))
	} else {
		d.charge(callMemCreate, d.costs.MemCreate(size))
	}
	d.note(recCreate, 0, 0, size, c, 0)
	return c.handle, nil
}

// giveHandle makes the handle of a new chunk.
func (d *Driver) giveHandle(c *chunk) {
	if n := len(d.freeCh); n > 0 {
		c.slot = d.freeCh[n-1]
		d.freeCh = d.freeCh[:n-1]
		d.chunks[c.slot] = c
	} else {
		c.slot = uint32(len(d.chunks))
		d.chunks = append(d.chunks, c)
	}
	c.handle = cuda.Handle(c.serial<<24 | uint64(c.slot+1)&(1<<24-1))
	d.live.handles++
}

// newChunk takes memory from the device or the host.
func (d *Driver) newChunk(size uint64, prop cuda.MemProp) (*chunk, cuda.Code) {
	if prop.Location == cuda.LocationHostNUMA {
		if !d.takeHost(size) {
			return nil, cuda.ErrOutOfMemory
		}
	} else if code := d.takeDevice(d.devices[prop.Device], size); code != cuda.Success {
		return nil, code
	}
	d.live.chunks++
	d.mapSeq++
	return &chunk{serial: d.mapSeq, size: size, prop: prop, uses: ranges{hi: size}}, cuda.Success
}

// takeDevice takes device memory.
func (d *Driver) takeDevice(v *device, size uint64) cuda.Code {
	if d.shared != nil {
		if code := d.shared.take(v, size); code != cuda.Success {
			return code
		}
	} else if v.available() < size {
		return cuda.ErrOutOfMemory
	}
	v.used += size
	v.peak = max(v.peak, v.used)
	return cuda.Success
}

// takeHost takes host memory; false where it is used up.
func (d *Driver) takeHost(size uint64) bool {
	if d.opt.HostCapacity != 0 && (size > d.opt.HostCapacity || d.hostUsed > d.opt.HostCapacity-size) {
		return false
	}
	d.hostUsed += size
	return true
}

// releaseUnused frees the chunk's memory if nothing refers to it any more.
func (d *Driver) releaseUnused(c *chunk) {
	if c.handle != 0 || c.maps != 0 {
		return
	}
	d.live.chunks--
	if c.file != nil {
		if !c.other {
			c.file.charged().CompareAndSwap(d.identity, 0)
		}
		c.file.close()
		c.file = nil
	}
	if c.other {
		return
	}
	if c.prop.Location == cuda.LocationHostNUMA {
		d.hostUsed -= c.size
	} else {
		v := d.devices[c.prop.Device]
		if v.used -= c.size; d.shared != nil {
			d.shared.give(v)
		}
	}
}

func (d *Driver) chunk(h cuda.Handle) *chunk {
	slot := uint64(h)&(1<<24-1) - 1
	if slot >= uint64(len(d.chunks)) || d.chunks[slot] == nil || d.chunks[slot].handle != h {
		return nil
	}
	return d.chunks[slot]
}

// handleCall begins a call on a chunk's handle.
func (d *Driver) handleCall(c call, h cuda.Handle, cost func(uint64) time.Duration) (*chunk, error) {
	k := d.chunk(h)
	dev, size, t := noDevice, uint64(0), cost(0)
	if k != nil {
		dev, size, t = k.prop.Device, k.size, cost(k.size)
	}
	if err := d.begin(c, dev, size, t); err != nil {
		return nil, err
	}
	if k == nil {
		return nil, d.errorOf(c, dev, 0, cuda.ErrInvalidValue)
	}
	if code := d.poisoned(dev); code != cuda.Success {
		return nil, d.errorOf(c, dev, size, code)
	}
	return k, nil
}

// MemRelease drops the handle; the memory stays while it is mapped.
func (d *Driver) MemRelease(h cuda.Handle) error {
	d.mu.Lock()
	defer d.leave()
	cost := d.costs.MemRelease
	switch k := d.chunk(h); {
	case k == nil:
	case k.other || k.refs > 0:
		cost = func(uint64) time.Duration { return d.costs.ImportRelease }
	case k.prop.Location == cuda.LocationHostNUMA:
		cost = d.costs.HostNUMARelease
	}
	c, err := d.handleCall(callMemRelease, h, cost)
	if err != nil {
		return err
	}
	d.live.handles--
	if c.refs > 0 {
		c.refs--
		return nil
	}
	d.note(recRelease, 0, 0, c.size, c, 0)
	d.chunks[c.slot] = nil
	d.freeCh = append(d.freeCh, c.slot)
	c.handle = 0
	d.releaseUnused(c)
	return nil
}

// MemMap maps the whole chunk at p, which must lie in one reservation and be free. (The H200's driver also maps over
// two reservations that happen to touch, and unmaps and sets access over holes; nothing documents it, so here it
// fails.)
func (d *Driver) MemMap(p cuda.Ptr, size uint64, h cuda.Handle) error {
	d.mu.Lock()
	defer d.leave()
	c, err := d.handleCall(callMemMap, h, d.costs.MemMap)
	if err != nil {
		return err
	}
	lo := uint64(p)
	r := d.space.reservation(lo, size)
	if size < c.size && size != 0 {
		return d.errorOf(callMemMap, c.prop.Device, size, cuda.ErrNotSupported) // a part of a chunk
	}
	if lo%d.opt.Granularity != 0 || size != c.size || r == nil || d.space.anyMapped(lo, size) {
		return d.errorOf(callMemMap, c.prop.Device, size, cuda.ErrInvalidValue)
	}
	d.charge(callMemMap, d.costs.MapAfresh)
	d.mapSeq++
	m := &mapping{region: region{base: lo, size: size, seq: d.mapSeq}, chunk: c, pages: size, resv: r}
	d.space.set(lo, size, m)
	r.mapped += size
	c.maps++
	d.live.mappings++
	d.note(recMap, 0, lo, size, c, 0)
	return nil
}

func (s *space) anyMapped(lo, size uint64) bool {
	for p := lo; p < lo+size; p += s.page {
		if s.find(p) != nil {
			return true
		}
	}
	return false
}

// wholeMappings reports whether [lo, lo+size) is made of whole mappings of chunks, without holes.
func (s *space) wholeMappings(lo, size uint64) bool {
	if size == 0 || lo+size < lo {
		return false
	}
	for p := lo; p < lo+size; {
		m := s.find(p)
		if m == nil || m.resv == nil || m.base != p || m.pages > lo+size-p {
			return false
		}
		p += m.pages
	}
	return true
}

// mappedCall begins a call on a range of mappings, and finds the device whose chunk comes first.
func (d *Driver) mappedCall(c call, lo, size uint64) (cuda.Device, error) {
	m := d.space.find(lo)
	dev := noDevice
	if m != nil {
		dev = m.chunk.prop.Device
	}
	if err := d.begin(c, dev, size, 0); err != nil {
		return dev, err
	}
	if dev != noDevice {
		if code := d.poisoned(dev); code != cuda.Success {
			return dev, d.errorOf(c, dev, size, code)
		}
	}
	if !d.space.wholeMappings(lo, size) {
		return dev, d.errorOf(c, dev, size, cuda.ErrInvalidValue)
	}
	return dev, nil
}

// charge adds to the cost of a call that has begun.
func (d *Driver) charge(c call, cost time.Duration) {
	d.stats[c].Time += cost
	d.spent += cost
	if d.opt.CallsTakeTime {
		d.clock.now += cost
	}
}

// MemUnmap undoes whole mappings. It does not wait: queued work that still uses them is a fault, and nothing is
// unmapped.
func (d *Driver) MemUnmap(p cuda.Ptr, size uint64) error {
	d.mu.Lock()
	defer d.leave()
	lo := uint64(p)
	dev, err := d.mappedCall(callMemUnmap, lo, size)
	if err != nil {
		return err
	}
	if d.opt.Check >= CheckUse {
		for at := lo; at < lo+size; {
			m := d.space.find(at)
			if f := d.stillUsed(&m.region, m.chunk, 0, callMemUnmap, dev); f != nil {
				return d.found(f)
			}
			at += m.pages
		}
	}
	var cost time.Duration
	for at := lo; at < lo+size; {
		m := d.space.find(at)
		cost += d.costs.MemUnmap(m.pages)
		if m.chunk.maps > 1 {
			cost += d.costs.UnmapShared
		}
		d.note(recUnmap, 0, m.base, m.pages, m.chunk, 0)
		at += m.pages
		d.space.set(m.base, m.pages, nil)
		m.resv.mapped -= m.pages
		m.chunk.maps--
		d.live.mappings--
		d.releaseUnused(m.chunk)
	}
	d.charge(callMemUnmap, cost)
	return nil
}

// MemSetAccess lets devices use whole mappings.
func (d *Driver) MemSetAccess(p cuda.Ptr, size uint64, devs []cuda.Device) error {
	return d.setAccess(p, size, devs, false)
}

// MemSetReadOnly lets devices read whole mappings.
func (d *Driver) MemSetReadOnly(p cuda.Ptr, size uint64, devs []cuda.Device) error {
	return d.setAccess(p, size, devs, true)
}

func (d *Driver) setAccess(p cuda.Ptr, size uint64, devs []cuda.Device, locked bool) error {
	d.mu.Lock()
	defer d.leave()
	lo := uint64(p)
	dev, err := d.mappedCall(callMemSetAccess, lo, size)
	if err != nil {
		return err
	}
	if len(devs) == 0 {
		return d.errorOf(callMemSetAccess, dev, size, cuda.ErrInvalidValue)
	}
	var bits uint64
	for _, v := range devs {
		if uint(v) >= uint(len(d.devices)) {
			return d.errorOf(callMemSetAccess, v, size, cuda.ErrInvalidDevice)
		}
		if d.opt.Isolated && v != dev && d.space.find(lo).chunk.prop.Location == cuda.LocationDevice {
			return d.errorOf(callMemSetAccess, v, size, cuda.ErrNotSupported)
		}
		bits |= 1 << v
	}
	d.giveAccess(lo, size, bits)
	for at := lo; at < lo+size; {
		m := d.space.find(at)
		if m.locked &^= bits; locked {
			m.locked |= bits
		}
		at += m.pages
	}
	return nil
}

// MemSetHostAccess lets the host use whole mappings of its own memory. Nothing comes of it here: the memory's addresses
// are the simulated device's, and the host's way to it is a copy.
func (d *Driver) MemSetHostAccess(p cuda.Ptr, size uint64, node int) error {
	d.mu.Lock()
	defer d.leave()
	lo := uint64(p)
	dev, err := d.mappedCall(callMemSetAccess, lo, size)
	if err != nil {
		return err
	}
	for at := lo; at < lo+size; {
		m := d.space.find(at)
		if m.chunk.prop.Location != cuda.LocationHostNUMA || m.chunk.prop.NUMANode != node {
			return d.errorOf(callMemSetAccess, dev, size, cuda.ErrInvalidValue)
		}
		at += m.pages
	}
	d.giveAccess(lo, size, 0)
	return nil
}

// giveAccess adds devices to those that may use the mappings of a range, and charges for it.
func (d *Driver) giveAccess(lo, size, bits uint64) {
	first := d.space.find(lo)
	if first.chunk.prop.Location == cuda.LocationHostNUMA {
		d.charge(callMemSetAccess, d.costs.HostNUMAAccess(size))
		for at := lo; at < lo+size; {
			m := d.space.find(at)
			m.access |= bits
			at += m.pages
		}
		return
	}
	if first.pages == size {
		d.charge(callMemSetAccess, d.costs.MemSetAccess(size, 1))
		first.access |= bits
		return
	}
	var cost time.Duration
	for at := lo; at < lo+size; {
		m := d.space.find(at)
		m.access |= bits
		cost += d.costs.curves[curveAccessMany].at(m.pages)
		at += m.pages
	}
	d.charge(callMemSetAccess, cost)
}
