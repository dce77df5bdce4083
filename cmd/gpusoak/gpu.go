package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/open"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/gpu"
)

// machine is a device that work can be put on.
type machine interface {
	driver() cuda.Driver
	newStream(blocking bool) (cuda.Stream, error)
	destroyStream(s cuda.Stream) error
	// fill writes the seed's pattern on the stream, check compares with it.
	fill(s cuda.Stream, p cuda.Ptr, size, seed uint64) error
	check(s cuda.Stream, p cuda.Ptr, size, seed uint64) error
	// wrong waits for everything and is the number of differences so far.
	wrong() (uint64, error)
	// detects reports whether check finds a difference where there is one; it leaves the count at zero.
	detects() (bool, error)
}

func openMachine(spec string, dev cuda.Device) (machine, error) {
	if kind, _, _ := strings.Cut(spec, ":"); kind == "sim" {
		// The simulated device has no contents; its checker judges instead, on what the wall clock says.
		return &simulated{dev: dev, drv: sim.New(sim.Options{Devices: int(dev) + 1, Check: sim.CheckOrder, RealTime: true, Lag: time.Millisecond})}, nil
	}
	drv, err := open.Open(spec)
	if err != nil {
		return nil, err
	}
	g, err := gpu.New(drv)
	if err != nil {
		return nil, err
	}
	r := &real{dev: dev, gpu: g}
	if r.counter, err = g.NewCounter(dev); err != nil {
		return nil, err
	}
	return r, nil
}

type real struct {
	dev     cuda.Device
	gpu     *gpu.GPU
	counter cuda.Ptr
}

func (r *real) driver() cuda.Driver { return r.gpu.Driver }

func (r *real) newStream(blocking bool) (cuda.Stream, error) {
	return r.gpu.StreamCreate(r.dev, blocking)
}

func (r *real) destroyStream(s cuda.Stream) error { return r.gpu.StreamDestroy(r.dev, s) }

func (r *real) fill(s cuda.Stream, p cuda.Ptr, size, seed uint64) error {
	return r.gpu.Fill(r.dev, s, p, size, seed)
}

func (r *real) check(s cuda.Stream, p cuda.Ptr, size, seed uint64) error {
	return r.gpu.Check(r.dev, s, p, size, seed, r.counter)
}

func (r *real) wrong() (uint64, error) { return r.gpu.Counter(r.dev, r.counter) }

func (r *real) detects() (bool, error) {
	const size = 1000
	p, err := r.gpu.MemAlloc(r.dev, size)
	if err != nil {
		return false, err
	}
	if err := r.fill(0, p, size, 1); err != nil {
		return false, err
	}
	if err := r.check(0, p, size, 1); err != nil {
		return false, err
	}
	if n, err := r.wrong(); err != nil || n != 0 {
		return false, fmt.Errorf("%d differences between a pattern and itself (%w)", n, err)
	}
	if err := r.check(0, p, size, 2); err != nil {
		return false, err
	}
	n, err := r.wrong()
	if err != nil || n < size/8 {
		return false, fmt.Errorf("%d differences between two patterns of %d bytes (%w)", n, size, err)
	}
	if err := r.gpu.CopyToDevice(r.dev, r.counter, make([]byte, 8)); err != nil {
		return false, err
	}
	return true, r.gpu.MemFree(r.dev, p)
}

type simulated struct {
	dev cuda.Device
	drv *sim.Driver
}

func (m *simulated) driver() cuda.Driver { return m.drv }

func (m *simulated) newStream(blocking bool) (cuda.Stream, error) {
	if blocking {
		return m.drv.NewStream(m.dev), nil
	}
	return m.drv.NewStreamNonBlocking(m.dev), nil
}

func (m *simulated) destroyStream(s cuda.Stream) error { return m.drv.DestroyStream(m.dev, s) }

func (m *simulated) fill(s cuda.Stream, p cuda.Ptr, size, _ uint64) error {
	return m.drv.Use(m.dev, s, p, size)
}

func (m *simulated) check(s cuda.Stream, p cuda.Ptr, size, _ uint64) error {
	return m.drv.Read(m.dev, s, p, size)
}

func (m *simulated) wrong() (uint64, error) { return 0, m.drv.Fault() }

func (m *simulated) detects() (bool, error) { return false, nil }
