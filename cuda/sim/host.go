package sim

import (
	"errors"
	"math"
	"runtime/debug"
	"slices"
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
)

// Host memory that the driver knows: page-locked, registered or managed. It is real memory of the process at its real
// address, so that code in C or Python can use it. Device memory is given out from the bottom of the address space, far
// below, so that the two do not meet.

// hostPage is the bytes that host memory is counted and registered in.
const hostPage = 4096

type hostKind uint8

const (
	hostAllocated  hostKind = iota // by HostAlloc
	hostRegistered                 // by HostRegister
	hostManaged                    // by ManagedAlloc
)

// hostRange is one piece of such memory. Every device may use it.
type hostRange struct {
	kind  hostKind
	m     *mapping
	bytes []byte // where the driver made the memory
	fresh bool   // managed, and never moved
}

// hostBytes is memory of the process by its address. (Go 1.26's compiler fails where the like of it is inlined into a copy.)
//
//go:noinline
func hostBytes(addr, size uint64) []byte {
	a := uintptr(addr)
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&a))), size)
}

// guarded runs f, which copies from or to an address that the caller gave, and reports whether memory was there.
func guarded(f func()) (there bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if recover() != nil {
			there = false
		}
	}()
	f()
	return true
}

// hostIndex is the index of the first host range that ends after the address.
func (d *Driver) hostIndex(addr uint64) int {
	i, _ := slices.BinarySearchFunc(d.host, addr, func(h *hostRange, at uint64) int {
		if h.m.base+h.m.size <= at {
			return -1
		}
		return 1
	})
	return i
}

// hostAt is the host range that holds the address, as a mapping; nil where there is none.
func (d *Driver) hostAt(addr uint64) *mapping {
	if len(d.host) == 0 {
		return nil
	}
	if i := d.hostIndex(addr); i < len(d.host) && d.host[i].m.base <= addr {
		return d.host[i].m
	}
	return nil
}

// hostFrom is the host range of the kind that begins at the address, or nil.
func (d *Driver) hostFrom(addr uint64, kind hostKind) *hostRange {
	if i := d.hostIndex(addr); i < len(d.host) && d.host[i].m.base == addr && d.host[i].kind == kind {
		return d.host[i]
	}
	return nil
}

// overlapsHost reports whether some of [addr, addr+size) is known host memory.
func (d *Driver) overlapsHost(addr, size uint64) bool {
	i := d.hostIndex(addr)
	return i < len(d.host) && d.host[i].m.base < addr+size
}

// addHost enters host memory.
func (d *Driver) addHost(kind hostKind, dev cuda.Device, addr, size uint64, made []byte) {
	d.mapSeq++
	c := &chunk{serial: d.mapSeq, size: size, prop: cuda.MemProp{Device: dev, Location: cuda.LocationHostNUMA}, maps: 1,
		uses: ranges{hi: size}}
	d.mapSeq++
	m := &mapping{region: region{base: addr, size: size, seq: d.mapSeq}, chunk: c, pages: size, access: math.MaxUint64}
	d.host = slices.Insert(d.host, d.hostIndex(addr), &hostRange{kind: kind, m: m, bytes: made, fresh: true})
	d.note(recAlloc, 0, addr, size, c, 0)
}

// dropHost takes a host range out, unless queued work uses it.
func (d *Driver) dropHost(h *hostRange, by call, dev cuda.Device) error {
	if d.opt.Check >= CheckUse {
		if f := d.stillUsed(&h.m.region, h.m.chunk, 0, by, dev); f != nil {
			return d.found(f)
		}
	}
	d.note(recFree, 0, h.m.base, h.m.size, h.m.chunk, 0)
	d.host = slices.Delete(d.host, d.hostIndex(h.m.base), d.hostIndex(h.m.base)+1)
	if h.kind != hostManaged {
		d.hostUsed -= h.m.size
	}
	if h.bytes != nil {
		freeHostMemory(h.bytes)
	}
	return nil
}

// makeHost makes memory of the process and enters it; 0 where there is none.
func (d *Driver) makeHost(kind hostKind, dev cuda.Device, size uint64) cuda.Ptr {
	pages := (size + hostPage - 1) / hostPage * hostPage
	if pages < size || pages > math.MaxInt64 || kind != hostManaged && !d.takeHost(pages) {
		return 0
	}
	b, err := hostMemory(pages)
	addr := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
	if err == nil && d.deviceSpace(addr) {
		freeHostMemory(b)
		err = errors.New("the device has these addresses")
	}
	if err != nil {
		if kind != hostManaged {
			d.hostUsed -= pages
		}
		return 0
	}
	d.addHost(kind, dev, addr, pages, b)
	return cuda.Ptr(addr)
}

// HostAlloc makes page-locked memory, which is memory of the process. Options.HostCapacity bounds it.
func (d *Driver) HostAlloc(dev cuda.Device, size uint64) (cuda.Ptr, error) {
	d.mu.Lock()
	defer d.leave()
	if err := d.beginContext(callMemHostAlloc, dev, size, 0); err != nil {
		return 0, err
	}
	if size == 0 {
		return 0, d.errorOf(callMemHostAlloc, dev, size, cuda.ErrInvalidValue)
	}
	p := d.makeHost(hostAllocated, dev, size)
	if p == 0 {
		return 0, d.errorOf(callMemHostAlloc, dev, size, cuda.ErrOutOfMemory)
	}
	d.charge(callMemHostAlloc, d.costs.HostAlloc(size))
	d.live.hosts++
	return p, nil
}

// HostFree frees what HostAlloc made. That queued work uses it is a fault.
func (d *Driver) HostFree(dev cuda.Device, p cuda.Ptr) error {
	d.mu.Lock()
	defer d.leave()
	if err := d.beginContext(callMemFreeHost, dev, 0, 0); err != nil {
		return err
	}
	h := d.hostFrom(uint64(p), hostAllocated)
	if h == nil {
		return d.errorOf(callMemFreeHost, dev, 0, cuda.ErrInvalidValue)
	}
	if err := d.dropHost(h, callMemFreeHost, dev); err != nil {
		return err
	}
	d.charge(callMemFreeHost, d.costs.HostFree(h.m.size))
	d.live.hosts--
	return nil
}

// HostRegister page-locks whole pages of the process's memory, which must be there. They count as host memory.
func (d *Driver) HostRegister(dev cuda.Device, p cuda.Ptr, size uint64) error {
	d.mu.Lock()
	defer d.leave()
	const c = callMemHostRegister
	if err := d.beginContext(c, dev, size, 0); err != nil {
		return err
	}
	addr := uint64(p)
	switch {
	case p == 0 || size == 0 || addr%hostPage != 0 || size%hostPage != 0 || addr+size < addr || d.deviceSpace(addr):
		return d.errorOf(c, dev, size, cuda.ErrInvalidValue)
	case d.overlapsHost(addr, size):
		return d.errorOf(c, dev, size, cuda.ErrHostAlreadyRegistered)
	}
	var some [2]byte
	if !guarded(func() { copy(some[:1], hostBytes(addr, 1)); copy(some[1:], hostBytes(addr+size-1, 1)) }) {
		return d.errorOf(c, dev, size, cuda.ErrInvalidValue)
	}
	if !d.takeHost(size) {
		return d.errorOf(c, dev, size, cuda.ErrOutOfMemory)
	}
	d.addHost(hostRegistered, dev, addr, size, nil)
	d.charge(c, d.costs.HostRegister(size))
	d.live.registered++
	return nil
}

// HostUnregister undoes HostRegister. That queued work uses the memory is a fault.
func (d *Driver) HostUnregister(dev cuda.Device, p cuda.Ptr) error {
	d.mu.Lock()
	defer d.leave()
	const c = callMemHostUnregister
	if err := d.beginContext(c, dev, 0, 0); err != nil {
		return err
	}
	h := d.hostFrom(uint64(p), hostRegistered)
	if h == nil {
		return d.errorOf(c, dev, 0, cuda.ErrHostNotRegistered)
	}
	if err := d.dropHost(h, c, dev); err != nil {
		return err
	}
	d.charge(c, d.costs.HostUnregister(h.m.size))
	d.live.registered--
	return nil
}

// ManagedAlloc makes managed memory, which is memory of the process. It takes none of the device's memory, nor does it
// count as host memory: where its pages are is not modelled, and a device may be given more than it could hold.
func (d *Driver) ManagedAlloc(dev cuda.Device, size uint64) (cuda.Ptr, error) {
	d.mu.Lock()
	defer d.leave()
	const c = callMemAllocManaged
	if err := d.beginContext(c, dev, size, d.costs.ManagedAlloc); err != nil {
		return 0, err
	}
	if size == 0 {
		return 0, d.errorOf(c, dev, size, cuda.ErrInvalidValue)
	}
	p := d.makeHost(hostManaged, dev, size)
	if p == 0 {
		return 0, d.errorOf(c, dev, size, cuda.ErrOutOfMemory)
	}
	d.live.managed++
	return p, nil
}

// freeManaged is MemFree of managed memory.
func (d *Driver) freeManaged(dev cuda.Device, h *hostRange) error {
	if err := d.beginContext(callMemFree, dev, h.m.size, d.costs.ManagedFree(h.m.size)); err != nil {
		return err
	}
	if err := d.dropHost(h, callMemFree, dev); err != nil {
		return err
	}
	d.freeWaits(dev)
	d.live.managed--
	return nil
}

// MemPrefetch takes the time on the stream that moving the pages takes: less the first time, when there is nothing to
// move yet. What kernels and the host move by touching is not followed.
func (d *Driver) MemPrefetch(dev cuda.Device, p cuda.Ptr, size uint64, to cuda.Location, sh cuda.Stream) error {
	d.mu.Lock()
	defer d.leave()
	const c = callMemPrefetch
	s, err := d.streamCall(c, dev, sh, 0)
	if err != nil {
		return err
	}
	if err := d.refuseCaptured(c, dev, s); err != nil {
		return err
	}
	m := d.hostAt(uint64(p))
	if m == nil || size == 0 || uint64(p)-m.base > m.size || size > m.size-(uint64(p)-m.base) || to > cuda.LocationHostNUMA {
		return d.errorOf(c, dev, size, cuda.ErrInvalidValue)
	}
	h := d.host[d.hostIndex(m.base)]
	if h.kind != hostManaged {
		return d.errorOf(c, dev, size, cuda.ErrInvalidValue)
	}
	took := d.costs.Prefetch(size, to, h.fresh)
	h.fresh = false
	return d.runCopy(s, dev, took, c, side{addr: uint64(p), size: size, tracked: true}, side{})
}
