package engine_test

import (
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
)

// Gauges count every call that the engine makes of the driver, as the driver counts them.
func TestGaugesCountCalls(t *testing.T) {
	for _, opts := range []config.Options{{}, {Backend: config.BackendMalloc}, {SingleHandle: true}} {
		drv := sim.New(sim.Options{Capacity: 128 * mib})
		a, err := engine.New(drv, opts)
		must(t, err)
		dev, err := a.Device(0)
		must(t, err)
		st, err := dev.Stream(drv.NewStreamNonBlocking(0))
		must(t, err)
		var g memory.Gauges
		dev.Views.Gauges(&g)
		before := g.DriverCalls
		drv.ResetCalls()
		same := func(what string) {
			t.Helper()
			dev.Views.Gauges(&g)
			if n := g.DriverCalls - before; n != drv.Calls().Count {
				t.Errorf("%s, %s: %d driver calls, want %d: %v", opts, what, n, drv.Calls().Count, drv.Calls().Calls)
			}
		}
		var blocks []cuda.Ptr
		for range 10 {
			p, err := dev.Alloc(5*mib, st)
			must(t, err)
			blocks = append(blocks, p)
		}
		same("growth")
		if g.DriverCalls < before+2 || g.Reserved < 50*mib || g.Allocated != 50*mib || g.PeakAllocated != 50*mib {
			t.Errorf("%+v", g)
		}
		for _, p := range blocks {
			must(t, a.Free(p))
		}
		if _, err := dev.Alloc(200*mib, st); err == nil {
			t.Error("200 MiB of 128")
		}
		must(t, a.Trim())
		same("trim")
		if g.Reserved != 0 || g.PeakReserved < 50*mib || g.OOMs != 1 {
			t.Errorf("%+v", g)
		}
		dev.Views.ResetAccumulated()
		dev.Views.ResetPeaks()
		last := g
		dev.Views.Gauges(&g)
		if g.OOMs != 1 || g.DriverCalls < last.DriverCalls || g.PeakReserved != 0 {
			t.Errorf("after a reset %+v", g)
		}
	}
}

// Gauges cost no Go memory, and do not wait for a thread that holds the device for long.
func TestGaugesDoNotWait(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 256 * mib}, config.Options{}, 2)
	e.alloc(t, 10*mib, e.streams[0])
	e.alloc(t, 10, e.streams[1])
	var g memory.Gauges
	calls := e.drv.Calls().Count
	if n := testing.AllocsPerRun(100, func() { e.dev.Views.Gauges(&g) }); n != 0 || e.drv.Calls().Count != calls {
		t.Errorf("%v Go allocations, %d driver calls", n, e.drv.Calls().Count-calls)
	}
	first := g
	letGo := engine.HoldDevice(e.dev)
	dev := e.dev
	g = memory.Gauges{}
	done := make(chan struct{})
	go func() {
		defer close(done)
		dev.Views.Gauges(&g)
	}()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Error("it waits for who holds the device's lock")
	}
	letGo()
	<-done
	if g != first {
		t.Errorf("behind a lock that is held: %+v, want %+v", g, first)
	}
	e.alloc(t, 10*mib, e.streams[0])
	dev.Views.Gauges(&g)
	if g.Allocated != first.Allocated+10*mib {
		t.Errorf("%+v", g)
	}
}

// What was active with physical memory before a pause counts, also where no figures were taken in between, and after the resume.
func TestRecentWithPause(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 256 * mib}, config.Options{}, 1)
	e.alloc(t, 100*mib, e.streams[0])
	_, err := e.dev.Pause(engine.Selection{}, config.PauseOptions{Keep: config.KeepNone})
	must(t, err)
	var g memory.Gauges
	e.dev.Views.Gauges(&g)
	if g.Paused != 100*mib || g.Recent[0] != 100*mib {
		t.Errorf("%d MiB paused, %v were active recently", g.Paused/mib, g.Recent)
	}
	e.alloc(t, 20*mib, e.streams[0])
	_, err = e.dev.Resume(engine.Selection{})
	must(t, err)
	e.dev.Views.Gauges(&g)
	if g.Paused != 0 || g.Recent[0] != 120*mib {
		t.Errorf("%d MiB paused, %v were active recently", g.Paused/mib, g.Recent)
	}
}
