package engine_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/cputime"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
)

// A program that makes a stream for every piece of work and destroys it afterwards leaves neither addresses nor events
// behind, and its ten thousandth stream costs no more than its first.
func TestManyShortLivedStreams(t *testing.T) {
	n := 20_000
	if testing.Short() {
		n = 3_000
	}
	for _, text := range []string{"", "backend:malloc", "cross_stream:ready"} {
		t.Run(text, func(t *testing.T) {
			opts, err := config.Parse(text)
			must(t, err)
			e := newEngine(t, sim.Options{Capacity: 1 << 30, Lag: time.Millisecond, Check: sim.CheckUse, OnFault: func(err error) { t.Error(err) }}, opts, 1)
			st := e.streams[0]
			kept := e.alloc(t, 3*mib, st)
			pool, err := e.dev.NewPool(memory.PoolID{1, 1}, config.PoolOptions{})
			must(t, err)
			var half time.Duration
			began := cputime.Process()
			for i := range n {
				if i == n/2 {
					half = cputime.Process() - began
				}
				h := e.drv.NewStreamNonBlocking(0)
				s, err := e.dev.Stream(h)
				must(t, err)
				p, q := e.alloc(t, 20*mib, s), e.alloc(t, 1000, s)
				must(t, e.drv.Use(0, h, p, 20*mib))
				if i%10 == 0 {
					x, err := pool.Alloc(mib, s)
					must(t, err)
					must(t, e.a.RecordStream(x, st))
					e.free(t, x)
				}
				e.free(t, p)
				e.free(t, q)
				if i%100 == 0 { // a stream that lives on while it is idle
					defer func() {
						p := e.alloc(t, mib, s)
						must(t, e.drv.Use(0, h, p, mib))
						e.free(t, p)
						e.drv.DestroyStream(0, h)
					}()
				} else {
					must(t, e.drv.DestroyStream(0, h))
				}
				e.drv.Advance(100 * time.Microsecond)
			}
			whole := cputime.Process() - began
			t.Logf("%d streams: the first half took %v, all %v", n, half, whole)
			if whole > 5*half {
				t.Errorf("the first half of %d streams took %v, all %v", n, half, whole)
			}
			s, l := e.dev.Views.Stats(), e.drv.Leaks()
			if s.AddressBytes > 64<<40 || l.Events > 2000 || l.Reservations > 1000 {
				t.Errorf("%d bytes of addresses are reserved; the driver has %+v", s.AddressBytes, l)
			}
			blocks := int64(2*n + (n+9)/10 + 1)
			if s.Allocations.All.Added != blocks || s.Allocations.All.Removed != blocks-1 || s.Allocations.All.Current != 1 {
				t.Errorf("%d blocks were handed out; %+v", blocks, s.Allocations.All)
			}
			if s.Reserved.All.Current != s.ActiveBytes.All.Current+s.InactiveBytes.All.Current || s.Reserved.All.Current != int64(e.drv.ReservedBytes(0)) {
				t.Errorf("the books: %+v; the driver has given %d", s, e.drv.ReservedBytes(0))
			}
			e.free(t, kept)
		})
	}
}

// What dissolving makes spare is free memory still: a block that is freed afterwards raises the peak of free memory.
func TestPeakAfterDissolving(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 1 << 30}, config.Options{}, 0)
	st, err := e.dev.Stream(e.drv.NewStreamNonBlocking(0)) // which the program may destroy
	must(t, err)
	small, large := e.alloc(t, 100<<10, st), e.alloc(t, 20*mib, st)
	e.free(t, small)
	small = e.alloc(t, 100<<10, st)
	e.free(t, large)
	e.dev.Views.Stats()
	engine.ForgetStreams(e.dev)
	e.free(t, small)
	e.alloc(t, 100<<10, st)
	if s := e.dev.Views.Stats(); s.InactiveBytes.All.Peak != s.Reserved.All.Current {
		t.Errorf("%d bytes were free and the peak is %d", s.Reserved.All.Current, s.InactiveBytes.All.Peak)
	}
}

// A stream whose arenas were dissolved because it may have been gone goes on as if nothing had happened.
func TestDissolvedArenaComesBack(t *testing.T) {
	e := newEngine(t, sim.Options{Check: sim.CheckOrder, OnFault: func(err error) { t.Error(err) }}, config.Options{}, 0)
	type user struct {
		h  cuda.Stream
		st *engine.Stream
		p  cuda.Ptr
	}
	users := make([]user, 400)
	for round := range 5 {
		for i := range users {
			u := &users[i]
			if u.st == nil {
				u.h = e.drv.NewStreamNonBlocking(0)
				var err error
				u.st, err = e.dev.Stream(u.h)
				must(t, err)
			}
			size := uint64(1000 + (i+round)%3*mib)
			u.p = e.alloc(t, size, u.st)
			must(t, e.drv.Use(0, u.h, u.p, size))
			if b, err := e.a.Base(u.p); err != nil || b.Stream != u.st.ID() || b.Handle != u.h {
				t.Fatalf("round %d, stream %d: %+v, %v", round, i, b, err)
			}
			if i%3 == 0 || round%2 == 0 {
				e.free(t, u.p)
				u.p = 0
			}
		}
		for i := range users {
			if users[i].p != 0 {
				e.free(t, users[i].p)
			}
		}
		if s := e.dev.Views.Stats(); s.Allocations.All.Current != 0 || s.Allocations.All.Added != int64((round+1)*len(users)) {
			t.Fatalf("round %d: %+v", round, s.Allocations)
		}
	}
	must(t, e.a.Close())
	if fmt.Sprint(e.dev.Views.Snapshot()) != "[]" {
		t.Error("memory is left")
	}
}

// Lanes are dissolved under the hands of threads that use them.
func TestArenasDissolveConcurrently(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 1 << 30, Lag: 100 * time.Microsecond, Check: sim.CheckOrder, OnFault: func(err error) { t.Error(err) }}, config.Options{}, 0)
	n := 1500
	if testing.Short() {
		n = 500
	}
	var live ranges
	var done sync.WaitGroup
	for g := range 4 {
		done.Add(1)
		go func() {
			defer done.Done()
			rng := rand.New(rand.NewPCG(8, uint64(g)))
			var own []*engine.Stream
			for i := range n {
				if i < 60 || rng.IntN(10) == 0 {
					st, err := e.dev.Stream(e.drv.NewStreamNonBlocking(0))
					if err != nil {
						t.Error(err)
						return
					}
					own = append(own, st)
				}
				st := own[rng.IntN(len(own))]
				size := 1 + rng.Uint64N(uint64(1)<<(10+rng.IntN(14)))
				p, err := e.dev.Alloc(size, st)
				if err == nil {
					err = live.add(uint64(p), round512(size))
				}
				if err == nil {
					err = e.drv.Use(0, st.Handle(), p, size)
				}
				if err == nil {
					live.remove(uint64(p))
					err = e.a.Free(p)
				}
				if err != nil {
					t.Error(err)
					return
				}
				e.drv.Advance(10 * time.Microsecond)
			}
		}()
	}
	done.Wait()
	if s := e.dev.Views.Stats(); s.Allocations.All.Current != 0 || s.Allocations.All.Added != int64(4*n) ||
		s.Reserved.All.Current != s.InactiveBytes.All.Current || s.Reserved.All.Current != int64(e.drv.ReservedBytes(0)) {
		t.Errorf("%+v", s)
	}
	e.drv.Advance(time.Second)
	must(t, e.a.Close())
}

// A stream that was forgotten and is named again by a free keeps no event beyond the end of the allocator: one of the block's
// device, and one of a peer.
func TestForgottenStreamUsed(t *testing.T) {
	for of := range cuda.Device(2) {
		t.Run(fmt.Sprint("device ", of), func(t *testing.T) {
			e := newEngine(t, sim.Options{Devices: 2, Busy: true, Lag: time.Millisecond}, config.Options{Limit: 2 * mib}, 1)
			dev, err := e.a.Device(of)
			must(t, err)
			if of != 0 {
				must(t, e.dev.Peers.Enable(of))
			}
			st, err := dev.Stream(e.drv.NewStreamNonBlocking(of))
			must(t, err)
			p := e.alloc(t, 2*mib, e.streams[0])
			if engine.ForgetStreams(dev); slices.Contains(engine.LiveStreams(dev), st) {
				t.Fatal("the stream is still known")
			}
			must(t, e.a.RecordStream(p, st))
			e.free(t, p)
			if n := e.drv.Leaks().Events; n == 0 {
				t.Error("nothing was recorded on the stream")
			}
			e.free(t, e.alloc(t, 2*mib, e.streams[0])) // which waits for the stream on the GPU, and asks nothing about the event
			if of == 0 && !slices.Contains(engine.LiveStreams(dev), st) {
				t.Error("the stream is not known again, so that nothing would ask how far it is")
			}
			must(t, e.a.Close())
			if n := e.drv.Leaks().Events; n != 0 {
				t.Errorf("%d events are left", n)
			}
		})
	}
}
