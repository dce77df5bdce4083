//go:build linux && cgo

package nvidia_test

import (
	"errors"
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/cistern-gpu/cistern/cuda"
)

// Sharing, with what reaches the driver.
func TestSharing(t *testing.T) {
	t.Setenv("STANDIN_DEVICES", "2")
	b := open(t)
	must(t, b.RetainContext(1))
	var h, k cuda.Handle
	b.wants(`cuMemCreate(size 2097152, handles 1, location 1:1, rdma 0) = 0, context -1
cuMemExportToShareableHandle(type 1) = 0, context -1
cuMemImportFromShareableHandle(type 1) = 0, context -1
cuMemRelease() = 0, context -1
cuMemRelease() = 0, context -1`, func() {
		var err error
		h, err = b.MemCreate(chunk, cuda.MemProp{Device: 1, Handles: cuda.HandlePosix})
		must(t, err)
		fd, err := b.MemExport(h)
		must(t, err)
		k, err = b.MemImport(1, fd)
		must(t, err)
		must(t, os.NewFile(uintptr(fd), "chunk").Close())
		must(t, b.MemRelease(k))
		must(t, b.MemRelease(h))
	})
	b.wants(`cuMemAlloc(size 2097152) = 0, context 1
cuIpcGetMemHandle() = 0, context 1
cuIpcOpenMemHandle(flags 1) = 201, context 1
cuIpcCloseMemHandle() = 1, context 1
cuMemFree() = 0, context 1`, func() {
		p, err := b.MemAlloc(1, chunk)
		must(t, err)
		handle, err := b.IpcExport(1, p)
		must(t, err)
		if _, err := b.IpcOpen(1, handle); !errors.Is(err, cuda.ErrInvalidContext) {
			t.Errorf("opening what is this process's own: %v", err)
		}
		if err := b.IpcClose(1, p); !errors.Is(err, cuda.ErrInvalidValue) {
			t.Errorf("closing what is not open: %v", err)
		}
		must(t, b.MemFree(1, p))
	})
}

// Pools and events for other processes, with what reaches the driver.
func TestSharingPools(t *testing.T) {
	t.Setenv("STANDIN_DEVICES", "2")
	b := open(t)
	must(t, b.RetainContext(1))
	b.wants(`cuMemPoolCreate(handles 1, location 1:1, max 0) = 0, context 1
cuMemPoolExportToShareableHandle(type 1) = 0, context 1
cuMemPoolImportFromShareableHandle(type 1) = 0, context 1
cuMemPoolSetAccess( 1:0=3) = 0, context 1
cuMemAllocFromPoolAsync(size 4096, stream 0) = 1, context 1
cuMemAllocFromPoolAsync(size 4096, stream 0) = 0, context 1
cuMemPoolExportPointer() = 0, context 1
cuMemPoolImportPointer() = 0, context 1
cuMemPoolExportPointer() = 1, context 1
cuMemcpyAsync(size 8) = 0, context 1
cuMemcpyAsync(size 8) = 0, context 1
cuMemFreeAsync(stream 0) = 0, context 1
cuMemFreeAsync(stream 0) = 0, context 1
cuMemPoolDestroy() = 0, context 1
cuMemPoolDestroy() = 0, context 1`, func() {
		pool, err := b.MemPoolCreate(cuda.MemPoolProps{Device: 1, Handles: cuda.HandlePosix})
		must(t, err)
		fd, err := b.MemPoolExport(1, pool)
		must(t, err)
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("the descriptor has flags %#x, %v", flags, err)
		}
		imported, err := b.MemPoolImport(1, fd)
		must(t, err)
		must(t, os.NewFile(uintptr(fd), "pool").Close())
		must(t, b.MemPoolSetAccess(1, imported, []cuda.Device{0}))
		if _, err := b.MemAllocAsync(1, 4096, imported, 0); !errors.Is(err, cuda.ErrInvalidValue) {
			t.Errorf("allocating from an imported pool: %v", err)
		}
		p, err := b.MemAllocAsync(1, 4096, pool, 0)
		must(t, err)
		handle, err := b.MemPoolExportPtr(1, p)
		must(t, err)
		q, err := b.MemPoolImportPtr(1, imported, handle)
		must(t, err)
		if _, err := b.MemPoolExportPtr(1, q); !errors.Is(err, cuda.ErrInvalidValue) {
			t.Errorf("exporting imported memory: %v", err)
		}
		words := [...]uint64{0x0123456789abcdef, 0}
		must(t, b.MemcpyAsync(1, p+4088, ptrTo(&words[0]), 8, 0))
		must(t, b.MemcpyAsync(1, ptrTo(&words[1]), q+4088, 8, 0))
		if words[1] != words[0] {
			t.Errorf("the importer reads %#x of %#x", words[1], words[0])
		}
		must(t, b.MemFreeAsync(1, q, 0))
		must(t, b.MemFreeAsync(1, p, 0))
		must(t, b.MemPoolDestroy(1, imported))
		must(t, b.MemPoolDestroy(1, pool))
	})
	b.wants(`cuEventCreate(flags 6) = 0, context 1
cuIpcGetEventHandle() = 0, context 1
cuIpcOpenEventHandle() = 0, context 1
cuEventQuery() = 0, context 1
cuEventDestroy() = 0, context 1
cuEventDestroy() = 0, context 1
cuEventCreate(flags 2) = 0, context 1
cuIpcGetEventHandle() = 400, context 1
cuIpcOpenEventHandle() = 1, context 1
cuEventDestroy() = 0, context 1`, func() {
		e, err := b.EventCreateShared(1)
		must(t, err)
		handle, err := b.EventExport(1, e)
		must(t, err)
		f, err := b.EventOpen(1, handle)
		must(t, err)
		if done, err := b.EventQuery(1, f); !done || err != nil {
			t.Errorf("%v, %v", done, err)
		}
		must(t, b.EventDestroy(1, f))
		must(t, b.EventDestroy(1, e))
		e, err = b.EventCreate(1)
		must(t, err)
		if _, err := b.EventExport(1, e); !errors.Is(err, cuda.ErrInvalidHandle) {
			t.Errorf("exporting an event of this process alone: %v", err)
		}
		if _, err := b.EventOpen(1, cuda.EventHandle{}); !errors.Is(err, cuda.ErrInvalidValue) {
			t.Errorf("opening what is no event: %v", err)
		}
		must(t, b.EventDestroy(1, e))
	})
}

func ptrTo(p *uint64) cuda.Ptr { return cuda.Ptr(uintptr(unsafe.Pointer(p))) }
