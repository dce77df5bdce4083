package engine_test

import (
	"errors"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/internal/testkit"
	"github.com/cistern-gpu/cistern/memory"
)

// checked is an engine on a machine whose checker fails the test.
func checked(t *testing.T, opts config.Options, capacity uint64, streams int) *fixture {
	return newEngine(t, sim.Options{Capacity: capacity, Lag: 20 * time.Millisecond, Check: sim.CheckOrder,
		OnFault: func(err error) { t.Error(err) }}, opts, streams)
}

func (e *fixture) use(t testing.TB, st *engine.Stream, p cuda.Ptr, size uint64) {
	t.Helper()
	if err := e.drv.Use(0, st.Handle(), p, size); err != nil {
		t.Fatal(err)
	}
}

// must stops the test on an error.
var must = testkit.Must

// capture captures f on the stream into the pool.
func (e *fixture) capture(t *testing.T, st *engine.Stream, pool *engine.Pool, f func()) *sim.Graph {
	t.Helper()
	must(t, e.dev.Captures.Begin(st, pool))
	must(t, e.drv.BeginCapture(0, st.Handle()))
	f()
	g, err := e.drv.EndCapture(0, st.Handle())
	must(t, err)
	must(t, e.dev.Captures.End(st))
	return g
}

// What a captured graph uses stays where it is, also while it is free and however much memory is wanted, until the
// pool is released; then all of it can go.
func TestCapturedMemoryIsPinned(t *testing.T) {
	for _, backend := range []config.Backend{config.BackendVMM, config.BackendMalloc} {
		e := checked(t, config.Options{Backend: backend}, 128*mib, 2)
		pool, err := e.dev.NewPool(memory.PoolID{0, 1}, config.PoolOptions{})
		must(t, err)
		st, other := e.streams[0], e.streams[1]
		g := e.capture(t, st, pool, func() {
			for range 3 {
				p := e.alloc(t, 24*mib, st)
				e.use(t, st, p, 24*mib)
				q := e.alloc(t, 1000, st)
				e.use(t, st, q, 1000)
				e.free(t, q)
				e.free(t, p)
			}
		})
		e.use(t, other, 0, 0)
		held := e.dev.Views.Stats().Reserved.All.Current
		must(t, e.a.Trim())
		must(t, pool.Trim())
		must(t, g.Check())
		if n := e.dev.Views.Stats().Reserved.All.Current; n != held {
			t.Errorf("%s: Trim gave back %d bytes of a pool that a graph uses", backend, held-n)
		}
		// More than there is beside the pool.
		var oom *memory.OutOfMemoryError
		if _, err := e.dev.Alloc(120*mib, other); !errors.As(err, &oom) {
			t.Fatalf("%s: Alloc: %v", backend, err)
		} else if oom.Pinned == 0 {
			t.Errorf("%s: the error does not say that memory is pinned: %v", backend, err)
		}
		must(t, g.Launch(0, other.Handle()))
		p := e.alloc(t, 60*mib, other)
		e.use(t, other, p, 60*mib)
		must(t, g.Launch(0, other.Handle()))
		e.free(t, p)
		must(t, e.drv.StreamSynchronize(0, other.Handle()))
		must(t, pool.Release())
		p = e.alloc(t, 120*mib, other)
		e.use(t, other, p, 120*mib)
		e.free(t, p)
		must(t, e.a.Trim())
		if n := e.drv.ReservedBytes(0); n != 0 {
			t.Errorf("%s: %d bytes held after release and trim", backend, n)
		}
	}
}

// During a capture the engine neither records on, waits for nor queries the capturing stream, and does not touch the
// legacy stream while a stream that blocks with it is captured, whether or not the capture was announced; the checker
// faults on a call that spoils a capture.
func TestNothingSpoilsACapture(t *testing.T) {
	for _, announced := range []bool{true, false} {
		for _, blocking := range []bool{true, false} {
			for _, cross := range []config.CrossStream{config.CrossStreamWait, config.CrossStreamReady} {
				e := checked(t, config.Options{CrossStream: cross}, 512*mib, 1)
				h := e.drv.NewStreamNonBlocking(0)
				if blocking {
					h = e.drv.NewStream(0)
				}
				st, err := e.dev.Stream(h)
				must(t, err)
				null, err := e.dev.Stream(cuda.StreamNull)
				must(t, err)
				side := e.streams[0]
				pool, err := e.dev.NewPool(memory.PoolID{0, 1}, config.PoolOptions{})
				must(t, err)
				before := []cuda.Ptr{e.alloc(t, 50*mib, st), e.alloc(t, 50*mib, null), e.alloc(t, 50*mib, side), e.alloc(t, 1*mib, st)}
				for i, s := range []*engine.Stream{st, null, side, st} {
					e.use(t, s, before[i], mib)
				}
				must(t, e.a.RecordStream(before[2], st))
				if announced {
					must(t, e.dev.Captures.Begin(st, pool))
				} else {
					must(t, e.dev.Captures.Route(st, pool))
				}
				must(t, e.drv.BeginCapture(0, h))
				p := e.alloc(t, 10*mib, st)
				e.use(t, st, p, 10*mib)
				must(t, e.a.RecordStream(p, side))
				for _, q := range before {
					must(t, e.a.Free(q)) // of streams that are captured, or that the capture keeps from being recorded on
				}
				for _, s := range []*engine.Stream{side, null} {
					for _, n := range []uint64{100 * mib, 80 * mib, 1 * mib} {
						q, err := e.dev.Alloc(n, s)
						if err != nil && !errors.Is(err, cuda.ErrOutOfMemory) {
							t.Fatal(err)
						}
						if err == nil {
							e.free(t, q)
						}
					}
				}
				must(t, e.dev.Trim())
				q := e.alloc(t, 100*mib, st)
				e.use(t, st, q, 100*mib)
				e.free(t, q)
				must(t, e.a.Free(p))
				must(t, e.dev.Trim())
				g, err := e.drv.EndCapture(0, h)
				if err != nil {
					t.Fatalf("announced %v, blocking %v, %s: %v", announced, blocking, cross, err)
				}
				if announced {
					must(t, e.dev.Captures.End(st))
					must(t, g.Launch(0, h))
					must(t, e.drv.StreamSynchronize(0, h))
				} else {
					must(t, e.dev.Captures.Unroute(st))
				}
				must(t, pool.Release())
				must(t, e.a.Trim())
				if s := e.dev.Views.Stats(); s.Reserved.All.Current != 0 {
					t.Errorf("announced %v, blocking %v, %s: held after the end: %+v", announced, blocking, cross, s)
				}
			}
		}
	}
}

// A capture takes memory that other streams have used only when the host knows that they are done with it.
func TestCaptureGetsHostOrder(t *testing.T) {
	e := checked(t, config.Options{}, 64*mib, 2)
	pool, err := e.dev.NewPool(memory.PoolID{0, 1}, config.PoolOptions{})
	must(t, err)
	p := e.alloc(t, 60*mib, e.streams[1])
	e.use(t, e.streams[1], p, 60*mib)
	e.free(t, p)
	st := e.streams[0]
	g := e.capture(t, st, pool, func() {
		q := e.alloc(t, 50*mib, st) // only to be had from the other stream
		e.use(t, st, q, 50*mib)
		e.free(t, q)
	})
	null, err := e.dev.Stream(cuda.StreamNull)
	must(t, err)
	must(t, g.Launch(0, null.Handle())) // on a stream that waits for neither
}

// warmUp is what a program does before it captures: it uses and gives back memory on the stream.
func (e *fixture) warmUp(t *testing.T, pool *engine.Pool, st *engine.Stream) {
	t.Helper()
	var all []cuda.Ptr
	for _, size := range []uint64{1000, 30 * mib, 20 * mib} {
		p, err := pool.Alloc(size, st)
		must(t, err)
		e.use(t, st, p, size)
		all = append(all, p)
	}
	for _, p := range all {
		e.free(t, p)
	}
}

// A program warms up, waits for the GPU, and captures, as PyTorch's do: the allocator learns of the capture when its
// first request comes. With its frees marked before, the capture is given the memory of the warm-up; without, it is
// given other memory. Nothing spoils the capture either way, and the next one needs nothing new.
func TestLateCapture(t *testing.T) {
	for _, marked := range []bool{false, true} {
		for _, synced := range []bool{false, true} {
			e := checked(t, config.Options{}, 512*mib, 1)
			st, h := e.streams[0], e.streams[0].Handle()
			pool, err := e.dev.NewPool(memory.PoolID{0, 1}, config.PoolOptions{})
			must(t, err)
			null, err := e.dev.Stream(cuda.StreamNull)
			must(t, err)
			e.warmUp(t, pool, st)
			held := e.dev.Views.Stats().Reserved.All.Current
			if marked {
				must(t, e.dev.Captures.MarkFrees())
			}
			if synced {
				must(t, e.drv.StreamSynchronize(0, h))
			}
			late := func(what string, want int64) {
				t.Helper()
				must(t, e.drv.BeginCapture(0, h))
				e.drv.ResetCalls()
				must(t, e.dev.Captures.Begin(st, pool))
				for range 3 {
					e.warmUp(t, pool, st)
				}
				calls := e.drv.Calls().Calls
				if n := calls["cuEventRecord"].Count + calls["cuEventSynchronize"].Count + calls["cuStreamWaitEvent"].Count +
					calls["cuStreamSynchronize"].Count + calls["cuCtxSynchronize"].Count; n != 0 {
					t.Errorf("%s, marked %v, synced %v: recorded or waited %d times", what, marked, synced, n)
				}
				if n := e.dev.Views.Stats().Reserved.All.Current; n != want {
					t.Errorf("%s, marked %v, synced %v: %d bytes held, want %d", what, marked, synced, n, want)
				}
				g, err := e.drv.EndCapture(0, h)
				must(t, err)
				must(t, e.dev.Captures.End(st))
				must(t, g.Launch(0, null.Handle())) // on a stream that waits for nothing
			}
			if marked && synced {
				late("first", held)
			} else {
				late("first", 2*held)
				held *= 2
			}
			late("second", held) // with no frees marked since
			// Outside of captures the stream has it all again.
			p, err := pool.Alloc(uint64(held)-4*mib, st)
			must(t, err)
			if n := e.dev.Views.Stats().Reserved.All.Current; n != held {
				t.Errorf("marked %v, synced %v: %d bytes held after the captures, want %d", marked, synced, n, held)
			}
			e.free(t, p)
			must(t, pool.Release())
			must(t, e.a.Trim())
			if n := e.drv.ReservedBytes(0); n != 0 {
				t.Errorf("marked %v, synced %v: %d bytes held at the end", marked, synced, n)
			}
		}
	}
}

// Memory that the stream has given back to other pools serves a capture if the GPU is known to be done with it, or can be
// seen to be.
func TestLateCaptureBorrows(t *testing.T) {
	for _, how := range []string{"", "marked", "announced"} {
		marked := how != ""
		e := checked(t, config.Options{Limit: 60 * mib}, 512*mib, 1)
		st, h := e.streams[0], e.streams[0].Handle()
		pool, err := e.dev.NewPool(memory.PoolID{0, 1}, config.PoolOptions{})
		must(t, err)
		e.warmUp(t, e.dev.DefaultPool(), st)
		switch how {
		case "marked":
			must(t, e.dev.Captures.MarkFrees())
		case "announced":
			must(t, e.dev.Captures.Begin(st, pool))
		}
		must(t, e.drv.BeginCapture(0, h))
		if how != "announced" {
			must(t, e.dev.Captures.Begin(st, pool))
		}
		p, err := e.dev.Alloc(30*mib, st)
		if marked != (err == nil) || err != nil && !errors.Is(err, cuda.ErrOutOfMemory) {
			t.Errorf("%q: %v", how, err)
		}
		if err == nil {
			e.use(t, st, p, 30*mib)
			e.free(t, p)
		}
		g, err := e.drv.EndCapture(0, h)
		must(t, err)
		must(t, e.dev.Captures.End(st))
		null, err := e.dev.Stream(cuda.StreamNull)
		must(t, err)
		must(t, g.Launch(0, null.Handle()))
	}
}

// What is given back during a capture by a stream that got it before is not the capture's while the GPU may use it.
func TestFreedDuringCapture(t *testing.T) {
	e := checked(t, config.Options{}, 512*mib, 2)
	st, side, h := e.streams[0], e.streams[1], e.streams[0].Handle()
	pool, err := e.dev.NewPool(memory.PoolID{0, 1}, config.PoolOptions{})
	must(t, err)
	null, err := e.dev.Stream(cuda.StreamNull)
	must(t, err)
	var before []cuda.Ptr
	for range 3 {
		p, err := pool.Alloc(10*mib, st)
		must(t, err)
		e.use(t, st, p, 10*mib)
		before = append(before, p)
	}
	must(t, e.a.RecordStream(before[1], side)) // completes while the capture is under way
	e.free(t, before[1])
	g := e.capture(t, st, pool, func() {
		for _, i := range []int{0, 2} {
			e.free(t, before[i])
		}
		for range 4 {
			e.drv.Advance(time.Second)
			p := e.alloc(t, 10*mib, st)
			e.use(t, st, p, 10*mib)
			q := e.alloc(t, 40*mib, st)
			e.use(t, st, q, 40*mib)
			e.free(t, p)
			e.free(t, q)
		}
	})
	must(t, g.Launch(0, null.Handle()))
	if n := e.dev.Views.Stats().Reserved.All.Current; n > 100*mib {
		t.Errorf("%d bytes held: what the capture gives back is not reused by it", n)
	}
	// After the capture it is the pool's again.
	held := e.dev.Views.Stats().Reserved.All.Current
	must(t, e.drv.StreamSynchronize(0, h))
	for range 2 {
		p, err := pool.Alloc(30*mib, st)
		must(t, err)
		e.free(t, p)
	}
	if n := e.dev.Views.Stats().Reserved.All.Current; n != held {
		t.Errorf("after the capture the pool grew from %d to %d bytes", held, n)
	}
}

// Streams that join a capture share its pool: each is announced when its first request comes, its memory pinned without
// a route for it, also where it is asked of another pool by name.
func TestJoinedCapture(t *testing.T) {
	e := checked(t, config.Options{}, 512*mib, 3)
	a, b, eager := e.streams[0], e.streams[1], e.streams[2]
	var pools [2]*engine.Pool
	for i := range pools {
		var err error
		pools[i], err = e.dev.NewPool(memory.PoolID{0, uint64(i + 1)}, config.PoolOptions{})
		must(t, err)
		e.warmUp(t, pools[i], b)
	}
	must(t, e.drv.BeginCapture(0, a.Handle()))
	must(t, e.dev.Captures.Begin(a, pools[0]))
	if err := e.dev.Captures.Begin(a, pools[1]); err == nil {
		t.Error("a stream was captured twice at a time")
	}
	p := e.alloc(t, 10*mib, a)
	e.use(t, a, p, 10*mib)
	order := func(from, to *engine.Stream) {
		ev, err := e.drv.EventCreate(0)
		must(t, err)
		must(t, e.drv.EventRecord(0, ev, from.Handle()))
		must(t, e.drv.StreamWaitEvent(0, to.Handle(), ev))
		must(t, e.drv.EventDestroy(0, ev))
	}
	order(a, b)
	must(t, e.dev.Captures.Begin(b, pools[0]))
	e.use(t, b, p, 10*mib)
	must(t, e.a.RecordStream(p, b))
	var all []cuda.Ptr
	for _, pool := range pools {
		q, err := pool.Alloc(20*mib, b) // by name
		must(t, err)
		e.use(t, b, q, 20*mib)
		all = append(all, q)
	}
	e.free(t, p)
	if _, err := e.dev.DefaultPool().Alloc(mib, b); err == nil {
		t.Error("the default pool served a capture, which nothing would pin")
	}
	order(b, a)
	g, err := e.drv.EndCapture(0, a.Handle())
	must(t, err)
	must(t, e.dev.Captures.End(a))
	must(t, e.dev.Captures.End(b))
	for _, q := range all {
		e.free(t, q)
	}
	held := e.dev.Views.Stats().Reserved.All.Current
	must(t, e.a.Trim())
	x, err := e.dev.Alloc(300*mib, eager)
	must(t, err)
	e.use(t, eager, x, 300*mib)
	must(t, g.Check())
	must(t, g.Launch(0, eager.Handle()))
	e.free(t, x)
	for _, pool := range pools {
		must(t, pool.Release())
	}
	must(t, e.a.Trim())
	if n := e.drv.ReservedBytes(0); n != 0 || held == 0 {
		t.Errorf("%d bytes held after the end", n)
	}
}

// Routes nest, also around a capture that ends before what began within it.
func TestRoutesNest(t *testing.T) {
	e := checked(t, config.Options{}, 512*mib, 1)
	st := e.streams[0]
	var pools []*engine.Pool
	for i := range uint64(3) {
		p, err := e.dev.NewPool(memory.PoolID{0, i + 1}, config.PoolOptions{})
		must(t, err)
		pools = append(pools, p)
	}
	goes := func(want memory.PoolID) {
		t.Helper()
		p := e.alloc(t, 1000, st)
		b, err := e.a.Base(p)
		must(t, err)
		if b.Pool != want {
			t.Errorf("memory came from pool %v, want %v", b.Pool, want)
		}
		e.free(t, p)
	}
	must(t, e.dev.Captures.Route(st, pools[0]))
	goes(pools[0].ID())
	must(t, e.dev.Captures.Route(st, pools[1]))
	goes(pools[1].ID())
	must(t, e.dev.Captures.Unroute(st))
	goes(pools[0].ID())
	must(t, e.dev.Captures.Begin(st, pools[2]))
	goes(pools[2].ID())
	must(t, e.dev.Captures.Route(st, pools[1]))
	goes(pools[1].ID())
	must(t, e.dev.Captures.End(st))
	goes(pools[1].ID())
	if err := pools[0].Release(); err == nil {
		t.Error("a pool that a stream is routed to was released")
	}
	must(t, e.dev.Captures.Unroute(st))
	goes(pools[0].ID())
	must(t, e.dev.Captures.Unroute(st))
	goes(memory.PoolID{})
	if err := e.dev.Captures.Unroute(st); err == nil {
		t.Error("a route ended that had not begun")
	}
	for _, p := range pools {
		must(t, p.Release())
	}
}

// The per-thread default stream is never recorded on, and its memory goes back only after the context was waited for.
func TestPerThreadStream(t *testing.T) {
	e := checked(t, config.Options{}, 256*mib, 1)
	per, err := e.dev.Stream(cuda.StreamPerThread)
	must(t, err)
	for range 3 {
		p := e.alloc(t, 20*mib, per)
		e.use(t, per, p, 20*mib)
		e.free(t, p)
		must(t, e.a.Trim())
		if n := e.drv.ReservedBytes(0); n != 0 {
			t.Fatalf("%d bytes held", n)
		}
	}
	p := e.alloc(t, 200*mib, per)
	e.use(t, per, p, 200*mib)
	e.free(t, p)
	q := e.alloc(t, 200*mib, e.streams[0]) // by waiting for the context
	e.use(t, e.streams[0], q, 200*mib)
	must(t, e.a.RecordStream(q, per))
	e.use(t, e.streams[0], 0, 0)
	must(t, e.a.Free(q))
	must(t, e.a.Trim())
	if n := e.drv.ReservedBytes(0); n != 0 {
		t.Fatalf("%d bytes held", n)
	}
}

func TestCaptureNeedsItsOwnPool(t *testing.T) {
	e := checked(t, config.Options{}, 64*mib, 1)
	if err := e.dev.Captures.Begin(e.streams[0], e.dev.DefaultPool()); err == nil {
		t.Error("a capture into the default pool began")
	}
	if err := e.dev.Captures.End(e.streams[0]); err == nil {
		t.Error("a capture ended that had not begun")
	}
}

// The driver gives a stream another id while it is captured. Looked up by its handle meanwhile, it is the stream whose capture
// was announced, so that what is promised of it and the end of the capture reach that one.
func TestStreamLookedUpDuringCapture(t *testing.T) {
	e := checked(t, config.Options{}, 64*mib, 0)
	pool, err := e.dev.NewPool(memory.PoolID{0, 1}, config.PoolOptions{})
	must(t, err)
	h := e.drv.NewStreamNonBlocking(0)
	st, err := e.dev.Stream(h)
	must(t, err)
	e.capture(t, st, pool, func() {
		for _, opts := range [][]config.StreamOption{nil, {config.StreamDurable}} {
			if again, err := e.dev.Stream(h, opts...); again != st || err != nil {
				t.Errorf("the captured stream is another one: %v", err)
			}
		}
	})
	if again, err := e.dev.Stream(h); again != st || err != nil {
		t.Errorf("the stream is another one after its capture: %v", err)
	}
	must(t, pool.Release())
}

// TestRouteEndsDuringRequest: a request that found a pool as its stream's, which another thread then released with the stream's
// capture, is met from where the stream's requests go now.
func TestRouteEndsDuringRequest(t *testing.T) {
	for name, alloc := range map[string]func(*engine.Device, *engine.Stream) (cuda.Ptr, error){
		"Alloc": func(d *engine.Device, st *engine.Stream) (cuda.Ptr, error) { return d.Alloc(mib, st) },
		"AllocWith": func(d *engine.Device, st *engine.Stream) (cuda.Ptr, error) {
			return d.AllocWith(mib, st, engine.AllocOptions{Tag: 1})
		},
		"AllocWith, host order": func(d *engine.Device, st *engine.Stream) (cuda.Ptr, error) {
			return d.AllocWith(mib, st, engine.AllocOptions{HostOrder: true})
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := checked(t, config.Options{}, 512*mib, 1)
			st := e.streams[0]
			pool, err := e.dev.NewPool(memory.PoolID{0, 1}, config.PoolOptions{})
			must(t, err)
			must(t, e.dev.Captures.Route(st, pool))
			// It is called between the two: here, the other thread.
			e.a.Stacks.Catch(func(uint64) uint32 {
				e.a.Stacks.Catch(nil)
				must(t, e.dev.Captures.Unroute(st))
				must(t, pool.Release())
				return 0
			})
			p, err := alloc(e.dev, st)
			must(t, err)
			e.free(t, p)
			if _, err := pool.Alloc(mib, st); err == nil {
				t.Error("memory of a pool that was released")
			}
		})
	}
}
