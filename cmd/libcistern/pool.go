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

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
)

// pools finds a device's pool by its name without the device's lock: programs have few pools and ask at every request.
type pools struct {
	mu   sync.Mutex // held while list is replaced
	list atomic.Pointer[[]*engine.Pool]
	// +checklocks:mu
	made map[*engine.Pool]made // those that were given an upstream
}

// made is what a pool was given.
type made struct {
	words string   // for its upstream, as statistics show it
	owned []*owned // the upstream and the spill, where they were made here
}

// upstreamOf is what statistics say of where a pool's memory comes from, "" where it is the driver, as the settings say.
func (l *library) upstreamOf(d *engine.Device, p *engine.Pool) string {
	known := &l.devices[d.ID()].pools
	known.mu.Lock()
	words := known.made[p].words
	known.mu.Unlock()
	if all := l.upstream.Load(); words == "" && all != nil {
		return *all
	}
	return words
}

func (l *library) pool(d *engine.Device, id memory.PoolID) (*engine.Pool, error) {
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
	var next []*engine.Pool
	if list := known.list.Load(); list != nil {
		next = slices.DeleteFunc(slices.Clone(*list), func(o *engine.Pool) bool { return o.ID() == id })
	}
	next = append(next, p)
	known.list.Store(&next)
	return p, nil
}

// forget takes a pool that is being released off the list.
func (l *library) forget(d *engine.Device, p *engine.Pool) {
	known := &l.devices[d.ID()].pools
	known.mu.Lock()
	m := known.made[p]
	delete(known.made, p)
	if list := known.list.Load(); list != nil {
		next := slices.DeleteFunc(slices.Clone(*list), func(o *engine.Pool) bool { return o == p })
		known.list.Store(&next)
	}
	known.mu.Unlock()
	m.end()
}

// onPool calls f with a pool of a device.
func onPool(d C.int, pool0, pool1 C.uint64_t, f func(*library, *engine.Device, *engine.Pool) error) C.int {
	l, dev, err := inUse(d)
	if err != nil {
		return fail(err)
	}
	p, err := l.pool(dev, memory.PoolID{uint64(pool0), uint64(pool1)})
	if err != nil {
		return fail(err)
	}
	if err := f(l, dev, p); err != nil {
		return fail(err)
	}
	return C.CISTERN_OK
}

// onStream calls f with a stream of a device.
func onStream(d C.int, h C.uintptr_t, f func(*engine.Device, *engine.Stream) error) C.int {
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

//export corePoolBegin
func corePoolBegin(d C.int, pool0, pool1 C.uint64_t, h C.uintptr_t) (code C.int) {
	defer caught(&code)
	return onPool(d, pool0, pool1, func(l *library, dev *engine.Device, p *engine.Pool) error {
		st, err := l.stream(dev, cuda.Stream(h))
		if err != nil {
			return err
		}
		return dev.Captures.Route(st, p)
	})
}

//export corePoolEnd
func corePoolEnd(d C.int, h C.uintptr_t) (code C.int) {
	defer caught(&code)
	return onStream(d, h, func(dev *engine.Device, st *engine.Stream) error { return dev.Captures.Unroute(st) })
}

//export coreCaptureBegin
func coreCaptureBegin(d C.int, pool0, pool1 C.uint64_t, h C.uintptr_t) (code C.int) {
	defer caught(&code)
	return onPool(d, pool0, pool1, func(l *library, dev *engine.Device, p *engine.Pool) error {
		st, err := l.stream(dev, cuda.Stream(h))
		if err != nil {
			return err
		}
		err = dev.Captures.Begin(st, p)
		if err == nil {
			l.devices[d].streams.capture(cuda.Stream(h), st)
		}
		return err
	})
}

//export coreCaptureReuse
func coreCaptureReuse(d, on C.int) (code C.int) {
	defer caught(&code)
	_, dev, err := inUse(d)
	if err != nil {
		return fail(err)
	}
	dev.Captures.SetReuse(on != 0)
	return C.CISTERN_OK
}

//export coreCaptureEnd
func coreCaptureEnd(d C.int, h C.uintptr_t) (code C.int) {
	defer caught(&code)
	return onStream(d, h, func(dev *engine.Device, st *engine.Stream) error {
		defer current.Load().devices[d].streams.capture(cuda.Stream(h), nil)
		return dev.Captures.End(st)
	})
}

//export corePoolRelease
func corePoolRelease(d C.int, pool0, pool1 C.uint64_t) (code C.int) {
	defer caught(&code)
	return onPool(d, pool0, pool1, func(l *library, dev *engine.Device, p *engine.Pool) error {
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
	return onPool(d, pool0, pool1, func(_ *library, _ *engine.Device, p *engine.Pool) error { return p.Trim() })
}
