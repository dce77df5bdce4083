package sim

import "github.com/cistern-gpu/cistern/cuda"

// liveCounts is what exists. Protected by Driver.mu.
type liveCounts struct {
	handles, chunks, mappings, allocs, events, streams int
	hosts, registered, managed, pools, asyncs          int
}

// Live is what exists in the driver, for tests that look for leaks.
type Live struct {
	Handles      int // from MemCreate, not released
	Chunks       int // physical memory, from MemCreate or under MemAlloc
	Mappings     int // from MemMap
	Reservations int
	Allocs       int // from MemAlloc
	Events       int
	Streams      int
	Hosts        int // from HostAlloc
	Registered   int // from HostRegister
	Managed      int // from ManagedAlloc
	Pools        int // from MemPoolCreate
	Asyncs       int // from MemAllocAsync
}

// Leaks is what exists now. A program that gave back everything leaves Live{}.
func (d *Driver) Leaks() Live {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := d.live
	return Live{Handles: l.handles, Chunks: l.chunks, Mappings: l.mappings, Reservations: len(d.space.resv),
		Allocs: l.allocs, Events: l.events, Streams: l.streams,
		Hosts: l.hosts, Registered: l.registered, Managed: l.managed, Pools: l.pools, Asyncs: l.asyncs}
}

// ReservedBytes is the physical memory of the device that is in use: each chunk once, however often it is mapped.
func (d *Driver) ReservedBytes(dev cuda.Device) uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.devices[dev].used
}

// PeakBytes is the highest ReservedBytes since New or ResetPeak.
func (d *Driver) PeakBytes(dev cuda.Device) uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.devices[dev].peak
}

// ResetPeak starts PeakBytes anew from what is in use now.
func (d *Driver) ResetPeak(dev cuda.Device) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.devices[dev].peak = d.devices[dev].used
}

// HostBytes is the host memory in LocationHostNUMA chunks, from HostAlloc and under HostRegister.
func (d *Driver) HostBytes() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.hostUsed
}

// SetOutside says how many bytes of the device other processes hold, beside those of Options.Shared.
func (d *Driver) SetOutside(dev cuda.Device, bytes uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.devices[dev].outside = bytes
}

// MappingInfo is one mapping of a chunk.
type MappingInfo struct {
	Addr   cuda.Ptr
	Size   uint64      // bytes
	Handle cuda.Handle // 0 if it was released
	Chunk  uint64      // a number that the chunk keeps, and never shares
	Access []cuda.Device
}

// Mappings are the mappings of the device's chunks, by address, without MemAlloc's.
func (d *Driver) Mappings(dev cuda.Device) []MappingInfo {
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []MappingInfo
	for _, r := range d.space.resv {
		for p := r.base; p < r.base+r.size; {
			n := (p - spaceBase) / d.space.page
			if d.space.leaves[n/leafPages] == nil { // nothing in this part of the page table
				p = spaceBase + (n/leafPages+1)*leafPages*d.space.page
				continue
			}
			m := d.space.find(p)
			if m == nil {
				p += d.space.page
				continue
			}
			p += m.pages
			if m.chunk.prop.Device != dev {
				continue
			}
			info := MappingInfo{Addr: cuda.Ptr(m.base), Size: m.pages, Handle: m.chunk.handle, Chunk: m.chunk.serial}
			for v := range d.devices {
				if m.access>>v&1 != 0 {
					info.Access = append(info.Access, cuda.Device(v))
				}
			}
			out = append(out, info)
		}
	}
	return out
}

// HandleInfo is one handle of MemCreate.
type HandleInfo struct {
	Handle   cuda.Handle
	Size     uint64 // bytes
	Prop     cuda.MemProp
	Mappings int
}

// Handles are the device's handles that were not released, in no order.
func (d *Driver) Handles(dev cuda.Device) []HandleInfo {
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []HandleInfo
	for _, c := range d.chunks {
		if c != nil && c.prop.Device == dev {
			out = append(out, HandleInfo{Handle: c.handle, Size: c.size, Prop: c.prop, Mappings: c.maps})
		}
	}
	return out
}
