package engine_test

import (
	"errors"
	"testing"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
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
