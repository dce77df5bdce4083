package query

import (
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/gpu"
)

// simulated prices kernels as on an H200: what a launch takes of the host, and of the device 2 us and the bytes at 2 TB/s.
// It has no contents to compare; its checker finds memory that is used against the rules. What the engine's own code takes
// of the host is not in its clock.
func simulated(o sim.Options) gpu.Machine {
	o.Check, o.CallsTakeTime = sim.CheckOrder, true
	return &gpu.Sim{Driver: sim.New(o), Launch: 2500 * time.Nanosecond,
		Work: func(size uint64) time.Duration { return 2*time.Microsecond + time.Duration(size/2000)*time.Nanosecond }}
}

// within runs f, a thread of the job, with the device's context current, as threads of programs that use CUDA run: no call
// has to make it so.
func within(m gpu.Machine, dev cuda.Device, f func() error) error {
	if d, ok := m.(interface {
		WithContext(cuda.Device, func() error) error
	}); ok {
		return d.WithContext(dev, f)
	}
	return f()
}
