package engine_test

import (
	"errors"
	"testing"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

// A quiet pause and resume do what others do, and call no function of the program: with observers they fail, and a resume that
// lacks memory does not call for help.
func TestQuietPause(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 256 * mib}, config.Options{}, 1)
	e.alloc(t, 100*mib, e.streams[0])
	r, err := engine.Quietly(e.dev).Pause(engine.Selection{}, config.PauseOptions{})
	must(t, err)
	if r.Physical != 100*mib || e.drv.ReservedBytes(0) != 0 {
		t.Errorf("%+v, %d bytes reserved", r, e.drv.ReservedBytes(0))
	}

	called := 0
	remove := e.dev.OnOutOfMemory(func(uint64) bool { called++; return false })
	o := newOthers(t, e, 0, 200*mib, 0)
	var oom *memory.OutOfMemoryError
	if _, err := engine.Quietly(e.dev).Resume(engine.Selection{}); !errors.As(err, &oom) || called != 0 {
		t.Errorf("%v; %d calls of the program", err, called)
	}
	if _, err := e.dev.Resume(engine.Selection{}); !errors.As(err, &oom) || called != 1 {
		t.Errorf("%v; %d calls of the program", err, called)
	}
	remove.Remove()
	o.cached = 150 * mib // the broker may be asked
	r, err = engine.Quietly(e.dev).Resume(engine.Selection{})
	must(t, err)
	if r.Physical != 100*mib {
		t.Errorf("%+v", r)
	}

	e.dev.OnUnmap(func(cuda.Ptr, uint64) { called++ })
	if _, err := engine.Quietly(e.dev).Pause(engine.Selection{}, config.PauseOptions{}); !errors.Is(err, engine.ErrObserved) {
		t.Error(err)
	}
	e.dev.OnUnmap(nil)
	_, err = engine.Quietly(e.dev).Pause(engine.Selection{}, config.PauseOptions{})
	must(t, err)
	e.dev.OnMap(func(cuda.Ptr, uint64) { called++ })
	if _, err := engine.Quietly(e.dev).Resume(engine.Selection{}); !errors.Is(err, engine.ErrObserved) {
		t.Error(err)
	}
	if called != 1 {
		t.Errorf("%d calls of the program", called)
	}
	_, err = e.dev.Resume(engine.Selection{}) // still paused, and resumed by the program itself
	must(t, err)
	if called == 1 {
		t.Error("the observer was not notified")
	}
}

// A user's resource is the program's: what a pool over one has cached stays there.
func TestQuietPauseLeavesResources(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 256 * mib}, config.Options{SingleHandle: true}, 1)
	p := e.alloc(t, 30*mib, e.streams[0])
	e.use(t, e.streams[0], p, 30*mib)
	e.free(t, p) // the engine's own goes
	up := &freeCounter{Resource: resource.Device(e.drv, 0)}
	pool := e.pool(t, 1, config.PoolOptions{Upstream: up})
	e.free(t, fromPool(t, pool, 20*mib, e.streams[0]))
	e.alloc(t, 100*mib, e.streams[0])
	r, err := engine.Quietly(e.dev).Pause(engine.Selection{}, config.PauseOptions{})
	must(t, err)
	if r.Physical != 130*mib || up.frees != 0 || e.drv.ReservedBytes(0) != 20*mib {
		t.Errorf("%+v; %d calls of the program's resource; %d bytes reserved", r, up.frees, e.drv.ReservedBytes(0))
	}
	_, err = e.dev.Resume(engine.Selection{})
	must(t, err)
	_, err = e.dev.Pause(engine.Selection{}, config.PauseOptions{})
	must(t, err)
	if up.frees != 1 {
		t.Errorf("%d calls of the program's resource where the program pauses", up.frees)
	}
}

type freeCounter struct {
	resource.Resource
	frees int
}

func (f *freeCounter) Free(p cuda.Ptr, size, align uint64, s cuda.Stream) error {
	f.frees++
	return f.Resource.Free(p, size, align, s)
}
