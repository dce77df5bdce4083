package analyze

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/recording"
)

// engineRun is a program on the engine over a simulated device, until a request fails.
type engineRun struct {
	t    *testing.T
	a    *cistern.Allocator
	dev  cistern.Device
	st   cistern.Stream
	conf string
	us   int64
	oom  *cistern.OutOfMemoryError
}

func newEngineRun(t *testing.T, conf string, capacity uint64) *engineRun {
	t.Helper()
	opts, err := cistern.ParseOptions(conf)
	if err != nil {
		t.Fatal(err)
	}
	r := &engineRun{t: t, conf: opts.String()}
	if r.a, err = cistern.New(sim.New(sim.Options{Capacity: capacity}), opts); err != nil {
		t.Fatal(err)
	}
	if r.dev, err = r.a.Device(0); err != nil {
		t.Fatal(err)
	}
	if r.st, err = r.dev.Stream(cuda.StreamNull, cistern.StreamDurable); err != nil {
		t.Fatal(err)
	}
	r.dev.SetHistory(1 << 20)
	r.dev.SetHistoryClock(func() int64 {
		r.us += 10
		return r.us
	})
	r.a.KeepStacks(true)
	return r
}

// alloc asks for memory from one of a few stacks; null once the run is over.
func (r *engineRun) alloc(size uint64, stack int) cuda.Ptr {
	r.t.Helper()
	if r.oom != nil {
		return 0
	}
	p, err := r.dev.AllocWith(size, r.st, cistern.AllocOptions{Tag: uint32(stack % 3), Library: uint8(1 + stack%2), Thread: 100 + uint32(stack%2),
		Stack: r.a.StackOf([]uint64{uint64(stack), 99})})
	if err != nil && !errors.As(err, &r.oom) {
		r.t.Fatal(err)
	}
	return p
}

func (r *engineRun) free(p cuda.Ptr) {
	r.t.Helper()
	if p == 0 || r.oom != nil {
		return
	}
	if err := r.a.Free(p); err != nil {
		r.t.Fatal(err)
	}
}

// trace is what the dying process writes.
func (r *engineRun) trace() *recording.Trace {
	r.t.Helper()
	if r.oom == nil {
		r.t.Fatal("nothing failed")
	}
	events, lost := r.dev.History()
	t := &recording.Trace{Path: "oom-7-1.cistern", Format: recording.FormatCistern, Events: events, FromStart: lost == 0,
		Tags: []string{"", "activations", "weights"}, Libraries: []string{"", "torch", "cupy"}, Threads: map[uint32]string{100: "main"},
		Stacks: []recording.Stack{nil}}
	for _, s := range r.dev.Streams() {
		t.Streams = append(t.Streams, uint64(s.Handle()))
	}
	for _, p := range r.dev.Pools() {
		t.Pools = append(t.Pools, recording.PoolID(p))
	}
	for n := uint32(1); r.a.StackFrames(n) != nil; n++ {
		var s recording.Stack
		for _, f := range r.a.StackFrames(n) {
			s = append(s, uint32(len(t.Frames)))
			t.Frames = append(t.Frames, recording.Frame{File: "train.py", Line: int(f), Func: fmt.Sprintf("layer%d", f)})
		}
		t.Stacks = append(t.Stacks, s)
	}
	o := r.oom
	last := len(events) - 1
	t.Failures = []*recording.Failure{{Event: last, TimeUS: events[last].TimeUS, PID: 7, Program: []string{"python", "train it.py"}, Version: "1.0",
		Conf: r.conf, Lines: []string{o.Error()}, Requested: o.Requested, Need: o.Need, Upstream: o.Upstream, Tag: uint16(o.Tag),
		Library: o.Library, Thread: events[last].Thread, Stack: events[last].Stack, Device: "simulated", DeviceTotal: o.DriverTotal, DeviceFree: o.DriverFree,
		Reserved: o.Reserved, Allocated: o.Allocated, Pending: o.Pending, Cached: o.Cached, Pinned: o.Pinned, Paused: o.Paused,
		Largest: o.Largest, Limit: o.Limit, PoolLimit: o.PoolLimit, PoolHolds: o.PoolReserved,
		Steps: []recording.FailureStep{{Stage: "fit", Tries: 1}, {Stage: "grow", Tries: 2, Gained: 4 * mib, TookUS: 31, Note: "the limit was in the way"}}}}
	return t
}

// scattered is a run whose chunks are each held by a small block, so that nothing of them can move.
func scattered(t *testing.T, conf string) *engineRun {
	r := newEngineRun(t, conf, 2<<30)
	var short []cuda.Ptr
	for i := range 8 {
		for range 4 {
			short = append(short, r.alloc(8*mib-512, i%3))
		}
		r.alloc(300<<10, 4) // and stays
	}
	for _, p := range short {
		r.free(p)
	}
	r.alloc(200*mib, 5)
	return r
}
