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
