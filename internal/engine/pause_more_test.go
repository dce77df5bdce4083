package engine_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/internal/magazine"
	"github.com/cistern-gpu/cistern/memory"
)

// TestResumedMemoryIsThePeers: a peer that was allowed to use memory, before it was paused or meanwhile, may use what came
// back.
func TestResumedMemoryIsThePeers(t *testing.T) {
	for _, conf := range []string{"", "single_handle:true"} {
		for _, meanwhile := range []bool{false, true} {
			opts, _ := config.Parse(conf)
			p := newPausing(t, sim.Options{Devices: 2}, opts)
			enable := func() {
				t.Helper()
				if err := p.d.Peers.Enable(1); err != nil {
					t.Fatal(err)
				}
			}
			if !meanwhile {
				enable()
			}
			a := p.alloc(nil, 5*mib, 1)
			b := p.alloc(nil, 5*mib, 2)
			p.fill(a, 5*mib, 1)
			p.pause(engine.Selection{Tag: 1}, config.PauseOptions{})
			if meanwhile {
				enable()
			}
			p.resume(all)
			p.holds(a, 5*mib, 1)
			if err := p.drv.ContextSynchronize(0); err != nil {
				t.Fatal(err)
			}
			for _, q := range []cuda.Ptr{a, b} {
				if err := p.drv.Use(1, cuda.StreamNull, q, 5*mib); err != nil {
					t.Errorf("%s, meanwhile %v: device 1 uses %#x: %v", conf, meanwhile, q, err)
				}
			}
			p.check()
		}
	}
}

// TestPausedBlockInMagazine: a free that C was in the middle of when its block was paused is not lost, and the
// magazine does not hand the block out.
func TestPausedBlockInMagazine(t *testing.T) {
	p := newPausing(t, sim.Options{}, config.Options{})
	q, token, err := p.d.Magazines.Alloc(3*mib, p.st)
	if err != nil || token.Magazine == nil {
		t.Fatal(err)
	}
	f := token.Magazine
	p.pause(all, config.PauseOptions{})
	f.Lock()
	if !f.Put(uint64(q), 3*mib, token.Mark, 1) {
		f.PutBeyond(uint64(q), 3*mib, token.Mark)
	}
	if addr, _, o := f.Take(3*mib, false, 1); o == magazine.Taken {
		t.Errorf("the tray gave out %#x, which has no memory", addr)
	}
	f.Unlock()
	if n := p.d.Views.Stats().Allocations.All.Current; n != 0 {
		t.Fatalf("%d blocks are in use: statistics leave out what lies in a magazine", n)
	}
	p.check()
	if s := p.d.Views.Stats(); s.Paused.All.Current != 0 || s.ActiveBytes.All.Current != 0 {
		t.Errorf("%+v", s)
	}
	if err := p.a.Close(); err != nil {
		t.Error(err)
	}
}

// TestPauseNoRoomForContents: where contents find no room nothing is paused, and what is wrong is said in one line.
func TestPauseNoRoomForContents(t *testing.T) {
	p := newPausing(t, sim.Options{}, config.Options{})
	a := p.alloc(nil, 5*mib, 1)
	p.fill(a, 5*mib, 1)
	fails := func(o config.PauseOptions) {
		t.Helper()
		r, err := p.d.Pause(all, o)
		if err == nil || strings.Contains(err.Error(), "\n") || !strings.HasPrefix(err.Error(), "pause: ") || r != (memory.PauseReport{}) {
			t.Errorf("%+v, %v", r, err)
		}
		p.check()
		p.holds(a, 5*mib, 1)
	}
	fails(config.PauseOptions{Keep: config.KeepDisk, Dir: filepath.Join(t.TempDir(), "none")})
	p.drv.FailCall(func(call string, _ uint64) cuda.Code {
		if call == "cuMemHostAlloc" {
			return cuda.ErrOutOfMemory
		}
		return cuda.Success
	})
	fails(config.PauseOptions{})
	fails(config.PauseOptions{Keep: config.KeepDisk, Dir: t.TempDir()})
	p.drv.FailCall(nil)
	p.pause(all, config.PauseOptions{})
	p.resume(all)
	p.holds(a, 5*mib, 1)
}

// TestPauseSelections: what is no selection of this device is refused.
func TestPauseSelections(t *testing.T) {
	p := newPausing(t, sim.Options{Devices: 2}, config.Options{})
	other, err := p.a.Device(1)
	if err != nil {
		t.Fatal(err)
	}
	for _, sel := range []engine.Selection{{Pool: other.DefaultPool()}, {Tag: memory.MaxTag + 1}} {
		if _, err := p.d.Pause(sel, config.PauseOptions{}); err == nil {
			t.Errorf("%+v was paused", sel)
		}
		if _, err := p.d.Resume(sel); err == nil {
			t.Errorf("%+v was resumed", sel)
		}
	}
	if _, err := p.d.Pause(all, config.PauseOptions{Keep: 9}); err == nil {
		t.Error("keep 9")
	}
	// A tag is told apart from a library.
	q, err := p.d.AllocWith(3*mib, p.st, engine.AllocOptions{Tag: 4, Library: 2})
	if err != nil {
		t.Fatal(err)
	}
	if r := p.pause(engine.Selection{Tag: 4}, config.PauseOptions{}); r.Blocks != 1 {
		t.Errorf("%+v", r)
	}
	if u := p.d.Views.LibraryUsage(); len(u) != 1 || u[0].Paused != 3*mib {
		t.Errorf("%+v", u)
	}
	p.free(q)
}

// TestRestoreWhilePaused: a pool whose memory is paused goes back to an earlier state as far as what is live is concerned;
// what was freed while it was paused has no memory to come back to.
func TestRestoreWhilePaused(t *testing.T) {
	p := newPausing(t, sim.Options{}, config.Options{})
	pool, err := p.d.NewPool(memory.PoolID{1, 0}, config.PoolOptions{})
	if err != nil {
		t.Fatal(err)
	}
	a, b := p.alloc(pool, 3*mib, 0), p.alloc(pool, 3*mib, 0)
	p.fill(a, 3*mib, 1)
	both := pool.Blocks()
	p.pause(engine.Selection{Pool: pool}, config.PauseOptions{})
	if err := pool.Restore(both); err != nil {
		t.Errorf("all of it is live: %v", err)
	}
	if err := pool.Restore(both[:1]); err != nil {
		t.Errorf("one is to be freed: %v", err)
	}
	p.check()
	if _, err := p.a.Base(b); err == nil {
		t.Error("it is live still")
	}
	if err := pool.Restore(both); err == nil {
		t.Error("a block was restored where there is no memory")
	}
	p.check()
	p.resume(all)
	p.holds(a, 3*mib, 1)
}
