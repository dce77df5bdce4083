//go:build linux && cgo

package nvidia_test

import (
	"bytes"
	"errors"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/nvidia"
)

// hostAt is host memory by its address. (Go 1.26's compiler fails where this is inlined into a copy of a constant.)
//
//go:noinline
func hostAt(p cuda.Ptr, size int) []byte {
	a := uintptr(p)
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&a))), size)
}

// Host and managed memory, with every argument that reaches the driver.
func TestHostMemory(t *testing.T) {
	t.Setenv("STANDIN_DEVICES", "2")
	b := retained(t)
	must(t, b.RetainContext(1))
	const dev = cuda.Device(1)
	var h, m cuda.Ptr
	b.wants(`cuMemHostAlloc(size 100, flags 3) = 0, context 1
cuMemAllocManaged(size 4096, flags 1) = 0, context 1
cuMemPrefetchAsync_v2(size 4096, location 1:1) = 0, context 1
cuMemPrefetchAsync_v2(size 2048, location 2:0) = 0, context 1
cuMemcpyAsync(size 100) = 0, context 1`, func() {
		var err error
		h, err = b.HostAlloc(dev, 100)
		must(t, err)
		m, err = b.ManagedAlloc(dev, 4096)
		must(t, err)
		must(t, b.MemPrefetch(dev, m, 4096, cuda.LocationDevice, cuda.StreamPerThread))
		must(t, b.MemPrefetch(dev, m, 2048, cuda.LocationHostNUMA, cuda.StreamPerThread))
		copy(hostAt(h, 100), "from here to there")
		must(t, b.MemcpyAsync(dev, m, h, 100, cuda.StreamPerThread))
	})
	if !bytes.Equal(hostAt(h, 100), hostAt(m, 100)) {
		t.Error("nothing was copied")
	}
	b.wants(`cuMemFree() = 0, context 1
cuMemFreeHost() = 0, context 1
cuMemFreeHost() = 1, context 1`, func() {
		must(t, b.MemFree(dev, m))
		must(t, b.HostFree(dev, h))
		if err := b.HostFree(dev, h); !errors.Is(err, cuda.ErrInvalidValue) {
			t.Errorf("freed twice: %v", err)
		}
	})
	p, err := b.MemAlloc(dev, 8192) // which is the process's memory, over the stand-in
	must(t, err)
	b.wants(`cuMemHostRegister(size 8192, flags 1) = 0, context 1
cuMemHostRegister(size 4096, flags 1) = 712, context 1
cuMemHostUnregister() = 0, context 1
cuMemHostUnregister() = 713, context 1`, func() {
		must(t, b.HostRegister(dev, p, 8192))
		if err := b.HostRegister(dev, p+4096, 4096); !errors.Is(err, cuda.ErrHostAlreadyRegistered) {
			t.Errorf("registered twice: %v", err)
		}
		must(t, b.HostUnregister(dev, p))
		if err := b.HostUnregister(dev, p); !errors.Is(err, cuda.ErrHostNotRegistered) {
			t.Errorf("unregistered twice: %v", err)
		}
	})
	must(t, b.MemFree(dev, p))
}

// Before CUDA 12.2 prefetching took a device, and the host was one too.
func TestPrefetchByTheOldCall(t *testing.T) {
	b := retained(t, "cuMemPrefetchAsync_v2", "cuStreamGetFlags")
	m, err := b.ManagedAlloc(dev0, 4096)
	must(t, err)
	b.wants("cuMemPrefetchAsync(size 4096, device 0) = 0, context 0\ncuMemPrefetchAsync(size 4096, device -1) = 0, context 0", func() {
		must(t, b.MemPrefetch(dev0, m, 4096, cuda.LocationDevice, 0))
		must(t, b.MemPrefetch(dev0, m, 4096, cuda.LocationHostNUMA, 0))
	})
	must(t, b.MemFree(dev0, m))
}

// The host gets access to its own memory, and to no other.
func TestHostAccess(t *testing.T) {
	b := open(t)
	va, err := b.AddressReserve(2*chunk, chunk, 0)
	must(t, err)
	h, err := b.MemCreate(chunk, cuda.MemProp{Location: cuda.LocationHostNUMA, NUMANode: 1})
	must(t, err)
	k, err := b.MemCreate(chunk, cuda.MemProp{})
	must(t, err)
	must(t, b.MemMap(va, chunk, h))
	must(t, b.MemMap(va+chunk, chunk, k))
	b.wants(`cuMemSetAccess(size 2097152, 3:1=3) = 0, context -1
cuMemSetAccess(size 2097152, 3:1=3) = 1, context -1`, func() {
		must(t, b.MemSetHostAccess(va, chunk, 1))
		if err := b.MemSetHostAccess(va+chunk, chunk, 1); !errors.Is(err, cuda.ErrInvalidValue) {
			t.Errorf("access to the device's memory: %v", err)
		}
	})
	hostAt(va, chunk)[chunk-1] = 1
}

// A pool's life, with every argument that reaches the driver.
func TestPools(t *testing.T) {
	t.Setenv("STANDIN_DEVICES", "2")
	b := retained(t)
	must(t, b.RetainContext(1))
	const dev = cuda.Device(1)
	var pool cuda.MemPool
	var p cuda.Ptr
	var err error
	b.wants(`cuMemPoolCreate(handles 1, location 1:1, max 1073741824) = 0, context 1
cuMemPoolSetAttribute(4, 18446744073709551615) = 0, context 1
cuMemPoolSetAttribute(2, 0) = 0, context 1
cuMemPoolGetAttribute(2) = 0, context 1
cuMemPoolGetAttribute(1) = 0, context 1
cuMemPoolGetAttribute(4) = 0, context 1
cuMemPoolSetAccess( 1:0=3 1:1=3) = 0, context 1
cuMemAllocFromPoolAsync(size 67108964, stream 2) = 0, context 1
cuMemPoolGetAttribute(5) = 0, context 1
cuMemPoolGetAttribute(7) = 0, context 1
cuMemFreeAsync(stream 1) = 0, context 1
cuMemPoolTrimTo(33554432) = 0, context 1
cuMemPoolGetAttribute(5) = 0, context 1
cuMemAllocFromPoolAsync(size 100, stream 0) = 0, context 1
cuMemFree() = 0, context 1
cuMemPoolDestroy() = 0, context 1`, func() {
		pool, err = b.MemPoolCreate(cuda.MemPoolProps{Device: dev, Handles: cuda.HandlePosix, MaxSize: 1 << 30})
		must(t, err)
		must(t, b.MemPoolSet(dev, pool, cuda.MemPoolReleaseThreshold, ^uint64(0)))
		must(t, b.MemPoolSet(dev, pool, cuda.MemPoolReuseAllowOpportunistic, 0))
		for _, c := range []struct {
			attr cuda.MemPoolAttr
			want uint64
		}{{cuda.MemPoolReuseAllowOpportunistic, 0}, {cuda.MemPoolReuseFollowEventDependencies, 1}, {cuda.MemPoolReleaseThreshold, ^uint64(0)}} {
			if v, err := b.MemPoolGet(dev, pool, c.attr); v != c.want || err != nil {
				t.Errorf("attribute %d is %d, %v; want %d", c.attr, v, err, c.want)
			}
		}
		must(t, b.MemPoolSetAccess(dev, pool, []cuda.Device{0, 1}))
		p, err = b.MemAllocAsync(dev, 64<<20+100, pool, cuda.StreamPerThread)
		must(t, err)
		if v, err := b.MemPoolGet(dev, pool, cuda.MemPoolReservedCurrent); v != 96<<20 || err != nil {
			t.Errorf("%d reserved, %v", v, err)
		}
		if v, err := b.MemPoolGet(dev, pool, cuda.MemPoolUsedCurrent); v != 64<<20+100 || err != nil {
			t.Errorf("%d used, %v", v, err)
		}
		must(t, b.MemFreeAsync(dev, p, cuda.StreamLegacy))
		must(t, b.MemPoolTrim(dev, pool, 32<<20))
		if v, err := b.MemPoolGet(dev, pool, cuda.MemPoolReservedCurrent); v != 32<<20 || err != nil {
			t.Errorf("%d reserved after trimming, %v", v, err)
		}
		p, err = b.MemAllocAsync(dev, 100, pool, cuda.StreamNull)
		must(t, err)
		must(t, b.MemFree(dev, p))
		must(t, b.MemPoolDestroy(dev, pool))
	})
	b.wants("cuDeviceGetDefaultMemPool(1) = 0, context 1\ncuMemPoolDestroy() = 1, context 1", func() {
		pool, err = b.MemPoolDefault(dev)
		must(t, err)
		if err := b.MemPoolDestroy(dev, pool); !errors.Is(err, cuda.ErrInvalidValue) {
			t.Errorf("the device's own pool destroyed: %v", err)
		}
	})
	b.wants("", func() { // what cannot be right does not reach the driver
		if err := b.MemPoolSet(dev, pool, cuda.MemPoolReuseAllowInternal, 1<<32); !errors.Is(err, cuda.ErrInvalidValue) {
			t.Errorf("a flag of 2^32: %v", err)
		}
		if err := b.MemPoolSetAccess(dev, pool, []cuda.Device{0, 2}); !errors.Is(err, cuda.ErrInvalidDevice) {
			t.Errorf("access for a device that is not there: %v", err)
		}
		if _, err := b.MemPoolCreate(cuda.MemPoolProps{Device: 2}); !errors.Is(err, cuda.ErrInvalidDevice) {
			t.Errorf("a pool of a device that is not there: %v", err)
		}
	})
	many := b.calls(func() { must(t, b.MemPoolSetAccess(dev, pool, make([]cuda.Device, 20))) })
	if strings.Count(many, " 1:0=3") < 15 { // the log has room for no more
		t.Error(many)
	}
}

// Whether a stream blocks with the legacy stream is asked of streams that no capture is about.
func TestStreamBlocking(t *testing.T) {
	b := retained(t)
	for _, want := range []bool{true, false} {
		s, err := b.StreamCreate(dev0, want)
		must(t, err)
		if is, err := b.StreamBlocking(dev0, s); is != want || err != nil {
			t.Errorf("blocking %v, %v; want %v", is, err, want)
		}
		must(t, b.CaptureBegin(dev0, s, nvidia.CaptureGlobal))
		if is, err := b.StreamBlocking(dev0, s); is || !errors.Is(err, cuda.ErrStreamCaptureUnsupported) {
			t.Errorf("captured: blocking %v, %v", is, err)
		}
		if is, err := b.StreamBlocking(dev0, cuda.StreamLegacy); !is || err != nil {
			t.Errorf("the legacy stream meanwhile: blocking %v, %v", is, err)
		}
		if status, _, err := b.StreamCapture(dev0, s); status != cuda.CaptureActive || err != nil {
			t.Errorf("the capture is %v, %v", status, err)
		}
		_, err = b.CaptureEnd(dev0, s)
		must(t, err)
		must(t, b.StreamDestroy(dev0, s))
	}
	b = retained(t, "cuMemPrefetchAsync_v2", "cuStreamGetFlags")
	s, err := b.StreamCreate(dev0, true)
	must(t, err)
	var missing *nvidia.MissingCallError
	if _, err := b.StreamBlocking(dev0, s); !errors.As(err, &missing) || missing.Call != "cuStreamGetFlags" {
		t.Errorf("a driver that cannot be asked: %v", err)
	}
}

// memoryCall is one call with arguments that need not make sense.
type memoryCall struct {
	op   string
	size uint64 // that its error names
	call func() error
}

func memoryCalls(b *binding) []memoryCall {
	const size = 4096
	return []memoryCall{
		{"cuMemHostAlloc", size, func() error { _, err := b.HostAlloc(0, size); return err }},
		{"cuMemFreeHost", 0, func() error { return b.HostFree(0, size) }},
		{"cuMemHostRegister", size, func() error { return b.HostRegister(0, size, size) }},
		{"cuMemHostUnregister", 0, func() error { return b.HostUnregister(0, size) }},
		{"cuMemAllocManaged", size, func() error { _, err := b.ManagedAlloc(0, size); return err }},
		{"cuMemPrefetchAsync", size, func() error { return b.MemPrefetch(0, size, size, cuda.LocationDevice, 0) }},
		{"cuMemcpyAsync", size, func() error { return b.MemcpyAsync(0, size, size, size, 0) }},
		{"cuMemPoolCreate", size, func() error { _, err := b.MemPoolCreate(cuda.MemPoolProps{MaxSize: size}); return err }},
		{"cuMemPoolDestroy", 0, func() error { return b.MemPoolDestroy(0, 1) }},
		{"cuDeviceGetDefaultMemPool", 0, func() error { _, err := b.MemPoolDefault(0); return err }},
		{"cuMemPoolGetAttribute", 0, func() error { _, err := b.MemPoolGet(0, 1, cuda.MemPoolUsedHigh); return err }},
		{"cuMemPoolSetAttribute", 0, func() error { return b.MemPoolSet(0, 1, cuda.MemPoolUsedHigh, 0) }},
		{"cuMemPoolTrimTo", 0, func() error { return b.MemPoolTrim(0, 1, 0) }},
		{"cuMemPoolSetAccess", 0, func() error { return b.MemPoolSetAccess(0, 1, []cuda.Device{0}) }},
		{"cuMemAllocFromPoolAsync", size, func() error { _, err := b.MemAllocAsync(0, size, 1, 0); return err }},
		{"cuMemFreeAsync", 0, func() error { return b.MemFreeAsync(0, size, 0) }},
		{"cuStreamCreate", 0, func() error { _, err := b.StreamCreate(0, true); return err }},
		{"cuStreamDestroy", 0, func() error { return b.StreamDestroy(0, 7) }},
	}
}

// A failure of each call is the driver's own, named, and leaves nothing behind on the thread.
func TestMemoryFailures(t *testing.T) {
	b := retained(t)
	for _, c := range memoryCalls(b) {
		for _, code := range []cuda.Code{cuda.ErrOutOfMemory, cuda.ErrIllegalAddress} {
			symbol := c.op
			if symbol == "cuMemPrefetchAsync" {
				symbol += "_v2"
			}
			t.Setenv("STANDIN_FAIL", symbol+"="+strconv.Itoa(int(code)))
			var err error
			b.calls(func() { err = c.call() })
			var e *cuda.Error
			if !errors.As(err, &e) || *e != (cuda.Error{Op: c.op, Size: c.size, Code: code}) {
				t.Errorf("%s: %v", c.op, err)
			}
		}
	}
}

// A driver that lacks all of them says so of each, when it is called.
func TestMemoryCallsMissing(t *testing.T) {
	var names []string
	for _, c := range memoryCalls(nil) {
		names = append(names, c.op)
	}
	names = append(names, "cuMemHostRegister_v2", "cuMemPrefetchAsync_v2", "cuStreamDestroy_v2")
	b := retained(t, names...)
	for _, c := range memoryCalls(b) {
		err := c.call()
		var m *nvidia.MissingCallError
		if !errors.As(err, &m) || m.Call != c.op || !errors.Is(err, cuda.ErrNotSupported) {
			t.Errorf("%s is missing: %v", c.op, err)
		}
	}
}

// Nothing here makes a context.
func TestMemoryWithoutContext(t *testing.T) {
	b := open(t)
	for name, err := range map[string]error{
		"HostAlloc":      func() error { _, err := b.HostAlloc(0, 1); return err }(),
		"HostRegister":   b.HostRegister(0, 4096, 4096),
		"ManagedAlloc":   func() error { _, err := b.ManagedAlloc(0, 1); return err }(),
		"MemPrefetch":    b.MemPrefetch(0, 1, 1, cuda.LocationDevice, 0),
		"MemcpyAsync":    b.MemcpyAsync(0, 1, 1, 1, 0),
		"MemPoolCreate":  func() error { _, err := b.MemPoolCreate(cuda.MemPoolProps{}); return err }(),
		"MemPoolDefault": func() error { _, err := b.MemPoolDefault(0); return err }(),
		"MemAllocAsync":  func() error { _, err := b.MemAllocAsync(0, 1, 1, 0); return err }(),
		"StreamCreate":   func() error { _, err := b.StreamCreate(0, false); return err }(),
		"StreamBlocking": func() error { _, err := b.StreamBlocking(0, 0); return err }(),
	} {
		if !errors.Is(err, cuda.ErrInvalidContext) {
			t.Errorf("%s: %v; want invalid context", name, err)
		}
	}
	if active, err := b.ContextActive(0); active || err != nil {
		t.Errorf("a context was made: %v, %v", active, err)
	}
}

// What copies in streams' order costs no garbage.
func TestNoGarbageOfPools(t *testing.T) {
	b := retained(t)
	t.Setenv("STANDIN_LOG", "")
	pool, err := b.MemPoolDefault(0)
	must(t, err)
	h, err := b.HostAlloc(0, 4096)
	must(t, err)
	if n := testing.AllocsPerRun(100, func() {
		p, err1 := b.MemAllocAsync(0, 4096, pool, 0)
		err2 := b.MemcpyAsync(0, p, h, 4096, 0)
		err3 := b.MemFreeAsync(0, p, 0)
		_, err4 := b.MemPoolGet(0, pool, cuda.MemPoolUsedCurrent)
		if err := errors.Join(err1, err2, err3, err4); err != nil {
			t.Fatal(err)
		}
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}
