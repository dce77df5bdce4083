package gpu

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
)

// Machine is a driver whose devices can be made to work on memory: they fill it with a pattern made from a seed and
// compare it with one.
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

// NewMachine is a machine over a driver that is open, for work on those devices, or on all. GPUs work with kernels. On
// simulated devices the host writes and compares all contents.
func NewMachine(drv cuda.Driver, devs ...cuda.Device) (Machine, error) {
	if s, ok := drv.(*sim.Driver); ok {
		return &Sim{Driver: s, Contents: math.MaxUint64}, nil
	}
	g, err := New(drv)
	if err != nil {
		return nil, err
	}
	if len(devs) == 0 {
		for dev := range g.loaded {
			devs = append(devs, cuda.Device(dev))
		}
	}
	m := &gpus{Driver: g.Driver, gpu: g, devs: devs, counters: map[cuda.Device]*counter{}}
	for _, dev := range devs {
		c := &counter{}
		if c.p, err = g.NewCounter(dev); err != nil {
			return nil, err
		}
		m.counters[dev] = c
	}
	return m, nil
}

// gpus is a machine with real devices.
type gpus struct {
	cuda.Driver
	gpu      *GPU
	devs     []cuda.Device
	counters map[cuda.Device]*counter
}

// counter counts differences on a device.
type counter struct {
	p    cuda.Ptr
	seen uint64 // what was counted up to the last Wrong
}

// WithContext is the driver's, which package nccl needs.
func (m *gpus) WithContext(dev cuda.Device, f func() error) error {
	return m.Driver.(interface {
		WithContext(cuda.Device, func() error) error
	}).WithContext(dev, f)
}

func (m *gpus) Fill(dev cuda.Device, s cuda.Stream, p cuda.Ptr, size, seed uint64) error {
	return m.gpu.Fill(dev, s, p, size, seed)
}

func (m *gpus) Check(dev cuda.Device, s cuda.Stream, p cuda.Ptr, size, seed uint64) error {
	return m.gpu.Check(dev, s, p, size, seed, m.counters[dev].p)
}

func (m *gpus) Wrong(devs ...cuda.Device) error {
	if len(devs) == 0 {
		devs = m.devs
	}
	for _, dev := range devs {
		c := m.counters[dev]
		n, err := m.gpu.Counter(dev, c.p)
		if err != nil {
			return fmt.Errorf("counting the differences on device %d: %w", dev, err)
		}
		if wrong := n - c.seen; wrong != 0 {
			c.seen = n
			return fmt.Errorf("device %d: %d words are not what was written", dev, wrong)
		}
	}
	return nil
}

// Sim is a machine with simulated devices. Their checker sees the whole of every range that is worked on.
type Sim struct {
	*sim.Driver
	// Contents is how many bytes at each end of a range have contents, which the host writes and compares.
	Contents uint64
	// Launch is what queueing work takes of the host, and Work what it takes of the device; without Work it takes the
	// driver's Options.Lag.
	Launch time.Duration
	Work   func(size uint64) time.Duration

	mu    sync.Mutex
	wrong map[cuda.Device]error // the last of each device; +checklocks:mu
}

// Fill is work on the whole range for the checker, and the pattern at its ends.
func (m *Sim) Fill(dev cuda.Device, s cuda.Stream, p cuda.Ptr, size, seed uint64) error {
	var err error
	if m.Work == nil {
		err = m.Use(dev, s, p, size)
	} else {
		m.Advance(m.Launch)
		err = m.UseFor(dev, s, p, size, m.Work(size))
	}
	if err != nil {
		return err
	}
	return m.ends(size, func(off, n uint64) error {
		b := make([]byte, n)
		pattern(b, seed, off/8)
		return m.Write(dev, s, p+cuda.Ptr(off), b)
	})
}

// Check is the same for reading.
func (m *Sim) Check(dev cuda.Device, s cuda.Stream, p cuda.Ptr, size, seed uint64) error {
	var err error
	if m.Work == nil {
		err = m.Read(dev, s, p, size)
	} else {
		m.Advance(m.Launch)
		err = m.ReadFor(dev, s, p, size, m.Work(size))
	}
	if err != nil {
		return err
	}
	return m.ends(size, func(off, n uint64) error {
		got, want := make([]byte, n), make([]byte, n)
		pattern(want, seed, off/8)
		if err := m.ReadBack(dev, s, p+cuda.Ptr(off), got); err != nil {
			return err
		}
		if bytes.Equal(got, want) {
			return nil
		}
		i := 0
		for got[i] == want[i] {
			i++
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.wrong == nil {
			m.wrong = map[cuda.Device]error{}
		}
		m.wrong[dev] = fmt.Errorf("device %d: byte %d of %d at %#x is %#x; %#x was written", dev, off+uint64(i), size, uint64(p), got[i], want[i])
		return nil
	})
}

// ends calls f for the parts of a range that have contents, which begin at multiples of 8.
func (m *Sim) ends(size uint64, f func(off, n uint64) error) error {
	head := min(size, m.Contents)
	if head == 0 {
		return nil
	}
	if err := f(0, head); err != nil || size == head {
		return err
	}
	tail := max(head, (size-head)&^7)
	return f(tail, size-tail)
}

// Wrong is the last wrong byte, or what the checker found.
func (m *Sim) Wrong(devs ...cuda.Device) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for dev, err := range m.wrong {
		if len(devs) == 0 || slices.Contains(devs, dev) {
			delete(m.wrong, dev)
			return err
		}
	}
	return m.Fault()
}
