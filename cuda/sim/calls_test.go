package sim

import (
	"errors"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
)

// Every call is counted under the driver's name and priced by the table.
func TestCallsAreCountedAndPriced(t *testing.T) {
	d := New(Options{})
	c := DefaultCosts()
	s := d.NewStream(0)
	p := must[cuda.Ptr](t)(d.AddressReserve(gib, 0, 0))
	for i := range cuda.Ptr(16) {
		h := must[cuda.Handle](t)(d.MemCreate(64*mib, cuda.MemProp{}))
		ok(t, d.MemMap(p+i*64*mib, 64*mib, h))
		ok(t, d.MemRelease(h))
	}
	ok(t, d.MemSetAccess(p, gib, []cuda.Device{0}))
	ok(t, d.MemUnmap(p, gib))
	ok(t, d.AddressFree(p, gib))
	a := must[cuda.Ptr](t)(d.MemAlloc(0, 20*mib))
	ok(t, d.MemFree(0, a))
	e := eventOn(t, d, s)
	ok(t, d.StreamWaitEvent(0, s, e))
	_, err := d.EventQuery(0, e)
	ok(t, err)
	_, _, err = d.MemInfo(0)
	ok(t, err)

	got := d.Calls()
	want := map[string]CallStat{
		"cuMemAddressReserve": {1, c.MemAddressReserve(gib)},
		"cuMemCreate":         {16, 16 * c.MemCreate(64*mib)},
		"cuMemMap":            {16, 16 * (c.MemMap(64*mib) + c.MapAfresh)},
		"cuMemRelease":        {16, 16 * c.MemRelease(64*mib)},
		"cuMemSetAccess":      {1, c.MemSetAccess(64*mib, 16)},
		"cuMemUnmap":          {1, 16 * c.MemUnmap(64*mib)},
		"cuMemAddressFree":    {1, c.MemAddressFree(gib)},
		"cuMemAlloc":          {1, c.MemAlloc(20 * mib)},
		"cuMemFree":           {1, c.MemFree(20 * mib)},
		"cuEventCreate":       {1, c.EventCreate},
		"cuEventRecord":       {1, c.EventRecord},
		"cuStreamWaitEvent":   {1, c.StreamWaitEvent},
		"cuEventQuery":        {1, c.EventQuery},
		"cuMemGetInfo":        {1, c.MemGetInfo},
	}
	var total time.Duration
	var count uint64
	for name, w := range want {
		if got.Calls[name] != w {
			t.Errorf("%s: %v, want %v", name, got.Calls[name], w)
		}
		total += w.Time
		count += w.Count
	}
	if len(got.Calls) != len(want) || got.Time != total || got.Count != count {
		t.Errorf("%d names, %d calls, %v; want %d, %d, %v", len(got.Calls), got.Count, got.Time, len(want), count, total)
	}
	if d.Now() != 0 {
		t.Errorf("calls took time on the host clock: %v", d.Now())
	}
	d.ResetCalls()
	if z := d.Calls(); len(z.Calls) != 0 || z.Time != 0 || z.DeviceSyncs != 0 {
		t.Errorf("after reset: %+v", z)
	}
}

func TestCallsTakeTime(t *testing.T) {
	d := New(Options{CallsTakeTime: true})
	h := must[cuda.Handle](t)(d.MemCreate(gib, cuda.MemProp{}))
	ok(t, d.MemRelease(h))
	if want := d.Calls().Time; d.Now() != want || want != DefaultCosts().MemCreate(gib)+DefaultCosts().MemRelease(gib) {
		t.Errorf("clock %v, cost %v", d.Now(), want)
	}
}

// TestEveryCallCanFail fails each call of a scenario in turn: the call returns the code under the driver's name, has
// no effect, and the scenario completes when it is made again.
func TestEveryCallCanFail(t *testing.T) {
	scenario := func(d *Driver, s cuda.Stream, again func(error) bool) {
		retry := func(f func() error) {
			for again(f()) {
			}
		}
		var p, a cuda.Ptr
		var h cuda.Handle
		var e cuda.Event
		var err error
		retry(func() error { _, err = d.DeviceCount(); return err })
		retry(func() error { _, err = d.DeviceInfo(0); return err })
		retry(func() error { _, err = d.ContextActive(0); return err })
		retry(func() error { return d.RetainContext(0) })
		retry(func() error { return d.RetainContext(1) })
		retry(func() error { _, err = d.CanAccessPeer(0, 1); return err })
		retry(func() error { return d.EnablePeerAccess(0, 1) })
		retry(func() error { _, _, err = d.MemInfo(0); return err })
		retry(func() error { p, err = d.AddressReserve(4*mib, 0, 0); return err })
		retry(func() error { h, err = d.MemCreate(4*mib, cuda.MemProp{}); return err })
		retry(func() error { return d.MemMap(p, 4*mib, h) })
		retry(func() error { return d.MemSetReadOnly(p, 4*mib, []cuda.Device{0}) })
		retry(func() error { return d.MemSetAccess(p, 4*mib, []cuda.Device{0}) })
		retry(func() error { a, err = d.MemAlloc(0, 100); return err })
		retry(func() error { _, err = d.StreamID(0, s); return err })
		retry(func() error { _, _, err = d.StreamCapture(0, s); return err })
		retry(func() error { e, err = d.EventCreate(0); return err })
		retry(func() error { return d.EventRecord(0, e, s) })
		retry(func() error { return d.StreamWaitEvent(0, s, e) })
		retry(func() error { _, err = d.EventQuery(0, e); return err })
		retry(func() error { return d.EventSynchronize(0, e) })
		retry(func() error { return d.StreamSynchronize(0, s) })
		retry(func() error { return d.ContextSynchronize(0) })
		retry(func() error { return d.EventDestroy(0, e) })
		if err := errors.Join(d.BeginCapture(0, s), d.Use(0, s, 0, 0)); err != nil {
			t.Fatal(err)
		}
		var nodes []cuda.GraphNode
		retry(func() error { _, nodes, err = d.StreamCaptureNodes(0, s); return err })
		retry(func() error { _, err = d.GraphNodeDependencies(0, nodes[0]); return err })
		if _, err := d.EndCapture(0, s); err != nil {
			t.Fatal(err)
		}
		everyCallOfSharing(t, d, retry)
		everyCallOfMemory(d, retry)
		retry(func() error { return d.MemFree(0, a) })
		retry(func() error { return d.MemUnmap(p, 4*mib) })
		retry(func() error { return d.MemRelease(h) })
		retry(func() error { return d.AddressFree(p, 4*mib) })
	}
	seen := map[string]bool{}
	for k := uint64(1); ; k++ {
		d := New(Options{Devices: 2, Check: CheckOrder, Handles: Exportable})
		s := d.NewStream(0)
		var failed string
		var before Live
		d.FailCall(func(call string, n uint64) cuda.Code {
			if n == k {
				failed = call
				return cuda.ErrNotReady
			}
			return cuda.Success
		})
		scenario(d, s, func(err error) bool {
			defer func() { before = d.Leaks() }()
			if err == nil {
				return false
			}
			var ce *cuda.Error
			if !errors.As(err, &ce) || ce.Op != failed || ce.Code != cuda.ErrNotReady {
				t.Fatalf("call %d (%s): %v", k, failed, err)
			}
			if now := d.Leaks(); now != before && k > 1 {
				t.Errorf("call %d (%s) failed and changed %+v to %+v", k, failed, before, now)
			}
			return true
		})
		if failed == "" {
			break
		}
		seen[failed] = true
		if l := d.Leaks(); l != (Live{Streams: 1}) || d.ReservedBytes(0) != 0 || d.Fault() != nil {
			t.Errorf("call %d (%s): left %+v, fault %v", k, failed, l, d.Fault())
		}
	}
	for c, name := range callNames {
		if !seen[name] && (Exportable != cuda.HandleNone || call(c) < callMemExport || call(c) > callIpcClose) {
			t.Errorf("%s was never made to fail", name)
		}
	}
}

func TestPoisonStays(t *testing.T) {
	d := New(Options{Devices: 2})
	s := d.NewStream(0)
	d.NewStream(1)
	e := eventOn(t, d, s)
	first := true
	d.FailCall(func(call string, n uint64) cuda.Code {
		if first && call == "cuEventQuery" {
			first = false
			return cuda.ErrIllegalAddress
		}
		return cuda.Success
	})
	_, err := d.EventQuery(0, e)
	wantCode(t, err, cuda.ErrIllegalAddress)
	_, err = d.MemAlloc(0, 100)
	wantCode(t, err, cuda.ErrIllegalAddress)
	_, err = d.MemCreate(2*mib, cuda.MemProp{})
	wantCode(t, err, cuda.ErrIllegalAddress)
	wantCode(t, d.StreamSynchronize(0, s), cuda.ErrIllegalAddress)
	wantCode(t, d.Use(0, s, 0, 0), cuda.ErrIllegalAddress)
	_, err = d.MemAlloc(1, 100) // the other device lives
	ok(t, err)
	d.Poison(1, cuda.ErrECCUncorrectable)
	_, err = d.MemAlloc(1, 100)
	wantCode(t, err, cuda.ErrECCUncorrectable)
	if d.Fault() != nil {
		t.Error("poison is no fault of the caller")
	}
}

func TestCallsNeedDeviceAndContext(t *testing.T) {
	d := New(Options{})
	if active := must[bool](t)(d.ContextActive(0)); active {
		t.Error("a context exists before anyone asked for it")
	}
	_, _, err := d.MemInfo(0)
	wantCode(t, err, cuda.ErrInvalidContext)
	_, err = d.MemAlloc(0, 100)
	wantCode(t, err, cuda.ErrInvalidContext)
	_, err = d.EventCreate(0)
	wantCode(t, err, cuda.ErrInvalidContext)
	if active := must[bool](t)(d.ContextActive(0)); active {
		t.Error("asking made a context")
	}
	ok(t, d.RetainContext(0))
	if active := must[bool](t)(d.ContextActive(0)); !active {
		t.Error("no context after it was retained")
	}
	_, err = d.DeviceInfo(1)
	wantCode(t, err, cuda.ErrInvalidDevice)
	_, err = d.MemAlloc(-1, 100)
	wantCode(t, err, cuda.ErrInvalidDevice)
	wantCode(t, d.Use(1, 0, 0, 0), cuda.ErrInvalidDevice)
}

func TestOptions(t *testing.T) {
	d := New(Options{})
	info := must[cuda.DeviceInfo](t)(d.DeviceInfo(0))
	if info.TotalBytes != DefaultCapacity || info.Granularity != 2*mib || !info.VMM {
		t.Errorf("%+v", info)
	}
	for _, o := range []Options{{Devices: -1}, {Devices: 65}, {Granularity: 3 << 20}, {Granularity: 512}, {Lag: -1},
		{RealTime: true, CallsTakeTime: true}, {Check: 9}, {AddressSpace: 1}} {
		if o.Validate() == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
	if n := must[int](t)(New(Options{Devices: 3}).DeviceCount()); n != 3 {
		t.Error(n)
	}
}

func TestProbeHandles(t *testing.T) {
	for _, granted := range []cuda.HandleType{cuda.HandleNone, cuda.HandlePosix, cuda.HandleFabric | cuda.HandlePosix} {
		d := New(Options{Handles: granted})
		if got := must[cuda.HandleType](t)(d.ProbeHandles(0)); got != granted {
			t.Errorf("granted %v, probed %v", granted, got)
		}
		if d.Leaks() != (Live{}) || d.Calls().Calls["cuMemCreate"].Count == 0 {
			t.Errorf("probe left %+v after %v", d.Leaks(), d.Calls().Calls)
		}
	}
	d := New(Options{Handles: cuda.HandlePosix})
	_, err := d.MemCreate(2*mib, cuda.MemProp{Handles: cuda.HandleFabric})
	wantCode(t, err, cuda.ErrNotPermitted)
	_, err = d.MemCreate(2*mib, cuda.MemProp{RDMA: true})
	wantCode(t, err, cuda.ErrNotSupported)
}
