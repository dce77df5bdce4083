package engine_test

import (
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/memory"
)

// every returns all statistics of a device by name.
func every(s memory.Stats) map[string]memory.Value {
	out := map[string]memory.Value{}
	for name, g := range map[string]memory.Grouped{"allocations": s.Allocations, "active": s.Active, "inactive": s.Inactive,
		"requested": s.Requested, "allocated": s.Allocated, "active bytes": s.ActiveBytes, "inactive bytes": s.InactiveBytes,
		"segments": s.Segments, "reserved": s.Reserved} {
		out[name], out[name+", small"], out[name+", large"] = g.All, g.Small, g.Large
	}
	return out
}

// After ResetAccumulated, Added and Removed count what happened since, and nothing else has changed.
func TestResetAccumulated(t *testing.T) {
	for _, backend := range []config.Backend{config.BackendVMM, config.BackendMalloc} {
		e := newEngine(t, sim.Options{Lag: 20 * time.Millisecond}, config.Options{Backend: backend}, 2)
		small, large := e.alloc(t, 1000, e.streams[0]), e.alloc(t, 30*mib, e.streams[1])
		p := e.alloc(t, 70*mib, e.streams[0])
		e.drv.Use(0, e.streams[0].Handle(), p, 70*mib)
		e.free(t, p)
		if err := e.dev.Trim(); err != nil {
			t.Fatal(err)
		}
		if s := e.dev.Views.Stats(); s.StreamSyncs == 0 || s.DeviceFrees == 0 || s.ByGrow == 0 {
			t.Fatalf("%s: nothing to reset: %+v", backend, s.Counters)
		}
		before := every(e.dev.Views.Stats())
		e.dev.Views.ResetAccumulated()
		s := e.dev.Views.Stats()
		if s.Counters != (memory.Counters{}) {
			t.Errorf("%s: counters are %+v after the reset", backend, s.Counters)
		}
		for name, v := range every(s) {
			if v.Added != 0 || v.Removed != 0 || v.Current != before[name].Current || v.Peak != before[name].Peak {
				t.Errorf("%s: %s is %+v after the reset, was %+v", backend, name, v, before[name])
			}
		}
		e.free(t, small)
		x := e.alloc(t, 2000, e.streams[0])
		s = e.dev.Views.Stats()
		for name, want := range map[string]memory.Value{
			"allocations":        {Added: 1, Removed: 1},
			"allocations, small": {Added: 1, Removed: 1},
			"allocations, large": {},
			"requested":          {Added: 2000, Removed: 1000},
			"allocated, small":   {Added: 2048, Removed: 1024},
		} {
			if v := every(s)[name]; v.Added != want.Added || v.Removed != want.Removed || v.Current-before[name].Current != want.Added-want.Removed {
				t.Errorf("%s: %s is %+v, was %+v; want +%d -%d", backend, name, v, before[name], want.Added, want.Removed)
			}
		}
		e.free(t, x)
		e.free(t, large)
		for name, v := range every(e.dev.Views.Stats()) {
			if v.Current-before[name].Current != v.Added-v.Removed {
				t.Errorf("%s: %s is %+v, was %+v: the books do not balance", backend, name, v, before[name])
			}
		}
	}
}

// StreamSyncs counts what the driver was made to wait.
func TestStreamSyncs(t *testing.T) {
	e := newEngine(t, sim.Options{Lag: time.Millisecond}, config.Options{}, 2)
	pool, err := e.dev.NewPool(memory.PoolID{1, 2}, config.PoolOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, size := range []uint64{1000, 40 * mib} {
		p, err := pool.Alloc(size, e.streams[1])
		if err != nil {
			t.Fatal(err)
		}
		e.drv.Use(0, e.streams[1].Handle(), p, size)
		e.free(t, p)
	}
	if err := e.dev.Captures.Begin(e.streams[1], pool); err != nil {
		t.Fatal(err)
	}
	if err := e.dev.Captures.End(e.streams[1]); err != nil {
		t.Fatal(err)
	}
	if err := pool.Release(); err != nil {
		t.Fatal(err)
	}
	if err := e.dev.Trim(); err != nil {
		t.Fatal(err)
	}
	calls := e.drv.Calls().Calls
	want := int64(0)
	for _, name := range []string{"cuEventSynchronize", "cuCtxSynchronize", "cuStreamSynchronize"} {
		want += int64(calls[name].Count)
	}
	if got := e.dev.Views.Stats().StreamSyncs; got != want || calls["cuEventSynchronize"].Count == 0 || calls["cuCtxSynchronize"].Count == 0 {
		t.Errorf("StreamSyncs is %d, the driver waited %d times: %v", got, want, calls)
	}
}
