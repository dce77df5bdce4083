package resourcetest

import (
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/gpu"
)

// Machine is a driver whose devices work on memory: they fill it with a pattern made from a seed and compare it with one.
type Machine interface {
	cuda.Driver
	// Fill queues work on the stream that writes the seed's pattern, Check work that compares with it. p is aligned to 8
	// bytes.
	Fill(dev cuda.Device, s cuda.Stream, p cuda.Ptr, size, seed uint64) error
	Check(dev cuda.Device, s cuda.Stream, p cuda.Ptr, size, seed uint64) error
	// Wrong waits for those devices, or all that the machine works on, and reports as an error that comparisons failed
	// since the last call, or that memory was used against the rules.
	Wrong(devs ...cuda.Device) error
}

// Sim is a Machine with simulated devices.
type Sim struct {
	*sim.Driver
	gpu *gpu.Sim
}

// Fill, Check and Wrong are those of Machine.
func (m *Sim) Fill(dev cuda.Device, s cuda.Stream, p cuda.Ptr, size, seed uint64) error {
	return m.gpu.Fill(dev, s, p, size, seed)
}
func (m *Sim) Check(dev cuda.Device, s cuda.Stream, p cuda.Ptr, size, seed uint64) error {
	return m.gpu.Check(dev, s, p, size, seed)
}
func (m *Sim) Wrong(devs ...cuda.Device) error { return m.gpu.Wrong(devs...) }

// GPU is a machine with real devices; it skips the test where there is none.
func GPU(t testing.TB, spec func() (cuda.Driver, error)) Machine {
	t.Helper()
	drv, err := spec()
	if err != nil {
		t.Skip(err)
	}
	m, err := gpu.NewMachine(drv)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// edge is how much of each end of a range has contents in the simulated memory; the checker sees all of it.
const edge = 4096

// Simulated is a machine with so many simulated devices of so many bytes each, whose work takes a while and whose
// checker demands order. It is new with each call.
func Simulated(devices int, capacity uint64) *Sim {
	drv := sim.New(sim.Options{Devices: devices, Capacity: capacity, HostCapacity: capacity, Handles: sim.Exportable,
		Check: sim.CheckOrder, RealTime: true, Lag: 50 * time.Microsecond})
	return &Sim{drv, &gpu.Sim{Contents: edge, Driver: drv}}
}
