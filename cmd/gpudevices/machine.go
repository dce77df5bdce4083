package main

import (
	"fmt"
	"slices"
	"sync"
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/open"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/gpu"
)

// machine is two devices, and work on them.
type machine struct {
	cuda.Driver
	worker
	large uint64 // size of a large block
}

// worker puts work on a device's stream. Sizes are bytes, addresses aligned to 8.
type worker interface {
	// fill writes the pattern of the seed.
	fill(dev cuda.Device, s cuda.Stream, p cuda.Ptr, size, seed uint64) error
	// check compares memory with the pattern of the seed; wrong is how many differences all checks on a device found. It
	// waits for the device.
	check(dev cuda.Device, s cuda.Stream, p cuda.Ptr, size, seed uint64) error
	wrong(dev cuda.Device) (uint64, error)
	// damage makes every later call about the device fail, as a kernel that uses an address that is none does.
	damage(dev cuda.Device, s cuda.Stream) error
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
	if s, ok := drv.(*sim.Driver); ok {
		return &machine{s, &copies{drv: s}, large}, nil
	}
	g, err := gpu.New(drv)
	if err != nil {
		return nil, err
	}
	k := &kernelWork{g: g}
	for dev := range cuda.Device(2) {
		if k.counter[dev], err = g.NewCounter(dev); err != nil {
			return nil, err
		}
	}
	return &machine{drv, k, large}, nil
}

// sound is an error where a check on one of the devices found a difference.
func (m *machine) sound(devs ...cuda.Device) error {
	for _, dev := range devs {
		n, err := m.wrong(dev)
		if err != nil {
			return fmt.Errorf("reading what device %d found: %w", dev, err)
		}
		if n != 0 {
			return fmt.Errorf("device %d found %d words that are wrong", dev, n)
		}
	}
	return nil
}

// kernelWork is a real GPU, or the stand-in for one.
type kernelWork struct {
	g       *gpu.GPU
	counter [2]cuda.Ptr // of differences, on each device
}

func (k *kernelWork) fill(dev cuda.Device, s cuda.Stream, p cuda.Ptr, size, seed uint64) error {
	return k.g.Fill(dev, s, p, size, seed)
}

func (k *kernelWork) check(dev cuda.Device, s cuda.Stream, p cuda.Ptr, size, seed uint64) error {
	return k.g.Check(dev, s, p, size, seed, k.counter[dev])
}

func (k *kernelWork) wrong(dev cuda.Device) (uint64, error) { return k.g.Counter(dev, k.counter[dev]) }

func (k *kernelWork) damage(dev cuda.Device, s cuda.Stream) error {
	if err := k.g.Fill(dev, s, 8, 8, 1); err != nil {
		return err
	}
	if err := k.g.StreamSynchronize(dev, s); err == nil {
		return fmt.Errorf("a kernel of device %d wrote to address 8 and nothing happened", dev)
	}
	return nil
}

// copies is the simulated device: the host makes and compares the pattern, in page-locked memory.
type copies struct {
	drv *sim.Driver

	mu    sync.Mutex
	found [2]uint64 // checks that found a difference; guarded by mu
}

func (c *copies) fill(dev cuda.Device, s cuda.Stream, p cuda.Ptr, size, seed uint64) error {
	return c.staged(dev, size, func(host cuda.Ptr, bytes []byte) error {
		gpu.Pattern(bytes, seed)
		if err := c.drv.MemcpyAsync(dev, p, host, size, s); err != nil {
			return err
		}
		return c.drv.StreamSynchronize(dev, s)
	})
}

func (c *copies) check(dev cuda.Device, s cuda.Stream, p cuda.Ptr, size, seed uint64) error {
	return c.staged(dev, size, func(host cuda.Ptr, bytes []byte) error {
		if err := c.drv.MemcpyAsync(dev, host, p, size, s); err != nil {
			return err
		}
		if err := c.drv.StreamSynchronize(dev, s); err != nil {
			return err
		}
		want := make([]byte, size)
		gpu.Pattern(want, seed)
		c.mu.Lock()
		defer c.mu.Unlock()
		if !slices.Equal(bytes, want) {
			c.found[dev]++
		}
		return nil
	})
}

// staged calls f with page-locked memory.
func (c *copies) staged(dev cuda.Device, size uint64, f func(host cuda.Ptr, bytes []byte) error) error {
	host, err := c.drv.HostAlloc(dev, size)
	if err != nil {
		return err
	}
	if err := f(host, hostBytes(host, size)); err != nil {
		return err
	}
	return c.drv.HostFree(dev, host)
}

func (c *copies) wrong(dev cuda.Device) (uint64, error) {
	if err := c.drv.ContextSynchronize(dev); err != nil {
		return 0, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.found[dev], nil
}

func (c *copies) damage(dev cuda.Device, _ cuda.Stream) error {
	c.drv.Poison(dev, cuda.ErrIllegalAddress)
	return nil
}

// hostBytes is page-locked memory as the host sees it.
func hostBytes(p cuda.Ptr, size uint64) []byte {
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&p)), size)
}
