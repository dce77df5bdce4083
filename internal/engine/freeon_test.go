package engine_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
)

// Memory that is given back on another stream than it was allocated on, which may have been destroyed by then: the
// simulated device reports every use of such a stream, and every use of memory that nothing orders.

// loose is an engine and a stream that no option promises anything of.
func loose(t *testing.T, text string) (*fixture, cuda.Stream, *engine.Stream) {
	opts, err := config.Parse(text)
	must(t, err)
	e := newEngine(t, sim.Options{Capacity: 512 * mib, Lag: 10 * time.Millisecond, Check: sim.CheckOrder, Handles: sim.Exportable,
		OnFault: func(err error) { t.Error(err) }}, opts, 2)
	h := e.drv.NewStreamNonBlocking(0)
	st, err := e.dev.Stream(h)
	must(t, err)
	return e, h, st
}

// after has the second stream wait for what the first has queued.
func (e *fixture) after(t *testing.T, first, second cuda.Stream) {
	t.Helper()
	ev, err := e.drv.EventCreate(0)
	must(t, err)
	must(t, e.drv.EventRecord(0, ev, first))
	must(t, e.drv.StreamWaitEvent(0, second, ev))
	must(t, e.drv.EventDestroy(0, ev))
}

func TestFreeOn(t *testing.T) {
	for _, text := range []string{"", "backend:malloc", "cross_stream:ready", "single_handle:true", "history:20"} {
		t.Run(text, func(t *testing.T) {
			e, h, own := loose(t, text)
			on, taker := e.streams[0], e.streams[1]
			// What the own stream has is memory of another stream's, for which it waits, and more than it uses.
			first := e.alloc(t, 64*mib, on)
			must(t, e.drv.Use(0, on.Handle(), first, 64*mib))
			e.free(t, first)
			var blocks []cuda.Ptr
			for _, size := range []uint64{3*mib + 512, 5 * mib, 1000, 20 * mib} {
				p := e.alloc(t, size, own)
				must(t, e.drv.Use(0, h, p, size))
				blocks = append(blocks, p)
			}
			e.after(t, h, on.Handle())
			must(t, e.drv.DestroyStream(0, h))
			must(t, e.drv.Use(0, on.Handle(), blocks[1], 5*mib))
			for _, p := range blocks {
				must(t, e.a.FreeOn(p, on))
				for _, again := range []error{e.a.FreeOn(p, on), e.a.FreeOn(p, own), e.a.Free(p), e.a.RecordStream(p, on)} {
					if !errors.Is(again, memory.ErrUnknownPointer) {
						t.Fatalf("once more: %v", again)
					}
				}
			}
			s := e.dev.Views.Stats()
			if s.Allocations.All.Current != 0 || s.Active.All.Current != int64(len(blocks)) {
				t.Errorf("%d blocks out, %d active: what is queued on the stream has not run yet", s.Allocations.All.Current, s.Active.All.Current)
			}
			// All memory for one request on a third stream, then again on the first: it waits for the one named, not for the other.
			for _, st := range []*engine.Stream{taker, on} {
				p := e.alloc(t, 500*mib, st)
				must(t, e.drv.Use(0, st.Handle(), p, 500*mib))
				e.free(t, p)
			}
			if s := e.dev.Views.Stats(); s.Active.All.Current != 0 {
				t.Errorf("%d blocks are active", s.Active.All.Current)
			}
			must(t, e.a.Close())
		})
	}
}

// On its own stream it is Free: the memory is reused at once.
func TestFreeOnItsOwn(t *testing.T) {
	e, h, own := loose(t, "")
	p := e.alloc(t, 3*mib, own)
	must(t, e.drv.Use(0, h, p, 3*mib))
	must(t, e.a.FreeOn(p, own))
	if q := e.alloc(t, 3*mib, own); q != p {
		t.Errorf("%#x, want %#x", q, p)
	}
}

// A block that was never used says nothing of what its memory was used for before, on the stream that is gone.
func TestFreeOnUnused(t *testing.T) {
	for _, durable := range []bool{false, true} {
		t.Run(fmt.Sprintf("durable:%v", durable), func(t *testing.T) {
			e, h, own := loose(t, "cross_stream:ready")
			if durable {
				h, own = e.streams[0].Handle(), e.streams[0]
			}
			c := newCMagazines(e.a)
			pair := func(work time.Duration) {
				p, err := c.alloc(e.dev, mib, own)
				must(t, err)
				must(t, e.drv.UseFor(0, h, p, mib, work))
				must(t, c.free(e.a, p))
			}
			for range 10 { // until a magazine takes them, where there is one
				pair(1)
			}
			must(t, e.dev.Captures.MarkFrees())
			e.drv.Advance(time.Second)
			met, kept := c.met, c.kept
			pair(time.Second)
			p, err := c.alloc(e.dev, mib, own)
			must(t, err)
			if durable && (c.met != met+2 || c.kept != kept+1) {
				t.Fatalf("%d requests were met by the tray, and it took %d", c.met-met, c.kept-kept)
			}
			if !durable {
				must(t, e.drv.DestroyStream(0, h))
			}
			st := e.streams[1]
			must(t, c.freeOn(e.a, p, st)) // nothing is queued there
			q := e.alloc(t, 500*mib, st)
			must(t, e.drv.Use(0, st.Handle(), q, 500*mib))
		})
	}
}

// Work that RecordStream named is waited for as well, and a stream of another device may be named.
func TestFreeOnWaitsForAll(t *testing.T) {
	drv := sim.New(sim.Options{Devices: 2, Capacity: 512 * mib, Lag: 10 * time.Millisecond, Check: sim.CheckOrder, OnFault: func(err error) { t.Error(err) }})
	a, err := engine.New(drv, config.Options{})
	must(t, err)
	d, err := a.Device(0)
	must(t, err)
	o, err := a.Device(1)
	must(t, err)
	must(t, d.Peers.Enable(1))
	own := drv.NewStreamNonBlocking(0)
	st, err := d.Stream(own)
	must(t, err)
	side, err := d.Stream(drv.NewStreamNonBlocking(0))
	must(t, err)
	far, err := o.Stream(drv.NewStreamNonBlocking(1))
	must(t, err)
	p, err := d.Alloc(30*mib, st)
	must(t, err)
	must(t, drv.Use(0, side.Handle(), p, 15*mib))
	must(t, a.RecordStream(p, side))
	must(t, drv.Use(1, far.Handle(), p+15*mib, 15*mib))
	must(t, drv.DestroyStream(0, own))
	must(t, a.FreeOn(p, far))
	must(t, drv.DestroyStream(0, side.Handle())) // from now on they are not needed
	must(t, drv.DestroyStream(1, far.Handle()))
	last, err := d.Stream(cuda.StreamNull)
	must(t, err)
	q, err := d.Alloc(500*mib, last)
	must(t, err)
	must(t, drv.Use(0, cuda.StreamNull, q, 500*mib))
	must(t, a.Free(q))
	must(t, a.Close())
}

// A program that makes a stream for a piece of work, and gives the memory back on another when the stream is gone, leaves
// neither addresses nor events behind.
func TestManyStreamsGoneBeforeTheirMemory(t *testing.T) {
	n := 10_000
	if testing.Short() {
		n = 2_000
	}
	e := newEngine(t, sim.Options{Capacity: 1 << 30, Lag: time.Millisecond, Check: sim.CheckUse, OnFault: func(err error) { t.Error(err) }}, config.Options{}, 1)
	st := e.streams[0]
	for range n {
		h := e.drv.NewStreamNonBlocking(0)
		s, err := e.dev.Stream(h)
		must(t, err)
		p, q := e.alloc(t, 20*mib, s), e.alloc(t, 1000, s)
		must(t, e.drv.Use(0, h, p, 20*mib))
		e.after(t, h, st.Handle())
		must(t, e.drv.DestroyStream(0, h))
		must(t, e.a.FreeOn(p, st))
		must(t, e.a.FreeOn(q, st))
		e.drv.Advance(100 * time.Microsecond)
	}
	s, l := e.dev.Views.Stats(), e.drv.Leaks()
	if s.Allocations.All.Added != int64(2*n) || s.Allocations.All.Current != 0 {
		t.Errorf("%d blocks were handed out; %+v", 2*n, s.Allocations.All)
	}
	if s.AddressBytes > 64<<40 || l.Events > 2000 || l.Reservations > 1000 {
		t.Errorf("%d bytes of addresses are reserved; the driver has %+v", s.AddressBytes, l)
	}
	must(t, e.a.Close())
}

// While the stream named is captured nothing can be recorded there: the block waits for the end of the capture.
func TestFreeOnCaptured(t *testing.T) {
	for _, announced := range []bool{true, false} {
		t.Run(fmt.Sprintf("announced:%v", announced), func(t *testing.T) {
			e, h, own := loose(t, "")
			on := e.streams[0]
			pool, err := e.dev.NewPool(memory.PoolID{1, 1}, config.PoolOptions{})
			must(t, err)
			p := e.alloc(t, 30*mib, own)
			must(t, e.drv.Use(0, h, p, 30*mib))
			e.after(t, h, on.Handle())
			must(t, e.drv.DestroyStream(0, h))
			if announced {
				must(t, e.dev.Captures.Begin(on, pool))
			}
			must(t, e.drv.BeginCapture(0, on.Handle()))
			must(t, e.a.FreeOn(p, on))
			e.drv.Advance(time.Second)
			e.free(t, e.alloc(t, 100, e.streams[1]))
			if s := e.dev.Views.Stats(); s.Active.All.Current != 1 {
				t.Errorf("%d blocks are active while the stream is captured", s.Active.All.Current)
			}
			if _, err := e.drv.EndCapture(0, on.Handle()); err != nil {
				t.Fatal(err)
			}
			if announced {
				must(t, e.dev.Captures.End(on))
				must(t, pool.Release())
			}
			must(t, e.a.Trim())
			if s := e.dev.Views.Stats(); s.Active.All.Current != 0 || s.Reserved.All.Current != 0 {
				t.Errorf("after the capture: %+v", s)
			}
			must(t, e.a.Close())
		})
	}
}

// Freed on a stream, a block that is shared with other processes is shared no more, and one that is paused is forgotten.
func TestFreeOnSharedAndPaused(t *testing.T) {
	e, h, own := loose(t, "")
	on := e.streams[0]
	shared, paused := e.alloc(t, 2*mib, own), e.alloc(t, 8*mib, own)
	var export *engine.Export
	if sim.Exportable != cuda.HandleNone { // which is so on Linux
		var err error
		export, err = e.a.Sharing.Export(shared)
		must(t, err)
	}
	e.after(t, h, on.Handle())
	must(t, e.drv.DestroyStream(0, h))
	must(t, e.a.FreeOn(shared, on))
	if export == nil {
	} else if err := export.Live(); !errors.Is(err, memory.ErrNotExported) {
		t.Errorf("the export: %v", err)
	}
	_, err := e.dev.Pause(engine.Selection{}, config.PauseOptions{})
	must(t, err)
	must(t, e.a.FreeOn(paused, on))
	must(t, e.a.Trim())
	if r, err := e.dev.Resume(engine.Selection{}); err != nil || r.Blocks != 0 {
		t.Errorf("resumed %v, %v", r, err)
	}
	if s := e.dev.Views.Stats(); s.Active.All.Current != 0 || s.Reserved.All.Current != 0 || s.Paused.All.Current != 0 {
		t.Errorf("left: %+v", s)
	}
	must(t, e.a.Close())
}

// The event behind a free cannot be recorded, and then the stream goes as well: only the whole context says when the memory
// is free.
func TestFreeOnFails(t *testing.T) {
	for _, call := range []string{"cuEventCreate", "cuEventRecord", "cuStreamGetCaptureInfo"} {
		for _, how := range []string{"FreeOn", "Free", "RecordStream"} {
			t.Run(call+" "+how, func(t *testing.T) {
				e, h, own := loose(t, "")
				g := e.drv.NewStreamNonBlocking(0)
				on, err := e.dev.Stream(g)
				must(t, err)
				p := e.alloc(t, 30*mib, own)
				must(t, e.drv.Use(0, h, p, 30*mib))
				e.after(t, h, g)
				must(t, e.drv.Use(0, g, p, 30*mib))
				if how == "FreeOn" {
					must(t, e.drv.DestroyStream(0, h))
				}
				if how == "RecordStream" {
					must(t, e.a.RecordStream(p, on))
				}
				seen := 0
				e.drv.FailCall(func(name string, _ uint64) cuda.Code {
					if name == call {
						seen++
						return cuda.ErrUnknown
					}
					return cuda.Success
				})
				if how == "FreeOn" {
					err = e.a.FreeOn(p, on)
				} else {
					err = e.a.Free(p)
					if how == "Free" {
						err = cuda.ErrUnknown // which the device keeps to itself
					}
				}
				if !errors.Is(err, cuda.ErrUnknown) || seen == 0 {
					t.Fatalf("%d calls failed: %v", seen, err)
				}
				e.drv.FailCall(nil)
				if how != "FreeOn" {
					e.after(t, g, h)
					must(t, e.drv.DestroyStream(0, h))
				}
				must(t, e.drv.DestroyStream(0, g))
				last := e.streams[1]
				q := e.alloc(t, 500*mib, last)
				must(t, e.drv.Use(0, last.Handle(), q, 500*mib))
				e.free(t, q)
				must(t, e.a.Close())
			})
		}
	}
}
