package timeline_test

import (
	"errors"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine/health"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
)

const lag = time.Second

// world is one simulated device whose work takes lag.
type world struct {
	t     *testing.T
	drv   *sim.Driver
	dev   *timeline.Device
	turns timeline.Turns
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, drv: sim.New(sim.Options{Busy: true, Lag: lag})}
	w.must(w.drv.RetainContext(0))
	w.dev = timeline.New(health.New(w.drv, 0), timeline.NewGates(1), &w.turns)
	return w
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// stream is a new stream of the device, or the default one.
func (w *world) stream(durable bool) *timeline.Stream {
	w.t.Helper()
	h := w.drv.NewStreamNonBlocking(0)
	id, err := w.drv.StreamID(0, h)
	w.must(err)
	st := &timeline.Stream{}
	st.Init(w.dev, id, h)
	st.Queue.SetDurable(durable)
	return st
}

func (w *world) calls(name string) int { return int(w.drv.Calls().Calls[name].Count) }

// An epoch is over once its event is complete, and what is open is not.
func TestEpochs(t *testing.T) {
	w := newWorld(t)
	st := w.stream(true)
	first := st.Epoch()
	if st.IsOver(first) || st.Progress(first) != timeline.Running {
		t.Fatal("an open epoch is over")
	}
	w.must(st.Close())
	if st.Epoch() != first+1 || st.IsOver(first) || st.Progress(first) != timeline.Marked {
		t.Fatalf("epoch %d open, progress of %d is %v", st.Epoch(), first, st.Progress(first))
	}
	w.drv.Advance(lag)
	if st.IsOver(first) {
		t.Error("an event that was incomplete was asked about again in the same turn")
	}
	w.turns.Next()
	if !st.IsOver(first) || st.IsOver(first+1) || st.Progress(first) != timeline.Done {
		t.Error("the epoch is not over when its event is complete, or the next one is as well")
	}
}

// A stream that may be destroyed closes its epoch at every free, and uses few events for that.
func TestShortLivedStream(t *testing.T) {
	w := newWorld(t)
	st := w.stream(false)
	for range 1000 {
		st.Freed()
	}
	if _, n := st.Size(); n > 64 || w.calls("cuEventRecord") != 1000 {
		t.Errorf("%d events, %d records", n, w.calls("cuEventRecord"))
	}
	w.drv.Advance(lag)
	w.turns.Next()
	if !st.IsOver(st.Epoch()-1) || !st.Idle() {
		t.Error("the frees are not over, or events are left")
	}
	lasting := w.stream(true)
	lasting.Freed()
	if n := w.calls("cuEventRecord"); n != 1000 {
		t.Errorf("a free of a durable stream recorded an event")
	}
}

// A stream is made to wait for an epoch once, and not at all when the epoch is over.
func TestWaitFor(t *testing.T) {
	w := newWorld(t)
	a, b := w.stream(true), w.stream(true)
	epoch := b.Epoch()
	w.must(a.WaitFor(b, epoch))
	w.must(a.WaitFor(b, epoch))
	if n := w.calls("cuStreamWaitEvent"); n != 1 {
		t.Errorf("%d waits for one epoch", n)
	}
	w.must(a.WaitFor(b, b.Epoch()))
	if n := w.calls("cuStreamWaitEvent"); n != 2 {
		t.Errorf("%d waits for two epochs", n)
	}
	w.must(b.Sync(b.Epoch()))
	w.must(a.WaitFor(b, b.Epoch()-1))
	if n := w.calls("cuStreamWaitEvent"); n != 2 {
		t.Error("a wait for what is over")
	}
}

// Waits of streams that are captured, or that nothing can be recorded on, are told from failures.
func TestUnordered(t *testing.T) {
	w := newWorld(t)
	st, other := w.stream(true), w.stream(true)
	st.SetCapture(1)
	if err := st.Close(); !errors.Is(err, timeline.ErrCapturing) || !timeline.Unordered(err) {
		t.Errorf("close of a captured stream: %v", err)
	}
	if err := st.WaitFor(other, other.Epoch()); !timeline.Unordered(err) {
		t.Errorf("wait of a captured stream: %v", err)
	}
	st.SetCapture(0)
	w.must(st.Close())
	threads := &timeline.Stream{}
	threads.Init(w.dev, cuda.StreamID{ID: 99}, cuda.StreamPerThread)
	if err := threads.Close(); !errors.Is(err, timeline.ErrPerThread) {
		t.Errorf("close of the per-thread stream: %v", err)
	}
	epoch := threads.Epoch()
	w.must(threads.Sync(epoch)) // by the context
	if !threads.IsOver(epoch) || w.dev.Waits() != 1 {
		t.Errorf("after a wait for the context the epoch is not over (%d waits)", w.dev.Waits())
	}
	if timeline.Unordered(cuda.ErrIllegalAddress) {
		t.Error("a driver's error is taken for a stream that cannot be ordered")
	}
}

// Sync waits for all streams, with one wait for the context for those without events.
func TestSync(t *testing.T) {
	w := newWorld(t)
	a, b := w.stream(true), w.stream(true)
	var waits timeline.Waits
	waits.Add(a, a.Epoch())
	waits.Add(b, b.Epoch())
	waits.Add(a, a.Epoch())
	if len(waits) != 2 {
		t.Fatalf("%d waits for two streams", len(waits))
	}
	w.must(w.dev.Sync(waits))
	for _, x := range waits {
		if !x.Stream.IsOver(x.Epoch) {
			t.Error("an epoch is not over after it was waited for")
		}
	}
	var none timeline.Waits
	none.AddUnfinished(a, waits[0].Epoch)
	if len(none) != 0 {
		t.Error("what is over is waited for")
	}
}

// A wait for the context does not start during an announced capture.
func TestGate(t *testing.T) {
	w := newWorld(t)
	g := w.dev.Gate()
	g.Announce()
	if err := w.dev.SyncContext(0); !errors.Is(err, timeline.ErrCapturing) || w.calls("cuCtxSynchronize") != 0 {
		t.Errorf("during a capture: %v", err)
	}
	g.End()
	w.must(w.dev.SyncContext(0))
	if g.Announced() || w.calls("cuCtxSynchronize") != 1 {
		t.Errorf("%d waits after the capture", w.calls("cuCtxSynchronize"))
	}
}

// Every driver call may fail: the error is returned, an epoch that could not be closed is not over, and events are kept.
func TestFailingDriver(t *testing.T) {
	for _, name := range []string{"cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"} {
		w := newWorld(t)
		a, b := w.stream(true), w.stream(true)
		epoch := b.Epoch()
		fails := true
		w.drv.FailCall(func(call string, _ uint64) cuda.Code {
			if fails && call == name {
				return cuda.ErrUnknown
			}
			return 0
		})
		if err := a.WaitFor(b, epoch); !errors.Is(err, cuda.ErrUnknown) {
			t.Errorf("%s fails: %v", name, err)
		}
		fails = false
		w.must(a.WaitFor(b, epoch))
		w.must(b.Sync(epoch))
		if !b.IsOver(epoch) {
			t.Errorf("%s failed once: the epoch is not over", name)
		}
	}
}
