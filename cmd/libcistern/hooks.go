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
)

// hooks are the functions of the host program that a device calls.
type hooks struct {
	mu      sync.Mutex
	oom     []oomHook     // +checklocks:mu
	unmap   hook          // +checklocks:mu
	mapped  hook          // +checklocks:mu
	version atomic.Uint32 // of everywhere, when this device last caught up
}

// hook is a function of the host program with its context. Both are numbers here: only C looks behind them.
type hook struct{ fn, ctx C.uintptr_t }

// oomHook is a function that is asked for memory.
type oomHook struct {
	hook
	registered *engine.Registration
}

// asked is the index of a function that is asked for memory, -1 where there is none. The caller holds mu.
//
// +checklocks:h.mu
func (h *hooks) asked(f hook) int {
	return slices.IndexFunc(h.oom, func(o oomHook) bool { return o.hook == f })
}

// ask has a device ask a function. The caller holds mu.
//
// +checklocks:h.mu
func (h *hooks) ask(d C.int, dev *engine.Device, f hook) {
	if h.asked(f) < 0 {
		h.oom = append(h.oom, oomHook{f, dev.OnOutOfMemory(func(missing uint64) bool {
			return C.shim_call_oom(f.fn, f.ctx, d, C.uint64_t(missing)) != 0
		})})
	}
}

// askNoMore takes a function from those that the device asks, nil where it is not one of them. Removing it waits, so the
// caller does that when it holds no lock.
func (h *hooks) askNoMore(f hook) *engine.Registration {
	h.mu.Lock()
	defer h.mu.Unlock()
	i := h.asked(f)
	if i < 0 {
		return nil
	}
	o := h.oom[i]
	h.oom = slices.Delete(h.oom, i, i+1)
	return o.registered
}

// everywhere is the functions that every device asks, also one that comes into use later: it catches up when it is next
// looked for.
type everywhere struct {
	mu      sync.Mutex
	oom     []hook // +checklocks:mu
	version atomic.Uint32
}

// allDevices is what stands for them.
const allDevices = -1

// catchUp also notices that a device came into use, as it never was before what everywhere has when the library starts.
func (l *library) catchUp(d C.int, dev *engine.Device) {
	l.showing.Do(l.show)
	l.devices[d].joining.Do(func() { l.join(dev) })
	e, h := &l.everywhere, &l.devices[d].hooks
	e.mu.Lock()
	defer e.mu.Unlock()
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, f := range e.oom {
		h.ask(d, dev, f)
	}
	h.version.Store(e.version.Load())
}

//export coreOnOutOfMemory
func coreOnOutOfMemory(d C.int, fn, ctx C.uintptr_t) (code C.int) {
	defer caught(&code)
	added := hook{fn, ctx}
	if d == allDevices {
		l, err := started()
		if err != nil {
			return fail(err)
		}
		e := &l.everywhere
		e.mu.Lock()
		if !slices.Contains(e.oom, added) {
			e.oom = append(e.oom, added)
			e.version.Add(1)
		}
		e.mu.Unlock()
		for i := range l.devices {
			if dev, ok := l.Started(cuda.Device(i)); ok {
				l.catchUp(C.int(i), dev)
			}
		}
		return C.CISTERN_OK
	}
	l, dev, err := inUse(d)
	if err != nil {
		return fail(err)
	}
	h := &l.devices[d].hooks
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ask(d, dev, added)
	return C.CISTERN_OK
}

//export coreOffOutOfMemory
func coreOffOutOfMemory(d C.int, fn, ctx C.uintptr_t) (code C.int) {
	defer caught(&code)
	f := hook{fn, ctx}
	if d == allDevices {
		l, err := started()
		if err != nil {
			return fail(err)
		}
		e := &l.everywhere
		e.mu.Lock()
		i := slices.Index(e.oom, f)
		if i < 0 {
			e.mu.Unlock()
			return fail(&failure{C.CISTERN_INVALID, "this function is not registered with this ctx for all devices"})
		}
		e.oom = slices.Delete(e.oom, i, i+1)
		var asked []*engine.Registration
		for i := range l.devices {
			if r := l.devices[i].hooks.askNoMore(f); r != nil {
				asked = append(asked, r)
			}
		}
		e.mu.Unlock() // before waiting: a call that is under way may register others
		for _, r := range asked {
			r.Remove()
		}
		return C.CISTERN_OK
	}
	l, _, err := ifUsed(d)
	if err != nil {
		return fail(err)
	}
	r := l.devices[d].hooks.askNoMore(f)
	if r == nil {
		return fail(&failure{C.CISTERN_INVALID, fmt.Sprintf("device %d: this function is not registered with this ctx", int(d))})
	}
	r.Remove()
	return C.CISTERN_OK
}

//export coreOnUnmap
func coreOnUnmap(d C.int, fn, ctx C.uintptr_t) (code C.int) {
	defer caught(&code)
	return onRange(d, hook{fn, ctx}, func(h *hooks) *hook { return &h.unmap }, (*engine.Device).OnUnmap)
}

//export coreOnMap
func coreOnMap(d C.int, fn, ctx C.uintptr_t) (code C.int) {
	defer caught(&code)
	return onRange(d, hook{fn, ctx}, func(h *hooks) *hook { return &h.mapped }, (*engine.Device).OnMap)
}

// onRange sets an observer of ranges. The one that is set already is left alone: setting waits until the
// former is not called any more, and callers that make sure of theirs may hold a lock that it waits for.
func onRange(d C.int, added hook, at func(*hooks) *hook, set func(*engine.Device, func(cuda.Ptr, uint64))) C.int {
	l, dev, err := inUse(d)
	if err != nil {
		return fail(err)
	}
	if added.fn == 0 {
		added.ctx = 0
	}
	h := &l.devices[d].hooks
	h.mu.Lock()
	known := *at(h)
	*at(h) = added
	h.mu.Unlock()
	if known == added {
		return C.CISTERN_OK
	}
	if added.fn == 0 {
		set(dev, nil)
		return C.CISTERN_OK
	}
	set(dev, func(addr cuda.Ptr, size uint64) {
		C.shim_call_range(added.fn, added.ctx, d, C.uintptr_t(addr), C.size_t(size))
	})
	return C.CISTERN_OK
}
