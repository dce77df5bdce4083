// Package cistern is a caching allocator of GPU memory: one engine that hands out device memory to every library of a
// process, reuses what is freed without asking the driver, moves physical memory to where it is wanted by remapping
// it, and explains itself when there is none left.
//
// # Use
//
//	drv, err := open.Open("")            // package cuda/open: the GPU, or a simulated one
//	a, err := cistern.New(drv, cistern.Options{})
//	dev, err := a.Device(0)
//	st, err := dev.Stream(0)             // the default stream
//	p, err := dev.Alloc(64<<20, st)      // 64 MiB, usable at once by work queued on the stream
//	err = a.Free(p)                      // reusable on the stream at once, elsewhere when the GPU's order allows
//
// # How it is built
//
// Each device has pools; pool 0 is the default one. A (pool, stream, size class) is a *space*: a range of reserved
// addresses, the chunks of physical memory mapped into it, and a heap of blocks over them. A request that some free
// block of its space fits is met there, under the lock of its lane (pool and stream), with no driver call: that is the hot path
// (space.go). Every other request takes the device's lock and climbs the ladder (ladder.go): it collects frees whose
// other users are done, moves free chunks here from elsewhere, gets new chunks, asks other pools, asks callbacks, and
// fails with an *OutOfMemoryError that says what was tried.
//
// # What makes reuse safe
//
// On its own stream a freed block is reused at once: stream order does it. For everything else a free is marked with
// the epoch of its stream; an event closes an epoch (stream.go). Another stream takes the memory by waiting for the
// event on the GPU; unmapping and releasing wait until the host has seen it complete. No driver call is relied upon
// to wait.
//
// # Lock order
//
//	Allocator.mu → Device.mu → lane.mu (several only by the holder of Device.mu) → Stream.mu → history.mu
//
// No lock is held while a callback runs or while anything waits for the GPU.
package cistern

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/heap"
)

// Allocator serves the devices of one process.
type Allocator struct {
	drv  cuda.Driver
	opts Options

	mu      sync.Mutex
	devices []atomic.Pointer[Device] // by ordinal; set under mu, read without

	// turn counts the occasions on which the GPU is asked how far it is: requests on the ladder and waits.
	turn atomic.Uint64

	exported atomic.Uint64 // number of the last export
	byExport sync.Map      // exports by number
	opened   opened

	// regions finds the owner of an address: a table of the 4 GiB pieces of the 48-bit address space.
	regions [1 << (addressBits - regionBits)]atomic.Pointer[region]
}

const (
	addressBits = 48 // virtual addresses of CUDA devices up to and including Hopper lie below 2^47
	regionBits  = 32
)

// region says who owns the addresses of one 4 GiB piece: one space, or a list of segments in address order.
type region struct {
	space    *space
	segments []segmentRef
}

type segmentRef struct {
	base, end uint64
	space     *space
}

// New makes an allocator over a driver. Nothing is asked of the driver until memory is.
func New(drv cuda.Driver, opts Options) (*Allocator, error) {
	opts = opts.withDefaults()
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	n, err := drv.DeviceCount()
	if err != nil {
		return nil, err
	}
	return &Allocator{drv: drv, opts: opts, devices: make([]atomic.Pointer[Device], n)}, nil
}

// Options returns the options in force.
func (a *Allocator) Options() Options { return a.opts }

// Driver returns the driver under the allocator.
func (a *Allocator) Driver() cuda.Driver { return a.drv }

// Device returns the engine of one device, starting it (and the device's primary context) when it is first asked for.
func (a *Allocator) Device(d cuda.Device) (*Device, error) {
	if d < 0 || int(d) >= len(a.devices) {
		return nil, fmt.Errorf("device %d: there are %d devices: %w", d, len(a.devices), cuda.ErrInvalidDevice)
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

// spaceOf finds the space that an address belongs to, nil when it is none of ours.
func (a *Allocator) spaceOf(p cuda.Ptr) *space {
	i := uint64(p) >> regionBits
	if i >= uint64(len(a.regions)) {
		return nil
	}
	r := a.regions[i].Load()
	if r == nil {
		return nil
	}
	if r.space != nil {
		return r.space
	}
	return r.find(uint64(p))
}

func (r *region) find(p uint64) *space {
	lo, hi := 0, len(r.segments)
	for lo < hi {
		if m := (lo + hi) / 2; r.segments[m].end <= p {
			lo = m + 1
		} else {
			hi = m
		}
	}
	if lo < len(r.segments) && r.segments[lo].base <= p {
		return r.segments[lo].space
	}
	return nil
}

func (r *region) overlaps(base, size uint64) bool {
	return r.space != nil || slices.ContainsFunc(r.segments, func(s segmentRef) bool { return s.base < base+size && base < s.end })
}

// claim makes [base, base+size) known as the space's, release undoes it. Reservations are whole pieces of 4 GiB and
// get a region each; segments share regions, which are replaced, never changed, because readers take no lock.
func (a *Allocator) claim(base, size uint64, s *space) error {
	if base>>addressBits != 0 || (base+size-1)>>addressBits != 0 {
		return fmt.Errorf("address %#x lies above the %d bits that the allocator can look up", base+size-1, addressBits)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	// A user's upstream may hand out anything, memory of this allocator among it.
	for i := base >> regionBits; i <= (base+size-1)>>regionBits; i++ {
		if r := a.regions[i].Load(); r != nil && r.overlaps(base, size) {
			return fmt.Errorf("[%#x, %#x) is the allocator's already", base, base+size)
		}
	}
	for i := base >> regionBits; i <= (base+size-1)>>regionBits; i++ {
		start := i << regionBits
		if base <= start && start+1<<regionBits <= base+size {
			a.regions[i].Store(&region{space: s})
			continue
		}
		next := &region{}
		if old := a.regions[i].Load(); old != nil {
			next.segments = append(next.segments, old.segments...)
		}
		at := 0
		for at < len(next.segments) && next.segments[at].base < base {
			at++
		}
		next.segments = append(next.segments, segmentRef{})
		copy(next.segments[at+1:], next.segments[at:])
		next.segments[at] = segmentRef{base, base + size, s}
		a.regions[i].Store(next)
	}
	return nil
}

func (a *Allocator) disown(base, size uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := base >> regionBits; i <= (base+size-1)>>regionBits; i++ {
		old := a.regions[i].Load()
		if old == nil {
			continue
		}
		if old.space != nil {
			a.regions[i].Store(nil)
			continue
		}
		next := &region{}
		for _, s := range old.segments {
			if s.base != base {
				next.segments = append(next.segments, s)
			}
		}
		if len(next.segments) == 0 {
			next = nil
		}
		a.regions[i].Store(next)
	}
}

// Free gives back what Alloc returned; null is nothing to free. The block may be reused on its own stream at once and
// on others when the GPU's order guarantees that this use is over; streams named by RecordStream are waited for.
func (a *Allocator) Free(p cuda.Ptr) error {
	if p == 0 {
		return nil
	}
	s := a.spaceOf(p)
	if s == nil {
		return &PointerError{Op: "free", Ptr: p}
	}
	return s.freePtr(p)
}

// RecordStream says that work queued on another stream uses the block as well: after Free it is reused only when that
// work, as queued until Free, is done. The stream must exist until then.
func (a *Allocator) RecordStream(p cuda.Ptr, st *Stream) error {
	if p == 0 {
		return nil
	}
	s := a.spaceOf(p)
	if s == nil {
		return &PointerError{Op: "record stream", Ptr: p}
	}
	return s.recordStream(p, st)
}

// Block describes the allocation that an address lies in.
type Block struct {
	Base      cuda.Ptr
	Size      uint64 // bytes, rounded
	Requested uint64 // bytes asked for
	Device    cuda.Device
	Pool      PoolID
	Stream    cuda.StreamID
	Handle    cuda.Stream // by which the stream was made known
	Tag       uint32      // as given to AllocTagged, 0 none
	Library   uint8       // as given to AllocWith, 0 none
}

// Base finds the live allocation that starts at p.
func (a *Allocator) Base(p cuda.Ptr) (Block, error) {
	s := a.spaceOf(p)
	if s == nil {
		return Block{}, &PointerError{Op: "look up", Ptr: p}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	id, _, ok := s.heap.Lookup(uint64(p))
	if !ok || s.heap.At(id).State != heap.Used {
		return Block{}, &PointerError{Op: "look up", Ptr: p}
	}
	return s.describe(s.heap.At(id)), nil
}

// Trim gives everything that is cached and not pinned on any device back to the driver. It waits for the GPU where it
// must.
func (a *Allocator) Trim() error { return a.started((*Device).Trim) }

// Close gives everything back that is free and fails if blocks are still out. It is for programs that stop using the
// allocator while they go on; at the end of a process nothing needs closing.
func (a *Allocator) Close() error {
	return a.started(func(d *Device) error {
		if n := d.Stats().Allocations.All.Current; n != 0 {
			return fmt.Errorf("device %d: %d allocations are still out", d.id, n)
		}
		return d.close()
	})
}
