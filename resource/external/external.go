// Package external is memory from two C functions of a shared library, with the signatures that PyTorch's
// CUDAPluggableAllocator takes:
//
//	void *alloc(ssize_t size, int device, cudaStream_t stream);
//	void free(void *ptr, ssize_t size, int device, cudaStream_t stream);
//
// They are called from any thread, several at once, with the device's primary context current and with no lock of Cistern's
// held, for whole segments. alloc returns addresses aligned to 512 bytes, and NULL when there is no memory. When free is called
// the GPU is done with the memory. The library stays loaded.
//
// Files: external.go the resource; library.go and library.c the calls.
package external

import (
	"fmt"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/resource"
)

// natural is what the memory is aligned to, in bytes.
const natural = 512

// Options name the functions.
type Options struct {
	Library string // path, or a name for the dynamic linker
	Alloc   string // the name of the function that allocates
	Free    string // and of the one that frees
}

// Load reports, as an error of one line, that the library cannot be loaded or lacks a function.
func Load(o Options) error {
	_, err := load(o)
	return err
}

// caller makes a call with the device's primary context current. *nvidia.Driver is one; the simulated device has no contexts.
type caller interface {
	WithContext(dev cuda.Device, f func() error) error
}

// New makes the resource for a device. Its memory is taken for the device's own.
func New(drv cuda.Driver, dev cuda.Device, o Options) (resource.Resource, error) {
	f, err := load(o)
	if err != nil {
		return nil, err
	}
	with := func(call func() error) error { return call() }
	if c, ok := drv.(caller); ok {
		if err := drv.RetainContext(dev); err != nil {
			return nil, err
		}
		with = func(call func() error) error { return c.WithContext(dev, call) }
	}
	free := func(p cuda.Ptr, size, _ uint64, st cuda.Stream) error {
		return with(func() error {
			f.dealloc(p, size, dev, st)
			return nil
		})
	}
	r, err := resource.External(resource.ExternalOptions{
		Alloc: func(size, align uint64, st cuda.Stream) (p cuda.Ptr, err error) {
			err = with(func() error {
				p = f.alloc(size, dev, st)
				return nil
			})
			if err != nil && p != 0 { // the context could not be restored
				if failed := free(p, size, align, st); failed != nil {
					err = fmt.Errorf("%w; and then: %w", err, failed)
				}
				p = 0
			}
			return p, err
		},
		Free:    free,
		MemInfo: func() (free, total uint64, err error) { return drv.MemInfo(dev) },
		Traits:  resource.Traits{Device: dev, OnDevice: true, DeviceAccessible: true, Align: natural},
	})
	if err != nil {
		return nil, err
	}
	return &memory{r, o}, nil
}

// memory is equal where the functions and the device are.
type memory struct {
	resource.Resource
	from Options
}

func (m *memory) Equal(other resource.Resource) bool {
	o, ok := other.(*memory)
	return ok && o.from == m.from && o.Traits().Device == m.Traits().Device
}
