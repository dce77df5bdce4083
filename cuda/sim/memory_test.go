package sim

import (
	"sync/atomic"
	"testing"
	"time"
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

// escaped keeps what addressOf was given last: a slice that Go put on the stack would move with it.
var escaped atomic.Pointer[byte]

// addressOf is where a slice is.
func addressOf(b []byte) cuda.Ptr {
	escaped.Store(unsafe.SliceData(b))
	return cuda.Ptr(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
}

// Page-locked memory is the process's own, bounded by what the host has.
func TestHostMemory(t *testing.T) {
	d := New(Options{HostCapacity: 4 * mib, Check: CheckOrder, Lag: ms})
	s := d.NewStream(0)
	p := must[cuda.Ptr](t)(d.HostAlloc(0, mib))
	b := hostBytes(uint64(p), mib)
	b[0], b[mib-1] = 1, 2
	q := must[cuda.Ptr](t)(d.HostAlloc(0, 1))
	if d.HostBytes() != mib+hostPage || d.ReservedBytes(0) != 0 {
		t.Errorf("%d bytes of the host, %d of the device", d.HostBytes(), d.ReservedBytes(0))
	}
	_, err := d.HostAlloc(0, 3*mib)
	wantCode(t, err, cuda.ErrOutOfMemory)
	_, err = d.HostAlloc(0, 1<<50)
	wantCode(t, err, cuda.ErrOutOfMemory)
	_, err = d.HostAlloc(0, 0)
	wantCode(t, err, cuda.ErrInvalidValue)
	h := must[cuda.Handle](t)(d.MemCreate(2*mib, cuda.MemProp{Location: cuda.LocationHostNUMA}))
	_, err = d.MemCreate(2*mib, cuda.MemProp{Location: cuda.LocationHostNUMA})
	wantCode(t, err, cuda.ErrOutOfMemory)
	ok(t, d.MemRelease(h))

	// Kernels of every device may use it, and then it cannot go.
	ok(t, d.Use(0, s, p, mib))
	wantFault(t, d.HostFree(0, p), FaultInUse)
	ok(t, d.StreamSynchronize(0, s))
	wantCode(t, d.HostFree(0, p+hostPage), cuda.ErrInvalidValue)
	wantCode(t, d.HostUnregister(0, p), cuda.ErrHostNotRegistered)
	wantCode(t, d.MemFree(0, p), cuda.ErrInvalidValue)
	wantCode(t, d.HostRegister(0, p, hostPage), cuda.ErrHostAlreadyRegistered)
	ok(t, d.HostFree(0, p))
	wantCode(t, d.HostFree(0, p), cuda.ErrInvalidValue)
	wantFault(t, d.Use(0, s, p, 1), FaultUnmapped)
	ok(t, d.HostFree(0, q))
	if d.HostBytes() != 0 || d.Leaks() != (Live{Streams: 1}) {
		t.Errorf("%d bytes, %+v", d.HostBytes(), d.Leaks())
	}
}

func TestHostRegister(t *testing.T) {
	d := New(Options{HostCapacity: 4 * hostPage, Check: CheckOrder, Lag: ms})
	s := d.NewStream(0)
	own := make([]byte, 10*hostPage)
	p := (addressOf(own) + hostPage - 1) / hostPage * hostPage
	wantCode(t, d.HostRegister(0, p+1, hostPage), cuda.ErrInvalidValue)
	wantCode(t, d.HostRegister(0, p, hostPage+1), cuda.ErrInvalidValue)
	wantCode(t, d.HostRegister(0, p, 0), cuda.ErrInvalidValue)
	wantCode(t, d.HostRegister(0, hostPage, hostPage), cuda.ErrInvalidValue) // nothing is there
	wantCode(t, d.HostRegister(0, p, 5*hostPage), cuda.ErrOutOfMemory)
	ok(t, d.HostRegister(0, p, 2*hostPage))
	ok(t, d.HostRegister(0, p+2*hostPage, 2*hostPage))
	for _, off := range []cuda.Ptr{0, hostPage, 3 * hostPage} {
		wantCode(t, d.HostRegister(0, p+off, hostPage), cuda.ErrHostAlreadyRegistered)
	}
	q := must[cuda.Ptr](t)(d.MemAlloc(0, mib))
	for _, bad := range [][2]uint64{{hostPage, 2 * hostPage}, {3 * hostPage, 2 * hostPage}, {0, 5 * hostPage}} {
		wantCode(t, d.MemcpyAsync(0, q, p+cuda.Ptr(bad[0]), bad[1], s), cuda.ErrInvalidValue)
		wantCode(t, d.MemcpyAsync(0, p+cuda.Ptr(bad[0]), q, bad[1], s), cuda.ErrInvalidValue)
	}
	if d.Fault() != nil {
		t.Error(d.Fault()) // it is an error, as on a GPU
	}
	ok(t, d.MemcpyAsync(0, q, p+2*hostPage, 2*hostPage, s))
	wantFault(t, d.HostUnregister(0, p+2*hostPage), FaultInUse)
	ok(t, d.HostUnregister(0, p))
	ok(t, d.StreamSynchronize(0, s))
	wantCode(t, d.HostUnregister(0, p+3*hostPage), cuda.ErrHostNotRegistered)
	ok(t, d.HostUnregister(0, p+2*hostPage))
	ok(t, d.MemcpyAsync(0, q, p, 5*hostPage, s)) // pageable memory has no such borders
	ok(t, d.StreamSynchronize(0, s))
	ok(t, d.MemFree(0, q))
	own[0] = 1
	if d.HostBytes() != 0 || d.Leaks() != (Live{Streams: 1}) {
		t.Errorf("%d bytes, %+v", d.HostBytes(), d.Leaks())
	}
}

// Managed memory may be more than the device has.
func TestManagedMemory(t *testing.T) {
	d := New(Options{Capacity: 64 * mib, Devices: 2, HostCapacity: mib, Check: CheckOrder, CallsTakeTime: true})
	s := d.NewStream(0)
	ok(t, d.RetainContext(1))
	p := must[cuda.Ptr](t)(d.ManagedAlloc(0, gib))
	if d.ReservedBytes(0) != 0 || d.HostBytes() != 0 || d.Leaks().Managed != 1 {
		t.Errorf("%d bytes of the device, %d of the host, %+v", d.ReservedBytes(0), d.HostBytes(), d.Leaks())
	}
	took := func(f func()) time.Duration {
		ok(t, d.StreamSynchronize(0, s))
		began := d.Now()
		f()
		ok(t, d.StreamSynchronize(0, s))
		return (d.Now() - began).Round(ms)
	}
	for _, c := range []struct {
		to   cuda.Location
		took time.Duration
	}{{cuda.LocationDevice, 5 * ms}, {cuda.LocationHostNUMA, 94 * ms}, {cuda.LocationDevice, 21 * ms}} {
		if got := took(func() { ok(t, d.MemPrefetch(0, p, gib, c.to, s)) }); got != c.took {
			t.Errorf("prefetching to %d took %v, measured %v", c.to, got, c.took)
		}
	}
	ok(t, d.Use(1, cuda.StreamLegacy, p, gib))
	wantFault(t, d.Use(0, s, p, 1), FaultRace)
	wantFault(t, d.MemFree(0, p), FaultInUse)
	ok(t, d.ContextSynchronize(0))
	ok(t, d.ContextSynchronize(1))
	for _, bad := range []cuda.Ptr{0, 12345, p + gib} {
		wantCode(t, d.MemPrefetch(0, bad, 1, cuda.LocationDevice, s), cuda.ErrInvalidValue)
	}
	wantCode(t, d.MemPrefetch(0, p+1, gib, cuda.LocationDevice, s), cuda.ErrInvalidValue)
	wantCode(t, d.MemPrefetch(0, p, 0, cuda.LocationDevice, s), cuda.ErrInvalidValue)
	wantCode(t, d.HostFree(0, p), cuda.ErrInvalidValue)
	wantCode(t, d.MemFreeAsync(0, p, s), cuda.ErrInvalidValue)
	syncs := d.Calls().DeviceSyncs
	if got := took(func() { ok(t, d.MemFree(0, p)) }); got != 13*ms || d.Calls().DeviceSyncs != syncs+1 {
		t.Errorf("freeing took %v, measured 12.6ms", got)
	}
	wantCode(t, d.MemFree(0, p), cuda.ErrInvalidValue)
	_, err := d.ManagedAlloc(0, 1<<50)
	wantCode(t, err, cuda.ErrOutOfMemory)
	if d.Leaks() != (Live{Streams: 1}) {
		t.Errorf("%+v", d.Leaks())
	}
}

// What was measured for host memory is given back as it was measured.
func TestCostOfHostMemory(t *testing.T) {
	c := DefaultCosts()
	for name, m := range map[string]struct{ got, want time.Duration }{
		"alloc 2 MiB":     {c.HostAlloc(2 * mib), 1060 * time.Microsecond},
		"alloc 64 MiB":    {c.HostAlloc(64 * mib), 22 * ms},
		"alloc 256 MiB":   {c.HostAlloc(256 * mib), 88 * ms},
		"alloc 2 GiB":     {c.HostAlloc(2 * gib), 916 * ms},
		"free 2 GiB":      {c.HostFree(2 * gib), 191 * ms},
		"register 2 GiB":  {c.HostRegister(2 * gib), 38 * ms},
		"unregister":      {c.HostUnregister(2 * gib), 32 * ms},
		"create on host":  {c.HostNUMACreate(gib), 211 * ms},
		"access to host":  {c.HostNUMAAccess(gib), 9500 * time.Microsecond},
		"release on host": {c.HostNUMARelease(gib), 44 * ms},
	} {
		if m.got != m.want {
			t.Errorf("%s: %v, measured %v", name, m.got, m.want)
		}
	}
	d := New(Options{})
	p := must[cuda.Ptr](t)(d.AddressReserve(gib, 0, 0))
	h := must[cuda.Handle](t)(d.MemCreate(gib, cuda.MemProp{Location: cuda.LocationHostNUMA}))
	ok(t, d.MemMap(p, gib, h))
	ok(t, d.MemSetAccess(p, gib, []cuda.Device{0}))
	ok(t, d.MemUnmap(p, gib))
	ok(t, d.MemRelease(h))
	for name, want := range map[string]time.Duration{"cuMemCreate": 211 * ms, "cuMemSetAccess": 9500 * time.Microsecond, "cuMemRelease": 44 * ms} {
		if got := d.Calls().Calls[name].Time; got != want {
			t.Errorf("%s of 1 GiB of the host took %v, measured %v", name, got, want)
		}
	}
}

// The host's access is to its own memory alone.
func TestMemSetHostAccess(t *testing.T) {
	d := New(Options{})
	p := must[cuda.Ptr](t)(d.AddressReserve(4*mib, 0, 0))
	chunkAt(t, d, p, 2*mib)
	h := must[cuda.Handle](t)(d.MemCreate(2*mib, cuda.MemProp{Location: cuda.LocationHostNUMA}))
	ok(t, d.MemMap(p+2*mib, 2*mib, h))
	ok(t, d.MemSetHostAccess(p+2*mib, 2*mib, 0))
	wantCode(t, d.MemSetHostAccess(p+2*mib, 2*mib, 1), cuda.ErrInvalidValue)
	wantCode(t, d.MemSetHostAccess(p, 4*mib, 0), cuda.ErrInvalidValue)
	wantCode(t, d.MemSetHostAccess(p+2*mib, mib, 0), cuda.ErrInvalidValue)
	_, err := d.MemCreate(2*mib, cuda.MemProp{Location: cuda.LocationHostNUMA, NUMANode: 1})
	wantCode(t, err, cuda.ErrInvalidDevice)
}

func TestStreamCalls(t *testing.T) {
	d := New(Options{Check: CheckOrder, Lag: ms})
	_, err := d.StreamCreate(0, true)
	wantCode(t, err, cuda.ErrInvalidContext)
	ok(t, d.RetainContext(0))
	s := must[cuda.Stream](t)(d.StreamCreate(0, false))
	b := must[cuda.Stream](t)(d.StreamCreate(0, true))
	for h, want := range map[cuda.Stream]bool{s: false, b: true, cuda.StreamNull: true, cuda.StreamLegacy: true, cuda.StreamPerThread: true} {
		if got := must[bool](t)(d.StreamBlocking(0, h)); got != want {
			t.Errorf("stream %#x is blocking: %v", h, got)
		}
	}
	ok(t, d.BeginCapture(0, s))
	_, err = d.StreamBlocking(0, s)
	wantCode(t, err, cuda.ErrStreamCaptureUnsupported)
	if st, _, err := d.StreamCapture(0, s); st != cuda.CaptureActive || err != nil {
		t.Errorf("the capture is %v, %v", st, err)
	}
	must[*Graph](t)(d.EndCapture(0, s))
	if d.Fault() != nil {
		t.Error(d.Fault())
	}
	ok(t, d.StreamDestroy(0, s))
	ok(t, d.StreamDestroy(0, b))
	wantFault(t, d.StreamDestroy(0, s), FaultStream)
	wantFault(t, d.StreamDestroy(0, cuda.StreamLegacy), FaultStream)
	if d.Leaks() != (Live{}) || d.Calls().Calls["cuStreamCreate"].Count != 3 {
		t.Errorf("%+v after %+v", d.Leaks(), d.Calls().Calls)
	}
	d.AdoptStreams()
	id := must[cuda.StreamID](t)(d.StreamID(0, 0x1234))
	ok(t, d.StreamDestroy(0, 0x1234))
	if again := must[cuda.StreamID](t)(d.StreamID(0, 0x1234)); again == id {
		t.Error("an adopted stream that was destroyed is the same stream")
	}
}
