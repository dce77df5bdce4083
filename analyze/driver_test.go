package analyze

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

func noFrames(uint32) []recording.Frame { return nil }
func noPID(uint32) uint32               { return 1 }

func driverRun(calls ...recording.Call) *DriverSummary {
	r := NewDriverRun()
	for i := range calls {
		r.Call(&calls[i])
	}
	return r.Summary(noFrames, noPID)
}

// TestDriverHeld: small allocations share pages of 2 MiB, large ones have their own, pools say what they hold.
func TestDriverHeld(t *testing.T) {
	const mib = 1 << 20
	small := func(at uint64) recording.Call {
		return recording.Call{Kind: recording.MemAlloc, Addr: 2*mib*at + 4096, Size: 60 << 10}
	}
	for _, c := range []struct {
		what            string
		calls           []recording.Call
		held, requested uint64
	}{
		{"a small one", []recording.Call{small(5)}, 2 * mib, 60 << 10},
		{"two in a page", []recording.Call{small(5), {Kind: recording.MemAlloc, Addr: 11 * mib, Size: mib}}, 2 * mib, 60<<10 + mib},
		{"two in two", []recording.Call{small(5), small(6)}, 4 * mib, 120 << 10},
		{"one over three", []recording.Call{{Kind: recording.MemAlloc, Addr: 3 * mib, Size: 4 * mib}}, 6 * mib, 4 * mib},
		{"one after the other", []recording.Call{small(5), {Kind: recording.MemFree, Addr: 10*mib + 4096}, small(6)}, 2 * mib, 60 << 10},
		{"a pool", []recording.Call{{Kind: recording.MemAllocAsync, Addr: 4096, Size: mib, Pool: 7, Extra: 32 * mib}, {Kind: recording.MemFreeAsync, Addr: 4096},
			{Kind: recording.MemPoolTrimTo, Pool: 7}, {Kind: recording.MemAlloc, Addr: 2 * mib, Size: 30 * mib}}, 32 * mib, 30 * mib},
		{"a handle, mapped twice", []recording.Call{{Kind: recording.MemCreate, Handle: 1, Size: 4 * mib, Extra: 1}, {Kind: recording.MemMap, Handle: 1, Addr: 8 * mib, Size: 4 * mib},
			{Kind: recording.MemMap, Handle: 1, Addr: 16 * mib, Size: 4 * mib}}, 4 * mib, 4 * mib},
		{"none of the host's", []recording.Call{{Kind: recording.MemHostAlloc, Addr: 4096, Size: mib}, {Kind: recording.MemAllocManaged, Addr: 2 * mib, Size: mib}, small(5)}, 2 * mib, 60 << 10},
	} {
		s := driverRun(c.calls...)
		if len(s.Devices) != 1 || s.Devices[0].PeakHeld != c.held || s.Devices[0].PeakRequested != c.requested {
			t.Errorf("%s: %+v, want %d held and %d requested", c.what, s.Devices, c.held, c.requested)
		}
	}
}

// TestDriverEnded: what a process held is free once it has ended, though it never freed it.
func TestDriverEnded(t *testing.T) {
	const mib = 1 << 20
	calls := func(process uint32, from uint64) []recording.Call {
		return []recording.Call{
			{Kind: recording.MemAlloc, Addr: 8 * mib, Size: 4 * mib, Process: process, TimeNS: from, TookNS: 5},
			{Kind: recording.MemCreate, Handle: 1, Size: 2 * mib, Extra: 1, Process: process, TimeNS: from + 10},
			{Kind: recording.MemAllocAsync, Addr: 4096, Size: mib, Pool: 7, Extra: 32 * mib, Process: process, TimeNS: from + 20},
			{Kind: recording.MemHostAlloc, Addr: 1 << 40, Size: mib, Process: process, TimeNS: from + 30},
		}
	}
	const held, requested = 38 * mib, 7 * mib
	d := &recording.Driver{Processes: make([]recording.Process, 3), Stacks: []recording.Stack{nil}, Calls: append(append(calls(0, 100), calls(1, 200)...), calls(2, 300)...)}
	for _, c := range []struct {
		ends  [2]uint64
		times uint64
	}{{[2]uint64{0, 0}, 3}, {[2]uint64{200, 0}, 2}, {[2]uint64{200, 300}, 1}, {[2]uint64{199, 299}, 1}} {
		d.Processes[0].EndNS, d.Processes[1].EndNS = c.ends[0], c.ends[1]
		s := SummarizeDriver(d)
		if v := s.Devices[0]; v.PeakHeld != c.times*held || v.PeakRequested != c.times*requested || s.HostPeak != c.times*mib || s.KeptBytes != 3*(requested+mib) {
			t.Errorf("ends at %v: %+v, host %d, kept %d", c.ends, v, s.HostPeak, s.KeptBytes)
		}
	}
	r := NewDriverRun()
	one := calls(0, 100)
	for i := range one {
		r.Call(&one[i])
	}
	r.EndAt(0, 1000)
	if v := r.Device(0); v.Now != held {
		t.Errorf("%d bytes are held before it ended", v.Now)
	}
	r.CloseEnded()
	r.Call(&recording.Call{Kind: recording.MemFree, Addr: 8 * mib, TimeNS: 400}) // whose record came late
	r.Call(&recording.Call{Kind: recording.MemPoolTrimTo, Pool: 7, Extra: 32 * mib, TimeNS: 401})
	if v := r.Device(0); v.Now != 0 || v.Requested() != 0 {
		t.Errorf("%d bytes are held after it ended, %d requested", v.Now, v.Requested())
	}
}

// TestDriverOtherDevice: memory is where it is, whichever device is current.
func TestDriverOtherDevice(t *testing.T) {
	const mib = 1 << 20
	r := NewDriverRun()
	now := func(what string, held ...uint64) {
		t.Helper()
		for i, want := range held {
			if d := r.Device(i); d == nil && want != 0 || d != nil && d.Now != want {
				t.Errorf("%s: device %d is %+v, want %d bytes", what, i, d, want)
			}
		}
	}
	call := func(c recording.Call) { r.Call(&c) }
	call(recording.Call{Kind: recording.MemCreate, Device: 1, Handle: 1, Size: 4 * mib, Extra: 1})
	call(recording.Call{Kind: recording.MemAlloc, Device: 1, Addr: 2 * mib, Size: 2 * mib})
	now("got", 0, 6*mib)
	call(recording.Call{Kind: recording.MemRelease, Handle: 1})
	now("released with another device current", 0, 2*mib)
	call(recording.Call{Kind: recording.MemFree, Addr: 2 * mib})
	now("freed", 0, 0)
	call(recording.Call{Kind: recording.MemPoolCreate, Device: 1, Pool: 7})
	call(recording.Call{Kind: recording.MemAllocFromPoolAsync, Addr: 4096, Size: mib, Pool: 7, Extra: 32 * mib})
	now("from a pool of another device", 0, 32*mib)
	if d := r.Device(1); d.Requested() != mib {
		t.Errorf("%d bytes requested", d.Requested())
	}
	call(recording.Call{Kind: recording.MemFreeAsync, Addr: 4096})
	call(recording.Call{Kind: recording.MemPoolDestroy, Pool: 7})
	now("and that is gone", 0, 0)
	call(recording.Call{Kind: recording.DevicePrimaryCtxReset, Device: -1, Result: 101})
	if n := len(r.Devices()); n > 2 || r.Device(-1) != nil {
		t.Errorf("%d devices", n)
	}
}

// TestDriverHeldReturns: whatever the order, nothing is held when everything was freed.
func TestDriverHeldReturns(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	run := NewDriverRun()
	var live []recording.Call
	at := uint64(1 << 21)
	for range 5000 {
		if len(live) > 0 && r.IntN(2) == 0 {
			i := r.IntN(len(live))
			free := recording.Call{Kind: recording.MemFree, Addr: live[i].Addr, Process: live[i].Process}
			run.Call(&free)
			live[i] = live[len(live)-1]
			live = live[:len(live)-1]
			continue
		}
		c := recording.Call{Kind: recording.MemAlloc, Addr: at, Size: 1 + r.Uint64N(5<<20), Process: uint32(r.IntN(2))}
		at += (c.Size + 511) &^ 511
		live = append(live, c)
		run.Call(&c)
	}
	for i := range live {
		free := recording.Call{Kind: recording.MemFree, Addr: live[i].Addr, Process: live[i].Process}
		run.Call(&free)
	}
	if d := run.Device(0); d.Now != 0 || len(d.pages) != 0 {
		t.Errorf("%d bytes are held in %d pages", d.Now, len(d.pages))
	}
	if s := run.Summary(noFrames, noPID); s.KeptCount != 0 || s.Devices[0].PeakHeld < s.Devices[0].PeakRequested {
		t.Errorf("%+v", s)
	}
}

// TestFailureBesideEnded: a process that had ended when a request failed held nothing of the device; one that ended later did.
func TestFailureBesideEnded(t *testing.T) {
	const mib = 1 << 20
	d := &recording.Driver{Processes: []recording.Process{{PID: 10, EndNS: 5000}, {PID: 11, EndNS: 9_000_000}, {PID: 12, Program: "/bin/c"}}, Stacks: []recording.Stack{nil}}
	for i := range d.Processes {
		d.Calls = append(d.Calls, recording.Call{Kind: recording.MemAlloc, Addr: 8 * mib, Size: 4 * mib, Process: uint32(i), TimeNS: 1000})
	}
	d.Calls = append(d.Calls, recording.Call{Kind: recording.MemAlloc, Size: 100 * mib, Process: 2, Result: 2, TimeNS: 7_000_000})
	tr := &recording.Trace{Events: []event.Event{{Kind: event.OOM, Size: 100 * mib, TimeUS: 7000}}}
	x := &FailureReport{}
	x.driver(tr, d)
	if want := []recording.Neighbour{{PID: 11, Name: ".", Bytes: 4 * mib}, {PID: 12, Name: "c", Bytes: 4 * mib, Self: true}}; !slices.Equal(x.Processes, want) {
		t.Errorf("on the device are %+v, want %+v", x.Processes, want)
	}
}
