package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/open"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/gpu"
	"github.com/cistern-gpu/cistern/internal/units"
)

// machine is a device that kernels run on.
type machine interface {
	cuda.Driver
	// write and read queue a kernel on the stream that fills size bytes with the seed's pattern, or compares.
	write(s cuda.Stream, p cuda.Ptr, size, seed uint64) error
	read(s cuda.Stream, p cuda.Ptr, size, seed uint64) error
	// within runs f, a thread of the job, as a thread of a program that uses CUDA runs: with the device's context current, so
	// that no call has to make it so.
	within(f func() error) error
	// wrong waits for everything and says, as an error, that something compared was not what had been written.
	wrong() error
}

func openMachine(spec string, dev cuda.Device) (machine, error) {
	if kind, size, more := strings.Cut(spec, ":"); kind == "sim" {
		o := sim.Options{Devices: int(dev) + 1, Handles: sim.Exportable, Check: sim.CheckOrder, CallsTakeTime: true}
		if more {
			var err error
			if o.Capacity, err = units.ParseBytes(size); err != nil {
				return nil, fmt.Errorf("-driver %s: %w", spec, err)
			}
		}
		if err := o.Validate(); err != nil {
			return nil, fmt.Errorf("-driver %s: %w", spec, err)
		}
		m := &simulated{sim.New(o), dev}
		return m, m.RetainContext(dev)
	}
	drv, err := open.Open(spec)
	if err != nil {
		return nil, err
	}
	g, err := gpu.New(drv)
	if err != nil {
		return nil, err
	}
	r := &real{Driver: drv, gpu: g, dev: dev}
	r.counter, err = g.NewCounter(dev)
	return r, err
}

type real struct {
	cuda.Driver
	gpu     *gpu.GPU
	dev     cuda.Device
	counter cuda.Ptr
}

func (r *real) within(f func() error) error {
	if d, ok := r.Driver.(interface {
		WithContext(cuda.Device, func() error) error
	}); ok {
		return d.WithContext(r.dev, f)
	}
	return f()
}

func (r *real) write(s cuda.Stream, p cuda.Ptr, size, seed uint64) error {
	return r.gpu.Fill(r.dev, s, p, size, seed)
}

func (r *real) read(s cuda.Stream, p cuda.Ptr, size, seed uint64) error {
	return r.gpu.Check(r.dev, s, p, size, seed, r.counter)
}

func (r *real) wrong() error {
	n, err := r.gpu.Counter(r.dev, r.counter)
	if err == nil && n != 0 {
		err = fmt.Errorf("%d words are not what was written", n)
	}
	return err
}

// simulated prices kernels as on an H200: what a launch takes of the host, and of the device 2 us and the bytes at
// 2 TB/s. It has no contents to compare; its checker finds memory that is used against the rules. What the engine's own
// code takes of the host is not in its clock.
type simulated struct {
	*sim.Driver
	dev cuda.Device
}

const launchCost = 2500 * time.Nanosecond

func kernelTime(size uint64) time.Duration {
	return 2*time.Microsecond + time.Duration(size/2000)*time.Nanosecond
}

func (m *simulated) write(s cuda.Stream, p cuda.Ptr, size, _ uint64) error {
	m.Advance(launchCost)
	return m.UseFor(m.dev, s, p, size, kernelTime(size))
}

func (m *simulated) read(s cuda.Stream, p cuda.Ptr, size, _ uint64) error {
	m.Advance(launchCost)
	return m.ReadFor(m.dev, s, p, size, kernelTime(size))
}

func (m *simulated) within(f func() error) error { return f() }

func (m *simulated) wrong() error { return m.Fault() }
