package engine_test

import (
	"testing"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/latency"
	"github.com/cistern-gpu/cistern/memory"
)

// All requests are counted, and those that the hot path did not meet are timed; the figures are those of the last Gauges.
func TestRequests(t *testing.T) {
	e := newEngine(t, sim.Options{}, config.Options{}, 1)
	var blocks []cuda.Ptr
	for range 100 {
		blocks = append(blocks, e.alloc(t, 64*mib, e.streams[0]))
	}
	for _, p := range blocks {
		e.free(t, p)
	}
	for range 1000 {
		e.free(t, e.alloc(t, 64*mib, e.streams[0]))
	}
	var took latency.Histogram
	if n := e.dev.Views.Requests(&took); n != 0 || took.Count() != 0 {
		t.Errorf("%d requests, %d slow ones before the first look", n, took.Count())
	}
	var g memory.Gauges
	e.dev.Views.Gauges(&g)
	if n := e.dev.Views.Requests(&took); n != 1100 || took.Count() != 100 {
		t.Errorf("%d requests and %d slow ones, want 1100 and 100", n, took.Count())
	}
	if _, err := e.dev.Alloc(1<<45, e.streams[0]); err == nil {
		t.Fatal("a request that nothing can meet was met")
	}
	e.dev.Views.Gauges(&g)
	took = latency.Histogram{}
	if n := e.dev.Views.Requests(&took); n != 1100 || took.Count() != 101 {
		t.Errorf("after one that failed: %d requests and %d slow ones", n, took.Count())
	}
	if n := testing.AllocsPerRun(10, func() { e.dev.Views.Requests(&took) }); n != 0 {
		t.Errorf("%v Go allocations", n)
	}
}

// What was active lately counts also where its pool is gone.
func TestRecentOfReleasedPool(t *testing.T) {
	e := newEngine(t, sim.Options{}, config.Options{}, 1)
	var g memory.Gauges
	e.dev.Views.Gauges(&g)
	pool := e.pool(t, 1, config.PoolOptions{})
	e.free(t, fromPool(t, pool, gib, e.streams[0]))
	must(t, pool.Release())
	must(t, e.dev.Trim())
	e.dev.Views.Gauges(&g)
	for i, most := range g.Recent {
		if most < gib {
			t.Errorf("window %d: %d bytes were active; expected 1 GiB", i, most)
		}
	}
}
