package engine

import (
	"fmt"
	"sync/atomic"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/journal"
	"github.com/cistern-gpu/cistern/internal/engine/phys"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/internal/lockrank"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

// Allocator serves the devices of one process.
type Allocator struct {
	drv  cuda.Driver
	opts config.Options

	mu      lockrank.Mutex
	devices []atomic.Pointer[Device] // by ordinal; set under mu, read without
	gates   []timeline.Gate          // by ordinal

	turns timeline.Turns

	// +checklocks:mu
	kept bool // blocks remember stacks
	// +checklocks:mu
	history int // events that a device keeps which comes into use
	// +checklocks:mu
	catch  *func(size uint64) uint32 // finds out the stacks of requests that name none; nil: none
	thread journal.Thread            // set by SetHistoryThread
	node   atomic.Pointer[Node]      // set by SetNode
	// upstream makes what the memory of a device comes from, where no pool has another; nil: driver calls.
	// +checklocks:mu
	upstream func(cuda.Device) (resource.Resource, error)

	addresses phys.Table[streamHeap] // changed with mu

	Sharing *Sharing
	Stacks  *Stacks
}

// New makes an allocator over a driver. A device starts when it is first used.
func New(drv cuda.Driver, opts config.Options) (*Allocator, error) {
	opts = opts.WithDefaults()
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	n, err := drv.DeviceCount()
	if err != nil {
		return nil, err
	}
	a := &Allocator{drv: drv, opts: opts, devices: make([]atomic.Pointer[Device], n), gates: timeline.NewGates(n), kept: opts.Stacks != config.StacksOff, history: opts.History,
		mu: lockrank.Mutex{Rank: lockrank.Allocator}}
	a.Sharing = &Sharing{a: a, opened: opened{mu: lockrank.Mutex{Rank: lockrank.Opened}}}
	a.Stacks = &Stacks{a: a, keeping: lockrank.Mutex{Rank: lockrank.Keeping}}
	if opts.Stacks == config.StacksNative || opts.Stacks == config.StacksAll {
		a.Stacks.table.Sample = opts.StackSample
		a.Stacks.Catch(a.Stacks.table.Go)
	}
	return a, nil
}

// Options returns the options in force.
func (a *Allocator) Options() config.Options { return a.opts }

// SetUpstream has the default pool of every device, and pools that say nothing else, get their memory from a resource, which
// is called as that of PoolOptions.Upstream is. open makes it for a device that comes into use, and must not call the allocator;
// Close closes it. It is an error once a device is in use.
func (a *Allocator) SetUpstream(open func(cuda.Device) (resource.Resource, error)) error {
	if a.opts.Backend == config.BackendMalloc || a.opts.SingleHandle {
		return fmt.Errorf("upstream: excludes backend:malloc and single_handle, which say where memory comes from too")
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range a.devices {
		if a.devices[i].Load() != nil {
			return fmt.Errorf("upstream: device %d is in use already", i)
		}
	}
	a.upstream = open
	return nil
}

// Driver returns the driver under the allocator.
func (a *Allocator) Driver() cuda.Driver { return a.drv }

// Device returns the engine of one device, starting it (and the device's primary context) when it is first asked for.
func (a *Allocator) Device(d cuda.Device) (*Device, error) {
	if d < 0 || int(d) >= len(a.devices) {
		there := fmt.Sprintf("there are %d devices", len(a.devices))
		if len(a.devices) == 1 {
			there = "there is 1 device"
		}
		return nil, fmt.Errorf("device %d: %s: %w", d, there, cuda.ErrInvalidDevice)
	}
	if dev := a.devices[d].Load(); dev != nil {
		return dev, nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if dev := a.devices[d].Load(); dev != nil {
		return dev, nil
	}
	dev, err := newDevice(a, d)
	if err != nil {
		return nil, err
	}
	a.devices[d].Store(dev)
	return dev, nil
}

// DeviceCount is the number of devices.
func (a *Allocator) DeviceCount() int { return len(a.devices) }

// Started finds the engine of a device that is in use already; unlike Device it starts nothing.
func (a *Allocator) Started(d cuda.Device) (*Device, bool) {
	if d < 0 || int(d) >= len(a.devices) {
		return nil, false
	}
	dev := a.devices[d].Load()
	return dev, dev != nil
}

// started calls f for every device that is in use.
func (a *Allocator) started(f func(*Device) error) error {
	var first error
	for i := range a.devices {
		if d := a.devices[i].Load(); d != nil {
			if err := f(d); err != nil && first == nil {
				first = err
			}
		}
	}
	return first
}

// Free gives back what Alloc returned; null is nothing to free. The block may be reused on its own stream at once and
// on others when the GPU's order guarantees that this use is over; streams named by RecordStream are waited for.
func (a *Allocator) Free(p cuda.Ptr) error {
	if p == 0 {
		return nil
	}
	s := a.heapOf(p)
	if s == nil {
		return &memory.PointerError{Op: "free", Ptr: p}
	}
	return s.freePtr(p, nil)
}

// FreeOn is Free for programs that say on which stream they give memory back; it need not be the stream of the allocation. All
// work that uses the block must be ordered before the end of what is queued on st by now. The block is reused after that, and
// after the work of streams named by RecordStream. The stream of the allocation is not used: it may have been destroyed. st may
// be of another device. It must exist; while it is captured, until the capture ends. On the block's own stream FreeOn is Free.
func (a *Allocator) FreeOn(p cuda.Ptr, st *Stream) error {
	if p == 0 {
		return nil
	}
	s := a.heapOf(p)
	if s == nil {
		return &memory.PointerError{Op: "free", Ptr: p}
	}
	if st == s.stream {
		return s.freePtr(p, st)
	}
	return s.freeSlow(p, FreeOptions{Stream: st})
}

// RecordStream says that work queued on another stream uses the block as well: after Free it is reused only when that
// work, as queued until Free, is done. The stream must exist until then.
func (a *Allocator) RecordStream(p cuda.Ptr, st *Stream) error {
	if p == 0 {
		return nil
	}
	s := a.heapOf(p)
	if s == nil {
		return &memory.PointerError{Op: "record stream", Ptr: p}
	}
	return s.recordStream(p, st)
}

// Base finds the live allocation that starts at p.
func (a *Allocator) Base(p cuda.Ptr) (memory.Block, error) {
	s := a.heapOf(p)
	if s == nil {
		return memory.Block{}, &memory.PointerError{Op: "look up", Ptr: p}
	}
	s.arena.Lock()
	id, _, ok := s.blocks.Lookup(uint64(p))
	if ok && s.blocks.At(id).Uses != 0 { // another stream may have borrowed it, which the device's lock guards
		s.arena.Unlock()
		s.dev.mu.Lock()
		defer s.dev.mu.Unlock()
		s.arena.Lock()
		id, _, ok = s.blocks.Lookup(uint64(p))
	}
	defer s.arena.Unlock()
	if !ok {
		return memory.Block{}, &memory.PointerError{Op: "look up", Ptr: p}
	}
	if s.blocks.At(id).State != heap.Used {
		return memory.Block{}, &memory.PointerError{Op: "look up", Ptr: p, Detail: waitsDetail}
	}
	return s.describe(id), nil
}

// Trim gives everything that is cached and not pinned on any device back to the driver. It waits for the GPU where it
// must.
func (a *Allocator) Trim() error { return a.started((*Device).Trim) }

// Close gives everything back that is free and fails if blocks are still out. It is for programs that stop using the
// allocator while they go on; at the end of a process nothing needs closing.
func (a *Allocator) Close() error {
	return a.started(func(d *Device) error {
		if n := d.Views.Stats().Allocations.All.Current; n != 0 {
			return fmt.Errorf("device %d: %d allocations are still live", d.id, n)
		}
		return d.close()
	})
}
