package engine_test

import (
	"errors"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
)

// waitedFor calls a function, once, when an event was waited for.
type waitedFor struct {
	*sim.Driver
	then func()
}

func (w *waitedFor) EventSynchronize(d cuda.Device, e cuda.Event) error {
	err := w.Driver.EventSynchronize(d, e)
	if f := w.then; f != nil {
		w.then = nil
		f()
	}
	return err
}

// A request that waits for memory another stream freed waits again when another thread takes that memory meanwhile and
// frees as much. It failed, though the same request right after was met.
func TestWaitsAgain(t *testing.T) {
	drv := &waitedFor{Driver: sim.New(sim.Options{Lag: 10 * time.Second, Busy: true, Check: sim.CheckOrder})}
	a, err := engine.New(drv, config.Options{Limit: gib, CrossStream: config.CrossStreamReady})
	must(t, err)
	dev, err := a.Device(0)
	must(t, err)
	h := drv.NewStreamNonBlocking(0)
	mine, err := dev.Stream(cuda.StreamNull)
	must(t, err)
	other, err := dev.Stream(h)
	must(t, err)
	use := func() cuda.Ptr {
		t.Helper()
		p, err := dev.Alloc(512*mib, other)
		must(t, err)
		must(t, drv.Use(0, h, p, 512*mib))
		return p
	}
	x, y := use(), use()
	must(t, a.Free(x))
	drv.then = func() {
		x = use()
		must(t, a.Free(y))
	}
	p, err := dev.Alloc(512*mib, mine)
	must(t, err)
	if drv.then != nil {
		t.Error("the request did not wait")
	}
	// What nothing can meet fails all the same.
	if _, err := dev.Alloc(512*mib, mine); !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Errorf("a third block of half the limit: %v", err)
	}
	must(t, a.Free(p))
	must(t, a.Free(x))
}
