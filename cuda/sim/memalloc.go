package sim

import "github.com/cistern-gpu/cistern/cuda"

// unit is the alignment of cuMemAlloc, and the smallest piece of it, in bytes.
const unit = 512

// slab is one granule of device memory that holds small cuMemAlloc blocks, as the driver packs them: blocks of up to
// half a granule are cut, first fit in units of 512 bytes, from slabs of one granule, and a slab goes with its last
// block. Larger blocks are whole granules of their own. (H200, driver 580: 64 blocks of 512 B take 2 MiB, of 64 KiB 4,
// of 1 MiB 64, of 1 MiB + 512 B 128, of 2 MiB + 512 B 256.)
type slab struct {
	m     *mapping
	units []*region // by unit, the block that holds it
	free  int       // units
}

// find takes n units in a row; -1 where there is no such row.
func (s *slab) find(n int) int {
	if s.free < n {
		return -1
	}
	run := 0
	for i, r := range s.units {
		if r != nil {
			run = 0
		} else if run++; run == n {
			return i + 1 - n
		}
	}
	return -1
}

// MemAlloc allocates device memory that is mapped and accessible to its device.
func (d *Driver) MemAlloc(dev cuda.Device, size uint64) (cuda.Ptr, error) {
	d.mu.Lock()
	defer d.leave()
	if err := d.beginContext(callMemAlloc, dev, size, 0); err != nil {
		return 0, err
	}
	if size == 0 {
		return 0, d.errorOf(callMemAlloc, dev, size, cuda.ErrInvalidValue)
	}
	var r *region
	var m *mapping
	var code cuda.Code
	if size <= d.opt.Granularity/2 {
		r, code = d.allocSmall(d.devices[dev], int((size+unit-1)/unit))
	} else if m, code = d.allocPages(dev, size); code == cuda.Success {
		r = &m.region
		d.note(recAlloc, 0, r.base, r.size, m.chunk, 0)
	}
	if code != cuda.Success {
		d.charge(callMemAlloc, d.costs.MemAllocFails(d.devices[dev].available()))
		return 0, d.errorOf(callMemAlloc, dev, size, code)
	}
	d.charge(callMemAlloc, d.costs.MemAlloc(size))
	d.live.allocs++
	return cuda.Ptr(r.base), nil
}

// freeWaits is the wait within cuMemFree.
func (d *Driver) freeWaits(dev cuda.Device) {
	d.deviceSyncs++
	v := d.devices[dev]
	if d.opt.FreeWaitsAllContexts {
		d.drain(v.contexts...)
	} else {
		d.drain(v.primary)
	}
}

// allocPages makes a mapping of whole granules that hold size bytes.
func (d *Driver) allocPages(dev cuda.Device, size uint64) (*mapping, cuda.Code) {
	gran := d.opt.Granularity
	if size > d.devices[dev].capacity {
		return nil, cuda.ErrOutOfMemory
	}
	pages := (size + gran - 1) / gran * gran
	base := d.space.take(pages, gran, 0)
	if base == 0 {
		return nil, cuda.ErrOutOfMemory
	}
	c, code := d.newChunk(pages, cuda.MemProp{Device: dev})
	if code != cuda.Success {
		d.space.give(base, pages)
		return nil, code
	}
	c.maps = 1
	d.mapSeq++
	m := &mapping{region: region{base: base, size: (size + unit - 1) / unit * unit, seq: d.mapSeq},
		chunk: c, pages: pages, access: 1 << dev}
	d.space.set(base, pages, m)
	return m, cuda.Success
}

func (d *Driver) allocSmall(v *device, n int) (*region, cuda.Code) {
	for _, s := range v.slabs {
		if at := s.find(n); at >= 0 {
			return d.cut(s, at, n), cuda.Success
		}
	}
	m, code := d.allocPages(v.id, d.opt.Granularity)
	if code != cuda.Success {
		return nil, code
	}
	units := int(d.opt.Granularity / unit)
	m.slab = &slab{m: m, units: make([]*region, units), free: units}
	v.slabs = append(v.slabs, m.slab)
	return d.cut(m.slab, 0, n), cuda.Success
}

func (d *Driver) cut(s *slab, at, n int) *region {
	d.mapSeq++
	r := &region{base: s.m.base + uint64(at)*unit, size: uint64(n) * unit, seq: d.mapSeq}
	for i := at; i < at+n; i++ {
		s.units[i] = r
	}
	s.free -= n
	d.note(recAlloc, 0, r.base, r.size, s.m.chunk, r.base-s.m.base)
	return r
}

// MemFree frees an allocation, managed memory or memory of a pool. It waits, as the real call does, for all work of the primary context (or of all
// contexts of the device, where the options say so) and counts as a device synchronisation. No driver manual promises
// the wait, so nothing may rely on it: that the memory itself is still in use is a fault all the same, and for
// CheckOrder the host has seen nothing complete.
func (d *Driver) MemFree(dev cuda.Device, p cuda.Ptr) error {
	d.mu.Lock()
	defer d.leave()
	addr := uint64(p)
	m := d.space.find(addr)
	if m == nil {
		if h := d.hostFrom(addr, hostManaged); h != nil {
			return d.freeManaged(dev, h)
		}
	} else if m.arena != nil {
		return d.freePooled(dev, m.arena, addr)
	} else if m.pooled != nil && m.base == addr {
		return d.freeImported(dev, m)
	}
	var r *region
	if m != nil && m.resv == nil && !m.chunk.other && m.chunk.prop.Device == dev {
		r = &m.region
		if m.slab != nil {
			r = m.slab.units[(addr-m.base)/unit]
		}
	}
	var size uint64
	if r != nil {
		size = r.size
	}
	if err := d.beginContext(callMemFree, dev, size, d.costs.MemFree(size)); err != nil {
		return err
	}
	if r == nil || r.base != addr {
		return d.errorOf(callMemFree, dev, 0, cuda.ErrInvalidValue)
	}
	if d.opt.Check >= CheckUse {
		if f := d.stillUsed(r, m.chunk, r.base-m.base, callMemFree, dev); f != nil {
			return d.found(f)
		}
	}
	d.freeWaits(dev)
	v := d.devices[dev]
	m.chunk.forget(r.base-m.base, r.size)
	d.note(recFree, 0, r.base, r.size, m.chunk, r.base-m.base)
	d.live.allocs--
	if s := m.slab; s != nil {
		first := int((r.base - m.base) / unit)
		for i := first; i < first+int(r.size/unit); i++ {
			s.units[i] = nil
		}
		if s.free += int(r.size / unit); s.free < len(s.units) {
			return nil
		}
		for i, o := range v.slabs {
			if o == s {
				v.slabs = append(v.slabs[:i], v.slabs[i+1:]...)
				break
			}
		}
	}
	d.space.set(m.base, m.pages, nil)
	d.space.give(m.base, m.pages)
	m.chunk.maps--
	d.releaseUnused(m.chunk)
	return nil
}
