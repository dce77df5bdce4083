//go:build linux && cgo

package nvidia

/*
#include "driver.h"

#cgo nocallback nv_memcpy
#cgo noescape nv_host_alloc
#cgo nocallback nv_host_alloc
#cgo nocallback nv_host_free
#cgo nocallback nv_host_register
#cgo nocallback nv_host_unregister
#cgo noescape nv_managed_alloc
#cgo nocallback nv_managed_alloc
#cgo nocallback nv_prefetch
#cgo nocallback nv_mem_set_host_access
#cgo noescape nv_pool_create
#cgo nocallback nv_pool_create
#cgo nocallback nv_pool_destroy
#cgo noescape nv_pool_default
#cgo nocallback nv_pool_default
#cgo noescape nv_pool_get
#cgo nocallback nv_pool_get
#cgo nocallback nv_pool_set
#cgo nocallback nv_pool_trim
#cgo noescape nv_pool_set_access
#cgo nocallback nv_pool_set_access
#cgo noescape nv_alloc_async
#cgo nocallback nv_alloc_async
#cgo nocallback nv_free_async
*/
import "C"

import (
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
)

// sized is failure for a call that is about a device and a size, and nil for success.
func (d *Driver) sized(r C.nv_result, dev cuda.Device, size uint64) error {
	if r == 0 {
		return nil
	}
	return d.failure(r, dev, size)
}

// MemcpyAsync copies between any two addresses that CUDA knows.
func (d *Driver) MemcpyAsync(dev cuda.Device, dst, src cuda.Ptr, size uint64, s cuda.Stream) error {
	r := C.nv_memcpy(d.c, C.intptr_t(dev), C.CUdeviceptr(dst), C.CUdeviceptr(src), C.size_t(size), C.uintptr_t(s))
	return d.sized(r, dev, size)
}

// HostAlloc is page-locked host memory.
func (d *Driver) HostAlloc(dev cuda.Device, size uint64) (cuda.Ptr, error) {
	var p C.uint64_t
	if r := C.nv_host_alloc(d.c, C.intptr_t(dev), C.size_t(size), &p); r != 0 {
		return 0, d.failure(r, dev, size)
	}
	return cuda.Ptr(p), nil
}

// HostFree frees what HostAlloc gave.
func (d *Driver) HostFree(dev cuda.Device, p cuda.Ptr) error {
	return d.check(C.nv_host_free(d.c, C.intptr_t(dev), C.uint64_t(p)), dev)
}

// HostRegister page-locks memory of the process.
func (d *Driver) HostRegister(dev cuda.Device, p cuda.Ptr, size uint64) error {
	return d.sized(C.nv_host_register(d.c, C.intptr_t(dev), C.uint64_t(p), C.size_t(size)), dev, size)
}

// HostUnregister undoes HostRegister.
func (d *Driver) HostUnregister(dev cuda.Device, p cuda.Ptr) error {
	return d.check(C.nv_host_unregister(d.c, C.intptr_t(dev), C.uint64_t(p)), dev)
}

// ManagedAlloc is memory that host and devices use at one address.
func (d *Driver) ManagedAlloc(dev cuda.Device, size uint64) (cuda.Ptr, error) {
	var p C.CUdeviceptr
	if r := C.nv_managed_alloc(d.c, C.intptr_t(dev), C.size_t(size), &p); r != 0 {
		return 0, d.failure(r, dev, size)
	}
	return cuda.Ptr(p), nil
}

// MemPrefetch moves managed memory to the device or to the host.
func (d *Driver) MemPrefetch(dev cuda.Device, p cuda.Ptr, size uint64, to cuda.Location, s cuda.Stream) error {
	var host C.int
	if to == cuda.LocationHostNUMA {
		host = 1
	}
	return d.sized(C.nv_prefetch(d.c, C.intptr_t(dev), C.CUdeviceptr(p), C.size_t(size), host, C.uintptr_t(s)), dev, size)
}

// MemSetHostAccess lets the host read and write mapped memory of its own.
func (d *Driver) MemSetHostAccess(p cuda.Ptr, size uint64, node int) error {
	return d.sized(C.nv_mem_set_host_access(d.c, C.CUdeviceptr(p), C.size_t(size), C.int(node)), noDevice, size)
}

// MemPoolCreate makes a pool of stream-ordered memory.
func (d *Driver) MemPoolCreate(props cuda.MemPoolProps) (cuda.MemPool, error) {
	var pool C.uintptr_t
	r := C.nv_pool_create(d.c, C.intptr_t(props.Device), C.int(props.Handles), C.size_t(props.MaxSize), &pool)
	if r != 0 {
		return 0, d.failure(r, props.Device, props.MaxSize)
	}
	return cuda.MemPool(pool), nil
}

// MemPoolDestroy destroys a pool; its memory goes with the last allocation from it.
func (d *Driver) MemPoolDestroy(dev cuda.Device, pool cuda.MemPool) error {
	return d.check(C.nv_pool_destroy(d.c, C.intptr_t(dev), C.uintptr_t(pool)), dev)
}

// MemPoolDefault is the device's own pool.
func (d *Driver) MemPoolDefault(dev cuda.Device) (cuda.MemPool, error) {
	var pool C.uintptr_t
	if r := C.nv_pool_default(d.c, C.intptr_t(dev), &pool); r != 0 {
		return 0, d.failure(r, dev, 0)
	}
	return cuda.MemPool(pool), nil
}

// MemPoolGet reads an attribute of a pool.
func (d *Driver) MemPoolGet(dev cuda.Device, pool cuda.MemPool, attr cuda.MemPoolAttr) (uint64, error) {
	var value C.uint64_t
	if r := C.nv_pool_get(d.c, C.intptr_t(dev), C.uintptr_t(pool), C.int(attr), &value); r != 0 {
		return 0, d.failure(r, dev, 0)
	}
	return uint64(value), nil
}

// MemPoolSet sets an attribute of a pool.
func (d *Driver) MemPoolSet(dev cuda.Device, pool cuda.MemPool, attr cuda.MemPoolAttr, value uint64) error {
	return d.check(C.nv_pool_set(d.c, C.intptr_t(dev), C.uintptr_t(pool), C.int(attr), C.uint64_t(value)), dev)
}

// MemPoolTrim gives a pool's unused memory back until keep bytes are held.
func (d *Driver) MemPoolTrim(dev cuda.Device, pool cuda.MemPool, keep uint64) error {
	return d.check(C.nv_pool_trim(d.c, C.intptr_t(dev), C.uintptr_t(pool), C.size_t(keep)), dev)
}

// MemPoolSetAccess opens the pool's memory to devices.
func (d *Driver) MemPoolSetAccess(dev cuda.Device, pool cuda.MemPool, devs []cuda.Device) error {
	list := (*C.intptr_t)(unsafe.Pointer(unsafe.SliceData(devs))) // as wide as a cuda.Device
	return d.check(C.nv_pool_set_access(d.c, C.intptr_t(dev), C.uintptr_t(pool), list, C.size_t(len(devs))), dev)
}

// MemAllocAsync gets memory from a pool in the stream's order.
func (d *Driver) MemAllocAsync(dev cuda.Device, size uint64, pool cuda.MemPool, s cuda.Stream) (cuda.Ptr, error) {
	var p C.CUdeviceptr
	if r := C.nv_alloc_async(d.c, C.intptr_t(dev), C.size_t(size), C.uintptr_t(pool), C.uintptr_t(s), &p); r != 0 {
		return 0, d.failure(r, dev, size)
	}
	return cuda.Ptr(p), nil
}

// MemFreeAsync gives memory back to its pool in the stream's order.
func (d *Driver) MemFreeAsync(dev cuda.Device, p cuda.Ptr, s cuda.Stream) error {
	return d.check(C.nv_free_async(d.c, C.intptr_t(dev), C.CUdeviceptr(p), C.uintptr_t(s)), dev)
}
