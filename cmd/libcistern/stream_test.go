//go:build linux && cgo

package main

import (
	"errors"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
)

// What many threads look up at once is tested in Go as well, because a library built with the race detector cannot be
// loaded by a C program.

func startSim(t *testing.T) *library {
	t.Helper()
	t.Cleanup(func() { current.Store(nil) })
	l, err := start("driver:sim:1GiBx2", "")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestLookUps(t *testing.T) {
	l := startSim(t)
	n := 2000
	if testing.Short() {
		n = 500
	}
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(g)))
			dev, err := l.Device(0)
			if err != nil {
				t.Error(err)
				return
			}
			own := memory.PoolID{0, uint64(g + 1)}
			for i := range n {
				h := cuda.Stream(0x1000 + random.Uint64N(400)*16)
				st, err := l.stream(dev, h)
				if err != nil || st.Handle() != h {
					t.Errorf("stream %#x: %v, %v", h, st, err)
					return
				}
				if random.IntN(10) == 0 {
					l.devices[0].streams.keep(h, st)
				}
				if i%100 == 0 {
					if _, err := dev.NewPool(own, config.PoolOptions{}); err != nil {
						t.Error(err)
					}
				}
				p, err := l.pool(dev, own)
				if err != nil || p.ID() != own {
					t.Errorf("pool %v: %v", own, err)
					return
				}
				if i%100 == 99 {
					if err := p.Release(); err != nil {
						t.Error(err)
					}
					l.forget(dev, p)
					if _, err := l.pool(dev, own); err == nil {
						t.Error("a released pool is found")
					}
				}
				ptr, err := l.alloc(dev, 512, h, memory.PoolID{}, engine.AllocOptions{})
				if err == nil {
					err = l.Free(ptr)
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	dev, _ := l.Device(0)
	for i := range 400 {
		h := cuda.Stream(0x1000 + i*16)
		if st, err := l.stream(dev, h); err != nil || st.Handle() != h {
			t.Errorf("stream %#x: %v", h, err)
		}
	}
}

// TestHandles: the table of lasting streams against a map.
func TestHandles(t *testing.T) {
	l := startSim(t)
	dev, err := l.Device(1)
	if err != nil {
		t.Fatal(err)
	}
	var table *handles
	want := map[cuda.Stream]*engine.Stream{}
	random := rand.New(rand.NewPCG(3, 4))
	for range 3000 {
		h := cuda.Stream(random.Uint64N(1 << 40))
		if random.IntN(3) == 0 {
			h = cuda.Stream(random.Uint64N(64) << 32)
		}
		st, err := dev.Stream(h | 1<<41)
		if err != nil {
			t.Fatal(err)
		}
		old := table
		table = table.with(h, st)
		if old.find(h) != want[h] {
			t.Fatalf("the older table has changed for %#x", h)
		}
		want[h] = st
		if probe := cuda.Stream(random.Uint64N(1 << 40)); table.find(probe) != want[probe] {
			t.Fatalf("found %v for %#x", table.find(probe), probe)
		}
	}
	for h, st := range want {
		if table.find(h) != st {
			t.Errorf("lost %#x", h)
		}
	}
	if table.used != len(want) || 2*table.used > len(table.slots) {
		t.Errorf("%d of %d slots are used by %d handles", table.used, len(table.slots), len(want))
	}
}

// TestStreamsOfOtherDevices: a stream of another device is known by its context.
func TestStreamsOfOtherDevices(t *testing.T) {
	l := startSim(t)
	zero, err := l.Device(0)
	if err != nil {
		t.Fatal(err)
	}
	one, err := l.Device(1)
	if err != nil {
		t.Fatal(err)
	}
	st, err := l.stream(one, 0x5000)
	if err != nil {
		t.Fatal(err)
	}
	var f *failure
	if _, err := l.stream(zero, 0x5000); !errors.As(err, &f) {
		t.Errorf("device 0 takes a stream of device 1: %v", err)
	}
	for range 2 { // also once it lasts
		if got, err := l.anyStream(zero, 0x5000); err != nil || got != st {
			t.Errorf("got %v, %v", got, err)
		}
		l.devices[1].streams.keep(0x5000, st)
	}
	if got, err := l.anyStream(zero, cuda.StreamLegacy); err != nil || got.Device() != zero {
		t.Errorf("the legacy stream is not that of the memory's device: %v, %v", got, err)
	}
}

// TestNoGarbage: what is asked for most makes no garbage on the way into the engine and back.
func TestNoGarbage(t *testing.T) {
	l := startSim(t)
	dev, err := l.Device(0)
	if err != nil {
		t.Fatal(err)
	}
	pool := memory.PoolID{1, 2}
	if _, err := dev.NewPool(pool, config.PoolOptions{}); err != nil {
		t.Fatal(err)
	}
	for what, h := range map[string]cuda.Stream{"the legacy stream": 0, "a stream known by its id": 0x7000} {
		for _, id := range []memory.PoolID{{}, pool} {
			if n := testing.AllocsPerRun(1000, func() {
				p, err := l.alloc(dev, 5000, h, id, engine.AllocOptions{})
				if err == nil {
					err = l.Free(p)
				}
				if err != nil {
					t.Fatal(err)
				}
			}); n != 0 {
				t.Errorf("%s, pool %v: %v objects of garbage", what, id, n)
			}
		}
	}
}
