package cistern_test

import (
	"errors"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
)

// checked is an engine on a machine whose checker fails the test.
func checked(t *testing.T, opts cistern.Options, capacity uint64, streams int) *engine {
	return newEngine(t, sim.Options{Capacity: capacity, Lag: 20 * time.Millisecond, Check: sim.CheckOrder,
		OnFault: func(err error) { t.Error(err) }}, opts, streams)
}

func (e *engine) use(t testing.TB, st *cistern.Stream, p cuda.Ptr, size uint64) {
	t.Helper()
	if err := e.drv.Use(0, st.Handle(), p, size); err != nil {
		t.Fatal(err)
	}
}

// must stops the test on an error.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// capture captures f on the stream into the pool.
func (e *engine) capture(t *testing.T, st *cistern.Stream, pool *cistern.Pool, f func()) *sim.Graph {
	t.Helper()
	must(t, e.dev.BeginCapture(st, pool))
	must(t, e.drv.BeginCapture(0, st.Handle()))
	f()
	g, err := e.drv.EndCapture(0, st.Handle())
	must(t, err)
	must(t, e.dev.EndCapture(st))
	return g
}

// What a captured graph uses stays where it is, also while it is free and however much memory is wanted, until the
// pool is released; then all of it can go.
func TestCapturedMemoryIsPinned(t *testing.T) {
	for _, backend := range []cistern.Backend{cistern.BackendVMM, cistern.BackendMalloc} {
		e := checked(t, cistern.Options{Backend: backend}, 128*mib, 2)
		pool, err := e.dev.NewPool(cistern.PoolID{0, 1})
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
		held := e.dev.Stats().Reserved.All.Current
		must(t, e.a.Trim())
		must(t, pool.Trim())
		must(t, g.Check())
		if n := e.dev.Stats().Reserved.All.Current; n != held {
			t.Errorf("%s: Trim gave back %d bytes of a pool that a graph uses", backend, held-n)
		}
		// More than there is beside the pool.
		var oom *cistern.OutOfMemoryError
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
			for _, cross := range []cistern.CrossStream{cistern.CrossStreamWait, cistern.CrossStreamReady} {
				e := checked(t, cistern.Options{CrossStream: cross}, 512*mib, 1)
				h := e.drv.NewStreamNonBlocking(0)
				if blocking {
					h = e.drv.NewStream(0)
				}
				st, err := e.dev.Stream(h)
				must(t, err)
				null, err := e.dev.Stream(cuda.StreamNull)
				must(t, err)
				side := e.streams[0]
				pool, err := e.dev.NewPool(cistern.PoolID{0, 1})
				must(t, err)
				before := []cuda.Ptr{e.alloc(t, 50*mib, st), e.alloc(t, 50*mib, null), e.alloc(t, 50*mib, side), e.alloc(t, 1*mib, st)}
				for i, s := range []*cistern.Stream{st, null, side, st} {
					e.use(t, s, before[i], mib)
				}
				must(t, e.a.RecordStream(before[2], st))
				if announced {
					must(t, e.dev.BeginCapture(st, pool))
				} else {
					must(t, e.dev.Route(st, pool))
				}
				must(t, e.drv.BeginCapture(0, h))
				p := e.alloc(t, 10*mib, st)
				e.use(t, st, p, 10*mib)
				must(t, e.a.RecordStream(p, side))
				for _, q := range before {
					must(t, e.a.Free(q)) // of streams that are captured, or that the capture keeps from being recorded on
				}
				for _, s := range []*cistern.Stream{side, null} {
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
					must(t, e.dev.EndCapture(st))
					must(t, g.Launch(0, h))
					must(t, e.drv.StreamSynchronize(0, h))
				} else {
					must(t, e.dev.Unroute(st))
				}
				must(t, pool.Release())
				must(t, e.a.Trim())
				if s := e.dev.Stats(); s.Reserved.All.Current != 0 {
					t.Errorf("announced %v, blocking %v, %s: held after the end: %+v", announced, blocking, cross, s)
				}
			}
		}
	}
}

// A capture takes memory that other streams have used only when the host knows that they are done with it.
func TestCaptureGetsHostOrder(t *testing.T) {
	e := checked(t, cistern.Options{}, 64*mib, 2)
	pool, err := e.dev.NewPool(cistern.PoolID{0, 1})
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

// The per-thread default stream is never recorded on, and its memory goes back only after the context was waited for.
func TestPerThreadStream(t *testing.T) {
	e := checked(t, cistern.Options{}, 256*mib, 1)
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
	e := checked(t, cistern.Options{}, 64*mib, 1)
	if err := e.dev.BeginCapture(e.streams[0], e.dev.DefaultPool()); err == nil {
		t.Error("a capture into the default pool began")
	}
	if err := e.dev.EndCapture(e.streams[0]); err == nil {
		t.Error("a capture ended that had not begun")
	}
}
