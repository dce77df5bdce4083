//go:build linux && cgo

package nvidia

/*
#include "driver.h"

#cgo noescape nv_mem_export
#cgo nocallback nv_mem_export
#cgo noescape nv_mem_import
#cgo nocallback nv_mem_import
#cgo noescape nv_ipc_export
#cgo nocallback nv_ipc_export
#cgo noescape nv_ipc_open
#cgo nocallback nv_ipc_open
#cgo nocallback nv_ipc_close
#cgo noescape nv_pool_export
#cgo nocallback nv_pool_export
#cgo noescape nv_pool_import
#cgo nocallback nv_pool_import
#cgo noescape nv_pool_export_ptr
#cgo nocallback nv_pool_export_ptr
#cgo noescape nv_pool_import_ptr
#cgo nocallback nv_pool_import_ptr
#cgo noescape nv_event_export
#cgo nocallback nv_event_export
#cgo noescape nv_event_open
#cgo nocallback nv_event_open
*/
import "C"

import (
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
)

// MemExport makes a file descriptor of a chunk.
func (d *Driver) MemExport(h cuda.Handle) (int, error) {
	var fd C.int
	if r := C.nv_mem_export(d.c, C.CUmemGenericAllocationHandle(h), &fd); r != 0 {
		return -1, d.failure(r, noDevice, 0)
	}
	return int(fd), nil
}

// MemImport makes a chunk of a file descriptor.
func (d *Driver) MemImport(dev cuda.Device, fd int) (cuda.Handle, error) {
	var h C.CUmemGenericAllocationHandle
	if r := C.nv_mem_import(d.c, C.int(fd), &h); r != 0 {
		return 0, d.failure(r, dev, 0)
	}
	return cuda.Handle(h), nil
}

// IpcExport is a handle for memory from MemAlloc.
func (d *Driver) IpcExport(dev cuda.Device, p cuda.Ptr) (cuda.IpcHandle, error) {
	var h cuda.IpcHandle
	r := C.nv_ipc_export(d.c, C.intptr_t(dev), C.CUdeviceptr(p), (*C.CUipcMemHandle)(unsafe.Pointer(&h)))
	return h, d.check(r, dev)
}

// IpcOpen maps memory that another process exported.
func (d *Driver) IpcOpen(dev cuda.Device, h cuda.IpcHandle) (cuda.Ptr, error) {
	var p C.CUdeviceptr
	if r := C.nv_ipc_open(d.c, C.intptr_t(dev), (*C.CUipcMemHandle)(unsafe.Pointer(&h)), &p); r != 0 {
		return 0, d.failure(r, dev, 0)
	}
	return cuda.Ptr(p), nil
}

// IpcClose undoes one IpcOpen.
func (d *Driver) IpcClose(dev cuda.Device, p cuda.Ptr) error {
	return d.check(C.nv_ipc_close(d.c, C.intptr_t(dev), C.CUdeviceptr(p)), dev)
}

// MemPoolExport makes a file descriptor of a pool.
func (d *Driver) MemPoolExport(dev cuda.Device, pool cuda.MemPool) (int, error) {
	var fd C.int
	if r := C.nv_pool_export(d.c, C.intptr_t(dev), C.uintptr_t(pool), &fd); r != 0 {
		return -1, d.failure(r, dev, 0)
	}
	return int(fd), nil
}

// MemPoolImport makes a pool of a file descriptor.
func (d *Driver) MemPoolImport(dev cuda.Device, fd int) (cuda.MemPool, error) {
	var pool C.uintptr_t
	if r := C.nv_pool_import(d.c, C.intptr_t(dev), C.int(fd), &pool); r != 0 {
		return 0, d.failure(r, dev, 0)
	}
	return cuda.MemPool(pool), nil
}

// MemPoolExportPtr names memory of a pool in other processes.
func (d *Driver) MemPoolExportPtr(dev cuda.Device, p cuda.Ptr) (cuda.PoolPtr, error) {
	var h cuda.PoolPtr
	r := C.nv_pool_export_ptr(d.c, C.intptr_t(dev), C.CUdeviceptr(p), (*C.CUmemPoolPtrExportData)(unsafe.Pointer(&h)))
	return h, d.check(r, dev)
}

// MemPoolImportPtr maps memory of an imported pool.
func (d *Driver) MemPoolImportPtr(dev cuda.Device, pool cuda.MemPool, h cuda.PoolPtr) (cuda.Ptr, error) {
	var p C.CUdeviceptr
	r := C.nv_pool_import_ptr(d.c, C.intptr_t(dev), C.uintptr_t(pool), (*C.CUmemPoolPtrExportData)(unsafe.Pointer(&h)), &p)
	if r != 0 {
		return 0, d.failure(r, dev, 0)
	}
	return cuda.Ptr(p), nil
}

// EventExport names an event in other processes.
func (d *Driver) EventExport(dev cuda.Device, e cuda.Event) (cuda.EventHandle, error) {
	var h cuda.EventHandle
	r := C.nv_event_export(d.c, C.intptr_t(dev), C.uintptr_t(e), (*C.CUipcEventHandle)(unsafe.Pointer(&h)))
	return h, d.check(r, dev)
}

// EventOpen opens an event of another process.
func (d *Driver) EventOpen(dev cuda.Device, h cuda.EventHandle) (cuda.Event, error) {
	var e C.uintptr_t
	if r := C.nv_event_open(d.c, C.intptr_t(dev), (*C.CUipcEventHandle)(unsafe.Pointer(&h)), &e); r != 0 {
		return 0, d.failure(r, dev, 0)
	}
	return cuda.Event(e), nil
}
