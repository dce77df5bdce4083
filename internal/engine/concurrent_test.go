package engine_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/internal/testkit"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

// Several goroutines, each with streams of its own, free each other's blocks, use them on each other's streams, make
// and release pools, make and destroy streams, trim and change the limit. The books are compared whenever all of them stand
// still.
func TestConcurrent(t *testing.T) {
	seed := testkit.Seed(t)
	budget := 4 * time.Second
	if testing.Short() {
		budget = 1500 * time.Millisecond
	}
	for i, text := range []string{"", "chunk:2MiB,cross_stream:ready", "backend:malloc", "history:100", "single_handle:true", "cache_limit:8MiB,cache_decay:0s"} {
		opts, err := config.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(text, func(t *testing.T) { concurrent(t, opts, false, seed+uint64(i), budget/6) })
		if i == 0 {
			t.Run("magazine", func(t *testing.T) { concurrent(t, opts, true, seed+uint64(i), budget/5) })
		}
	}
}

type handed struct {
	p    cuda.Ptr
	size uint64
	st   *engine.Stream
}

// meddling is a user's upstream that uses the allocator while it is called.
type meddling struct {
	resource.Resource
	dev *engine.Device
}

func (m meddling) Alloc(size, align uint64, st cuda.Stream) (cuda.Ptr, error) {
	m.dev.Views.Stats()
	if err := m.dev.DefaultPool().Trim(); err != nil {
		return 0, err
	}
	return m.Resource.Alloc(size, align, st)
}

func (m meddling) Free(p cuda.Ptr, size, align uint64, st cuda.Stream) error {
	m.dev.Views.Snapshot()
	return m.Resource.Free(p, size, align, st)
}

func concurrent(t *testing.T, opts config.Options, inC bool, seed uint64, budget time.Duration) {
	const goroutines = 4
	what := fmt.Sprintf("seed %d, %s", seed, opts)
	drv := sim.New(sim.Options{Devices: 2, Capacity: 512 * mib, HostCapacity: 512 * mib, Lag: time.Millisecond, Check: sim.CheckOrder,
		OnFault: func(err error) { t.Errorf("%s: %v", what, err) }})
	a, err := engine.New(drv, opts)
	must(t, err)
	var c *cMagazines
	if inC {
		c = newCMagazines(a)
	}
	var live ranges
	var streams [2][]*engine.Stream
	var devs [2]*engine.Device
	var from [2]*sources // upstreams of pools
	var making sync.Mutex
	upstream := func(d int, rng *rand.Rand) resource.Resource {
		making.Lock()
		defer making.Unlock()
		s, err := from[d].add(sourceKinds[rng.IntN(len(sourceKinds))], func() { devs[d].Views.Stats() })
		if errors.Is(err, cuda.ErrOutOfMemory) { // it finds out what the device can do by making some memory
			return nil
		}
		report(t, err)
		return s
	}
	for d := range devs {
		from[d] = &sources{drv: drv, dev: cuda.Device(d)}
		if devs[d], err = a.Device(cuda.Device(d)); err != nil {
			t.Fatal(err)
		}
		for range goroutines {
			st, err := devs[d].Stream(drv.NewStreamNonBlocking(cuda.Device(d)), config.StreamDurable)
			must(t, err)
			streams[d] = append(streams[d], st)
		}
	}
	exchange := make(chan handed, 64)
	var sums [2]struct {
		sync.Mutex
		books
		allocs int64
	}
	// have enters a block that was handed out into the books, and uses it on its stream.
	have := func(p cuda.Ptr, size uint64, st *engine.Stream) handed {
		if err := live.add(uint64(p), round512(size)); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		dev := st.Device().ID()
		k := &sums[dev]
		k.Lock()
		k.add(size, round512(size))
		k.allocs++
		k.Unlock()
		drv.Use(dev, st.Handle(), p, size)
		return handed{p, size, st}
	}
	free := func(b handed) {
		live.remove(uint64(b.p))
		k := &sums[b.st.Device().ID()]
		k.Lock()
		k.remove(b.size, round512(b.size))
		k.Unlock()
		if err := c.free(a, b.p); err != nil {
			t.Errorf("%s: Free(%#x): %v", what, b.p, err)
		}
	}
	// brief has a stream that was made just now allocate, beside those of other goroutines that may be forgotten meanwhile.
	brief := func(d int, rng *rand.Rand) {
		h := drv.NewStreamNonBlocking(cuda.Device(d))
		st, err := devs[d].Stream(h)
		report(t, err)
		for range 1 + rng.IntN(3) {
			size := 1 + rng.Uint64N(mib)
			p, err := c.alloc(devs[d], size, st)
			if err != nil {
				if !errors.Is(err, cuda.ErrOutOfMemory) {
					t.Errorf("%s: %v", what, err)
				}
				continue
			}
			b := have(p, size, st)
			if rng.IntN(4) == 0 {
				engine.ForgetStreams(devs[d])
			}
			free(b)
			if rng.IntN(4) == 0 {
				engine.ForgetStreams(devs[d])
			}
			if again, err := devs[d].Stream(h); err != nil || again != st {
				t.Errorf("%s: stream %d is another: %v", what, st.ID(), err)
			}
		}
		report(t, drv.DestroyStream(cuda.Device(d), h))
	}
	work := func(g int, rng *rand.Rand, n int) {
		var mine []handed
		var pools [2]*engine.Pool
		for i := 0; i < n && !t.Failed(); i++ {
			d := rng.IntN(2)
			st := streams[d][g]
			switch k := rng.IntN(100); {
			case k < 45:
				size := uint64(512) << rng.IntN(15)
				size += rng.Uint64N(size)
				var p cuda.Ptr
				var err error
				if rng.IntN(4) == 0 {
					p, err = devs[d].AllocWith(size, st, engine.AllocOptions{Pool: pools[d], Tag: 1, Library: uint8(g + 1), HostOrder: rng.IntN(2) == 0})
				} else if pools[d] != nil && rng.IntN(3) == 0 {
					p, err = pools[d].Alloc(size, st)
				} else {
					p, err = c.alloc(devs[d], size, st)
				}
				if err != nil {
					if !errors.Is(err, cuda.ErrOutOfMemory) {
						t.Errorf("%s: %v", what, err)
					}
					continue
				}
				mine = append(mine, have(p, size, st))
			case k < 75 && len(mine) > 0:
				x := rng.IntN(len(mine))
				free(mine[x])
				mine[x] = mine[len(mine)-1]
				mine = mine[:len(mine)-1]
			case k < 85 && len(mine) > 0: // another goroutine frees it, perhaps after use on another stream
				b := mine[len(mine)-1]
				mine = mine[:len(mine)-1]
				dev := b.st.Device().ID()
				if other := streams[dev][rng.IntN(goroutines)]; other != b.st && rng.IntN(2) == 0 {
					e, err := drv.EventCreate(dev)
					report(t, err)
					report(t, drv.EventRecord(dev, e, b.st.Handle()))
					report(t, drv.StreamWaitEvent(dev, other.Handle(), e))
					report(t, drv.EventDestroy(dev, e))
					drv.Use(dev, other.Handle(), b.p, b.size)
					report(t, c.recordStream(a, b.p, other))
				}
				select {
				case exchange <- b:
				default:
					free(b)
				}
			case k < 93:
				select {
				case b := <-exchange:
					free(b)
				default:
				}
			case k < 94:
				brief(d, rng)
			case k < 95:
				report(t, devs[d].Trim())
				_, err := engine.ReleaseUnused(devs[d])
				report(t, err)
			case k < 96:
				devs[d].SetLimit(uint64(rng.IntN(512)) * mib)
			case k < 98:
				if pools[d] != nil {
					report(t, pools[d].Release())
				}
				o := config.PoolOptions{Kind: config.PoolKind(rng.IntN(3))}
				if rng.IntN(4) == 0 {
					o = config.PoolOptions{Upstream: meddling{resource.Device(drv, cuda.Device(d)), devs[d]}}
				}
				if o.Kind == config.PoolDefault && rng.IntN(2) == 0 {
					o = config.PoolOptions{Upstream: upstream(d, rng), Limit: uint64(rng.IntN(2)) * 40 * mib}
				}
				if rng.IntN(3) == 0 {
					o.Spill = upstream(d, rng)
				}
				p, err := devs[d].NewPool(memory.PoolID{uint64(g), rng.Uint64()}, o)
				report(t, err)
				pools[d] = p
			default:
				drv.Advance(time.Duration(rng.IntN(2_000_000)))
				devs[d].Views.Stats()
			}
		}
		for _, b := range mine {
			free(b)
		}
		for _, p := range pools {
			if p != nil {
				report(t, p.Release())
			}
		}
	}
	began := time.Now()
	for round := 0; time.Since(began) < budget && !t.Failed(); round++ {
		var wg sync.WaitGroup
		for g := range goroutines {
			wg.Go(func() { work(g, rand.New(rand.NewPCG(seed, uint64(round*goroutines+g))), 300) })
		}
		wg.Wait()
		for len(exchange) > 0 && round%2 == 1 {
			free(<-exchange)
		}
		for d := range devs {
			s, k := devs[d].Views.Stats(), &sums[d]
			held := int64(from[d].held(drv))
			if s.Allocations.All.Current != k.blocks || s.Requested.All.Current != k.requested ||
				s.Allocated.All.Current != k.allocated || s.Allocations.All.Added != k.allocs ||
				s.Reserved.All.Current != held || s.ActiveBytes.All.Current+s.InactiveBytes.All.Current != held {
				t.Fatalf("%s, round %d, device %d: want %d blocks of %d bytes, %d requested, %d ever, %d held; have %+v", what,
					round, d, k.blocks, k.allocated, k.requested, k.allocs, held, s)
			}
		}
	}
	for len(exchange) > 0 {
		free(<-exchange)
	}
	report(t, a.Trim())
	if err := a.Close(); err != nil && !t.Failed() {
		t.Fatalf("%s: %v", what, err)
	}
	for _, x := range from {
		if n := x.bytes.Load(); n != 0 {
			t.Errorf("%s: %d bytes are out of upstreams", what, n)
		}
		report(t, x.close())
	}
	if l := drv.Leaks(); !t.Failed() && (l.Handles != 0 || l.Mappings != 0 || l.Reservations != 0 || l.Allocs != 0 || l.Events != 0) {
		t.Fatalf("%s: left behind: %+v", what, l)
	}
}

// report is must for goroutines that are not the test's own.
func report(t *testing.T, err error) {
	if err != nil {
		t.Helper()
		t.Error(err)
	}
}
