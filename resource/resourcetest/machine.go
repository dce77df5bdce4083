package resourcetest

import (
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/gpu"
)

// Machine is a driver whose devices work on memory, Sim one with simulated devices.
type (
	Machine = gpu.Machine
	Sim     = gpu.Sim
)

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
	return &Sim{Contents: edge, Driver: sim.New(sim.Options{Devices: devices, Capacity: capacity, HostCapacity: capacity, Handles: sim.Exportable,
		Check: sim.CheckOrder, RealTime: true, Lag: 50 * time.Microsecond})}
}
