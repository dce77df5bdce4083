package sim

import (
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
)

// everyCallOfMemory is the part of TestEveryCallCanFail that is about host, managed and pooled memory, copies and streams.
func everyCallOfMemory(d *Driver, retry func(func() error)) {
	var s cuda.Stream
	var host, managed, p, q cuda.Ptr
	var pool, own cuda.MemPool
	var err error
	pages := make([]byte, 3*hostPage)
	first := (addressOf(pages) + hostPage - 1) / hostPage * hostPage
	retry(func() error { s, err = d.StreamCreate(0, false); return err })
	retry(func() error { _, err = d.StreamBlocking(0, s); return err })
	retry(func() error { host, err = d.HostAlloc(0, 100); return err })
	retry(func() error { return d.HostRegister(0, first, 2*hostPage) })
	retry(func() error { managed, err = d.ManagedAlloc(0, 100); return err })
	retry(func() error { return d.MemPrefetch(0, managed, 100, cuda.LocationDevice, s) })
	retry(func() error { return d.MemcpyAsync(0, managed, host, 100, s) })
	retry(func() error { return d.MemcpyAsync(0, first, managed, 100, s) })
	retry(func() error { pool, err = d.MemPoolCreate(cuda.MemPoolProps{}); return err })
	retry(func() error { own, err = d.MemPoolDefault(0); return err })
	retry(func() error { _, err = d.MemPoolGet(0, pool, cuda.MemPoolReleaseThreshold); return err })
	retry(func() error { return d.MemPoolSet(0, pool, cuda.MemPoolReleaseThreshold, 1<<40) })
	retry(func() error { return d.MemPoolSetAccess(0, pool, []cuda.Device{0, 1}) })
	retry(func() error { p, err = d.MemAllocAsync(0, 100, pool, s); return err })
	retry(func() error { q, err = d.MemAllocAsync(0, 100, own, s); return err })
	retry(func() error { return d.MemFreeAsync(0, p, s) })
	retry(func() error { return d.MemFreeAsync(0, q, s) })
	retry(func() error { return d.StreamSynchronize(0, s) })
	retry(func() error { return d.MemPoolTrim(0, pool, 0) })
	retry(func() error { return d.MemPoolDestroy(0, pool) })
	retry(func() error { return d.MemFree(0, managed) })
	retry(func() error { return d.HostUnregister(0, first) })
	retry(func() error { return d.HostFree(0, host) })
	retry(func() error { return d.StreamDestroy(0, s) })
}

// addressOf is where a slice is.
func addressOf(b []byte) cuda.Ptr { return cuda.Ptr(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
