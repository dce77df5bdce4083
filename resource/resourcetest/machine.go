package resourcetest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/gpu"
)

// Machine is a driver whose devices can be made to work on memory: they fill it with a pattern made from a seed and
// compare it with one.
type Machine interface {
	cuda.Driver
	// Fill queues work on the stream that writes the seed's pattern, Check work that compares with it. p is aligned to 8
	// bytes.
	Fill(dev cuda.Device, s cuda.Stream, p cuda.Ptr, size, seed uint64) error
	Check(dev cuda.Device, s cuda.Stream, p cuda.Ptr, size, seed uint64) error
	// Wrong waits for the devices and says, as an error, that comparisons failed since the last call, or that memory was
	// used against the rules.
	Wrong() error
}

// GPU is a machine with real devices; it skips the test where there is none.
func GPU(t testing.TB, spec func() (cuda.Driver, error)) Machine {
	t.Helper()
	drv, err := spec()
	if err != nil {
		t.Skip(err)
	}
	g, err := gpu.New(drv)
	if err != nil {
		t.Fatal(err)
	}
	n, err := g.DeviceCount()
	if err != nil {
		t.Fatal(err)
	}
	r := &real{Driver: g.Driver, gpu: g}
	for dev := range cuda.Device(n) {
		c, err := g.NewCounter(dev)
		if err != nil {
			t.Fatal(err)
		}
		r.counters = append(r.counters, c)
		r.seen = append(r.seen, 0)
	}
	return r
}

type real struct {
	cuda.Driver // the driver's own type, for those who look for more in it
	gpu         *gpu.GPU
	counters    []cuda.Ptr
	seen        []uint64 // what was counted up to the last Wrong
}

// WithContext is the driver's, which package nccl needs.
func (r *real) WithContext(dev cuda.Device, f func() error) error {
	return r.Driver.(interface {
		WithContext(cuda.Device, func() error) error
	}).WithContext(dev, f)
}

func (r *real) Fill(dev cuda.Device, s cuda.Stream, p cuda.Ptr, size, seed uint64) error {
	return r.gpu.Fill(dev, s, p, size, seed)
}

func (r *real) Check(dev cuda.Device, s cuda.Stream, p cuda.Ptr, size, seed uint64) error {
	return r.gpu.Check(dev, s, p, size, seed, r.counters[dev])
}

func (r *real) Wrong() error {
	for dev := range r.counters {
		n, err := r.gpu.Counter(cuda.Device(dev), r.counters[dev])
		if err != nil {
			return err
		}
		if wrong := n - r.seen[dev]; wrong != 0 {
			r.seen[dev] = n
			return fmt.Errorf("device %d: %d words are not what was written", dev, wrong)
		}
	}
	return nil
}

// Simulated is a machine with so many simulated devices of so many bytes each, whose work takes a while and whose
// checker demands order. It is new with each call.
func Simulated(devices int, capacity uint64) *Sim {
	return &Sim{Driver: sim.New(sim.Options{Devices: devices, Capacity: capacity, HostCapacity: capacity, Handles: sim.Exportable,
		Check: sim.CheckOrder, RealTime: true, Lag: 50 * time.Microsecond})}
}

// Sim is a simulated machine.
type Sim struct {
	*sim.Driver
	mu    sync.Mutex
	wrong error // +checklocks:mu
}

// edge is how much of each end of a range has contents in the simulated memory; the checker sees all of it.
const edge = 4096

// Fill is work of the stream's on the whole range for the checker, and the pattern at its ends.
func (m *Sim) Fill(dev cuda.Device, s cuda.Stream, p cuda.Ptr, size, seed uint64) error {
	if err := m.Use(dev, s, p, size); err != nil || size == 0 {
		return err
	}
	return ends(size, func(off, n uint64) error {
		return m.Write(dev, s, p+cuda.Ptr(off), pattern(seed, off, n))
	})
}

// Check is the same for reading.
func (m *Sim) Check(dev cuda.Device, s cuda.Stream, p cuda.Ptr, size, seed uint64) error {
	if err := m.Read(dev, s, p, size); err != nil || size == 0 {
		return err
	}
	return ends(size, func(off, n uint64) error {
		got := make([]byte, n)
		if err := m.ReadBack(dev, s, p+cuda.Ptr(off), got); err != nil {
			return err
		}
		if i, want := 0, pattern(seed, off, n); !bytes.Equal(got, want) {
			for got[i] == want[i] {
				i++
			}
			m.mu.Lock()
			defer m.mu.Unlock()
			m.wrong = fmt.Errorf("byte %d of %d at %#x is %#x; %#x was written", off+uint64(i), size, uint64(p), got[i], want[i])
		}
		return nil
	})
}

func ends(size uint64, f func(off, n uint64) error) error {
	head := min(size, edge)
	if err := f(0, head); err != nil || size == head {
		return err
	}
	tail := max(head, (size-min(size, edge))&^7)
	return f(tail, size-tail)
}

// pattern is what a kernel would write from byte off on, a multiple of 8.
func pattern(seed, off, n uint64) []byte {
	b := make([]byte, 0, n+8)
	for i := off / 8; uint64(len(b)) < n; i++ {
		b = binary.LittleEndian.AppendUint64(b, gpu.Word(seed, i))
	}
	return b[:n]
}

// Wrong is the first wrong byte, or what the checker found.
func (m *Sim) Wrong() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := m.wrong
	m.wrong = nil
	if err != nil {
		return err
	}
	return m.Fault()
}
