package engine_test

import (
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
)

// captor is a thread of the program that captures a stream of its own.
type captor struct {
	drv   *sim.Driver
	a     *engine.Allocator
	dev   *engine.Device
	st    *engine.Stream
	pool  *engine.Pool
	begun chan error // of the announcement and the begin; nil before begin is called
}

func newCaptor(t *testing.T, e *fixture, dev *engine.Device) *captor {
	t.Helper()
	st, err := dev.Stream(e.drv.NewStreamNonBlocking(dev.ID()), config.StreamDurable)
	must(t, err)
	pool, err := dev.NewPool(memory.PoolID{7, 1}, config.PoolOptions{})
	must(t, err)
	return &captor{drv: e.drv, a: e.a, dev: dev, st: st, pool: pool}
}

// begin announces and begins the capture in the thread, and returns once that is done or waits for something.
func (c *captor) begin() {
	done := make(chan struct{})
	c.begun = make(chan error, 1)
	go func() {
		defer close(done)
		err := c.dev.Captures.Begin(c.st, c.pool)
		if err == nil {
			err = c.drv.BeginCapture(c.dev.ID(), c.st.Handle())
		}
		c.begun <- err
	}()
	for !engine.CaptureBlocked(c.dev) {
		select {
		case <-done:
			return
		default:
			runtime.Gosched()
		}
	}
}

// finish captures some work and ends the capture, which must be intact.
func (c *captor) finish(t *testing.T) {
	t.Helper()
	if c.begun == nil {
		t.Fatal("nothing was waited for")
	}
	must(t, <-c.begun)
	p, err := c.dev.Alloc(4*mib, c.st)
	must(t, err)
	must(t, c.drv.Use(c.dev.ID(), c.st.Handle(), p, 4*mib))
	must(t, c.a.Free(p))
	if _, err := c.drv.EndCapture(c.dev.ID(), c.st.Handle()); err != nil {
		t.Errorf("the capture: %v", err)
	}
	must(t, c.dev.Captures.End(c.st))
}

// between is a machine of two devices whose memory both can use, and an engine in the middle of whose waits for the context
// of device at, once, something else happens.
func between(t *testing.T, at cuda.Device) (e *fixture, peer *engine.Device, during func(f func())) {
	t.Helper()
	machine := sim.New(sim.Options{Devices: 2, Capacity: 256 * mib, Lag: 20 * time.Millisecond, Check: sim.CheckOrder,
		OnFault: func(err error) { t.Error(err) }})
	seen := &interposed{Driver: machine}
	e = newEngineOver(t, machine, seen, config.Options{}, 2)
	peer, err := e.a.Device(1)
	must(t, err)
	must(t, e.dev.Peers.Enable(1))
	return e, peer, func(f func()) {
		happened := false
		seen.before = func(call string, dev cuda.Device) {
			if call == "cuCtxSynchronize" && dev == at && !happened {
				happened = true
				f()
			}
		}
	}
}

// A capture that another thread announces while something waits for the whole context is not invalidated: the
// announcement waits until that is over.
func TestCaptureBeginsDuringWait(t *testing.T) {
	graph := func(t *testing.T, e *fixture) *engine.Pool {
		pool, err := e.dev.NewPool(memory.PoolID{0, 1}, config.PoolOptions{})
		must(t, err)
		e.capture(t, e.streams[0], pool, func() { e.free(t, e.alloc(t, 4*mib, e.streams[0])) })
		return pool
	}
	for name, waits := range map[string]func(t *testing.T, e *fixture, during func()){
		"release of a pool": func(t *testing.T, e *fixture, during func()) {
			pool := graph(t, e)
			during()
			must(t, pool.Release())
		},
		"end of a capture": func(t *testing.T, e *fixture, during func()) {
			pool := graph(t, e)
			other, err := e.dev.NewPool(memory.PoolID{0, 2}, config.PoolOptions{})
			must(t, err)
			during()
			e.capture(t, e.streams[1], other, func() { must(t, pool.Release()) })
		},
		"pause": func(t *testing.T, e *fixture, during func()) {
			p := e.alloc(t, 4*mib, e.streams[0])
			during()
			refused(t, e.dev) // its second wait
			e.free(t, p)
		},
		"trim": func(t *testing.T, e *fixture, during func()) {
			own, err := e.dev.Stream(cuda.StreamPerThread)
			must(t, err)
			e.free(t, e.alloc(t, 4*mib, own))
			during()
			must(t, e.dev.Trim())
		},
	} {
		t.Run(name, func(t *testing.T) {
			e, _, during := between(t, 0)
			c := newCaptor(t, e, e.dev)
			waits(t, e, func() { during(c.begin) })
			c.finish(t)
		})
	}
}

// refused pauses the device, which must be refused because of a capture.
func refused(t *testing.T, dev *engine.Device) {
	t.Helper()
	var no *memory.PauseError
	if _, err := dev.Pause(engine.Selection{}, config.PauseOptions{}); !errors.As(err, &no) {
		t.Errorf("a pause beside a capture: %v", err)
	}
}

// Pausing waits for the contexts of peers as well, and leaves their captures alone: those that are announced while the
// device itself is waited for, and those that are announced while the peer is.
func TestCaptureOnPeerDuringPause(t *testing.T) {
	for at := range cuda.Device(2) {
		e, peer, during := between(t, at)
		c := newCaptor(t, e, peer)
		p := e.alloc(t, 4*mib, e.streams[0])
		during(c.begin)
		refused(t, e.dev)
		c.finish(t)
		_, err := e.dev.Pause(engine.Selection{}, config.PauseOptions{})
		must(t, err)
		_, err = e.dev.Resume(engine.Selection{})
		must(t, err)
		e.free(t, p)
	}
}

// A pool that is released while a capture is announced keeps its memory until that capture ends, without a wait.
func TestReleaseDuringCapture(t *testing.T) {
	e, _, _ := between(t, 0)
	pool, err := e.dev.NewPool(memory.PoolID{0, 1}, config.PoolOptions{})
	must(t, err)
	e.capture(t, e.streams[0], pool, func() { e.free(t, e.alloc(t, 64*mib, e.streams[0])) })
	c := newCaptor(t, e, e.dev)
	c.begin()
	must(t, pool.Release())
	must(t, e.dev.Trim())
	if n := e.dev.Views.Stats().Reserved.All.Current; n < 64*mib {
		t.Errorf("%d bytes are reserved during the capture: the pool's memory is gone", n)
	}
	c.finish(t)
	must(t, c.pool.Release())
	must(t, e.dev.Trim())
	if n := e.dev.Views.Stats().Reserved.All.Current; n != 0 {
		t.Errorf("%d bytes are reserved after the capture", n)
	}
}
