package devices

import (
	"fmt"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/open"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/gpu"
)

// machine is two devices, and work on them.
type machine struct {
	gpu.Machine
	driver cuda.Driver // without the work
	large  uint64      // size of a large block
}

func openMachine(driver string, large uint64) (*machine, error) {
	drv, err := open.Open(driver)
	if err != nil {
		return nil, err
	}
	return newMachine(drv, large)
}

func newMachine(drv cuda.Driver, large uint64) (*machine, error) {
	n, err := drv.DeviceCount()
	if err != nil {
		return nil, err
	}
	if n < 2 {
		return nil, fmt.Errorf("two devices are needed, there are %d", n)
	}
	m, err := gpu.NewMachine(drv, 0, 1)
	return &machine{m, drv, large}, err
}

// damage makes every later call about the device fail, as a kernel that uses an address that is none does.
func (m *machine) damage(dev cuda.Device, s cuda.Stream) error {
	if d, ok := m.driver.(*sim.Driver); ok {
		d.Poison(dev, cuda.ErrIllegalAddress)
		return nil
	}
	if err := m.Fill(dev, s, 8, 8, 1); err != nil {
		return err
	}
	if err := m.StreamSynchronize(dev, s); err == nil {
		return fmt.Errorf("a kernel of device %d wrote to address 8 and nothing happened", dev)
	}
	return nil
}
