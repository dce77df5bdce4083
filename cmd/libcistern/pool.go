//go:build linux && cgo

package main

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/resource"
)

// pools finds a device's pool by its name without the device's lock: programs have few pools and ask at every request.
type pools struct {
	mu   sync.Mutex // held while list is replaced
	list atomic.Pointer[[]*cistern.Pool]
}

func (l *library) pool(d *cistern.Device, id cistern.PoolID) (*cistern.Pool, error) {
	known := &l.devices[d.ID()].pools
	if list := known.list.Load(); list != nil {
		for _, p := range *list {
			if p.ID() == id {
				return p, nil
			}
		}
	}
	known.mu.Lock()
	defer known.mu.Unlock()
	p, ok := d.Pool(id)
	if !ok {
		return nil, &failure{C.CISTERN_INVALID, fmt.Sprintf("device %d has no pool {%d, %d}: cistern_pool_create makes one",
			d.ID(), id[0], id[1])}
	}
	var next []*cistern.Pool
	if list := known.list.Load(); list != nil {
		next = slices.DeleteFunc(slices.Clone(*list), func(o *cistern.Pool) bool { return o.ID() == id })
	}
	next = append(next, p)
	known.list.Store(&next)
	return p, nil
}

// forget takes a pool that is being released off the list.
func (l *library) forget(d *cistern.Device, p *cistern.Pool) {
	known := &l.devices[d.ID()].pools
	known.mu.Lock()
	defer known.mu.Unlock()
	if list := known.list.Load(); list != nil {
		next := slices.DeleteFunc(slices.Clone(*list), func(o *cistern.Pool) bool { return o == p })
		known.list.Store(&next)
	}
}

// onPool calls f with a pool of a device.
func onPool(d C.int, pool0, pool1 C.uint64_t, f func(*library, *cistern.Device, *cistern.Pool) error) C.int {
	l, dev, err := inUse(d)
	if err != nil {
		return fail(err)
	}
	p, err := l.pool(dev, cistern.PoolID{uint64(pool0), uint64(pool1)})
	if err != nil {
		return fail(err)
	}
	if err := f(l, dev, p); err != nil {
		return fail(err)
	}
	return C.CISTERN_OK
}

// onStream calls f with a stream of a device.
func onStream(d C.int, h C.uintptr_t, f func(*cistern.Device, *cistern.Stream) error) C.int {
	l, dev, err := inUse(d)
	if err != nil {
		return fail(err)
	}
	st, err := l.stream(dev, cuda.Stream(h))
	if err != nil {
		return fail(err)
	}
	if err := f(dev, st); err != nil {
		return fail(err)
	}
	return C.CISTERN_OK
}

//export corePoolCreate
func corePoolCreate(d C.int, pool0, pool1 C.uint64_t, flags C.uint32_t, alloc, free, ctx C.uintptr_t) (code C.int) {
	defer caught(&code)
	l, err := started()
	if err != nil {
		return fail(err)
	}
	const kinds = C.CISTERN_POOL_IPC_LEGACY | C.CISTERN_POOL_SINGLE_HANDLE
	if flags&^(C.CISTERN_POOL_NO_SPLIT|kinds) != 0 {
		return fail(&failure{C.CISTERN_INVALID, fmt.Sprintf("options.flags: %#x has flags that are not CISTERN_POOL_'s", uint32(flags))})
	}
	o := cistern.PoolOptions{NoSplit: flags&C.CISTERN_POOL_NO_SPLIT != 0}
	switch flags & kinds {
	case C.CISTERN_POOL_IPC_LEGACY:
		o.Kind = cistern.PoolMalloc
	case C.CISTERN_POOL_SINGLE_HANDLE:
		o.Kind = cistern.PoolSingleHandle
	case kinds:
		return fail(&failure{C.CISTERN_INVALID, "options.flags: memory for cudaIpcGetMemHandle is from cuMemAlloc, which has no handle: " +
			"choose CISTERN_POOL_IPC_LEGACY or CISTERN_POOL_SINGLE_HANDLE"})
	}
	if alloc != 0 {
		o.Upstream = &hostSegments{alloc: alloc, free: free, ctx: ctx, device: d}
	}
	dev, err := l.device(d)
	if err != nil {
		return fail(err)
	}
	if _, err := dev.NewPoolWith(cistern.PoolID{uint64(pool0), uint64(pool1)}, o); err != nil {
		return fail(err)
	}
	return C.CISTERN_OK
}

// hostSegments is segments from two functions of the host program. Functions and context are numbers here: only C looks
// behind them.
type hostSegments struct {
	alloc, free, ctx C.uintptr_t
	device           C.int
}

func (h *hostSegments) Alloc(size, _ uint64, st cuda.Stream) (cuda.Ptr, error) {
	p := C.shim_call_alloc(h.alloc, h.ctx, C.size_t(size), h.device, C.uintptr_t(st))
	if p == 0 {
		return 0, fmt.Errorf("the pool's own function has no %d bytes: %w", size, cuda.ErrOutOfMemory)
	}
	if p%512 != 0 {
		C.shim_call_free(h.free, h.ctx, p, C.size_t(size), h.device, C.uintptr_t(st))
		return 0, &failure{C.CISTERN_INVALID, fmt.Sprintf("the pool's own function returned %#x, which is not aligned to 512 bytes", uint64(p))}
	}
	return cuda.Ptr(p), nil
}

func (h *hostSegments) Free(p cuda.Ptr, size, _ uint64, st cuda.Stream) error {
	C.shim_call_free(h.free, h.ctx, C.uintptr_t(p), C.size_t(size), h.device, C.uintptr_t(st))
	return nil
}

func (h *hostSegments) MemInfo() (free, total uint64, err error) { return 0, 0, cuda.ErrNotSupported }

func (h *hostSegments) Equal(other resource.Resource) bool {
	o, ok := other.(*hostSegments)
	return ok && *o == *h
}

func (h *hostSegments) Traits() resource.Traits {
	return resource.Traits{Name: "external", Device: cuda.Device(h.device), OnDevice: true, DeviceAccessible: true, Align: 512}
}

//export corePoolBegin
func corePoolBegin(d C.int, pool0, pool1 C.uint64_t, h C.uintptr_t) (code C.int) {
	defer caught(&code)
	return onPool(d, pool0, pool1, func(l *library, dev *cistern.Device, p *cistern.Pool) error {
		st, err := l.stream(dev, cuda.Stream(h))
		if err != nil {
			return err
		}
		return dev.Route(st, p)
	})
}

//export corePoolEnd
func corePoolEnd(d C.int, h C.uintptr_t) (code C.int) {
	defer caught(&code)
	return onStream(d, h, (*cistern.Device).Unroute)
}

//export coreCaptureBegin
func coreCaptureBegin(d C.int, pool0, pool1 C.uint64_t, h C.uintptr_t) (code C.int) {
	defer caught(&code)
	return onPool(d, pool0, pool1, func(l *library, dev *cistern.Device, p *cistern.Pool) error {
		st, err := l.stream(dev, cuda.Stream(h))
		if err != nil {
			return err
		}
		err = dev.BeginCapture(st, p)
		if err == nil {
			l.devices[d].streams.capture(cuda.Stream(h), st)
		}
		return err
	})
}

//export coreCaptureEnd
func coreCaptureEnd(d C.int, h C.uintptr_t) (code C.int) {
	defer caught(&code)
	return onStream(d, h, func(dev *cistern.Device, st *cistern.Stream) error {
		defer current.Load().devices[d].streams.capture(cuda.Stream(h), nil)
		return dev.EndCapture(st)
	})
}

//export corePoolRelease
func corePoolRelease(d C.int, pool0, pool1 C.uint64_t) (code C.int) {
	defer caught(&code)
	return onPool(d, pool0, pool1, func(l *library, dev *cistern.Device, p *cistern.Pool) error {
		err := p.Release()
		if q, ok := dev.Pool(p.ID()); !ok || q != p {
			l.forget(dev, p)
		}
		return err
	})
}

//export corePoolTrim
func corePoolTrim(d C.int, pool0, pool1 C.uint64_t) (code C.int) {
	defer caught(&code)
	return onPool(d, pool0, pool1, func(_ *library, _ *cistern.Device, p *cistern.Pool) error { return p.Trim() })
}
