//go:build linux && cgo

package nvidia_test

import (
	"bytes"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/nvidia"
)

// The life of a chunk, with every field that reaches the driver.
func TestChunk(t *testing.T) {
	t.Setenv("STANDIN_DEVICES", "2")
	b := open(t)
	var va cuda.Ptr
	var h cuda.Handle
	b.wants(`cuMemAddressReserve(size 8388608, align 4194304, hint 0) = 0, context -1
cuMemCreate(size 2097152, handles 1, location 1:1, rdma 1) = 0, context -1
cuMemMap(size 2097152) = 0, context -1
cuMemMap(size 2097152) = 0, context -1
cuMemSetAccess(size 4194304, 1:0=3 1:1=3) = 0, context -1
cuMemSetAccess(size 2097152, 1:1=1) = 0, context -1
cuMemRelease() = 0, context -1
cuMemUnmap(size 4194304) = 0, context -1
cuMemAddressFree(size 8388608) = 0, context -1`, func() {
		var err error
		va, err = b.AddressReserve(4*chunk, 2*chunk, 0)
		must(t, err)
		if va == 0 || va%(2*chunk) != 0 {
			t.Errorf("reserved %#x", uint64(va))
		}
		h, err = b.MemCreate(chunk, cuda.MemProp{Device: 1, Handles: cuda.HandlePosix, RDMA: true})
		must(t, err)
		must(t, b.MemMap(va, chunk, h))
		must(t, b.MemMap(va+chunk, chunk, h))
		must(t, b.MemSetAccess(va, 2*chunk, []cuda.Device{0, 1}))
		must(t, b.MemSetReadOnly(va, chunk, []cuda.Device{1}))
		must(t, b.MemRelease(h))
		must(t, b.MemUnmap(va, 2*chunk))
		must(t, b.AddressFree(va, 4*chunk))
	})
	b.wants("cuMemCreate(size 4194304, handles 0, location 3:1, rdma 0) = 0, context -1", func() {
		_, err := b.MemCreate(2*chunk, cuda.MemProp{Device: 0, Location: cuda.LocationHostNUMA, NUMANode: 1})
		must(t, err)
	})
	b.wants("cuMemAddressReserve(size 2097152, align 2097152, hint 1) = 0, context -1", func() {
		_, err := b.AddressReserve(chunk, chunk, va)
		must(t, err)
	})
	for _, d := range []cuda.Device{0, 1} {
		if active, err := b.ContextActive(d); active || err != nil {
			t.Errorf("virtual memory made a context on device %d (%v)", d, err)
		}
	}
}

// More devices than fit the wrapper's own array.
func TestAccessForManyDevices(t *testing.T) {
	t.Setenv("STANDIN_DEVICES", "8")
	b := open(t)
	va, err := b.AddressReserve(chunk, chunk, 0)
	must(t, err)
	h, err := b.MemCreate(chunk, cuda.MemProp{})
	must(t, err)
	must(t, b.MemMap(va, chunk, h))
	var devs []cuda.Device
	for i := range 24 {
		devs = append(devs, cuda.Device(i%8))
	}
	got := b.calls(func() { must(t, b.MemSetAccess(va, chunk, devs)) })
	if !strings.Contains(got, " 1:0=3 1:1=3 1:2=3 1:3=3 1:4=3 1:5=3 1:6=3 1:7=3 1:0=3") {
		t.Error(got)
	}
	b.wants("", func() {
		if err := b.MemSetAccess(va, chunk, []cuda.Device{0, 8}); !errors.Is(err, cuda.ErrInvalidDevice) {
			t.Error(err)
		}
	})
}

// Calls that need a context get the primary one pushed, once it is retained, and no thread keeps it.
func TestContextCalls(t *testing.T) {
	t.Setenv("STANDIN_DEVICES", "2")
	b := open(t)
	b.wants("cuDevicePrimaryCtxRetain(1) = 0, context -1", func() {
		must(t, b.RetainContext(1))
		must(t, b.RetainContext(1)) // one reference is enough
	})
	if active, _ := b.ContextActive(1); !active {
		t.Error("device 1 has no context")
	}
	if active, _ := b.ContextActive(0); active {
		t.Error("device 0 has one")
	}
	const dev = cuda.Device(1)
	b.wants(`cuMemAlloc(size 1000) = 0, context 1
cuMemGetInfo() = 0, context 1
cuMemFree() = 0, context 1
cuCtxSynchronize() = 0, context 1`, func() {
		p, err := b.MemAlloc(dev, 1000)
		must(t, err)
		free, total, err := b.MemInfo(dev)
		if err != nil || total != 64<<30 || free != total-1000 {
			t.Errorf("free %d of %d, %v", free, total, err)
		}
		must(t, b.MemFree(dev, p))
		must(t, b.ContextSynchronize(dev))
	})
	b.wants(`cuEventCreate(flags 2) = 0, context 1
cuEventRecord(stream 0) = 0, context 1
cuEventRecord(stream 2) = 0, context 1
cuEventQuery() = 0, context 1
cuStreamWaitEvent(flags 0) = 0, context 1
cuEventSynchronize() = 0, context 1
cuStreamSynchronize() = 0, context 1
cuEventDestroy() = 0, context 1`, func() {
		e, err := b.EventCreate(dev)
		must(t, err)
		must(t, b.EventRecord(dev, e, cuda.StreamNull))
		must(t, b.EventRecord(dev, e, cuda.StreamPerThread))
		if done, err := b.EventQuery(dev, e); !done || err != nil {
			t.Errorf("done %v, %v", done, err)
		}
		must(t, b.StreamWaitEvent(dev, cuda.StreamLegacy, e))
		must(t, b.EventSynchronize(dev, e))
		must(t, b.StreamSynchronize(dev, cuda.StreamLegacy))
		must(t, b.EventDestroy(dev, e))
	})
}

func TestEventNotReady(t *testing.T) {
	b := retained(t)
	e, err := b.EventCreate(dev0)
	must(t, err)
	must(t, b.EventRecord(dev0, e, cuda.StreamLegacy))
	t.Setenv("STANDIN_NOT_READY", "1")
	if done, err := b.EventQuery(dev0, e); done || err != nil {
		t.Errorf("done %v, %v; want neither", done, err)
	}
}

// The program's own context is used where it is the right one and restored where it is not.
func TestProgramsContext(t *testing.T) {
	t.Setenv("STANDIN_DEVICES", "2")
	b := retained(t)
	must(t, b.RetainContext(1))
	log := func() string {
		var text string
		b.wants("cuMemAlloc(size 512) = 0, context 0", func() {
			_, err := b.MemAlloc(dev0, 512)
			must(t, err)
			text = b.raw()
		})
		return text
	}
	t.Setenv("STANDIN_CURRENT", "0")
	if text := log(); strings.Contains(text, "Push") || strings.Contains(text, "Pop") {
		t.Errorf("pushed a context that is current:\n%s", text)
	}
	t.Setenv("STANDIN_CURRENT", "1")
	if text := log(); !strings.Contains(text, "cuCtxPushCurrent") {
		t.Errorf("used another device's context:\n%s", text)
	}
}

// Without a context nothing that needs one works, and nothing makes one.
func TestNoContext(t *testing.T) {
	b := open(t)
	for name, err := range map[string]error{
		"MemInfo":            func() error { _, _, err := b.MemInfo(dev0); return err }(),
		"MemAlloc":           func() error { _, err := b.MemAlloc(dev0, 1); return err }(),
		"EventCreate":        func() error { _, err := b.EventCreate(dev0); return err }(),
		"StreamCapture":      func() error { _, _, err := b.StreamCapture(dev0, cuda.StreamLegacy); return err }(),
		"StreamID":           func() error { _, err := b.StreamID(dev0, cuda.StreamLegacy); return err }(),
		"ContextSynchronize": b.ContextSynchronize(dev0),
	} {
		if !errors.Is(err, cuda.ErrInvalidContext) {
			t.Errorf("%s: %v; want invalid context", name, err)
		}
	}
	for _, bad := range []cuda.Device{-1, 1} {
		for name, err := range map[string]error{
			"RetainContext": b.RetainContext(bad),
			"MemInfo":       func() error { _, _, err := b.MemInfo(bad); return err }(),
			"MemAlloc":      func() error { _, err := b.MemAlloc(bad, 1); return err }(),
			"ContextActive": func() error { _, err := b.ContextActive(bad); return err }(),
			"MemCreate":     func() error { _, err := b.MemCreate(chunk, cuda.MemProp{Device: bad}); return err }(),
		} {
			if !errors.Is(err, cuda.ErrInvalidDevice) {
				t.Errorf("%s on device %d: %v; want invalid device", name, bad, err)
			}
		}
	}
	if active, err := b.ContextActive(dev0); active || err != nil {
		t.Errorf("a context was made: %v, %v", active, err)
	}
}

// A context of another library is as good; looking at free memory does not keep it alive.
func TestSomebodyElsesContext(t *testing.T) {
	t.Setenv("STANDIN_ACTIVE", "1")
	b := open(t)
	b.wants(`cuDevicePrimaryCtxRetain(0) = 0, context -1
cuMemGetInfo() = 0, context 0
cuDevicePrimaryCtxRelease(0) = 0, context -1`, func() {
		_, _, err := b.MemInfo(dev0)
		must(t, err)
	})
	b.wants(`cuDevicePrimaryCtxRetain(0) = 0, context -1
cuMemAlloc(size 8) = 0, context 0
cuMemAlloc(size 8) = 0, context 0
cuMemGetInfo() = 0, context 0`, func() {
		for range 2 {
			_, err := b.MemAlloc(dev0, 8)
			must(t, err)
		}
		_, _, err := b.MemInfo(dev0)
		must(t, err)
	})
}

// A failure is the driver's own, named, with nothing left behind on the thread.
func TestFailures(t *testing.T) {
	b := retained(t)
	p, err := b.MemAlloc(dev0, 64)
	must(t, err)
	e, err := b.EventCreate(dev0)
	must(t, err)
	for _, c := range []struct {
		op   string
		code cuda.Code
		dev  cuda.Device
		size uint64
		call func() error
		says string
	}{
		{"cuMemCreate", cuda.ErrOutOfMemory, 0, chunk, func() error { _, err := b.MemCreate(chunk, cuda.MemProp{}); return err },
			"cuMemCreate of 2097152 bytes on device 0: CUDA_ERROR_OUT_OF_MEMORY"},
		{"cuMemAlloc", cuda.ErrOutOfMemory, 0, 5, func() error { _, err := b.MemAlloc(0, 5); return err },
			"cuMemAlloc of 5 bytes on device 0: CUDA_ERROR_OUT_OF_MEMORY"},
		{"cuMemFree", cuda.ErrIllegalAddress, 0, 0, func() error { return b.MemFree(0, p) }, "cuMemFree on device 0: CUDA_ERROR_ILLEGAL_ADDRESS"},
		{"cuMemMap", cuda.ErrInvalidValue, -1, chunk, func() error { return b.MemMap(p, chunk, 1) },
			"cuMemMap of 2097152 bytes: CUDA_ERROR_INVALID_VALUE"},
		{"cuMemUnmap", cuda.ErrUnmapFailed, -1, chunk, func() error { return b.MemUnmap(p, chunk) },
			"cuMemUnmap of 2097152 bytes: CUDA_ERROR_UNMAP_FAILED"},
		{"cuMemSetAccess", cuda.ErrInvalidDevice, 0, chunk, func() error { return b.MemSetAccess(p, chunk, []cuda.Device{0}) },
			"cuMemSetAccess of 2097152 bytes on device 0: CUDA_ERROR_INVALID_DEVICE"},
		{"cuMemRelease", cuda.ErrInvalidValue, -1, 0, func() error { return b.MemRelease(1) }, "cuMemRelease: CUDA_ERROR_INVALID_VALUE"},
		{"cuMemAddressReserve", cuda.ErrOutOfMemory, -1, chunk, func() error { _, err := b.AddressReserve(chunk, chunk, 0); return err },
			"cuMemAddressReserve of 2097152 bytes: CUDA_ERROR_OUT_OF_MEMORY"},
		{"cuMemAddressFree", cuda.ErrInvalidValue, -1, chunk, func() error { return b.AddressFree(p, chunk) },
			"cuMemAddressFree of 2097152 bytes: CUDA_ERROR_INVALID_VALUE"},
		{"cuEventQuery", cuda.ErrLaunchFailed, 0, 0, func() error { _, err := b.EventQuery(0, e); return err },
			"cuEventQuery on device 0: CUDA_ERROR_LAUNCH_FAILED"},
		{"cuEventRecord", cuda.Code(12345), 0, 0, func() error { return b.EventRecord(0, e, 0) }, "cuEventRecord on device 0: CUDA error 12345"},
		{"cuCtxPushCurrent", cuda.ErrContextIsDestroyed, 0, 0, func() error { return b.ContextSynchronize(0) },
			"cuCtxPushCurrent on device 0: CUDA_ERROR_CONTEXT_IS_DESTROYED"},
		{"cuThreadExchangeStreamCaptureMode", cuda.ErrUnknown, 0, 0, func() error { return b.ContextSynchronize(0) },
			"cuThreadExchangeStreamCaptureMode on device 0: CUDA_ERROR_UNKNOWN"},
		{"cuDevicePrimaryCtxGetState", cuda.ErrDeinitialized, 0, 0, func() error { _, err := b.ContextActive(0); return err },
			"cuDevicePrimaryCtxGetState on device 0: CUDA_ERROR_DEINITIALIZED"},
	} {
		t.Run(c.op, func(t *testing.T) {
			b.t = t
			t.Setenv("STANDIN_FAIL", c.op+"="+strconv.Itoa(int(c.code)))
			b.calls(func() { err = c.call() })
			var e *cuda.Error
			if !errors.Is(err, c.code) || !errors.As(err, &e) || *e != (cuda.Error{Op: c.op, Device: c.dev, Size: c.size, Code: c.code}) {
				t.Errorf("%+v", err)
			}
			if err == nil || err.Error() != c.says {
				t.Errorf("says %q; want %q", err, c.says)
			}
		})
	}
}

// An old driver's missing calls are named when they are needed, and not before.
func TestMissingCalls(t *testing.T) {
	t.Setenv("STANDIN_VERSION", "11020")
	b := retained(t, "cuStreamGetId", "cuMemCreate", "cuStreamGetCaptureInfo_v2", "cuStreamGetCaptureInfo_v3", "cuCtxGetId",
		"cuThreadExchangeStreamCaptureMode")
	for name, c := range map[string]struct {
		call func() error
		says string
	}{
		"StreamID": {func() error { _, err := b.StreamID(dev0, cuda.StreamPerThread); return err },
			"cuStreamGetId: the installed driver (CUDA 11.2) does not have it"},
		"MemCreate": {func() error { _, err := b.MemCreate(chunk, cuda.MemProp{}); return err },
			"cuMemCreate: the installed driver (CUDA 11.2) does not have it"},
	} {
		err := c.call()
		var missing *nvidia.MissingCallError
		var e *cuda.Error
		if err == nil || err.Error() != c.says || !errors.As(err, &missing) || !errors.As(err, &e) || !errors.Is(err, cuda.ErrNotSupported) {
			t.Errorf("%s: %v; want %s", name, err, c.says)
		}
	}
	if status, _, err := b.StreamCapture(dev0, cuda.StreamLegacy); status != cuda.CaptureNone || err != nil {
		t.Errorf("the oldest capture query: %v, %v", status, err)
	}
	if _, err := b.MemAlloc(dev0, 64); err != nil {
		t.Error(err)
	}
	none := retained(t, "cuStreamGetCaptureInfo", "cuStreamGetCaptureInfo_v2", "cuStreamGetCaptureInfo_v3")
	if _, _, err := none.StreamCapture(dev0, 0); err == nil || err.Error() != "cuStreamGetCaptureInfo: the installed driver (CUDA 11.2) does not have it" {
		t.Errorf("no capture query: %v", err)
	}
}

// Every version of the capture query says the same.
func TestStreamCapture(t *testing.T) {
	for name, missing := range map[string][]string{
		"v2": nil,
		"v3": {"cuStreamGetCaptureInfo_v2"},
		"v1": {"cuStreamGetCaptureInfo_v2", "cuStreamGetCaptureInfo_v3"},
	} {
		t.Run(name, func(t *testing.T) {
			b := retained(t, missing...)
			s, err := b.StreamCreate(dev0, false)
			must(t, err)
			if status, id, err := b.StreamCapture(dev0, s); status != cuda.CaptureNone || id != 0 || err != nil {
				t.Errorf("before: %v, %d, %v", status, id, err)
			}
			must(t, b.CaptureBegin(dev0, s, nvidia.CaptureGlobal))
			status, first, err := b.StreamCapture(dev0, s)
			if status != cuda.CaptureActive || first == 0 || err != nil {
				t.Errorf("during: %v, %d, %v", status, first, err)
			}
			if err := b.StreamSynchronize(dev0, s); !errors.Is(err, cuda.ErrStreamCaptureUnsupported) {
				t.Errorf("waiting for a captured stream: %v", err)
			}
			graph, err := b.CaptureEnd(dev0, s)
			must(t, err)
			exec, err := b.GraphInstantiate(dev0, graph)
			must(t, err)
			must(t, b.GraphLaunch(dev0, exec, s))
			must(t, b.GraphExecDestroy(dev0, exec))
			must(t, b.GraphDestroy(dev0, graph))
			must(t, b.CaptureBegin(dev0, s, nvidia.CaptureRelaxed))
			if _, second, _ := b.StreamCapture(dev0, s); second == first {
				t.Error("the next capture has the same number")
			}
		})
	}
}

// The nodes that come before a captured stream's next work, by either version of the query that has them.
func TestStreamCaptureNodes(t *testing.T) {
	for name, missing := range map[string][]string{"v2": nil, "v3": {"cuStreamGetCaptureInfo_v2"}} {
		t.Run(name, func(t *testing.T) {
			b := retained(t, missing...)
			s, err := b.StreamCreate(dev0, false)
			must(t, err)
			p, err := b.MemAlloc(dev0, 512)
			must(t, err)
			must(t, b.CaptureBegin(dev0, s, nvidia.CaptureGlobal))
			_, id, err := b.StreamCapture(dev0, s)
			must(t, err)
			var before []cuda.GraphNode
			for range 3 {
				must(t, b.Memset(dev0, p, 1, 512, s))
				capture, nodes, err := b.StreamCaptureNodes(dev0, s)
				if capture != id || len(nodes) != 1 || err != nil {
					t.Fatalf("capture %d, want %d; nodes %v, %v", capture, id, nodes, err)
				}
				if after, err := b.GraphNodeDependencies(dev0, nodes[0]); !slices.Equal(after, before) || err != nil {
					t.Errorf("the node comes after %v, %v; want %v", after, err, before)
				}
				before = nodes
			}
		})
	}
	t.Setenv("STANDIN_FAIL", "cuStreamGetCaptureInfo_v2=402")
	if _, _, err := retained(t).StreamCaptureNodes(dev0, 0); !errors.Is(err, cuda.ErrLossyQuery) {
		t.Errorf("work that overlaps: %v", err)
	}
	none := retained(t, "cuStreamGetCaptureInfo_v2", "cuStreamGetCaptureInfo_v3", "cuGraphNodeGetDependencies")
	if _, _, err := none.StreamCaptureNodes(dev0, 0); !errors.Is(err, cuda.ErrNotSupported) {
		t.Errorf("no query: %v", err)
	}
	if _, err := none.GraphNodeDependencies(dev0, 0); !errors.Is(err, cuda.ErrNotSupported) {
		t.Errorf("no query: %v", err)
	}
}

// A stream is known by its context's and its own number, which outlive no handle.
func TestStreamID(t *testing.T) {
	t.Setenv("STANDIN_DEVICES", "2")
	b := retained(t)
	must(t, b.RetainContext(1))
	id := func(dev cuda.Device, s cuda.Stream) cuda.StreamID {
		t.Helper()
		v, err := b.StreamID(dev, s)
		must(t, err)
		return v
	}
	s, err := b.StreamCreate(dev0, false)
	must(t, err)
	one := id(dev0, s)
	if one.Context != 100 || one != id(dev0, s) {
		t.Errorf("stream %+v, then %+v", one, id(dev0, s))
	}
	must(t, b.StreamDestroy(dev0, s))
	for range 100 { // the handle comes again, the number does not
		s, err := b.StreamCreate(dev0, true)
		must(t, err)
		if id(dev0, s) == one {
			t.Fatalf("%+v was reused", one)
		}
		must(t, b.StreamDestroy(dev0, s))
	}
	if id(0, cuda.StreamNull) != id(0, cuda.StreamLegacy) {
		t.Error("the null stream is not the legacy stream")
	}
	if id(0, cuda.StreamNull) == id(1, cuda.StreamNull) {
		t.Error("two devices share their null stream")
	}
	if id(1, cuda.StreamNull).Context != 101 {
		t.Errorf("the null stream of device 1 is %+v", id(1, cuda.StreamNull))
	}
}

// While a stream that blocks with the legacy stream is captured, looking at the legacy stream harms nothing. (Recording
// there would: the driver says so, and the capture is lost.)
func TestLegacyStreamDuringCapture(t *testing.T) {
	b := retained(t)
	s, err := b.StreamCreate(dev0, true)
	must(t, err)
	e, err := b.EventCreate(dev0)
	must(t, err)
	before, err := b.StreamID(dev0, cuda.StreamLegacy)
	must(t, err)
	must(t, b.CaptureBegin(dev0, s, nvidia.CaptureGlobal))
	for _, legacy := range []cuda.Stream{cuda.StreamNull, cuda.StreamLegacy} {
		if id, err := b.StreamID(dev0, legacy); id != before || err != nil {
			t.Errorf("stream %d: %+v, %v; want %+v", legacy, id, err, before)
		}
		if _, _, err := b.StreamCapture(dev0, legacy); !errors.Is(err, cuda.ErrStreamCaptureImplicit) {
			t.Errorf("stream %d: %v; want stream capture implicit", legacy, err)
		}
	}
	if status, _, err := b.StreamCapture(dev0, s); status != cuda.CaptureActive || err != nil {
		t.Errorf("the capture is %v, %v", status, err)
	}
	if err := b.EventRecord(dev0, e, cuda.StreamLegacy); !errors.Is(err, cuda.ErrStreamCaptureImplicit) {
		t.Errorf("recording on the legacy stream: %v", err)
	}
	if status, _, _ := b.StreamCapture(dev0, s); status != cuda.CaptureInvalidated {
		t.Errorf("the capture is %v after that", status)
	}
	if _, err := b.CaptureEnd(dev0, s); !errors.Is(err, cuda.ErrStreamCaptureInvalidated) {
		t.Error(err)
	}
}

// Asking a stream for its context while it is captured would end the capture; it has another number until then.
func TestStreamIDDuringCapture(t *testing.T) {
	b := retained(t)
	s, err := b.StreamCreate(dev0, false)
	must(t, err)
	other, err := b.StreamCreate(dev0, false)
	must(t, err)
	before, err := b.StreamID(dev0, s)
	must(t, err)
	seen := map[cuda.StreamID]bool{before: true}
	for range 3 {
		must(t, b.CaptureBegin(dev0, s, nvidia.CaptureGlobal))
		must(t, b.CaptureBegin(dev0, other, nvidia.CaptureGlobal))
		for _, st := range []cuda.Stream{s, other} {
			id, err := b.StreamID(dev0, st)
			if err != nil || id.Context != before.Context || seen[id] {
				t.Errorf("%+v, %v; the stream was %+v", id, err, before)
			}
			seen[id] = true
			if again, err := b.StreamID(dev0, st); again != id || err != nil {
				t.Errorf("%+v, %v; was %+v", again, err, id)
			}
			if status, _, err := b.StreamCapture(dev0, st); status != cuda.CaptureActive || err != nil {
				t.Errorf("the capture is %v, %v", status, err)
			}
			_, err = b.CaptureEnd(dev0, st)
			must(t, err)
		}
		if after, err := b.StreamID(dev0, s); after != before || err != nil {
			t.Errorf("%+v, %v after the capture; was %+v", after, err, before)
		}
	}
}

// A context that cannot be distinguished is not kept.
func TestRetainFails(t *testing.T) {
	b := open(t)
	t.Setenv("STANDIN_FAIL", "cuCtxGetId=999")
	b.wants("cuDevicePrimaryCtxRetain(0) = 0, context -1\ncuDevicePrimaryCtxRelease(0) = 0, context -1", func() {
		if err := b.RetainContext(dev0); !errors.Is(err, cuda.ErrUnknown) {
			t.Error(err)
		}
	})
}

// A driver before 12.0 has no context numbers: then the context is known by its address.
func TestStreamIDWithoutContextNumbers(t *testing.T) {
	b := retained(t, "cuCtxGetId")
	id, err := b.StreamID(dev0, cuda.StreamLegacy)
	if err != nil || id.Context == 0 || id.Context == 100 {
		t.Errorf("%+v, %v", id, err)
	}
	if own, err := b.StreamID(dev0, cuda.StreamPerThread); err != nil || own.Context != id.Context {
		t.Errorf("%+v and %+v, %v; want the same context", id, own, err)
	}
}

func TestWork(t *testing.T) {
	b := retained(t)
	b.wants(`cuStreamCreate(flags 1) = 0, context 0
cuStreamCreate(flags 0) = 0, context 0`, func() {
		_, err := b.StreamCreate(dev0, false)
		must(t, err)
		_, err = b.StreamCreate(dev0, true)
		must(t, err)
	})
	p, err := b.MemAlloc(dev0, 16)
	must(t, err)
	must(t, b.CopyToDevice(dev0, p, []byte("0123456789abcdef")))
	must(t, b.Memset(dev0, p+4, 'x', 3, cuda.StreamLegacy))
	got := make([]byte, 16)
	must(t, b.CopyFromDevice(dev0, got, p))
	if !bytes.Equal(got, []byte("0123xxx789abcdef")) {
		t.Errorf("%q", got)
	}
	from, err := b.EventCreateTiming(dev0)
	must(t, err)
	if d, err := b.EventElapsed(dev0, from, from); d != 1500*time.Microsecond || err != nil {
		t.Errorf("%v, %v", d, err)
	}
	_, err = b.ModuleLoad(dev0, "no ptx")
	if err == nil || err.Error() != "cuModuleLoadDataEx on device 0: CUDA error 218: ptxas application ptx input, line 1; fatal : no .version" {
		t.Errorf("the compiler said %v", err)
	}
	m, err := b.ModuleLoad(dev0, ".version 7.0")
	must(t, err)
	if _, err := b.ModuleFunction(dev0, m, "nothing"); !errors.Is(err, cuda.ErrNotFound) || !strings.Contains(err.Error(), "nothing") {
		t.Errorf("%v", err)
	}
	f, err := b.ModuleFunction(dev0, m, "spin")
	must(t, err)
	b.wants("cuLaunchKernel(spin, grid 3, block 64, 12345) = 0, context 0", func() {
		must(t, b.Launch(dev0, f, 3, 64, cuda.StreamLegacy, 12345))
	})
	if err := b.Launch(dev0, f, 1, 1, 0, make([]uint64, 17)...); !errors.Is(err, cuda.ErrInvalidValue) {
		t.Errorf("17 parameters: %v", err)
	}
	must(t, b.ModuleUnload(dev0, m))
}

// The calls of the hot path leave no garbage.
func TestNoGarbage(t *testing.T) {
	b := retained(t)
	t.Setenv("STANDIN_LOG", "")
	e, err := b.EventCreate(dev0)
	must(t, err)
	va, err := b.AddressReserve(chunk, chunk, 0)
	must(t, err)
	devs := []cuda.Device{0}
	if n := testing.AllocsPerRun(100, func() {
		h, err1 := b.MemCreate(chunk, cuda.MemProp{})
		err2 := b.MemMap(va, chunk, h)
		err3 := b.MemSetAccess(va, chunk, devs)
		err4 := b.MemUnmap(va, chunk)
		err5 := b.MemRelease(h)
		err6 := b.EventRecord(dev0, e, cuda.StreamLegacy)
		_, err7 := b.EventQuery(dev0, e)
		_, err8 := b.StreamID(dev0, cuda.StreamLegacy)
		_, _, err9 := b.StreamCapture(dev0, cuda.StreamLegacy)
		_, _, err10 := b.MemInfo(dev0)
		for _, err := range []error{err1, err2, err3, err4, err5, err6, err7, err8, err9, err10} {
			if err != nil {
				t.Fatal(err)
			}
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// Every call may be made from any goroutine.
func TestConcurrent(t *testing.T) {
	t.Setenv("STANDIN_DEVICES", "4")
	b := open(t)
	t.Setenv("STANDIN_LOG", "")
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			dev := cuda.Device(i % 4)
			if err := b.RetainContext(dev); err != nil {
				t.Error(err)
				return
			}
			for range 200 {
				p, err := b.MemAlloc(dev, 4096)
				id, err2 := b.StreamID(dev, cuda.StreamLegacy)
				if err != nil || err2 != nil || id.Context != 100+uint64(dev) {
					t.Errorf("device %d: %v, %+v, %v", dev, err, id, err2)
					return
				}
				if err := b.MemFree(dev, p); err != nil {
					t.Error(err)
					return
				}
			}
		}()
	}
	wg.Wait()
}
