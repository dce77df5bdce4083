package engine_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
)

// Random sequences in which requests name stacks (oracle_test.go), the history of such requests, and threads.

// allocStack asks for memory from one of few places; where there are magazines, they and their magazines stay in between.
func (w *world) allocStack(d *worldDevice, size uint64, s *worldStream, p *worldPool) (cuda.Ptr, engine.AllocOptions, error) {
	o := engine.AllocOptions{Stack: w.a.Stacks.Of([]uint64{w.rng.Uint64N(20), 1, 2, 3}), Thread: 7}
	if p != nil && s.capture == nil && s.routed == nil {
		o.Pool = p.pool
	}
	x, err := d.dev.AllocWith(size, s.st, o)
	return x, o, err
}

// toggleStacks has blocks remember where they come from, or forget it.
func (w *world) toggleStacks() {
	w.kept = !w.kept
	w.a.Stacks.Keep(w.kept)
	if w.kept {
		return
	}
	for _, d := range w.devs {
		for _, b := range d.blocks {
			b.stack = 0
		}
	}
	w.seen["stacks forgotten"]++
}

// withoutStacks are blocks as they are without what they remember.
func withoutStacks(blocks []memory.Block) []memory.Block {
	blocks = slices.Clone(blocks)
	for i := range blocks {
		blocks[i].Stack = 0
	}
	return blocks
}

// checkStacks compares who holds what with the books.
func (w *world) checkStacks(d *worldDevice) {
	w.t.Helper()
	want := uses[uint32]{}
	if w.kept {
		for _, b := range d.blocks {
			want.add(b.stack, b)
		}
	}
	for _, u := range d.dev.Views.StackUsage() {
		want.check(w, d, u.Stack, u.Use)
		if u.Stack != 0 {
			w.seen["stack held"]++
		}
	}
	if len(want) != 0 {
		w.fail("device %d: %v are not told of", d.id, want)
	}
}

// The history of blocks that are shared, pending, in pools and in the host's order tells who asked for them and who gave
// them back.
func TestHistoryOfStacks(t *testing.T) {
	for seed := range uint64(4) {
		what := fmt.Sprintf("seed %d", seed)
		e := checked(t, config.Options{History: 100, Limit: 60 * mib}, 64*mib, 3)
		kept := seed%2 == 0
		e.a.Stacks.Keep(kept)
		pool := e.pool(t, 1, config.PoolOptions{})
		rng := rand.New(rand.NewPCG(seed, 5))
		type block struct {
			engine.AllocOptions
			size uint64
			back engine.FreeOptions
		}
		live, pending := map[uint64]block{}, map[uint64]block{}
		var asked engine.AllocOptions
		var size uint64
		kinds := map[event.Kind]int{}
		drain := func() {
			for _, x := range e.dev.History.Drain(nil) {
				kinds[x.Kind]++
				tag, library, stack, thread := uint16(asked.Tag), asked.Library, asked.Stack, asked.Thread
				switch x.Kind {
				case event.Alloc:
					live[x.Addr] = block{AllocOptions: asked, size: size}
				case event.FreeRequested, event.FreeCompleted:
					b := pending[x.Addr]
					tag, library, stack, thread = uint16(b.Tag), b.Library, b.back.Stack, b.back.Thread
					if stack == 0 && kept {
						stack = b.Stack
					}
					if x.Kind == event.FreeCompleted {
						delete(pending, x.Addr)
					}
				case event.OOM, event.SegmentMap, event.Retry:
					if x.Kind != event.OOM {
						tag, library = 0, 0
					}
				default:
					continue
				}
				if x.Tag != tag || x.Library != library || x.Stack != stack || x.Thread != thread {
					t.Fatalf("%s: %v %+v, want tag %d, library %d, stack %d, thread %d", what, x.Kind, x, tag, library, stack, thread)
				}
			}
		}
		for range 3000 {
			if rng.IntN(100) < 53 {
				size = 1 + rng.Uint64N(1<<(9+rng.IntN(16)))
				asked = engine.AllocOptions{Tag: rng.Uint32N(4), Library: uint8(rng.IntN(4)), Stack: e.a.Stacks.Of([]uint64{rng.Uint64N(30)}),
					Thread: rng.Uint32N(9), HostOrder: rng.IntN(4) == 0}
				if rng.IntN(3) == 0 {
					asked.Pool = pool
				}
				e.dev.AllocWith(size, e.streams[rng.IntN(2)], asked) // it may fail
				drain()
				continue
			}
			if len(live) == 0 {
				continue
			}
			addrs := slices.Sorted(maps.Keys(live))
			addr := addrs[rng.IntN(len(addrs))]
			b := live[addr]
			if rng.IntN(3) == 0 {
				must(t, e.a.RecordStream(cuda.Ptr(addr), e.streams[2]))
				if rng.IntN(2) == 0 {
					e.use(t, e.streams[2], cuda.Ptr(addr), b.size)
				}
			}
			b.back = engine.FreeOptions{Thread: rng.Uint32N(9)}
			if rng.IntN(2) == 0 {
				b.back.Stack = e.a.Stacks.Of([]uint64{1000 + rng.Uint64N(30)})
			}
			pending[addr] = b
			delete(live, addr)
			must(t, e.a.FreeWith(cuda.Ptr(addr), b.back))
			drain()
		}
		for _, k := range []event.Kind{event.Alloc, event.FreeRequested, event.FreeCompleted, event.OOM, event.SegmentMap, event.Retry} {
			if kinds[k] < 5 {
				t.Errorf("%s: %d events of kind %v", what, kinds[k], k)
			}
		}
	}
}

// Threads that allocate from many places, and through magazines from none, while others look, have stacks kept and forgotten,
// and change who finds them out.
func TestStacksThreads(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 256 * mib}, config.Options{}, 4)
	e.a.Stacks.Keep(true)
	c := newCMagazines(e.a)
	stop := make(chan struct{})
	var watchers, workers sync.WaitGroup
	watch := func(f func()) {
		watchers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					f()
					time.Sleep(100 * time.Microsecond)
				}
			}
		})
	}
	var g memory.Gauges
	watch(func() { e.dev.Views.Gauges(&g) })
	watch(func() {
		for _, u := range e.dev.Views.StackUsage() {
			if f := e.a.Stacks.Frames(u.Stack); u.Stack != 0 && len(f) != 3 {
				t.Errorf("stack %d is %v", u.Stack, f)
			}
		}
		e.dev.Views.Snapshot()
	})
	on := false
	watch(func() {
		on = !on
		e.a.Stacks.Keep(on)
		if on {
			e.a.Stacks.Catch(func(size uint64) uint32 { return e.a.Stacks.Of([]uint64{size, 2, 3}) })
		} else {
			e.a.Stacks.Catch(nil)
		}
	})
	for i := range e.streams {
		workers.Go(func() {
			rng := rand.New(rand.NewPCG(3, uint64(i)))
			var mine []cuda.Ptr
			for k := range 3000 {
				if len(mine) > 20 || len(mine) > 0 && rng.IntN(2) == 0 {
					n := len(mine) - 1
					report(t, c.free(e.a, mine[n]))
					mine = mine[:n]
					continue
				}
				var p cuda.Ptr
				var err error
				switch size := 512 + rng.Uint64N(3)<<12; rng.IntN(4) { // few sizes, so that magazines have them
				case 0:
					p, err = e.dev.Alloc(1+rng.Uint64N(1<<20), e.streams[i])
				case 1, 2:
					p, err = c.alloc(e.dev, size, e.streams[i%2])
					if b, _ := e.a.Base(p); b.Stack != 0 {
						t.Errorf("a block of a magazine has stack %d", b.Stack)
					}
				default:
					p, err = e.dev.AllocWith(size, e.streams[i], engine.AllocOptions{Stack: e.a.Stacks.Of([]uint64{uint64(k), uint64(i), 4}), Thread: uint32(i)})
				}
				report(t, err)
				mine = append(mine, p)
			}
			for k, p := range mine {
				if k%2 == 0 {
					report(t, c.free(e.a, p))
					continue
				}
				c.forget(p)
				report(t, e.a.FreeWith(p, engine.FreeOptions{Thread: uint32(i)}))
			}
		})
	}
	workers.Wait()
	close(stop)
	watchers.Wait()
	e.a.Stacks.Keep(true)
	if u := e.dev.Views.StackUsage(); len(u) != 0 {
		t.Errorf("nothing is out, and yet %+v", u)
	}
	if c.met == 0 || c.kept == 0 {
		t.Errorf("%d requests and %d frees never came to the engine", c.met, c.kept)
	}
	must(t, e.a.Trim())
}
