package engine_test

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
)

// pieces is a device that is full of one stream's blocks of 300 KiB, every second of which was freed after work that is
// still queued: no chunk is free.
func pieces(t *testing.T, o config.Options, durable bool) (*fixture, []cuda.Ptr) {
	t.Helper()
	e := newEngine(t, sim.Options{Capacity: 64 * mib, Lag: 10 * time.Millisecond, Check: sim.CheckOrder}, o, 3)
	if !durable {
		st, err := e.dev.Stream(e.drv.NewStreamNonBlocking(0))
		if err != nil {
			t.Fatal(err)
		}
		e.streams[0] = st
	}
	var live []cuda.Ptr
	for {
		p, err := e.dev.Alloc(300*kib, e.streams[0])
		if errors.Is(err, cuda.ErrOutOfMemory) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		live = append(live, p)
	}
	kept := live[:0]
	for i, p := range live {
		if i%2 == 0 {
			kept = append(kept, p)
			continue
		}
		e.use(t, e.streams[0], p, 300*kib)
		e.free(t, p)
	}
	return e, kept
}

// giveAllBack ends a test: no work was out of order, and once everything is back all memory can be had in one piece.
func (e *fixture) giveAllBack(t *testing.T, rest []cuda.Ptr) {
	t.Helper()
	for _, p := range rest {
		e.free(t, p)
	}
	must(t, e.a.Trim()) // without the stage that collects nothing else does
	p := e.alloc(t, 64*mib, e.streams[2])
	e.free(t, p)
	if err := errors.Join(e.a.Close(), e.drv.Fault()); err != nil {
		t.Fatal(err)
	}
}

// A free block between live ones serves another stream when nothing else does; in whatever way it is given back, nobody
// has it before its last use is over.
func TestBorrow(t *testing.T) {
	for _, text := range []string{"", "backend:malloc", "single_handle:true", "cross_stream:ready", "stages:remap+grow+lend"} {
		opts, err := config.Parse(text)
		must(t, err)
		for _, durable := range []bool{true, false} {
			ways := map[string]func(e *fixture, p cuda.Ptr) error{
				"free":          func(e *fixture, p cuda.Ptr) error { return e.a.Free(p) },
				"on its stream": func(e *fixture, p cuda.Ptr) error { return e.a.FreeOn(p, e.streams[1]) },
				"used by a third": func(e *fixture, p cuda.Ptr) error {
					return errors.Join(e.useAfter(p, 1, 2), e.a.RecordStream(p, e.streams[2]), e.a.Free(p))
				},
				"used by lender": func(e *fixture, p cuda.Ptr) error {
					return errors.Join(e.useAfter(p, 1, 0), e.a.RecordStream(p, e.streams[0]), e.a.Free(p))
				},
				"recorded itself": func(e *fixture, p cuda.Ptr) error { return errors.Join(e.a.RecordStream(p, e.streams[1]), e.a.Free(p)) },
				"behind the other": func(e *fixture, p cuda.Ptr) error {
					return errors.Join(e.useAfter(p, 1, 0), e.drv.DestroyStream(0, e.streams[1].Handle()), e.a.FreeOn(p, e.streams[0]))
				},
				"behind a third": func(e *fixture, p cuda.Ptr) error {
					return errors.Join(e.useAfter(p, 1, 2), e.drv.DestroyStream(0, e.streams[1].Handle()), e.a.FreeOn(p, e.streams[2]))
				},
			}
			for name, giveBack := range ways {
				t.Run(text+"/"+name, func(t *testing.T) {
					e, kept := pieces(t, opts, durable)
					e.dev.History.SetLimit(1000)
					p := e.alloc(t, 290*kib, e.streams[1])
					if s := e.dev.Views.Stats(); s.Borrows != 1 {
						t.Fatalf("%d blocks were borrowed", s.Borrows)
					}
					b, err := e.a.Base(p)
					if err != nil || b.Stream != e.streams[1].ID() {
						t.Fatalf("%+v, %v: want stream %v", b, err, e.streams[1].ID())
					}
					e.use(t, e.streams[1], p, 290*kib)
					if err := giveBack(e, p); err != nil {
						t.Fatal(err)
					}
					if s := e.dev.Views.Stats(); s.Allocations.All.Current != int64(len(kept)) {
						t.Fatalf("%d blocks are out, want %d", s.Allocations.All.Current, len(kept))
					}
					if err := e.a.Free(p); !errors.Is(err, memory.ErrUnknownPointer) {
						t.Errorf("it can be freed twice: %v", err)
					}
					// All want it at once.
					for range 200 {
						for _, st := range []int{0, 2} {
							if q, err := e.dev.Alloc(300*kib, e.streams[st]); err == nil {
								e.use(t, e.streams[st], q, 300*kib)
								kept = append(kept, q)
							} else if !errors.Is(err, cuda.ErrOutOfMemory) {
								t.Fatal(err)
							}
						}
					}
					if free := e.dev.Views.Stats().InactiveBytes.All.Current; free > 4*mib {
						t.Errorf("with %d bytes free a request of %d failed", free, 300*kib)
					}
					h, _ := e.dev.History.Read()
					for _, x := range h {
						if want := e.streams[1]; x.Addr == uint64(p) && x.Kind <= event.FreeCompleted && x.Size == 290*kib && e.dev.Views.Streams()[x.Stream] != want {
							t.Errorf("the history says stream %d: %+v", x.Stream, x)
						}
					}
					e.giveAllBack(t, kept)
				})
			}
		}
	}
}

// useAfter has the program order a use of the block on one stream behind its use on another.
func (e *fixture) useAfter(p cuda.Ptr, before, then int) error {
	ev, err := e.drv.EventCreate(0)
	return errors.Join(err, e.drv.EventRecord(0, ev, e.streams[before].Handle()), e.drv.StreamWaitEvent(0, e.streams[then].Handle(), ev),
		e.drv.EventDestroy(0, ev), e.drv.Use(0, e.streams[then].Handle(), p, 290*kib))
}

// Where lending is turned off, nothing is lent; a capture and memory in the host's order are given nothing of the kind.
func TestBorrowNot(t *testing.T) {
	e, kept := pieces(t, config.Options{Stages: memory.AllStages &^ memory.StageLend}, true)
	if _, err := e.dev.Alloc(290*kib, e.streams[1]); !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Errorf("without lending: %v", err)
	}
	e.giveAllBack(t, kept)
	e, kept = pieces(t, config.Options{}, true)
	if _, err := e.dev.AllocWith(290*kib, e.streams[1], engine.AllocOptions{HostOrder: true}); !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Errorf("in the host's order: %v", err)
	}
	e.giveAllBack(t, kept)
}

// Several streams that fill a device and give back half of what they have when it is full: whoever asks can have what
// others gave back, so a request fails only where no piece is large enough; also while tags are paused and resumed.
func TestManyStreamsFill(t *testing.T) {
	var failed, borrowed [2]int64 // never paused, and paused
	for seed := range uint64(quick(6, 4)) {
		e := newEngine(t, sim.Options{Capacity: 200 * mib, Lag: time.Millisecond, Check: sim.CheckOrder}, config.Options{}, 4)
		rng := rand.New(rand.NewPCG(seed, 5))
		var mine [4][]cuda.Ptr
		half := func(g int) {
			for _, p := range mine[g][len(mine[g])/2:] {
				e.free(t, p)
			}
			mine[g] = mine[g][:len(mine[g])/2]
		}
		paused := seed % 2
		for step := range 40000 {
			g := rng.IntN(4)
			if paused == 1 && step%2000 == 0 {
				_, err := e.dev.Pause(engine.Selection{Tag: uint32(g + 1)}, config.PauseOptions{Keep: config.KeepNone})
				must(t, err)
			} else if paused == 1 && step%2000 == 50 {
				for _, err := e.dev.Resume(all); err != nil; _, err = e.dev.Resume(all) {
					i := rng.IntN(4)
					if n := len(mine[i]) - 1; n >= 0 {
						e.free(t, mine[i][n])
						mine[i] = mine[i][:n]
					}
				}
			}
			if rng.IntN(17) < 9 || len(mine[g]) == 0 {
				size := uint64(1 + rng.IntN(400*kib))
				p, err := e.dev.AllocWith(size, e.streams[g], engine.AllocOptions{Tag: uint32(g + 1)})
				if err == nil {
					mine[g] = append(mine[g], p)
					continue
				}
				s := e.dev.Views.Stats()
				if s.Paused.All.Current == 0 {
					failed[paused]++
					for _, x := range e.dev.Views.Snapshot() {
						for _, b := range x.Blocks {
							if b.State == memory.BlockFree && b.Size >= round512(size) {
								t.Fatalf("seed %d, step %d: %d bytes are free in one piece: %v", seed, step, b.Size, err)
							}
						}
					}
					if live := s.Allocated.All.Current; live < 170*mib {
						t.Fatalf("seed %d, step %d: with %d MiB of 200 live: %v", seed, step, live/mib, err)
					}
				}
				half(g)
				continue
			}
			i := rng.IntN(len(mine[g]))
			e.free(t, mine[g][i])
			mine[g][i] = mine[g][len(mine[g])-1]
			mine[g] = mine[g][:len(mine[g])-1]
		}
		borrowed[paused] += e.dev.Views.Stats().Borrows
		must(t, e.drv.Fault())
	}
	if failed[0]*failed[1] == 0 || borrowed[0]*borrowed[1] == 0 {
		t.Errorf("%d requests failed, %d were met with borrowed blocks: it tests nothing", failed, borrowed)
	}
}
