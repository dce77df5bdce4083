package engine_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
)

// engine is a device of a simulated machine with a number of durable streams that do not block.
type fixture struct {
	drv     *sim.Driver
	a       *engine.Allocator
	dev     *engine.Device
	streams []*engine.Stream
}

func newEngine(t testing.TB, o sim.Options, opts config.Options, streams int) *fixture {
	t.Helper()
	drv := sim.New(o)
	return newEngineOver(t, drv, drv, opts, streams)
}

// newEngineOver is newEngine with an engine that sees the machine through another driver.
func newEngineOver(t testing.TB, machine *sim.Driver, seen cuda.Driver, opts config.Options, streams int) *fixture {
	t.Helper()
	e := &fixture{drv: machine}
	var err error
	if e.a, err = engine.New(seen, opts); err != nil {
		t.Fatal(err)
	}
	if e.dev, err = e.a.Device(0); err != nil {
		t.Fatal(err)
	}
	for range streams {
		st, err := e.dev.Stream(e.drv.NewStreamNonBlocking(0), config.StreamDurable)
		if err != nil {
			t.Fatal(err)
		}
		e.streams = append(e.streams, st)
	}
	return e
}

func (e *fixture) alloc(t testing.TB, size uint64, st *engine.Stream) cuda.Ptr {
	p, err := e.dev.Alloc(size, st)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func (e *fixture) free(t testing.TB, p cuda.Ptr) {
	if err := e.a.Free(p); err != nil {
		t.Fatal(err)
	}
}

// In steady state, where every request is met from the cache, one stream costs no driver call and no Go memory, and
// several cost no more than the events that tell their frees apart.
func TestSteadyState(t *testing.T) {
	for _, backend := range []config.Backend{config.BackendVMM, config.BackendMalloc} {
		for _, streams := range []int{1, 4} {
			t.Run(fmt.Sprintf("%s/%d streams", backend, streams), func(t *testing.T) {
				e := newEngine(t, sim.Options{}, config.Options{Backend: backend}, streams)
				rng := rand.New(rand.NewPCG(1, 2))
				sizes := make([]uint64, 500)
				bytes := uint64(0)
				for i := range sizes {
					n := uint64(512) << rng.IntN(14)
					sizes[i] = n + rng.Uint64N(n)
					bytes += sizes[i]
				}
				blocks := make([]cuda.Ptr, len(sizes))
				round := func() {
					for i, n := range sizes {
						blocks[i] = e.alloc(t, n, e.streams[i%streams])
					}
					for i := range blocks {
						e.free(t, blocks[i*7%len(blocks)])
					}
				}
				for range 50 {
					round()
				}
				e.drv.ResetCalls()
				const rounds = 20
				if n := testing.AllocsPerRun(rounds, round); n != 0 {
					t.Errorf("%v Go allocations in %d operations", n, 2*len(sizes))
				}
				calls := e.drv.Calls()
				if streams == 1 && calls.Count != 0 {
					t.Errorf("driver calls with one stream: %v", calls.Calls)
				}
				for name, c := range calls.Calls {
					switch name {
					case "cuEventRecord", "cuStreamGetCaptureInfo":
						if most := (rounds + 1) * (bytes>>25 + uint64(streams)); c.Count > most {
							t.Errorf("%d calls of %s, want at most %d", c.Count, name, most)
						}
					case "cuEventQuery", "cuEventCreate":
					default:
						t.Errorf("%d calls of %s", c.Count, name)
					}
				}
			})
		}
	}
}

// A history costs no Go memory either, once its events have their place.
func TestSteadyHistory(t *testing.T) {
	e := newEngine(t, sim.Options{}, config.Options{History: 1000}, 2)
	round := func() {
		for i := range 100 {
			p := e.alloc(t, uint64(512+i*1000), e.streams[i%2])
			e.free(t, p)
		}
	}
	for range 30 {
		round()
	}
	e.drv.ResetCalls()
	if n := testing.AllocsPerRun(20, round); n != 0 {
		t.Errorf("%v Go allocations in 200 operations", n)
	}
	if calls := e.drv.Calls(); calls.Calls["cuMemCreate"].Count+calls.Calls["cuMemMap"].Count > 0 {
		t.Errorf("driver calls %v", calls.Calls)
	}
}

// Frees on a stream that may be destroyed next cost an event each, and no Go memory.
func TestSteadyShortLivedStream(t *testing.T) {
	e := newEngine(t, sim.Options{}, config.Options{}, 0)
	st, err := e.dev.Stream(e.drv.NewStream(0))
	if err != nil {
		t.Fatal(err)
	}
	round := func() { e.free(t, e.alloc(t, 1000, st)) }
	for range 10_000 {
		round()
	}
	e.drv.ResetCalls()
	if n := testing.AllocsPerRun(1000, round); n != 0 {
		t.Errorf("%v Go allocations", n)
	}
	for name, c := range e.drv.Calls().Calls {
		if name != "cuEventRecord" && name != "cuStreamGetCaptureInfo" {
			t.Errorf("%d calls of %s", c.Count, name)
		}
	}
}

// Memory that moves a million times uses up neither addresses nor handles nor Go memory for its books.
func TestMillionRemaps(t *testing.T) {
	remaps := int64(1_000_000)
	if testing.Short() {
		remaps = 100_000
	}
	for _, lag := range []time.Duration{0, 20 * time.Millisecond} {
		e := newEngine(t, sim.Options{Capacity: 256 * mib, Lag: lag, Busy: lag > 0}, config.Options{ChunkMax: 2 * mib}, 3)
		rng := rand.New(rand.NewPCG(5, 6))
		turn := func() {
			var blocks [4]cuda.Ptr
			st := e.streams[rng.IntN(3)]
			for i := range blocks {
				blocks[i] = e.alloc(t, uint64(1+rng.IntN(60))*mib, st)
			}
			for _, p := range blocks {
				e.free(t, p)
			}
			e.drv.Advance(time.Millisecond)
		}
		for e.dev.Views.Stats().Remaps < remaps/10 {
			turn()
		}
		before, leaks := e.dev.Views.Stats(), e.drv.Leaks()
		records := goBytes()
		for e.dev.Views.Stats().Remaps < remaps {
			turn()
		}
		after := e.dev.Views.Stats()
		if after.AddressBytes > before.AddressBytes {
			t.Errorf("lag %v: addresses grew from %d to %d bytes", lag, before.AddressBytes, after.AddressBytes)
		}
		now := e.drv.Leaks()
		if now.Handles > leaks.Handles+16 || now.Reservations > leaks.Reservations || now.Events > leaks.Events+64 {
			t.Errorf("lag %v: the driver held %+v, now %+v", lag, leaks, now)
		}
		if now.Mappings > 20*now.Handles {
			t.Errorf("lag %v: %d mappings of %d handles", lag, now.Mappings, now.Handles)
		}
		if n := goBytes(); n > records+records/2+(4<<20) {
			t.Errorf("lag %v: Go memory grew from %d to %d bytes", lag, records, n)
		}
		if err := e.a.Trim(); err != nil {
			t.Fatal(err)
		}
		if s := e.dev.Views.Stats(); s.Reserved.All.Current != 0 || s.StaleMappings != 0 {
			t.Errorf("after Trim: %+v", s)
		}
	}
}

// Streams that come and go use up no addresses, however many there were.
func TestManyStreams(t *testing.T) {
	n := 3000
	if testing.Short() {
		n = 1000
	}
	e := newEngine(t, sim.Options{Capacity: 8 * gib, Check: sim.CheckOrder, Lag: time.Millisecond, OnFault: func(err error) { t.Error(err) }},
		config.Options{}, 0)
	for i := range n {
		h := e.drv.NewStreamNonBlocking(0)
		st, err := e.dev.Stream(h)
		if err != nil {
			t.Fatal(err)
		}
		p, err := e.dev.Alloc(1000, st)
		if err != nil {
			t.Fatalf("stream %d: %v", i, err)
		}
		e.drv.Use(0, h, p, 1000)
		e.free(t, p)
		e.drv.DestroyStream(0, h)
		e.drv.Advance(100 * time.Microsecond)
	}
	if s := e.dev.Views.Stats(); s.Reserved.All.Current > 1*gib {
		t.Errorf("%d bytes held for streams that are gone", s.Reserved.All.Current)
	}
}
