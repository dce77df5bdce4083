//go:build linux && cgo

package main

/*
#include "shim.h"
*/
import "C"

import (
	"sync"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
)

// hooks are the functions of the host program that a device calls.
type hooks struct {
	mu            sync.Mutex
	oom           []hook // guarded by mu
	unmap, mapped hook   // guarded by mu
}

// hook is a function of the host program with its context. Both are numbers here: only C looks behind them.
type hook struct{ fn, ctx C.uintptr_t }

//export coreOnOutOfMemory
func coreOnOutOfMemory(d C.int, fn, ctx C.uintptr_t) (code C.int) {
	defer caught(&code)
	l, dev, err := inUse(d)
	if err != nil {
		return fail(err)
	}
	added := hook{fn, ctx}
	h := &l.devices[d].hooks
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, known := range h.oom {
		if known == added {
			return C.CISTERN_OK
		}
	}
	h.oom = append(h.oom, added)
	dev.OnOutOfMemory(func(missing uint64) bool {
		return C.shim_call_oom(fn, ctx, d, C.uint64_t(missing)) != 0
	})
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
