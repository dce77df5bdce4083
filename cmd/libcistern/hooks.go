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
	oom           []oomHook // guarded by mu
	unmap, mapped hook      // guarded by mu
}

// hook is a function of the host program with its context. Both are numbers here: only C looks behind them.
type hook struct{ fn, ctx C.uintptr_t }

// oomHook is a function that is asked for memory.
type oomHook struct {
	hook
	registered *cistern.Registration
}

// asked is the index of a function that is asked for memory, -1 where there is none. The caller holds mu.
func (h *hooks) asked(f hook) int {
	return slices.IndexFunc(h.oom, func(o oomHook) bool { return o.hook == f })
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
	if h.asked(added) < 0 {
		h.oom = append(h.oom, oomHook{added, dev.OnOutOfMemory(func(missing uint64) bool {
			return C.shim_call_oom(fn, ctx, d, C.uint64_t(missing)) != 0
		})})
	}
	return C.CISTERN_OK
}

//export coreOffOutOfMemory
func coreOffOutOfMemory(d C.int, fn, ctx C.uintptr_t) (code C.int) {
	defer caught(&code)
	l, _, err := ifUsed(d)
	if err != nil {
		return fail(err)
	}
	h := &l.devices[d].hooks
	h.mu.Lock()
	i := h.asked(hook{fn, ctx})
	if i < 0 {
		h.mu.Unlock()
		return fail(&failure{C.CISTERN_INVALID, fmt.Sprintf("device %d: this function is not registered with this ctx", int(d))})
	}
	o := h.oom[i]
	h.oom = slices.Delete(h.oom, i, i+1)
	h.mu.Unlock() // before waiting: a call that is under way may register others
	o.registered.Remove()
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
