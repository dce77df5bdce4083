// Package nccl is memory that NCCL made, or would have: ncclMemAlloc, whose ranges NCCL's communicators can register
// (zero-copy collectives) and NVLink peers use.
//
// The library is the one that the process has loaded already, as a program has that uses NCCL itself; else the one at
// the path given, or where there is no path, the one that the dynamic linker or a Python environment has. It stays
// loaded.
//
// Over the simulated device nothing is loaded: there a range is what ncclMemAlloc makes, one physical handle that can be
// exported as a file descriptor, mapped for every device that may use it.
//
// Files: nccl.go the resource; library.go and library.c the calls; find.go where a library may lie.
package nccl

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/resource"
)

// natural is what NCCL's memory is aligned to, in bytes: to the granularity of virtual memory, or where NCCL has to do
// without, as cuMemAlloc aligns.
const natural = 512

// caller makes a call with the device's primary context current. *nvidia.Driver is one.
type caller interface {
	WithContext(dev cuda.Device, f func() error) error
}

// New makes the resource for a device. library is the path of libnccl.so.2, for where the process has none loaded; it may
// be empty, and must not be another's than that of the one that is loaded. The error says in one line what is missing.
func New(drv cuda.Driver, dev cuda.Device, library string) (resource.Resource, error) {
	if drv.Name() == "sim" {
		return simulated(drv, dev)
	}
	with, ok := drv.(caller)
	if !ok {
		return nil, fmt.Errorf("nccl: driver %s has no contexts that NCCL could use", drv.Name())
	}
	l, err := load(library)
	if err != nil {
		return nil, err
	}
	if err := drv.RetainContext(dev); err != nil {
		return nil, err
	}
	return &memory{drv: drv, dev: dev, with: with, lib: l}, nil
}

// memory is ncclMemAlloc's.
type memory struct {
	drv  cuda.Driver
	dev  cuda.Device
	with caller
	lib  *library
}

var _ resource.Peers = (*memory)(nil)

// Error is a call of NCCL's that failed, with NCCL's words for it.
type Error struct {
	Op     string
	Device cuda.Device
	Size   uint64 // bytes; 0 where the call has no size
	Code   int    // ncclResult_t
	Words  string // ncclGetErrorString
	// Memory is true where the device has less memory free than was asked for, which NCCL does not tell from its other
	// troubles with CUDA. errors.Is finds cuda.ErrOutOfMemory then.
	Memory bool
}

func (e *Error) Error() string {
	what := fmt.Sprintf("%s on device %d: %s", e.Op, e.Device, e.Words)
	if e.Size != 0 {
		what = fmt.Sprintf("%s of %d bytes on device %d: %s", e.Op, e.Size, e.Device, e.Words)
	}
	if e.Memory {
		what += ": " + cuda.ErrOutOfMemory.Error()
	}
	return what
}

func (e *Error) Unwrap() error {
	if e.Memory {
		return cuda.ErrOutOfMemory
	}
	return nil
}

// unhandledCUDA is ncclUnhandledCudaError.
const unhandledCUDA = 1

// Alloc waits for the GPU, as ncclMemAlloc does.
func (m *memory) Alloc(size, align uint64, _ cuda.Stream) (p cuda.Ptr, err error) {
	if size == 0 {
		return 0, nil
	}
	if err := resource.Check("nccl", m.dev, size, align, natural); err != nil {
		return 0, err
	}
	err = m.with.WithContext(m.dev, func() error {
		var code int
		if p, code = m.lib.alloc(size); code != 0 {
			p = 0
			return &Error{Op: "ncclMemAlloc", Device: m.dev, Size: size, Code: code, Words: m.lib.words(code)}
		}
		return nil
	})
	if err != nil && p != 0 { // the context could not be restored
		if failed := m.Free(p, size, align, 0); failed != nil {
			err = fmt.Errorf("%w; and then: %w", err, failed)
		}
		return 0, err
	}
	var e *Error
	if errors.As(err, &e) && e.Code == unhandledCUDA {
		// NCCL rounds up to the granularity of multicast, which is 512 MiB where GPUs have it, and the device has a little
		// less than it says.
		const slack = 576 << 20
		free, _, failed := m.drv.MemInfo(m.dev)
		if failed != nil {
			return 0, failed // the context is broken, which NCCL does not say either
		}
		e.Memory = free < size+slack
	}
	return p, err
}

// Free waits for the GPU, as ncclMemFree does.
func (m *memory) Free(p cuda.Ptr, _, _ uint64, _ cuda.Stream) error {
	if p == 0 {
		return nil
	}
	return m.with.WithContext(m.dev, func() error {
		if code := m.lib.free(p); code != 0 {
			return &Error{Op: "ncclMemFree", Device: m.dev, Code: code, Words: m.lib.words(code)}
		}
		return nil
	})
}

// EnablePeer has nothing to do but to say whether it is so: ncclMemAlloc maps for every device that can.
func (m *memory) EnablePeer(peer cuda.Device) error { return canUse(m.drv, peer, m.dev) }

func canUse(drv cuda.Driver, peer, dev cuda.Device) error {
	if peer == dev {
		return nil
	}
	can, err := drv.CanAccessPeer(peer, dev)
	if err == nil && !can {
		err = &cuda.Error{Op: "ncclMemAlloc", Device: peer, Code: cuda.ErrPeerAccessUnsupported}
	}
	return err
}

func (m *memory) MemInfo() (free, total uint64, err error) { return m.drv.MemInfo(m.dev) }

func (m *memory) Equal(other resource.Resource) bool {
	o, ok := other.(*memory)
	return ok && o.drv == m.drv && o.dev == m.dev
}

func (m *memory) Traits() resource.Traits {
	return resource.Traits{Name: "nccl", Device: m.dev, OnDevice: true, DeviceAccessible: true, Align: natural, Registered: true}
}

// plain is the simulated memory without what NCCL's cannot do: it is registered, so its pages stay.
type plain struct {
	resource.Resource
	drv cuda.Driver
	dev cuda.Device
}

func (p *plain) Traits() resource.Traits {
	t := p.Resource.Traits()
	t.Name, t.Align, t.Registered = "nccl", natural, true
	return t
}

func (p *plain) Equal(other resource.Resource) bool { return resource.Resource(p) == other }

func (p *plain) EnablePeer(peer cuda.Device) error { return canUse(p.drv, peer, p.dev) }

// Trim gives back what the driver would not take when it was freed.
func (p *plain) Trim() error { return p.Resource.(resource.Trimmer).Trim() }

// simulated is what ncclMemAlloc does, through the driver.
func simulated(drv cuda.Driver, dev cuda.Device) (resource.Resource, error) {
	info, err := drv.DeviceInfo(dev)
	if err != nil {
		return nil, err
	}
	if info.Handles&cuda.HandlePosix == 0 {
		return nil, fmt.Errorf("nccl: device %d (%s) cannot export memory as file descriptors", dev, info.Name)
	}
	n, err := drv.DeviceCount()
	if err != nil {
		return nil, err
	}
	users := []cuda.Device{dev}
	for peer := range cuda.Device(n) {
		if peer == dev {
			continue
		}
		can, err := drv.CanAccessPeer(peer, dev)
		if err != nil {
			return nil, err
		}
		if can {
			users = append(users, peer)
		}
	}
	users = slices.Clip(users)
	s := resource.Single(drv, cuda.MemProp{Device: dev, Handles: cuda.HandlePosix}, info.Granularity,
		func(p cuda.Ptr, size uint64) error { return drv.MemSetAccess(p, size, users) })
	return &plain{s, drv, dev}, nil
}
