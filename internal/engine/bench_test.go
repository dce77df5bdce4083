package engine_test

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
)

func goBytes() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

func benchEngine(b testing.TB, streams int) *fixture {
	return newEngine(b, sim.Options{Capacity: 1 << 42}, config.Options{}, streams)
}

// mapTime is what a Go map takes to delete one 64-bit key and insert another, at a population, in nanoseconds: the
// yardstick of the engine's own cost on whatever machine this runs on.
func mapTime(population int) float64 {
	rng := rand.New(rand.NewPCG(3, 4))
	m := make(map[uint64]uint32, population)
	keys := make([]uint64, population)
	for i := range keys {
		keys[i] = rng.Uint64()
		m[keys[i]] = uint32(i)
	}
	order := make([]int, 1<<16)
	fresh := make([]uint64, 1<<16)
	for i := range order {
		order[i], fresh[i] = rng.IntN(population), rng.Uint64()
	}
	n := max(population, 1_000_000)
	began := time.Now()
	for i := range n {
		k := (order[i&(1<<16-1)] + i) % population
		delete(m, keys[k])
		keys[k] = fresh[i&(1<<16-1)] + uint64(i)
		m[keys[k]] = uint32(i)
	}
	return float64(time.Since(began).Nanoseconds()) / float64(n)
}

// BenchmarkPair is a request met from the cache and given back.
func BenchmarkPair(b *testing.B) {
	for _, size := range []uint64{512, mib, 20 * mib} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			e := benchEngine(b, 1)
			e.free(b, e.alloc(b, size, e.streams[0]))
			yard := mapTime(1000)
			b.ReportAllocs()
			b.ResetTimer()
			for range b.N {
				e.free(b, e.alloc(b, size, e.streams[0]))
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/yard, "maps")
		})
	}
}

// churn is a population of blocks of mixed sizes, 512 B to 8 MiB, log-uniform, that are replaced one by one.
type churn struct {
	e      *fixture
	st     *engine.Stream
	blocks []cuda.Ptr
	sizes  []uint64
	order  []int
	n      int
}

func newChurn(b testing.TB, e *fixture, st *engine.Stream, population int, seed uint64) *churn {
	rng := rand.New(rand.NewPCG(seed, 8))
	c := &churn{e: e, st: st, blocks: make([]cuda.Ptr, population), sizes: make([]uint64, 1<<16), order: make([]int, 1<<16)}
	for i := range c.sizes {
		n := uint64(512) << rng.IntN(14)
		c.sizes[i] = n + rng.Uint64N(n)
		c.order[i] = rng.IntN(population)
	}
	for i := range c.blocks {
		c.blocks[i] = e.alloc(b, c.sizes[i&(1<<16-1)], st)
	}
	c.turn(b, max(2*population, 100_000)) // until the heap has its shape
	return c
}

func (c *churn) turn(b testing.TB, n int) {
	for range n {
		k := (c.order[c.n&(1<<16-1)] + c.n) % len(c.blocks)
		c.e.free(b, c.blocks[k])
		c.blocks[k] = c.e.alloc(b, c.sizes[(c.n*31+7)&(1<<16-1)], c.st)
		c.n++
	}
}

func BenchmarkChurn(b *testing.B) {
	for _, population := range []int{1000, 100_000, 1_000_000} {
		b.Run(fmt.Sprint(population), func(b *testing.B) {
			e := benchEngine(b, 1)
			c := newChurn(b, e, e.streams[0], population, 1)
			yard := mapTime(population)
			e.drv.ResetCalls()
			b.ReportAllocs()
			b.ResetTimer()
			c.turn(b, b.N)
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/yard, "maps")
			b.ReportMetric(float64(e.drv.Calls().Count)/float64(b.N), "calls/op")
		})
	}
}

// BenchmarkStreams is churn on several streams at once, one goroutine each; ns/op is wall time per operation of all.
func BenchmarkStreams(b *testing.B) {
	for _, streams := range []int{1, 2, 4} {
		b.Run(fmt.Sprint(streams), func(b *testing.B) {
			e := benchEngine(b, streams)
			var all []*churn
			for i, st := range e.streams {
				all = append(all, newChurn(b, e, st, 2000, uint64(i)))
			}
			b.ReportAllocs()
			b.ResetTimer()
			var wg sync.WaitGroup
			for _, c := range all {
				wg.Go(func() { c.turn(b, b.N/streams) })
			}
			wg.Wait()
		})
	}
}

// BenchmarkAttribution is what a request from the cache, and its free, cost with stacks kept: named by number, by 20 frames,
// and found out by the engine.
func BenchmarkAttribution(b *testing.B) {
	frames := make([]uint64, 20)
	for i := range frames {
		frames[i] = uint64(0x400000 + i)
	}
	for _, c := range []struct {
		name string
		opts config.Options
		keep bool
		with func(a *engine.Allocator) engine.AllocOptions
	}{
		{"off", config.Options{}, false, func(*engine.Allocator) engine.AllocOptions { return engine.AllocOptions{} }},
		{"kept", config.Options{}, true, func(*engine.Allocator) engine.AllocOptions { return engine.AllocOptions{Stack: 1} }},
		{"frames", config.Options{}, true, func(a *engine.Allocator) engine.AllocOptions {
			return engine.AllocOptions{Stack: a.Stacks.Of(frames)}
		}},
		{"caught", config.Options{Stacks: config.StacksNative}, true, func(*engine.Allocator) engine.AllocOptions { return engine.AllocOptions{} }},
		{"sampled", config.Options{Stacks: config.StacksNative, StackSample: 1 << 20}, true, func(*engine.Allocator) engine.AllocOptions {
			return engine.AllocOptions{}
		}},
	} {
		b.Run(c.name, func(b *testing.B) {
			e := newEngine(b, sim.Options{Capacity: 1 << 42}, c.opts, 1)
			e.a.Stacks.Keep(c.keep)
			pair := func() {
				p, err := e.dev.AllocWith(20<<10, e.streams[0], c.with(e.a))
				if err != nil {
					b.Fatal(err)
				}
				e.free(b, p)
			}
			pair()
			b.ReportAllocs()
			b.ResetTimer()
			for range b.N {
				pair()
			}
		})
	}
}
