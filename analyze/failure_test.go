package analyze

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/driver"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/replay"
)

// died is a recorded run as it would have gone within a limit of PyTorch's allocator: up to the request that failed, with
// the addresses and segments that the allocator's model gave it.
func died(t *testing.T, tr *recording.Trace, limit uint64) *recording.Trace {
	t.Helper()
	rec := &replay.Recording{}
	r, err := replay.Run(tr, replay.Spec{Name: "torch"}, replay.Options{Capacity: limit, Record: rec})
	if err != nil {
		t.Fatal(err)
	}
	if r.Completed {
		return nil
	}
	out := rec.Trace()
	out.Path = tr.Path
	return out
}

func reportOn(t *testing.T, tr *recording.Trace, opt RemedyOptions) *TraceFailures {
	t.Helper()
	r, err := ReportFailures(context.Background(), tr, nil, opt)
	if err != nil {
		t.Fatal(err)
	}
	if r == nil {
		t.Fatal("no failure is seen")
	}
	return r
}

// heldAddsUp holds every list against the whole.
func heldAddsUp(t *testing.T, what string, h *Held) {
	t.Helper()
	if h.Requested+h.Rounding+h.Unknown != h.Allocated {
		t.Errorf("%s: %d requested, %d rounded and %d unattributed are not the %d allocated", what, h.Requested, h.Rounding, h.Unknown, h.Allocated)
	}
	for name, list := range map[string][]Share{"stack": h.Stack, "tag": h.Tag, "library": h.Library, "thread": h.Thread, "pool": h.Pool,
		"stream": h.Stream, "size": h.Size, "age": h.Age} {
		bytes, blocks := uint64(0), 0
		for _, s := range list {
			bytes, blocks = bytes+s.Bytes, blocks+s.Blocks
		}
		if len(list) > 0 && (bytes != h.Requested || blocks != h.Blocks) {
			t.Errorf("%s: by %s there are %d bytes in %d blocks, want %d in %d", what, name, bytes, blocks, h.Requested, h.Blocks)
		}
	}
}

// independently replays what a remedy says, through nothing that the search used, and reports whether the run completes
// with no out-of-memory.
func independently(t *testing.T, tr *recording.Trace, m *Remedy) bool {
	t.Helper()
	spec := m.Policy
	if m.Conf != "" {
		spec += ":" + m.Conf
	} else if m.Policy == "torch" {
		spec += ":default"
	}
	s, err := replay.ParseSpec(spec)
	if err != nil {
		t.Fatal(err)
	}
	opt := replay.Options{Capacity: m.Capacity, GPULag: 20 * time.Millisecond}
	if len(tr.Failures) > 0 {
		opt.Device = tr.Failures[0].DeviceTotal
	}
	if strings.Contains(m.CheckAgain, "--gpu-lag 0s") {
		opt.GPULag = 0
	}
	r, err := replay.Run(tr, s, opt)
	if err != nil {
		t.Fatal(err)
	}
	return r.Completed && r.OOMs == 0 && (r.PeakReserved <= m.Capacity || m.Kind == RemedySpill)
}

// Runs of PyTorch within a little too little memory: what is recommended meets the request, what is reported not to does not.
func TestRemediesOfTorch(t *testing.T) {
	for _, tr := range smallTraces(t) {
		if testing.Short() && len(tr.Events) > 20_000 {
			continue
		}
		peak, _ := tr.PeakLive()
		for _, part := range []float64{1.01, 1.05, 1.12} {
			d := died(t, tr, uint64(part*float64(peak))>>21<<21)
			if d == nil {
				continue
			}
			r := reportOn(t, d, RemedyOptions{GPULag: 20 * time.Millisecond})
			x := r.Failures[0]
			what := tr.Path + " " + x.Sentence
			heldAddsUp(t, what, &x.Held)
			if !x.Reproduced || x.Own == nil || x.Own.Survives {
				t.Errorf("%s: the run's own settings do not fail as they did", what)
			}
			if len(x.Remedies) == 0 && !slices.ContainsFunc(x.Tried, func(m Remedy) bool { return m.Barely }) {
				t.Errorf("%s: nothing is recommended", what)
			}
			for i := range x.Remedies {
				m := &x.Remedies[i]
				if !independently(t, d, m) {
					t.Errorf("%s: %s is recommended and does not survive", what, m.Title)
				}
				if m.Headroom != m.Capacity-m.Peak || !m.Survives || m.Luck {
					t.Errorf("%s: %+v", what, m)
				}
				if m.Floor > 0 {
					less := *m
					if less.Capacity = m.Floor; !independently(t, d, &less) {
						t.Errorf("%s: %s does not survive with its floor of %d", what, m.Title, m.Floor)
					}
				}
			}
			for i := range x.Tried {
				if m := &x.Tried[i]; !m.Luck && !m.Barely && independently(t, d, m) {
					t.Errorf("%s: %s survives, and is reported not to", what, m.Title)
				}
			}
			if len(x.Remedies) > 0 && !slices.ContainsFunc(x.Remedies, func(m Remedy) bool { return m.Command == "cistern run -- PROGRAM" }) {
				t.Errorf("%s: moving to Cistern is not among what would do", what)
			}
			if n := x.LargestRequest; n > 0 {
				smaller := *d
				smaller.Events = slices.Clone(d.Events)
				smaller.Events[x.Event].Size = n
				again, err := replay.Run(&smaller, replay.Spec{Name: "torch"}, replay.Options{Capacity: x.Capacity, Verify: true})
				if err != nil || len(again.FailedOOMs) > 0 {
					t.Errorf("%s: a request of %d bytes fails too: %v", what, n, err)
				}
			}
		}
	}
}

// What followed the same place in the repeats before is left room for. The steps are of one size but for the last, which is
// half as large again, and dies at its second request of three.
func TestStillToCome(t *testing.T) {
	r := newRecorder()
	addr := uint64(1 << 40)
	alloc := func(k event.Kind, size uint64, stack uint32) {
		addr += 1 << 33
		r.add(k, addr, size).Stack = stack
	}
	alloc(event.Alloc, 100*mib, 0)
	for range 10 {
		first := addr + 1<<33
		alloc(event.Alloc, 200*mib, 1)
		alloc(event.Alloc, 100*mib, 2)
		alloc(event.Alloc, 60*mib, 1)
		for i, size := range []uint64{200 * mib, 100 * mib, 60 * mib} {
			r.free(first+uint64(i)<<33, size)
		}
	}
	alloc(event.Alloc, 300*mib, 1)
	if got := stillToCome(&r.Trace, len(r.Events)-1, 0); got != 0 {
		t.Errorf("%d are still to come behind a request without a size that was met", got)
	}
	r.add(event.OOM, 10*mib, 150*mib).Stack = 2
	failed := len(r.Events) - 1
	if got := stillToCome(&r.Trace, failed, 150*mib); got != 90*mib {
		t.Errorf("%d MiB are still to come, want 90", got/mib)
	}
	if r.Events[failed].Stack = 0; stillToCome(&r.Trace, failed, 150*mib) != 0 {
		t.Error("something is still to come behind a place that is not known")
	}
	r.Events[failed].Stack = 2
	// 640 MiB are needed in all: with less the request alone is met, which is not recommended.
	for limit, met := range map[uint64]string{600 * mib: "the request only", 660 * mib: "", 540 * mib: "no"} {
		x := reportOn(t, &r.Trace, RemedyOptions{Capacity: limit}).Failures[0]
		at := slices.IndexFunc(x.Remedies, func(m Remedy) bool { return m.Policy == "cistern" })
		tried := slices.IndexFunc(x.Tried, func(m Remedy) bool { return m.Policy == "cistern" })
		switch {
		case x.More != 90*mib:
			t.Errorf("within %d MiB: %d MiB more", limit/mib, x.More/mib)
		case met == "" && at < 0, met != "" && at >= 0:
			t.Errorf("within %d MiB: remedies %+v", limit/mib, x.Remedies)
		case met != "" && x.Tried[tried].Barely != (met == "the request only"):
			t.Errorf("within %d MiB: %+v", limit/mib, x.Tried[tried])
		}
	}
}

// Nothing survives where what is live and the request are more than there is: the report has the smallest
// capacity that suffices.
func TestNothingSurvives(t *testing.T) {
	tr := smallTraces(t)[0]
	peak, _ := tr.PeakLive()
	d := died(t, tr, peak*3/4)
	x := reportOn(t, d, RemedyOptions{}).Failures[0]
	if x.Cause != CauseCapacity || len(x.Remedies) > 0 || x.Shortage != x.Held.Allocated+x.Need-x.Capacity {
		t.Errorf("%s: %d remedies, %d short: %v", x.Cause, len(x.Remedies), x.Shortage, x.Why)
	}
	if len(x.Floors) < 2 {
		t.Fatalf("floors: %+v", x.Floors)
	}
	for _, f := range x.Floors {
		if f.Capacity < x.Live+x.Requested {
			t.Errorf("%s is said to do with %d, less than what was live and the request", f.Who, f.Capacity)
		}
	}
}

// What spills has to fit into the memory that the process may have of the host.
func TestSpillWithinTheHost(t *testing.T) {
	for bytes, want := range map[uint64]bool{1 << 30: true, 4 * mib: false} {
		tr := scattered(t, "limit:100MiB").trace()
		tr.Failures[0].Limits = []recording.Limit{{Kind: "device", Bytes: 2 << 30}, {Kind: "container", Bytes: bytes}}
		x := reportOn(t, tr, RemedyOptions{GPULag: 20 * time.Millisecond}).Failures[0]
		spills := func(m Remedy) bool { return m.Kind == RemedySpill }
		if slices.ContainsFunc(x.Remedies, spills) != want || slices.ContainsFunc(x.Tried, spills) == want {
			t.Errorf("in a container of %d bytes spilling is a remedy: %v", bytes, !want)
		}
	}
}

// Runs on the engine itself.
func TestRemediesOfTheEngine(t *testing.T) {
	for _, c := range []struct {
		conf, cause string
		want        map[string]string // titles of remedies and the CISTERN_CONF that they set
	}{
		{"limit:100MiB", CauseLimit, map[string]string{
			"set limit:108MiB in CISTERN_CONF, in place of limit:100MiB": "limit:108MiB",
			"add spill:managed to CISTERN_CONF":                          "limit:104857600,spill:managed"}},
		{"limit:270MiB,backend:malloc", CauseFragmentation, map[string]string{
			"take backend:malloc out of CISTERN_CONF": "limit:283115520"}},
		{"limit:270MiB,stages:grow,history:1000", CauseFragmentation, map[string]string{
			"take stages:fit+grow out of CISTERN_CONF": "limit:283115520,history:1000"}},
	} {
		run := scattered(t, c.conf)
		tr := run.trace()
		x := reportOn(t, tr, RemedyOptions{GPULag: 20 * time.Millisecond}).Failures[0]
		heldAddsUp(t, c.conf, &x.Held)
		if x.Cause != c.cause || !x.Reproduced {
			t.Errorf("%s: %s, reproduced: %v: %v", c.conf, x.Cause, x.Reproduced, x.Why)
		}
		for title, conf := range c.want {
			i := slices.IndexFunc(x.Remedies, func(m Remedy) bool { return m.Title == title })
			if i < 0 {
				t.Errorf("%s: %s is not among %+v", c.conf, title, x.Remedies)
			} else if got := x.Remedies[i].Environment["CISTERN_CONF"]; got != conf {
				t.Errorf("%s: %s sets %s, want %s", c.conf, title, got, conf)
			}
		}
		for i := range x.Remedies {
			if m := &x.Remedies[i]; !independently(t, tr, m) {
				t.Errorf("%s: %s is recommended and does not survive", c.conf, m.Title)
			}
			if m := x.Remedies[i]; m.Kind == RemedyLimit {
				if m.Capacity = m.Floor - 2*FloorStep; m.Floor == 0 || independently(t, tr, &m) {
					t.Errorf("%s: %d would do, less than the least limit", c.conf, m.Capacity)
				}
			}
		}
		if x.Thread != "101" && x.Thread != "main 100" || x.PID != 7 || x.Where == NoStack {
			t.Errorf("%s: thread %q, tag %q, process %d, %s", c.conf, x.Thread, x.Tag, x.PID, x.Where)
		}
	}
}

// What other processes held would have been enough: replayed with it.
func TestOtherProcesses(t *testing.T) {
	run := scattered(t, "limit:100MiB")
	tr := run.trace()
	f := tr.Failures[0]
	f.Limit, f.Limits, f.Conf = 0, nil, ""
	f.DeviceTotal, f.DeviceFree = 200*mib, 100*mib-f.Reserved
	f.Others = []recording.Neighbour{{PID: 7, Bytes: f.Reserved, Self: true}, {PID: 9, Name: "jupyter", Bytes: 90 * mib}}
	x := reportOn(t, tr, RemedyOptions{}).Failures[0]
	if x.Cause != CauseProcesses || x.Processes[0].PID != 7 {
		t.Fatalf("%s: %v", x.Cause, x.Why)
	}
	i := slices.IndexFunc(x.Remedies, func(m Remedy) bool { return m.Kind == RemedyProcesses })
	if i < 0 || x.Remedies[i].Capacity != 190*mib || !independently(t, tr, &x.Remedies[i]) {
		t.Errorf("remedies: %+v", x.Remedies)
	}
	f.Others[1].Bytes = 3 * mib // not enough
	if x = reportOn(t, tr, RemedyOptions{}).Failures[0]; x.Cause != CauseCapacity {
		t.Errorf("%s: %v", x.Cause, x.Why)
	}
}

// Why a request failed, from what the process wrote down.
func TestCauses(t *testing.T) {
	const gib = 1 << 30
	for _, c := range []struct {
		cause string
		f     recording.Failure
	}{
		{CauseUpstream, recording.Failure{Need: gib, Upstream: "pinned", DeviceTotal: 80 * gib, DeviceFree: 40 * gib}},
		{CauseLimit, recording.Failure{Need: gib, PoolLimit: 2 * gib, PoolHolds: 2 * gib, DeviceTotal: 80 * gib, DeviceFree: 40 * gib}},
		{CauseLimit, recording.Failure{Need: gib, Limit: 10 * gib, Reserved: 10 * gib, Allocated: 10 * gib, DeviceTotal: 80 * gib, DeviceFree: 40 * gib}},
		{CauseCapacity, recording.Failure{Need: gib, Reserved: 80 * gib, Allocated: 80 * gib, DeviceTotal: 80 * gib}},
		{CausePinned, recording.Failure{Need: 4 * gib, Reserved: 80 * gib, Allocated: 70 * gib, Cached: 10 * gib, Pinned: 9 * gib, Largest: gib,
			DeviceTotal: 80 * gib}},
		{CausePending, recording.Failure{Need: 4 * gib, Reserved: 80 * gib, Allocated: 60 * gib, Pending: 15 * gib, Cached: gib, Largest: gib,
			DeviceTotal: 85 * gib, DeviceFree: gib}},
		{CauseCached, recording.Failure{Need: 4 * gib, Reserved: 80 * gib, Allocated: 70 * gib, Cached: 10 * gib, Largest: 5 * gib, DeviceTotal: 80 * gib}},
		{CauseFragmentation, recording.Failure{Need: 4 * gib, Reserved: 80 * gib, Allocated: 70 * gib, Cached: 10 * gib, Largest: gib, DeviceTotal: 80 * gib}},
	} {
		c.f.Requested, c.f.Event = c.f.Need, -1
		tr := &recording.Trace{Format: recording.FormatCistern, Failures: []*recording.Failure{&c.f}}
		x := reportOn(t, tr, RemedyOptions{}).Failures[0]
		if x.Cause != c.cause || len(x.Why) == 0 || x.Sentence == "" || x.Searched || x.Unsearched == "" {
			t.Errorf("%s: %v, want %s", x.Cause, x.Why, c.cause)
		}
	}
}

// What is allocated and in no block of the history is reported as unattributed.
func TestUnattributed(t *testing.T) {
	tr := scattered(t, "limit:100MiB").trace()
	tr.Failures[0].Allocated += 50 * mib
	h := reportOn(t, tr, RemedyOptions{}).Failures[0].Held
	heldAddsUp(t, "unattributed", &h)
	if h.Unknown != 50*mib {
		t.Errorf("%d bytes are unattributed, want 50 MiB", h.Unknown)
	}
}

// A leak shows, through the working set of each step; without one nothing is suspected.
func TestGrowth(t *testing.T) {
	for _, leaks := range []bool{false, true} {
		r := newRecorder()
		addr := uint64(1 << 40)
		alloc := func(size uint64, stack uint32) uint64 {
			addr += 1 << 30
			r.add(event.Alloc, addr, size).Stack = stack
			return addr
		}
		alloc(3000*mib, 0) // weights
		for range 60 {
			var step []uint64
			for range 10 {
				step = append(step, alloc(100*mib, 0))
			}
			if leaks {
				alloc(10*mib, 1)
			}
			for _, a := range step {
				r.free(a, 100*mib)
			}
		}
		r.add(event.OOM, mib, 1<<30)
		x := reportOn(t, &r.Trace, RemedyOptions{Capacity: 4 << 30}).Failures[0]
		g := x.Growth
		if !g.Known || g.Repeats < 20 {
			t.Errorf("leaks %v: known %v, %d repeats", leaks, g.Known, g.Repeats)
		}
		switch {
		case !leaks && len(g.Steady) > 0:
			t.Errorf("suspects without a leak: %+v", g.Steady)
		case leaks && (len(g.Steady) != 1 || g.Steady[0].Name != "f a.py:3" || g.Steady[0].After-g.Steady[0].Before < 200*mib || g.Steady[0].Blocks != 60):
			t.Errorf("suspects: %+v", g.Steady)
		}
	}
}

// A request that is met once something was given back is not what the run died of.
func TestMetLater(t *testing.T) {
	r := newRecorder()
	r.add(event.Alloc, 1<<40, 60*mib)
	r.add(event.OOM, 4*mib, 70*mib)
	r.free(1<<40, 60*mib)
	r.add(event.Alloc, 2<<40, 70*mib)
	r.add(event.OOM, 3*mib, 90*mib)
	r.Format = recording.FormatCistern
	r.Source = recording.FormatPyTorch
	all := reportOn(t, &r.Trace, RemedyOptions{}).Failures
	if len(all) != 2 || all[0].MetLater == nil || *all[0].MetLater != 4 || all[1].MetLater != nil || all[0].Searched || !all[1].Searched {
		t.Errorf("%+v", all)
	}
}

// Failed calls of the driver, in a trace of two processes: what is available is what was held and what was free, a cache
// between is tried, and a call that the program made again with success is not what it died of.
func TestFailedDriverCall(t *testing.T) {
	var b bytes.Buffer
	w, err := driver.NewWriter(&b, 0, []string{"python", "train.py"})
	if err != nil {
		t.Fatal(err)
	}
	mine, other := w.Process(recording.Process{PID: 10, Program: "/usr/bin/python3"}), w.Process(recording.Process{PID: 11, Program: "/usr/bin/loader"})
	stack := w.Stack([]recording.Frame{{File: "train.py", Func: "step", Line: 7}})
	at := uint64(0)
	call := func(process uint32, c recording.Call) {
		at += 1_000_000
		c.Process, c.TimeNS, c.TookNS, c.Thread, c.Stack = process, at, 500_000, 77, stack
		w.Call(&c)
	}
	call(other, recording.Call{Kind: recording.MemAlloc, Addr: 1 << 30, Size: 7 * mib})
	call(mine, recording.Call{Kind: recording.MemAlloc, Size: 90 * mib, Result: 2, Extra: 50 * mib})
	for i := range uint64(6) {
		call(mine, recording.Call{Kind: recording.MemAlloc, Addr: (8 + i) << 32, Size: 10 * mib})
	}
	call(mine, recording.Call{Kind: recording.MemAlloc, Size: 20 * mib, Result: 2, Extra: 5 * mib})
	for i := range uint64(3) {
		call(mine, recording.Call{Kind: recording.MemFree, Addr: (8 + 2*i) << 32})
	}
	call(mine, recording.Call{Kind: recording.MemAlloc, Addr: 40 << 32, Size: 20 * mib})
	call(mine, recording.Call{Kind: recording.MemAlloc, Size: 16 * mib, Result: 2, Extra: 15 * mib})
	if err := w.Close(recording.DriverEnd{}); err != nil {
		t.Fatal(err)
	}
	f, err := open.Read(&b, "driver")
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(f.Traces, func(t *recording.Trace) bool { return t.RecordedOOMs() > 0 })
	r, err := ReportFailures(context.Background(), f.Traces[i], f.Driver, RemedyOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Failures) != 3 || r.Failures[0].MetLater != nil || r.Failures[1].MetLater == nil {
		t.Fatalf("%+v", r.Failures)
	}
	x := r.Failures[2]
	if !x.Searched || x.Cause != CauseCapacity || x.Own == nil || x.Own.Policy != "direct" || !x.Reproduced {
		t.Errorf("%s, capacity %d, own %+v: %v", x.Cause, x.Capacity, x.Own, x.Why)
	}
	want := []recording.Neighbour{{PID: 10, Name: "python3", Bytes: 50 * mib, Self: true}, {PID: 11, Name: "loader", Bytes: 7 * mib}}
	if !slices.Equal(x.Processes, want) || x.PID != 10 || x.Thread != "77" || x.Message[0] != "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY" ||
		x.Where != "step train.py:7" {
		t.Errorf("%v, process %d, thread %s: %q", x.Processes, x.PID, x.Thread, x.Message)
	}
}

// The time for replays is kept, and what it left out is reported; a run that is interrupted ends.
func TestBudget(t *testing.T) {
	d := died(t, smallTraces(t)[0], 21<<30)
	x := reportOn(t, d, RemedyOptions{Budget: time.Nanosecond}).Failures[0]
	if len(x.NotTried) != 1 || !strings.Contains(x.NotTried[0], "--budget 1ns") || len(x.Remedies) > 0 || x.Replays > 1 { // the one in which the time was over
		t.Errorf("after %d replays: %q, %d remedies", x.Replays, x.NotTried, len(x.Remedies))
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := ReportFailures(ctx, d, nil, RemedyOptions{Budget: time.Hour}); !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted: %v", err)
	}
}

// Files may say anything.
func TestHostileFailure(t *testing.T) {
	const most = math.MaxUint64
	f := &recording.Failure{Event: math.MaxInt, Requested: most, Need: most, Reserved: most, Allocated: most, Pending: most, Cached: most, Pinned: most,
		Largest: most, Limit: most, PoolHolds: most, DeviceTotal: most, DeviceFree: most, Tag: math.MaxUint16, Library: 255, Stack: math.MaxUint32,
		Thread: math.MaxUint32, Others: []recording.Neighbour{{Bytes: most}, {Bytes: most}}, Steps: []recording.FailureStep{{Stage: "\x1b[2J"}}}
	tr := &recording.Trace{Format: recording.FormatCistern, Events: []event.Event{{Kind: event.OOM, Size: most, Addr: most, Stack: 7, Pool: 9, Stream: 9, Tag: 9}},
		Failures: []*recording.Failure{{Event: 0, Requested: most, Limit: 1, DeviceTotal: 1}, f}}
	x := reportOn(t, tr, RemedyOptions{Budget: time.Minute})
	if len(x.Failures) != 2 {
		t.Fatalf("%d failures", len(x.Failures))
	}
	for _, x := range x.Failures {
		heldAddsUp(t, "hostile", &x.Held)
		if x.Sentence == "" {
			t.Error("no sentence")
		}
	}
	// A device on which no allocator could start.
	tr.Events[0] = event.Event{Kind: event.OOM, Size: most, Addr: most}
	tr.Streams, tr.Pools, tr.Failures = []uint64{0}, []recording.PoolID{{}}, tr.Failures[:1]
	if x := reportOn(t, tr, RemedyOptions{Budget: time.Minute}); !x.Failures[0].Searched {
		t.Errorf("nothing was searched: %s", x.Failures[0].Unsearched)
	}
}

// RMM's log does not say what was free: the capacity is to be given.
func TestFailureInRMMLog(t *testing.T) {
	log := "Thread,Time,Action,Pointer,Size,Stream\n"
	for i := range 4 {
		log += fmt.Sprintf("1,10:00:00.00000%d,allocate,0x7f8a00%d00000,1048576,0x0\n", i, i)
	}
	log += "1,10:00:00.000009,allocate failure,(nil),8388608,0x0\n"
	f, err := open.Read(strings.NewReader(log), "rmm.csv")
	if err != nil {
		t.Fatal(err)
	}
	x := reportOn(t, f.Traces[0], RemedyOptions{}).Failures[0]
	if x.Searched || !strings.Contains(x.Unsearched, "--capacity") {
		t.Errorf("searched: %v, %q", x.Searched, x.Unsearched)
	}
	x = reportOn(t, f.Traces[0], RemedyOptions{Capacity: 10 * mib}).Failures[0]
	if !x.Searched || x.Own.Policy != "rmm-pool" || !x.Reproduced {
		t.Errorf("own %+v, reproduced: %v", x.Own, x.Reproduced)
	}
}

// A loop that catches the error fails for ever: the report has the last ones and says how many there were.
func TestManyFailures(t *testing.T) {
	r := newRecorder()
	for range 1000 {
		r.add(event.OOM, mib, 70*mib)
	}
	x := reportOn(t, &r.Trace, RemedyOptions{Capacity: 10 * mib})
	if x.Count != 1000 || len(x.Failures) != MaxFailures || x.Failures[MaxFailures-1].Event != 999 {
		t.Errorf("%d in all, %d reported", x.Count, len(x.Failures))
	}
}

// While a process writes of one failure, other threads of it go on to fail, of which it says nothing: the file is about the
// one that it says more of, however many are behind it.
func TestFailureThatTheFileIsAbout(t *testing.T) {
	tr := scattered(t, "limit:100MiB").trace()
	f := tr.Failures[0]
	for range 2 * MaxFailures {
		e := tr.Events[f.Event]
		e.Size, e.Thread = 2*e.Size, 0
		tr.Events = append(tr.Events, e)
	}
	if at, ok := tr.FailedAt(); !ok || at != f.Event {
		t.Errorf("the failure is at event %d, %v; want %d", at, ok, f.Event)
	}
	r := reportOn(t, tr, RemedyOptions{GPULag: 20 * time.Millisecond})
	x := r.Failures[len(r.Failures)-1]
	if r.Count != 1+2*MaxFailures || x.Event != f.Event || !x.Searched || x.PID != f.PID || x.Conf != f.Conf || len(x.Steps) == 0 {
		t.Errorf("%d failed; the report is of event %d, process %d, settings %q, searched: %v; want event %d of process %d, settings %q",
			r.Count, x.Event, x.PID, x.Conf, x.Searched, f.Event, f.PID, f.Conf)
	}
}

// The limit of the settings was in force at earlier failures too, of which the process says nothing; one that the program set
// need not have been, and a device that was full is no limit's doing.
func TestEarlierFailureUnderTheLimit(t *testing.T) {
	for _, c := range []struct {
		from  string
		free  uint64
		limit bool
	}{{"setting limit:100.00 MiB", 900 * mib, true}, {"the program: cistern_set_limit", 900 * mib, false}, {"setting limit:100.00 MiB", mib, false}} {
		tr := scattered(t, "limit:100MiB").trace()
		f := tr.Failures[0]
		earlier := f.Event
		tr.Events[earlier].Addr = c.free
		tr.Events = append(tr.Events, tr.Events[earlier])
		f.Event = len(tr.Events) - 1
		f.Limits = []recording.Limit{{Kind: "cistern", Bytes: f.Limit, From: c.from}}
		x := reportOn(t, tr, RemedyOptions{}).Failures[0]
		if x.Event != earlier || x.said != nil || (x.Capacity == 100*mib) != c.limit || strings.Contains(x.CapacityFrom, "setting") != c.limit {
			t.Errorf("%+v: event %d of %d: %d, %s: %v", c, x.Event, earlier, x.Capacity, x.CapacityFrom, x.Why)
		}
	}
}
