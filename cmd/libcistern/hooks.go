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

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
)

// hooks are the functions of the host program that a device calls.
type hooks struct {
	mu            sync.Mutex
	asks          bool       // guarded by mu: the device asks this package when it is out of memory
	oom           []*oomHook // guarded by mu: in the order in which they came
	unmap, mapped hook       // guarded by mu
}

// hook is a function of the host program with its context. Both are numbers here: only C looks behind them.
type hook struct{ fn, ctx C.uintptr_t }

// oomHook is a function that is asked for memory. Who takes it back waits until no call is under way.
type oomHook struct {
	hook
	mu    sync.Mutex
	idle  sync.Cond // over mu: calls is 0
	calls int       // guarded by mu: under way
	gone  bool      // guarded by mu: taken back
}

// help asks the function for memory, unless it was taken back.
func (o *oomHook) help(d C.int, missing uint64) bool {
	o.mu.Lock()
	if o.gone {
		o.mu.Unlock()
		return false
	}
	o.calls++
	o.mu.Unlock()
	helped := C.shim_call_oom(o.fn, o.ctx, d, C.uint64_t(missing)) != 0
	o.mu.Lock()
	if o.calls--; o.calls == 0 {
		o.idle.Broadcast()
	}
	o.mu.Unlock()
	return helped
}

func (o *oomHook) takeBack() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.gone = true
	for o.calls > 0 {
		o.idle.Wait()
	}
}

// help asks all functions of the device.
func (h *hooks) help(d C.int, missing uint64) bool {
	h.mu.Lock()
	all := slices.Clone(h.oom)
	h.mu.Unlock()
	any := false
	for _, o := range all {
		any = o.help(d, missing) || any
	}
	return any
}

func (h *hooks) find(f hook) int {
	return slices.IndexFunc(h.oom, func(o *oomHook) bool { return o.hook == f })
}

//export coreOnOutOfMemory
func coreOnOutOfMemory(d C.int, fn, ctx C.uintptr_t) (code C.int) {
	defer caught(&code)
	l, dev, err := inUse(d)
	if err != nil {
		return fail(err)
	}
	h := &l.devices[d].hooks
	h.mu.Lock()
	defer h.mu.Unlock()
	added := hook{fn, ctx}
	if h.find(added) >= 0 {
		return C.CISTERN_OK
	}
	o := &oomHook{hook: added}
	o.idle.L = &o.mu
	h.oom = append(h.oom, o)
	if !h.asks {
		h.asks = true
		dev.OnOutOfMemory(func(missing uint64) bool { return h.help(d, missing) })
	}
	return C.CISTERN_OK
}

//export coreOffOutOfMemory
func coreOffOutOfMemory(d C.int, fn, ctx C.uintptr_t) (code C.int) {
	defer caught(&code)
	l, err := started()
	if err != nil {
		return fail(err)
	}
	if _, err := l.idle(d); err != nil {
		return fail(err)
	}
	h := &l.devices[d].hooks
	h.mu.Lock()
	i := h.find(hook{fn, ctx})
	if i < 0 {
		h.mu.Unlock()
		return fail(&failure{C.CISTERN_INVALID, fmt.Sprintf("device %d: this function is not registered with this ctx", int(d))})
	}
	o := h.oom[i]
	h.oom = slices.Delete(h.oom, i, i+1)
	h.mu.Unlock()
	o.takeBack()
	return C.CISTERN_OK
}

//export coreOnUnmap
func coreOnUnmap(d C.int, fn, ctx C.uintptr_t) (code C.int) {
	defer caught(&code)
	return onRange(d, hook{fn, ctx}, func(h *hooks) *hook { return &h.unmap }, (*cistern.Device).OnUnmap)
}

//export coreOnMap
func coreOnMap(d C.int, fn, ctx C.uintptr_t) (code C.int) {
	defer caught(&code)
	return onRange(d, hook{fn, ctx}, func(h *hooks) *hook { return &h.mapped }, (*cistern.Device).OnMap)
}

// onRange sets a function that is told of ranges. The one that is set already is left alone: setting waits until the
// former is not called any more, and callers who make sure of theirs may hold a lock that it waits for.
func onRange(d C.int, added hook, at func(*hooks) *hook, set func(*cistern.Device, func(cuda.Ptr, uint64))) C.int {
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
