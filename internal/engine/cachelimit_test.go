package engine_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
)

// limited is a device with a limit of free memory whose clock is the simulated one.
func limited(t *testing.T, opts config.Options, streams int) *fixture {
	e := checked(t, opts, 80*gib, streams)
	e.onSimulatedTime()
	return e
}

func (e *fixture) onSimulatedTime() {
	e.dev.History.SetClock(func() int64 { return e.drv.Now().Microseconds() })
}

// hold allocates so many bytes in blocks, uses them and frees them.
func (e *fixture) hold(t *testing.T, bytes, block uint64) {
	t.Helper()
	var blocks []cuda.Ptr
	for ; bytes > 0; bytes -= block {
		p := e.alloc(t, block, e.streams[0])
		e.use(t, e.streams[0], p, block)
		blocks = append(blocks, p)
	}
	for _, p := range blocks {
		e.free(t, p)
	}
}

// releases calls ReleaseUnused once a second for a time, and returns what is reserved then. The statistics must agree.
func (e *fixture) releases(t *testing.T, during time.Duration) uint64 {
	t.Helper()
	for end := e.drv.Now() + during; e.drv.Now() < end; e.drv.Advance(time.Second) {
		_, err := engine.ReleaseUnused(e.dev)
		must(t, err)
	}
	now := e.drv.ReservedBytes(0)
	if s := e.dev.Views.Stats(); uint64(s.Reserved.All.Current) != now || s.Reserved.All.Current != s.ActiveBytes.All.Current+s.InactiveBytes.All.Current {
		t.Errorf("%d bytes are reserved, the statistics say %+v", now, s)
	}
	return now
}

// Memory that was not needed for the time goes, down to the limit; the GPU's use of it is over by then.
func TestCacheLimit(t *testing.T) {
	for _, backend := range []config.Backend{config.BackendVMM, config.BackendMalloc} {
		t.Run(fmt.Sprint(backend), func(t *testing.T) {
			e := limited(t, config.Options{Backend: backend, CacheLimit: 256 * mib, CacheDecay: 5 * time.Second}, 1)
			e.hold(t, 2*gib, 64*mib)
			reserved := e.drv.ReservedBytes(0)
			if n := e.releases(t, 4*time.Second); n != reserved {
				t.Errorf("%d of %d bytes are reserved before the time is over", n, reserved)
			}
			if n := e.releases(t, 12*time.Second); n < 256*mib || n > 256*mib+64*mib {
				t.Errorf("%d bytes stay, the limit is 256 MiB", n)
			}
			if n := e.dev.Views.Stats().StreamSyncs; n != 0 {
				t.Errorf("%d waits for the GPU", n)
			}
		})
	}
}

// What a program needs again and again within the time stays, also while it is free; what it needed once goes.
func TestCacheLimitKeepsWhatIsNeeded(t *testing.T) {
	e := limited(t, config.Options{CacheLimit: 64 * mib, CacheDecay: 3 * time.Second}, 1)
	e.hold(t, 4*gib, 64*mib)
	for range 20 {
		e.hold(t, gib, 64*mib)
		e.releases(t, time.Second)
	}
	if n := e.drv.ReservedBytes(0); n < gib || n > gib+64*mib+64*mib {
		t.Fatalf("%d bytes are reserved, 1 GiB is needed each second", n)
	}
	e.drv.ResetCalls()
	for range 20 {
		e.hold(t, gib, 64*mib)
		e.releases(t, time.Second)
	}
	for _, call := range []string{"cuMemCreate", "cuMemMap", "cuMemUnmap", "cuMemRelease"} {
		if n := e.drv.Calls().Calls[call].Count; n != 0 {
			t.Errorf("%d calls of %s for memory that is needed", n, call)
		}
	}
}

// Without a call of ReleaseUnused, frees and requests look after the limit.
func TestCacheLimitAtFrees(t *testing.T) {
	for _, decay := range []time.Duration{-1, time.Second} {
		t.Run(fmt.Sprint(decay), func(t *testing.T) {
			e := limited(t, config.Options{CacheLimit: 256 * mib, CacheDecay: decay}, 2)
			e.hold(t, 2*gib, 64*mib)
			for i := range 20 {
				e.drv.Advance(500 * time.Millisecond)
				p := e.alloc(t, uint64(i+1)*mib, e.streams[1])
				e.free(t, p)
			}
			if n := e.drv.ReservedBytes(0); n > 320*mib || n < 192*mib {
				t.Errorf("%d bytes are reserved, the limit is 256 MiB", n)
			}
		})
	}
}

// A limit without a time holds as soon as the GPU is done with the memory, and not before.
func TestCacheLimitAtOnce(t *testing.T) {
	e := limited(t, config.Options{CacheLimit: 64 * mib, CacheDecay: -1}, 1)
	e.hold(t, gib, 64*mib)
	must(t, e.drv.UseFor(0, e.streams[0].Handle(), e.alloc(t, 64*mib, e.streams[0]), 64*mib, 2*time.Second))
	e.hold(t, gib, 64*mib)
	if n := e.releases(t, time.Second); n < gib {
		t.Errorf("%d bytes are reserved while the GPU uses more", n)
	}
	if n := e.releases(t, 5*time.Second); n != 128*mib {
		t.Errorf("%d bytes are reserved, 64 MiB are in use and 64 MiB may be free", n)
	}
}

// The free memory of a captured graph's pool stays, and does not count.
func TestCacheLimitLeavesGraphs(t *testing.T) {
	e := limited(t, config.Options{CacheLimit: 64 * mib, CacheDecay: -1}, 2)
	graph := e.pool(t, 1, config.PoolOptions{})
	e.capture(t, e.streams[1], graph, func() { e.free(t, fromPool(t, graph, gib, e.streams[1])) })
	e.hold(t, gib, 32*mib)
	if n := e.releases(t, 5*time.Second); n != gib+64*mib {
		t.Errorf("%d bytes are reserved, 1 GiB is the graph's and 64 MiB may be free", n)
	}
}

// A clock that is set back delays a release, and no more.
func TestCacheLimitClockSetBack(t *testing.T) {
	e := checked(t, config.Options{CacheLimit: 64 * mib, CacheDecay: time.Second}, 80*gib, 1)
	back := int64(0)
	e.dev.History.SetClock(func() int64 { return e.drv.Now().Microseconds() - back })
	e.hold(t, gib, 64*mib)
	e.releases(t, time.Second)
	back = time.Hour.Microseconds()
	if n := e.releases(t, 5*time.Second); n > 64*mib+32*mib {
		t.Errorf("%d bytes are reserved", n)
	}
}

// A run that stays below the limit makes no driver call and allocates no Go memory for it.
func TestSteadyCacheLimit(t *testing.T) {
	e := newEngine(t, sim.Options{}, config.Options{CacheLimit: gib, CacheDecay: 20 * time.Millisecond}, 1)
	e.onSimulatedTime()
	round := func() {
		var blocks [100]cuda.Ptr
		for i := range blocks {
			blocks[i] = e.alloc(t, uint64(512+i*100_000), e.streams[0])
		}
		for _, p := range blocks {
			e.free(t, p)
		}
		e.drv.Advance(10 * time.Millisecond)
		if n, err := engine.ReleaseUnused(e.dev); n != 0 || err != nil {
			t.Errorf("%d bytes were released, %v", n, err)
		}
	}
	for range 30 {
		round()
	}
	e.drv.ResetCalls()
	if n := testing.AllocsPerRun(50, round); n != 0 {
		t.Errorf("%v Go allocations", n)
	}
	if calls := e.drv.Calls(); calls.Count != 0 {
		t.Errorf("driver calls %v", calls.Calls)
	}
}
