package engine_test

import (
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

// What belongs to which pool, and to which device.

// A block is freed by the pool that it came from, whatever pool is current then, and by whatever thread.
func TestFreeGoesToTheBlocksPool(t *testing.T) {
	e := checked(t, config.Options{}, 256*mib, 2)
	st := e.streams[0]
	a, b := newShelf(1<<30, hostMemory), newShelf(1<<30, hostMemory)
	from, current := e.pool(t, 1, config.PoolOptions{Upstream: a}), e.pool(t, 2, config.PoolOptions{Upstream: b})
	must(t, e.dev.Captures.Route(st, from))
	x := e.alloc(t, 30*mib, st)
	must(t, e.dev.Captures.Route(st, current))
	y := e.alloc(t, 30*mib, st)
	var wg sync.WaitGroup
	wg.Go(func() { report(t, e.a.Free(x)) })
	wg.Wait()
	if p, q := from.Stats(), current.Stats(); p.Blocks != 0 || p.Cached != 30*mib || q.Blocks != 1 || q.Cached != 0 {
		t.Errorf("%+v, %+v", p, q)
	}
	must(t, current.Trim())
	if a.held() != 30*mib {
		t.Error("trimming one pool gave the other's memory back")
	}
	must(t, from.Trim())
	if a.held() != 0 || b.held() != 30*mib {
		t.Errorf("%d and %d bytes are held", a.held(), b.held())
	}
	must(t, e.dev.Captures.Unroute(st))
	must(t, e.dev.Captures.Unroute(st))
	e.free(t, y)
}

// A free is in the order of the block's own streams: the stream that it was got for, and those that were named. Which
// stream the one who frees uses meanwhile is of no matter.
func TestFreeUsesTheBlocksStreams(t *testing.T) {
	e := checked(t, config.Options{}, 256*mib, 3)
	st, other, current := e.streams[0], e.streams[1], e.streams[2]
	pool := e.pool(t, 1, config.PoolOptions{Upstream: resource.Device(e.drv, 0)})
	x := fromPool(t, pool, 30*mib, st)
	e.use(t, st, x, 30*mib)
	ev, err := e.drv.EventCreate(0)
	must(t, err)
	must(t, errors.Join(e.drv.EventRecord(0, ev, st.Handle()), e.drv.StreamWaitEvent(0, other.Handle(), ev)))
	must(t, e.a.RecordStream(x, other))
	e.use(t, other, x, 30*mib)
	e.free(t, x)
	if y := fromPool(t, pool, 30*mib, st); y == x {
		t.Error("memory was handed out while the stream that was named uses it")
	} else {
		e.free(t, y)
	}
	e.drv.Advance(time.Second)
	for range 40 { // until frees that waited are collected
		z := fromPool(t, pool, 30*mib, st)
		e.use(t, st, z, 30*mib) // the checker knows whether it may
		if z == x {
			x = 0
		}
		defer e.free(t, z)
		if x == 0 {
			break
		}
	}
	if x != 0 {
		t.Error("the memory was never used again")
	}
	big := fromPool(t, pool, 60*mib, current)
	e.use(t, current, big, 60*mib)
	e.free(t, big)
}

// A pool whose handle is gone lives as long as a block in it; then its memory goes back, and who asked is told.
func TestPoolOutlivesItsHandle(t *testing.T) {
	for _, spilled := range []bool{false, true} {
		e := checked(t, config.Options{}, 256*mib, 1)
		st := e.streams[0]
		up, end := newShelf(1<<30, hostMemory), make(chan bool, 2)
		o := config.PoolOptions{Upstream: up, OnEnd: func() { end <- true }}
		if spilled {
			o.Upstream, o.Spill = newShelf(0, hostMemory), up
		}
		pool := e.pool(t, 1, o)
		x, y := fromPool(t, pool, 30*mib, st), fromPool(t, pool, 50*mib, st)
		e.free(t, y)
		must(t, pool.Release())
		pool = nil
		if up.held() != 30*mib {
			t.Errorf("%d bytes held for a block of 30 MiB", up.held())
		}
		if b, err := e.a.Base(x); err != nil || b.Pool != (memory.PoolID{9, 1}) || b.Requested != 30*mib {
			t.Errorf("%+v, %v", b, err)
		}
		again := e.pool(t, 1, config.PoolOptions{}) // of the same name, which has nothing to do with it
		select {
		case <-end:
			t.Error("the pool's end was told of while a block is out")
		case <-time.After(10 * time.Millisecond):
		}
		e.free(t, x)
		must(t, e.dev.Trim())
		if up.held() != 0 {
			t.Errorf("%d bytes held after the last block", up.held())
		}
		select {
		case <-end:
		case <-time.After(time.Minute):
			t.Error("nobody was told of the pool's end")
		}
		must(t, again.Release())
		must(t, e.a.Close())
		if len(end) > 0 {
			t.Error("the pool ended twice")
		}
	}
}

// What is made for an upstream in a stream's order goes with its pool, or with the pool that could not be made.
func TestPoolsLeaveNoStreams(t *testing.T) {
	e := newEngine(t, sim.Options{Devices: 2, Capacity: 256 * mib}, config.Options{}, 1)
	before := e.drv.Leaks()
	up, err := resource.Async(e.drv, 0, resource.AsyncOptions{})
	must(t, err)
	for i := range uint64(3) {
		p := e.pool(t, i, config.PoolOptions{Upstream: up, Spill: up})
		if _, err := e.dev.NewPool(p.ID(), config.PoolOptions{Upstream: up}); err == nil {
			t.Error("two pools of one name")
		}
		over := e.pool(t, 100+i, config.PoolOptions{Upstream: p.Resource()})
		x := fromPool(t, over, 3*mib, e.streams[0])
		must(t, over.Release())
		must(t, p.Release())
		e.free(t, x)
	}
	must(t, e.a.Trim())
	must(t, e.a.Close())
	must(t, up.Close())
	if l := e.drv.Leaks(); l != before {
		t.Errorf("left %+v; before, there was %+v", l, before)
	}
}

// Scopes nest, on each stream by itself: what is allocated in one, by several threads on streams of their own, comes from
// that pool and no other.
func TestScopesDoNotLeak(t *testing.T) {
	e := checked(t, config.Options{}, 512*mib, 6)
	shelves := []*shelf{newShelf(1<<30, hostMemory), newShelf(1<<30, hostMemory)}
	pools := []*engine.Pool{e.pool(t, 1, config.PoolOptions{Upstream: shelves[0]}), e.pool(t, 2, config.PoolOptions{Upstream: shelves[1]})}
	want := [3]struct {
		sync.Mutex
		bytes uint64
	}{}
	blocks := make(chan cuda.Ptr, 10000)
	var wg sync.WaitGroup
	for g, st := range e.streams {
		wg.Go(func() {
			alloc := func(i int, size uint64) {
				p, err := e.dev.Alloc(size, st)
				report(t, err)
				id := memory.PoolID{}
				if i < 2 {
					id = pools[i].ID()
				}
				if b, err := e.a.Base(p); err != nil || b.Pool != id || b.Stream != st.ID() {
					t.Errorf("%+v, %v; want pool %v", b, err, id)
				}
				want[i].Lock()
				want[i].bytes += size
				want[i].Unlock()
				blocks <- p
			}
			for i := range 50 {
				outer, inner := g%2, 1-g%2
				alloc(2, uint64(1000+i))
				report(t, e.dev.Captures.Route(st, pools[outer]))
				alloc(outer, uint64(2000+i))
				report(t, e.dev.Captures.Route(st, pools[inner]))
				alloc(inner, uint64(3000+i*1000))
				report(t, e.dev.Captures.Unroute(st))
				alloc(outer, uint64(4000+i))
				report(t, e.dev.Captures.Unroute(st))
				alloc(2, uint64(5000+i))
				if i%5 == 0 {
					report(t, e.a.Free(<-blocks)) // somebody's, of whatever pool
				}
			}
		})
	}
	wg.Wait()
	close(blocks)
	var have [3]uint64
	for p := range blocks {
		b, err := e.a.Base(p)
		must(t, err)
		i := 2
		for k, pool := range pools {
			if b.Pool == pool.ID() {
				i = k
			}
		}
		have[i] += b.Requested
		if inside := b.Base >= 0x6000_0000_0000; inside != (i < 2) {
			t.Errorf("%#x is said to be pool %v's", uint64(b.Base), b.Pool)
		}
	}
	for i, pool := range append(pools, e.dev.DefaultPool()) {
		if s := pool.Stats(); s.Requested != have[i] || s.Requested > want[i].bytes {
			t.Errorf("pool %v: %+v, want %d bytes requested", pool.ID(), s, have[i])
		}
	}
}

// A device whose context is broken takes no other with it: everything else goes on on the others, from any thread, also in
// pools whose memory was opened to it.
func TestBrokenDeviceAndPools(t *testing.T) {
	drv := sim.New(sim.Options{Devices: 3, Capacity: 512 * mib, HostCapacity: 1 << 30, Lag: time.Millisecond, Check: sim.CheckOrder,
		OnFault: func(err error) { t.Error(err) }})
	a, err := engine.New(drv, config.Options{})
	must(t, err)
	var devs [3]*engine.Device
	var pools [3][]*engine.Pool
	var from [3]*sources
	for i := range devs {
		d := cuda.Device(i)
		devs[i], err = a.Device(d)
		must(t, err)
		from[i] = &sources{drv: drv, dev: d}
		for k, kind := range sourceKinds {
			up, err := from[i].add(kind, nil)
			must(t, err)
			p, err := devs[i].NewPool(memory.PoolID{9, uint64(k)}, config.PoolOptions{Upstream: up, Limit: 200 * mib})
			must(t, err)
			pools[i] = append(pools[i], p)
		}
		p, err := devs[i].NewPool(memory.PoolID{9, 99}, config.PoolOptions{Upstream: pools[i][0].Resource()})
		must(t, err)
		pools[i] = append(pools[i], p)
	}
	for i := range devs {
		for k := range devs {
			must(t, devs[i].Peers.Enable(cuda.Device(k)))
		}
	}
	broken := devs[1]
	bst, err := broken.Stream(drv.NewStreamNonBlocking(1), config.StreamDurable)
	must(t, err)
	var stuck []cuda.Ptr
	for _, p := range pools[1] {
		stuck = append(stuck, fromPool(t, p, 3*mib, bst))
	}
	drv.Poison(1, cuda.ErrIllegalAddress)
	var wg sync.WaitGroup
	for g := range 6 {
		i := []int{0, 2}[g%2]
		wg.Go(func() {
			d := cuda.Device(i)
			st, err := devs[i].Stream(drv.NewStreamNonBlocking(d), config.StreamDurable)
			if err != nil {
				t.Error(err)
				return
			}
			for n := range 60 {
				p := devs[i].DefaultPool()
				if k := n % (len(pools[i]) + 1); k < len(pools[i]) {
					p = pools[i][k]
				}
				size := uint64(1+n%5) * mib
				x, err := devs[i].AllocWith(size, st, engine.AllocOptions{Pool: p, HostOrder: n%3 == 0})
				if err == nil {
					err = errors.Join(drv.Use(d, st.Handle(), x, size), a.Free(x))
				}
				if n%10 == 0 {
					err = errors.Join(err, p.Trim(), devs[i].Trim())
				}
				if err != nil {
					t.Errorf("device %d, pool %v: %v", i, p.ID(), err)
				}
				devs[i].Views.Stats()
				broken.Views.Stats()
				if _, err := broken.Alloc(size, bst); n > 30 && err == nil {
					broken.Trim()
				}
			}
		})
	}
	wg.Wait()
	for _, x := range stuck {
		if err := a.Free(x); errors.Is(err, memory.ErrUnknownPointer) {
			t.Errorf("a free on the broken device: %v", err)
		}
	}
	broken.Trim()
	for _, p := range pools[1][1:] { // the first has a segment out to the pool over it, which nothing can give back
		if s := p.Stats(); s.Requested != 0 || s.Blocks != 0 {
			t.Errorf("the broken device's pool %v: %+v", p.ID(), s)
		}
	}
	for _, i := range []int{0, 2} {
		fresh, err := devs[i].NewPool(memory.PoolID{10, 1}, config.PoolOptions{Upstream: pools[i][1].Resource()})
		must(t, err)
		if want := map[int][]cuda.Device{0: {1, 2}, 2: {0, 1}}[i]; !slices.Equal(devs[i].Peers.List(), want) {
			t.Errorf("device %d has peers %v", i, devs[i].Peers.List())
		}
		must(t, fresh.Release())
		for _, p := range pools[i] {
			must(t, p.Release())
		}
		must(t, devs[i].Trim())
		if s := devs[i].Views.Stats(); s.Reserved.All.Current != 0 || s.Active.All.Current != 0 {
			t.Errorf("device %d holds %d bytes, %d blocks", i, s.Reserved.All.Current, s.Active.All.Current)
		}
		if n := from[i].held(drv); n != 0 {
			t.Errorf("device %d: %d bytes are out", i, n)
		}
	}
}
