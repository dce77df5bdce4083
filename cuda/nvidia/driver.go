//go:build linux && cgo

package nvidia

/*
#include "driver.h"

// The C functions keep no pointer that Go passes them and never call back into Go. Saying so keeps arguments on the
// Go stack and makes the crossing cheaper.
#cgo noescape nv_init
#cgo nocallback nv_init
#cgo noescape nv_device_info
#cgo nocallback nv_device_info
#cgo noescape nv_context_active
#cgo nocallback nv_context_active
#cgo nocallback nv_context_retain
#cgo noescape nv_can_access_peer
#cgo nocallback nv_can_access_peer
#cgo nocallback nv_enable_peer_access
#cgo noescape nv_mem_info
#cgo nocallback nv_mem_info
#cgo noescape nv_mem_alloc
#cgo nocallback nv_mem_alloc
#cgo nocallback nv_mem_free
#cgo noescape nv_address_reserve
#cgo nocallback nv_address_reserve
#cgo nocallback nv_address_free
#cgo noescape nv_mem_create
#cgo nocallback nv_mem_create
#cgo nocallback nv_mem_release
#cgo nocallback nv_mem_map
#cgo nocallback nv_mem_unmap
#cgo noescape nv_mem_set_access
#cgo nocallback nv_mem_set_access
#cgo noescape nv_stream_id
#cgo nocallback nv_stream_id
#cgo noescape nv_stream_capture
#cgo nocallback nv_stream_capture
#cgo noescape nv_capture_nodes
#cgo nocallback nv_capture_nodes
#cgo noescape nv_node_dependencies
#cgo nocallback nv_node_dependencies
#cgo nocallback nv_stream_wait_event
#cgo nocallback nv_stream_synchronize
#cgo nocallback nv_context_synchronize
#cgo noescape nv_stream_create
#cgo nocallback nv_stream_create
#cgo nocallback nv_stream_destroy
#cgo noescape nv_stream_blocking
#cgo nocallback nv_stream_blocking
#cgo noescape nv_event_create
#cgo nocallback nv_event_create
#cgo nocallback nv_event_destroy
#cgo nocallback nv_event_record
#cgo nocallback nv_event_query
#cgo nocallback nv_event_synchronize
*/
import "C"

import (
	"errors"
	"time"
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
)

// Name is "nvidia".
func (d *Driver) Name() string { return "nvidia" }

// Version is the driver's CUDA version: 13000 for 13.0.
func (d *Driver) Version() int { return d.version }

// Now is the host's clock, since the program started.
func (d *Driver) Now() time.Duration { return time.Since(began) }

var began = time.Now()

// DeviceCount is the number of visible devices, as it was when the driver was opened.
func (d *Driver) DeviceCount() (int, error) { return d.devices, nil }

// DeviceInfo describes a device. Handles is what its attributes promise; ProbeHandles tells what it keeps.
func (d *Driver) DeviceInfo(dev cuda.Device) (cuda.DeviceInfo, error) {
	var c C.nv_info
	if r := C.nv_device_info(d.c, C.intptr_t(dev), &c); r != 0 {
		return cuda.DeviceInfo{}, d.failure(r, dev, 0)
	}
	info := cuda.DeviceInfo{
		Name:        C.GoString(&c.name[0]),
		UUID:        *(*[16]byte)(unsafe.Pointer(&c.uuid)),
		TotalBytes:  uint64(c.total),
		Granularity: uint64(c.granularity),
		VMM:         c.vmm != 0,
		RDMA:        c.rdma != 0,
		Multiproc:   int(c.multiproc),
		Managed:     c.managed != 0,
		Pools:       c.pools != 0,
		PoolHandles: cuda.HandleType(c.pool_handles) & (cuda.HandlePosix | cuda.HandleFabric),
		HostNUMA:    int(c.host_numa),
		HostVMM:     c.host_vmm != 0,
	}
	if c.posix != 0 {
		info.Handles |= cuda.HandlePosix
	}
	if c.fabric != 0 {
		info.Handles |= cuda.HandleFabric
	}
	return info, nil
}

// ProbeHandles creates and releases a chunk with FABRIC|POSIX handles, then POSIX, then none, and returns the first
// that the device grants. Attributes are not enough: a device that promises FABRIC refuses it where the fabric service
// is not running or the container may not use it.
func (d *Driver) ProbeHandles(dev cuda.Device) (cuda.HandleType, error) {
	info, err := d.DeviceInfo(dev)
	if err != nil {
		return cuda.HandleNone, err
	}
	var refused error
	for _, handles := range []cuda.HandleType{cuda.HandleFabric | cuda.HandlePosix, cuda.HandlePosix, cuda.HandleNone} {
		h, err := d.MemCreate(info.Granularity, cuda.MemProp{Device: dev, Handles: handles, RDMA: info.RDMA})
		if err == nil {
			if err = d.MemRelease(h); err != nil {
				err = d.MemRelease(h) // once more: nothing else would
			}
			return handles, err
		}
		if !refusal(err) {
			return cuda.HandleNone, err
		}
		refused = err
	}
	return cuda.HandleNone, refused
}

// refusal reports whether a chunk could not be made because of its handle types, so that asking for less may help.
func refusal(err error) bool {
	for _, code := range []cuda.Code{cuda.ErrNotPermitted, cuda.ErrNotSupported, cuda.ErrInvalidValue,
		cuda.ErrInvalidDevice, cuda.ErrUnknown} {
		if errors.Is(err, code) {
			return true
		}
	}
	return false
}

// ContextActive reports whether the device's primary context exists.
func (d *Driver) ContextActive(dev cuda.Device) (bool, error) {
	var active C.int
	r := C.nv_context_active(d.c, C.intptr_t(dev), &active)
	return active != 0, d.check(r, dev)
}

// RetainContext makes the device's primary context exist until the process ends.
func (d *Driver) RetainContext(dev cuda.Device) error {
	return d.check(C.nv_context_retain(d.c, C.intptr_t(dev)), dev)
}

// CanAccessPeer reports whether the device can use the memory of another directly.
func (d *Driver) CanAccessPeer(dev, peer cuda.Device) (bool, error) {
	var can C.int
	r := C.nv_can_access_peer(d.c, C.intptr_t(dev), C.intptr_t(peer), &can)
	return can != 0, d.check(r, dev)
}

// EnablePeerAccess lets work of the device's primary context use what MemAlloc gives out on another.
func (d *Driver) EnablePeerAccess(dev, peer cuda.Device) error {
	return d.check(C.nv_enable_peer_access(d.c, C.intptr_t(dev), C.intptr_t(peer)), dev)
}

// MemInfo is the device's free and total memory in bytes.
func (d *Driver) MemInfo(dev cuda.Device) (free, total uint64, err error) {
	var f, t C.size_t
	r := C.nv_mem_info(d.c, C.intptr_t(dev), &f, &t)
	return uint64(f), uint64(t), d.check(r, dev)
}

// MemAlloc is cuMemAlloc on the device's primary context.
func (d *Driver) MemAlloc(dev cuda.Device, size uint64) (cuda.Ptr, error) {
	var p C.CUdeviceptr
	if r := C.nv_mem_alloc(d.c, C.intptr_t(dev), C.size_t(size), &p); r != 0 {
		return 0, d.failure(r, dev, size)
	}
	return cuda.Ptr(p), nil
}

// MemFree is cuMemFree on the device's primary context.
func (d *Driver) MemFree(dev cuda.Device, p cuda.Ptr) error {
	return d.check(C.nv_mem_free(d.c, C.intptr_t(dev), C.CUdeviceptr(p)), dev)
}

// AddressReserve reserves a range of addresses.
func (d *Driver) AddressReserve(size, align uint64, hint cuda.Ptr) (cuda.Ptr, error) {
	var p C.CUdeviceptr
	if r := C.nv_address_reserve(d.c, C.size_t(size), C.size_t(align), C.CUdeviceptr(hint), &p); r != 0 {
		return 0, d.failure(r, noDevice, size)
	}
	return cuda.Ptr(p), nil
}

// AddressFree gives a whole reservation back.
func (d *Driver) AddressFree(p cuda.Ptr, size uint64) error {
	if r := C.nv_address_free(d.c, C.CUdeviceptr(p), C.size_t(size)); r != 0 {
		return d.failure(r, noDevice, size)
	}
	return nil
}

// MemCreate makes physical memory.
func (d *Driver) MemCreate(size uint64, prop cuda.MemProp) (cuda.Handle, error) {
	var host, rdma C.int
	if prop.Location == cuda.LocationHostNUMA {
		host = 1
	}
	if prop.RDMA {
		rdma = 1
	}
	var h C.CUmemGenericAllocationHandle
	r := C.nv_mem_create(d.c, C.size_t(size), C.intptr_t(prop.Device), host, C.int(prop.NUMANode), C.int(prop.Handles), rdma, &h)
	if r != 0 {
		return 0, d.failure(r, prop.Device, size)
	}
	return cuda.Handle(h), nil
}

// MemRelease drops the caller's reference to a chunk.
func (d *Driver) MemRelease(h cuda.Handle) error {
	return d.check(C.nv_mem_release(d.c, C.CUmemGenericAllocationHandle(h)), noDevice)
}

// MemMap maps the whole of a chunk at p.
func (d *Driver) MemMap(p cuda.Ptr, size uint64, h cuda.Handle) error {
	if r := C.nv_mem_map(d.c, C.CUdeviceptr(p), C.size_t(size), C.CUmemGenericAllocationHandle(h)); r != 0 {
		return d.failure(r, noDevice, size)
	}
	return nil
}

// MemUnmap undoes whole mappings.
func (d *Driver) MemUnmap(p cuda.Ptr, size uint64) error {
	if r := C.nv_mem_unmap(d.c, C.CUdeviceptr(p), C.size_t(size)); r != 0 {
		return d.failure(r, noDevice, size)
	}
	return nil
}

// MemSetAccess gives every device in devs read-write access.
func (d *Driver) MemSetAccess(p cuda.Ptr, size uint64, devs []cuda.Device) error {
	return d.setAccess(p, size, devs, C.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
}

// MemSetReadOnly gives every device in devs access that only reads.
func (d *Driver) MemSetReadOnly(p cuda.Ptr, size uint64, devs []cuda.Device) error {
	return d.setAccess(p, size, devs, C.CU_MEM_ACCESS_FLAGS_PROT_READ)
}

func (d *Driver) setAccess(p cuda.Ptr, size uint64, devs []cuda.Device, flags C.int) error {
	// A cuda.Device is an int, which is as wide as C's intptr_t.
	list := (*C.intptr_t)(unsafe.Pointer(unsafe.SliceData(devs)))
	if r := C.nv_mem_set_access(d.c, C.CUdeviceptr(p), C.size_t(size), list, C.size_t(len(devs)), flags); r != 0 {
		dev := noDevice
		if len(devs) == 1 {
			dev = devs[0]
		}
		return d.failure(r, dev, size)
	}
	return nil
}

// StreamID identifies a stream. The legacy stream's number is this package's own: the driver cannot be asked for it
// while a stream that blocks with it is being captured. So is the number of a stream that is being captured itself, which
// lasts as long as the capture; its context is taken to be the device's primary one.
func (d *Driver) StreamID(dev cuda.Device, s cuda.Stream) (cuda.StreamID, error) {
	var context C.uint64_t
	var id C.ulonglong
	if r := C.nv_stream_id(d.c, C.intptr_t(dev), C.uintptr_t(s), &context, &id); r != 0 {
		return cuda.StreamID{}, d.failure(r, dev, 0)
	}
	return cuda.StreamID{Context: uint64(context), ID: uint64(id)}, nil
}

// StreamCapture reports whether the stream is being captured, and into which capture. On the legacy stream, while a
// stream that blocks with it is being captured, CUDA has no answer: cuda.ErrStreamCaptureImplicit.
func (d *Driver) StreamCapture(dev cuda.Device, s cuda.Stream) (cuda.CaptureStatus, uint64, error) {
	var status C.int
	var id C.uint64_t
	if r := C.nv_stream_capture(d.c, C.intptr_t(dev), C.uintptr_t(s), &status, &id); r != 0 {
		return cuda.CaptureNone, 0, d.failure(r, dev, 0)
	}
	if cuda.CaptureStatus(status) == cuda.CaptureNone {
		id = 0 // the driver leaves it unset
	}
	return cuda.CaptureStatus(status), uint64(id), nil
}

// StreamCaptureNodes names the capture that the stream is in, and the nodes that come before what it does next.
func (d *Driver) StreamCaptureNodes(dev cuda.Device, s cuda.Stream) (uint64, []cuda.GraphNode, error) {
	var id C.uint64_t
	nodes, err := d.nodes(dev, func(list *C.uintptr_t, limit C.size_t, n *C.size_t) C.nv_result {
		return C.nv_capture_nodes(d.c, C.intptr_t(dev), C.uintptr_t(s), &id, list, limit, n)
	})
	return uint64(id), nodes, err
}

// GraphNodeDependencies are the nodes that a node comes after.
func (d *Driver) GraphNodeDependencies(dev cuda.Device, node cuda.GraphNode) ([]cuda.GraphNode, error) {
	return d.nodes(dev, func(list *C.uintptr_t, limit C.size_t, n *C.size_t) C.nv_result {
		return C.nv_node_dependencies(d.c, C.intptr_t(dev), C.uintptr_t(node), list, limit, n)
	})
}

// nodes makes a call that lists nodes, again where there are more than expected.
func (d *Driver) nodes(dev cuda.Device, call func(list *C.uintptr_t, limit C.size_t, n *C.size_t) C.nv_result) ([]cuda.GraphNode, error) {
	list := make([]C.uintptr_t, 8)
	for {
		var n C.size_t
		if r := call(&list[0], C.size_t(len(list)), &n); r != 0 {
			return nil, d.failure(r, dev, 0)
		}
		if n > C.size_t(len(list)) {
			list = make([]C.uintptr_t, n)
			continue
		}
		out := make([]cuda.GraphNode, n)
		for i := range out {
			out[i] = cuda.GraphNode(list[i])
		}
		return out, nil
	}
}

// StreamWaitEvent makes later work of s wait for the event.
func (d *Driver) StreamWaitEvent(dev cuda.Device, s cuda.Stream, e cuda.Event) error {
	return d.check(C.nv_stream_wait_event(d.c, C.intptr_t(dev), C.uintptr_t(s), C.uintptr_t(e)), dev)
}

// StreamSynchronize waits until all work of s is done.
func (d *Driver) StreamSynchronize(dev cuda.Device, s cuda.Stream) error {
	return d.check(C.nv_stream_synchronize(d.c, C.intptr_t(dev), C.uintptr_t(s)), dev)
}

// ContextSynchronize waits until all work of the device's primary context is done.
func (d *Driver) ContextSynchronize(dev cuda.Device) error {
	return d.check(C.nv_context_synchronize(d.c, C.intptr_t(dev)), dev)
}

// StreamCreate makes a stream. A blocking one orders itself with the legacy default stream, the other kind does not.
func (d *Driver) StreamCreate(dev cuda.Device, blocking bool) (cuda.Stream, error) {
	flags := C.uint(C.CU_STREAM_NON_BLOCKING)
	if blocking {
		flags = 0
	}
	var s C.uintptr_t
	if r := C.nv_stream_create(d.c, C.intptr_t(dev), flags, &s); r != 0 {
		return 0, d.failure(r, dev, 0)
	}
	return cuda.Stream(s), nil
}

// StreamDestroy destroys a stream; work that it still has queued is done all the same.
func (d *Driver) StreamDestroy(dev cuda.Device, s cuda.Stream) error {
	return d.check(C.nv_stream_destroy(d.c, C.intptr_t(dev), C.uintptr_t(s)), dev)
}

// StreamBlocking reports whether the stream orders itself with the legacy stream. A stream that is being captured is not
// asked.
func (d *Driver) StreamBlocking(dev cuda.Device, s cuda.Stream) (bool, error) {
	var blocking C.int
	r := C.nv_stream_blocking(d.c, C.intptr_t(dev), C.uintptr_t(s), &blocking)
	return r == 0 && blocking != 0, d.check(r, dev)
}

// EventCreate makes an event without timing.
func (d *Driver) EventCreate(dev cuda.Device) (cuda.Event, error) {
	return d.eventCreate(dev, C.CU_EVENT_DISABLE_TIMING)
}

// EventCreateShared makes an event that other processes may open.
func (d *Driver) EventCreateShared(dev cuda.Device) (cuda.Event, error) {
	return d.eventCreate(dev, C.CU_EVENT_DISABLE_TIMING|C.CU_EVENT_INTERPROCESS)
}

func (d *Driver) eventCreate(dev cuda.Device, flags C.uint) (cuda.Event, error) {
	var e C.uintptr_t
	if r := C.nv_event_create(d.c, C.intptr_t(dev), flags, &e); r != 0 {
		return 0, d.failure(r, dev, 0)
	}
	return cuda.Event(e), nil
}

// EventDestroy destroys an event.
func (d *Driver) EventDestroy(dev cuda.Device, e cuda.Event) error {
	return d.check(C.nv_event_destroy(d.c, C.intptr_t(dev), C.uintptr_t(e)), dev)
}

// EventRecord marks the work queued on s so far.
func (d *Driver) EventRecord(dev cuda.Device, e cuda.Event, s cuda.Stream) error {
	return d.check(C.nv_event_record(d.c, C.intptr_t(dev), C.uintptr_t(e), C.uintptr_t(s)), dev)
}

const notReady = C.nv_result(C.NV_cuEventQuery)<<32 | C.nv_result(cuda.ErrNotReady)

// EventQuery reports whether the recorded work is done.
func (d *Driver) EventQuery(dev cuda.Device, e cuda.Event) (bool, error) {
	r := C.nv_event_query(d.c, C.intptr_t(dev), C.uintptr_t(e))
	if r == 0 {
		return true, nil
	}
	if r == notReady {
		return false, nil
	}
	return false, d.failure(r, dev, 0)
}

// EventSynchronize waits for the recorded work.
func (d *Driver) EventSynchronize(dev cuda.Device, e cuda.Event) error {
	return d.check(C.nv_event_synchronize(d.c, C.intptr_t(dev), C.uintptr_t(e)), dev)
}
