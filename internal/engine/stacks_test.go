package engine_test

import (
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

// stackUses is what StackUsage must say of blocks whose stacks are known.
func stackUses(live map[cuda.Ptr]memory.Block) map[uint32]memory.StackUse {
	out := map[uint32]memory.StackUse{}
	for _, b := range live {
		u := out[b.Stack]
		out[b.Stack] = memory.StackUse{Stack: b.Stack, Use: memory.Use{Blocks: u.Blocks + 1, Requested: u.Requested + b.Requested, Allocated: u.Allocated + b.Size}}
	}
	return out
}

// checkStacks holds StackUsage, Base, Blocks and Snapshot against what is live.
func checkStacks(t *testing.T, e *fixture, live map[cuda.Ptr]memory.Block) {
	t.Helper()
	want := stackUses(live)
	got := e.dev.Views.StackUsage()
	for i, u := range got {
		if u != want[u.Stack] || i > 0 && u.Allocated > got[i-1].Allocated {
			t.Fatalf("%+v at %d, want %+v", u, i, want[u.Stack])
		}
	}
	if len(got) != len(want) {
		t.Fatalf("%d stacks are in use, want %d", len(got), len(want))
	}
	for p, b := range live {
		if x, err := e.a.Base(p); err != nil || x.Stack != b.Stack {
			t.Fatalf("Base(%#x) = %+v, %v; want stack %d", uint64(p), x, err, b.Stack)
		}
	}
	for _, g := range e.dev.Views.Snapshot() {
		for _, b := range g.Blocks {
			x := live[cuda.Ptr(b.Addr)]
			if b.State == memory.BlockUsed && b.Stack != x.Stack || b.State == memory.BlockFree && b.Stack != 0 {
				t.Fatalf("%+v in the snapshot, want stack %d", b, x.Stack)
			}
		}
	}
}

// A block remembers where it was asked for while stacks are kept, and what is freed remembers nothing.
func TestStacks(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 256 * mib}, config.Options{}, 2)
	var stacks []uint32
	for i := range 20 {
		stacks = append(stacks, e.a.Stacks.Of([]uint64{uint64(i), 7, 8, 9}))
	}
	if n := e.a.Stacks.Of([]uint64{3, 7, 8, 9}); n != stacks[3] || !slices.Equal(e.a.Stacks.Frames(n), []uint64{3, 7, 8, 9}) || e.a.Stacks.Table().Stacks != 20 {
		t.Errorf("stack %d: %v, %+v", n, e.a.Stacks.Frames(n), e.a.Stacks.Table())
	}
	ask := func(size uint64, o engine.AllocOptions) cuda.Ptr {
		p, err := e.dev.AllocWith(size, e.streams[0], o)
		must(t, err)
		return p
	}
	before := ask(1000, engine.AllocOptions{Stack: stacks[0]})
	if u := e.dev.Views.StackUsage(); u != nil {
		t.Errorf("%+v while no stacks are kept", u)
	}
	e.a.Stacks.Keep(true)
	live := map[cuda.Ptr]memory.Block{}
	note := func(p cuda.Ptr) {
		b, err := e.a.Base(p)
		must(t, err)
		live[p] = b
	}
	note(before)
	if live[before].Stack != 0 {
		t.Error("a block remembers what was not kept")
	}
	pool := e.pool(t, 1, config.PoolOptions{})
	rng := rand.New(rand.NewPCG(7, 9))
	for i := range 4000 {
		if len(live) > 0 && rng.IntN(100) < 48 {
			for p := range live {
				if rng.IntN(4) == 0 {
					must(t, e.a.RecordStream(p, e.streams[1]))
				}
				e.free(t, p)
				delete(live, p)
				break
			}
		} else {
			o := engine.AllocOptions{HostOrder: rng.IntN(5) == 0}
			if rng.IntN(3) > 0 {
				o.Stack = stacks[rng.IntN(len(stacks))]
			}
			if rng.IntN(3) == 0 {
				o.Pool = pool
			}
			size := 1 + rng.Uint64N(1<<(9+rng.IntN(11)))
			p := ask(size, o)
			if b, err := e.a.Base(p); err != nil || b.Stack != o.Stack {
				t.Fatalf("%+v, %v; want stack %d", b, err, o.Stack)
			}
			note(p)
		}
		if i%500 == 0 {
			checkStacks(t, e, live)
		}
	}
	checkStacks(t, e, live)
	blocks := pool.Blocks()
	for _, b := range blocks {
		e.free(t, b.Base)
	}
	must(t, pool.Restore(blocks))
	if !slices.Equal(pool.Blocks(), blocks) {
		t.Error("a restored pool has lost stacks")
	}
	checkStacks(t, e, live)
	e.a.Stacks.Keep(false)
	e.a.Stacks.Keep(true)
	for p, b := range live {
		b.Stack = 0
		live[p] = b
	}
	checkStacks(t, e, live)
	for p := range live {
		e.free(t, p)
	}
	must(t, e.dev.Trim())
	if u := e.dev.Views.StackUsage(); len(u) != 0 {
		t.Errorf("nothing is out, and yet %+v", u)
	}
}

// What is paused keeps its stack, is told of as paused, and may be freed meanwhile.
func TestStacksOfPausedMemory(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 256 * mib}, config.Options{}, 1)
	e.a.Stacks.Keep(true)
	live := map[cuda.Ptr]memory.Block{}
	var order []cuda.Ptr
	for i := range 12 {
		p, err := e.dev.AllocWith(uint64(1+i)*mib, e.streams[0], engine.AllocOptions{Stack: e.a.Stacks.Of([]uint64{uint64(i % 3)}), Tag: uint32(i % 2)})
		must(t, err)
		live[p], err = e.a.Base(p)
		must(t, err)
		order = append(order, p)
	}
	for range 3 {
		_, err := e.dev.Pause(engine.Selection{Tag: 1}, config.PauseOptions{})
		must(t, err)
		paused := map[uint32]uint64{}
		for _, g := range e.dev.Views.Snapshot() {
			for _, b := range g.Blocks {
				paused[b.Stack] += b.Paused
			}
		}
		want, sum := stackUses(live), uint64(0)
		for _, u := range e.dev.Views.StackUsage() {
			x := want[u.Stack]
			x.Paused = paused[u.Stack]
			sum += u.Paused
			if u != x {
				t.Errorf("%+v, want %+v", u, x)
			}
		}
		if s := e.dev.Views.Stats(); sum == 0 || sum != uint64(s.Paused.All.Current) {
			t.Errorf("%d bytes of stacks are paused, want %d", sum, s.Paused.All.Current)
		}
		for _, p := range order[:2] {
			e.free(t, p)
			delete(live, p)
		}
		order = order[2:]
		_, err = e.dev.Resume(engine.Selection{})
		must(t, err)
		checkStacks(t, e, live)
	}
}

// The history tells on whose behalf things happened: a block's tag and library in its whole life, the request's stack and
// thread, those of the free where it names them, and else where the block was asked for.
func TestHistoryTellsWho(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 64 * mib}, config.Options{History: 1000}, 2)
	asked, gave := e.a.Stacks.Of([]uint64{1, 2}), e.a.Stacks.Of([]uint64{3, 2})
	o := engine.AllocOptions{Tag: 5, Library: 9, Stack: asked, Thread: 77}
	for _, kept := range []bool{false, true} {
		e.a.Stacks.Keep(kept)
		for _, with := range []engine.FreeOptions{{}, {Thread: 88}, {Stack: gave, Thread: 88}, {Stream: e.streams[1], Thread: 88}, {Stack: gave, Stream: e.streams[0]}} {
			for _, recorded := range []bool{false, true} {
				e.dev.History.Drain(nil)
				p, err := e.dev.AllocWith(3*mib, e.streams[0], o)
				must(t, err)
				if recorded {
					must(t, e.a.RecordStream(p, e.streams[1]))
				}
				must(t, e.a.FreeWith(p, with))
				must(t, e.dev.Trim())
				back := with.Stack
				if back == 0 && kept {
					back = asked
				}
				want := map[event.Kind]event.Event{
					event.SegmentMap:    {Stack: asked, Thread: 77},
					event.Alloc:         {Tag: 5, Library: 9, Stack: asked, Thread: 77},
					event.FreeRequested: {Tag: 5, Library: 9, Stack: back, Thread: with.Thread},
					event.FreeCompleted: {Tag: 5, Library: 9, Stack: back, Thread: with.Thread},
				}
				seen := map[event.Kind]int{}
				for _, x := range e.dev.History.Drain(nil) {
					w, ok := want[x.Kind]
					seen[x.Kind]++
					if ok && (x.Tag != w.Tag || x.Library != w.Library || x.Stack != w.Stack || x.Thread != w.Thread) {
						t.Errorf("kept %v, free %+v: %v with %+v, want %+v", kept, with, x.Kind, x, w)
					}
				}
				if seen[event.SegmentMap] == 0 || seen[event.Alloc] != 1 || seen[event.FreeRequested] != 1 || seen[event.FreeCompleted] != 1 {
					t.Errorf("kept %v, free %+v: %v", kept, with, seen)
				}
			}
		}
	}
	if _, err := e.dev.AllocWith(100*mib, e.streams[0], o); err == nil {
		t.Fatal("100 MiB of 64")
	}
	all := e.dev.History.Drain(nil)
	if x := all[len(all)-1]; x.Kind != event.OOM || x.Tag != 5 || x.Library != 9 || x.Stack != asked || x.Thread != 77 {
		t.Errorf("%+v", x)
	}
	// A second free is an error as ever.
	p := e.alloc(t, 1000, e.streams[0])
	must(t, e.a.FreeWith(p, engine.FreeOptions{Thread: 1}))
	if err := e.a.FreeWith(p, engine.FreeOptions{Thread: 1}); err == nil {
		t.Error("a block was freed twice")
	}
	if err := e.a.FreeWith(12345, engine.FreeOptions{}); err == nil || e.a.FreeWith(0, engine.FreeOptions{}) != nil {
		t.Error("an address that is no block was freed")
	}
}

// Kept stacks cost no Go memory and no driver call where requests are met from the cache.
func TestSteadyStateOfStacks(t *testing.T) {
	e := newEngine(t, sim.Options{}, config.Options{}, 1)
	e.a.Stacks.Keep(true)
	frames := []uint64{1, 2, 3, 4, 5, 6, 7}
	round := func() {
		p, err := e.dev.AllocWith(5000, e.streams[0], engine.AllocOptions{Stack: e.a.Stacks.Of(frames), Thread: 5})
		must(t, err)
		must(t, e.a.FreeWith(p, engine.FreeOptions{Thread: 5}))
	}
	round()
	e.drv.ResetCalls()
	if n := testing.AllocsPerRun(1000, round); n != 0 || e.drv.Calls().Count != 0 {
		t.Errorf("%v Go allocations, %d driver calls", n, e.drv.Calls().Count)
	}
}

// TestKeepStacksMeanwhile: stacks come to be kept and are forgotten while others ask for memory that nobody has reserved
// addresses for yet.
func TestKeepStacksMeanwhile(t *testing.T) {
	for range 30 {
		keepStacksMeanwhile(t)
	}
}

func keepStacksMeanwhile(t *testing.T) {
	e := newEngine(t, sim.Options{}, config.Options{}, 4)
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for on := true; ; on = !on {
			select {
			case <-stop:
				return
			default:
				e.a.Stacks.Keep(on)
			}
		}
	}()
	var wg sync.WaitGroup
	for g, st := range e.streams {
		wg.Go(func() {
			for i := range 50 {
				o := engine.AllocOptions{Stack: e.a.Stacks.Of([]uint64{uint64(g), uint64(i % 5)})}
				p, err := e.dev.AllocWith(512<<(i%12), st, o)
				if err == nil {
					err = e.a.Free(p)
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	ended := make(chan struct{})
	go func() { wg.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(3 * time.Minute):
		t.Fatal("requests and KeepStacks wait for each other")
	}
	close(stop)
	<-done
}
