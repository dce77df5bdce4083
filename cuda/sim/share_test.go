package sim

import (
	"os"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
)

// What takes two processes, over two drivers in one.
func TestSharing(t *testing.T) {
	if Exportable == cuda.HandleNone {
		t.Skip("descriptors are passed on Linux")
	}
	const g = DefaultGranularity
	a, b := New(Options{Handles: Exportable}), New(Options{Check: CheckOrder})
	for _, d := range []*Driver{a, b} {
		ok(t, d.RetainContext(0))
	}
	h, err := a.MemCreate(4*g, cuda.MemProp{Handles: Exportable})
	ok(t, err)
	fd, err := a.MemExport(h)
	ok(t, err)
	k, err := b.MemImport(0, fd)
	ok(t, err)
	ok(t, os.NewFile(uintptr(fd), "chunk").Close())
	p, err := b.AddressReserve(4*g, g, 0)
	ok(t, err)
	wantCode(t, b.MemMap(p, 2*g, k), cuda.ErrNotSupported)
	ok(t, b.MemMap(p, 4*g, k))
	ok(t, b.MemRelease(k))
	ok(t, b.MemSetAccess(p, 4*g, []cuda.Device{0}))
	ok(t, b.Use(0, cuda.StreamLegacy, p, 4*g))
	wantFault(t, b.MemUnmap(p, 4*g), FaultInUse)
	ok(t, b.StreamSynchronize(0, cuda.StreamLegacy))
	ok(t, b.MemUnmap(p, 4*g))
	ok(t, b.AddressFree(p, 4*g))
	ok(t, a.MemRelease(h))

	q, err := a.MemAlloc(0, 3*g)
	ok(t, err)
	handle, err := a.IpcExport(0, q)
	ok(t, err)
	first, err := b.IpcOpen(0, handle)
	ok(t, err)
	if second, err := b.IpcOpen(0, handle); second != first || err != nil {
		t.Errorf("opened at %#x, then at %#x, %v", uint64(first), uint64(second), err)
	}
	ok(t, b.IpcClose(0, first))
	ok(t, b.Use(0, cuda.StreamLegacy, first, 3*g))
	wantCode(t, b.MemFree(0, first), cuda.ErrInvalidValue) // it is another's
	wantFault(t, b.IpcClose(0, first), FaultInUse)
	ok(t, b.StreamSynchronize(0, cuda.StreamLegacy))
	ok(t, b.IpcClose(0, first))
	wantCode(t, b.IpcClose(0, first), cuda.ErrInvalidValue)
	ok(t, a.MemFree(0, q))
	for _, d := range []*Driver{a, b} {
		if l := d.Leaks(); l != (Live{}) || d.ReservedBytes(0) != 0 || d.PeakBytes(0) > 4*g {
			t.Errorf("left %+v, %d bytes, at most %d", l, d.ReservedBytes(0), d.PeakBytes(0))
		}
	}
	if b.PeakBytes(0) != 0 {
		t.Errorf("imported memory took %d bytes", b.PeakBytes(0))
	}
}

// everyCallOfSharing is the part of the scenario of TestEveryCallCanFail that is about sharing.
func everyCallOfSharing(t *testing.T, d *Driver, retry func(func() error)) {
	if Exportable == cuda.HandleNone {
		return
	}
	other := New(Options{})
	ok(t, other.RetainContext(0))
	imported := must[cuda.IpcHandle](t)(other.IpcExport(0, must[cuda.Ptr](t)(other.MemAlloc(0, 4*mib))))
	var h, k cuda.Handle
	var p, q cuda.Ptr
	var fd int
	var err error
	retry(func() error { h, err = d.MemCreate(4*mib, cuda.MemProp{Handles: Exportable}); return err })
	retry(func() error { p, err = d.MemAlloc(0, 4*mib); return err })
	retry(func() error { fd, err = d.MemExport(h); return err })
	retry(func() error { k, err = d.MemImport(0, fd); return err })
	retry(func() error { _, err = d.IpcExport(0, p); return err })
	retry(func() error { q, err = d.IpcOpen(0, imported); return err })
	retry(func() error { return d.IpcClose(0, q) })
	ok(t, os.NewFile(uintptr(fd), "chunk").Close())
	everyCallOfSharedPools(t, d, retry)
	retry(func() error { return d.MemRelease(k) })
	retry(func() error { return d.MemRelease(h) })
	retry(func() error { return d.MemFree(0, p) })
}

func everyCallOfSharedPools(t *testing.T, d *Driver, retry func(func() error)) {
	other := New(Options{Handles: Exportable})
	t.Cleanup(func() { ok(t, other.Close()); ok(t, d.Close()) })
	ok(t, other.RetainContext(0))
	theirs := must[cuda.MemPool](t)(other.MemPoolCreate(cuda.MemPoolProps{Handles: Exportable}))
	file := must[int](t)(other.MemPoolExport(0, theirs))
	memory := must[cuda.PoolPtr](t)(other.MemPoolExportPtr(0, must[cuda.Ptr](t)(other.MemAllocAsync(0, mib, theirs, 0))))
	mark := must[cuda.EventHandle](t)(other.EventExport(0, must[cuda.Event](t)(other.EventCreateShared(0))))
	var pool, imported cuda.MemPool
	var p, q cuda.Ptr
	var e, f cuda.Event
	var fd int
	var err error
	retry(func() error { pool, err = d.MemPoolCreate(cuda.MemPoolProps{Handles: Exportable}); return err })
	retry(func() error { fd, err = d.MemPoolExport(0, pool); return err })
	ok(t, os.NewFile(uintptr(fd), "pool").Close())
	retry(func() error { imported, err = d.MemPoolImport(0, file); return err })
	ok(t, os.NewFile(uintptr(file), "pool").Close())
	retry(func() error { p, err = d.MemAllocAsync(0, mib, pool, 0); return err })
	retry(func() error { _, err = d.MemPoolExportPtr(0, p); return err })
	retry(func() error { q, err = d.MemPoolImportPtr(0, imported, memory); return err })
	retry(func() error { e, err = d.EventCreateShared(0); return err })
	retry(func() error { _, err = d.EventExport(0, e); return err })
	retry(func() error { f, err = d.EventOpen(0, mark); return err })
	retry(func() error { return d.EventDestroy(0, f) })
	retry(func() error { return d.EventDestroy(0, e) })
	retry(func() error { return d.MemFreeAsync(0, q, 0) })
	retry(func() error { return d.MemFreeAsync(0, p, 0) })
	retry(func() error { return d.StreamSynchronize(0, 0) })
	retry(func() error { return d.MemPoolDestroy(0, imported) })
	retry(func() error { return d.MemPoolDestroy(0, pool) })
}
