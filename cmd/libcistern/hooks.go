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
	mu  sync.Mutex
	oom []oomHook // guarded by mu
}

// oomHook is a function with its context. Both are numbers here: only C looks behind them.
type oomHook struct{ fn, ctx C.uintptr_t }

//export coreOnOutOfMemory
func coreOnOutOfMemory(d C.int, fn, ctx C.uintptr_t) (code C.int) {
	defer caught(&code)
	l, err := started()
	if err != nil {
		return fail(err)
	}
	dev, err := l.device(d)
	if err != nil {
		return fail(err)
	}
	hook := oomHook{fn, ctx}
	h := &l.devices[d].hooks
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, known := range h.oom {
		if known == hook {
			return C.CISTERN_OK
		}
	}
	h.oom = append(h.oom, hook)
	dev.OnOutOfMemory(func(missing uint64) bool {
		return C.shim_call_oom(fn, ctx, d, C.uint64_t(missing)) != 0
	})
	return C.CISTERN_OK
}

//export coreOnUnmap
func coreOnUnmap(d C.int, fn, ctx C.uintptr_t) (code C.int) {
	defer caught(&code)
	return onRange(d, fn, ctx, (*cistern.Device).OnUnmap)
}

//export coreOnMap
func coreOnMap(d C.int, fn, ctx C.uintptr_t) (code C.int) {
	defer caught(&code)
	return onRange(d, fn, ctx, (*cistern.Device).OnMap)
}

// onRange sets a function that is told of ranges.
func onRange(d C.int, fn, ctx C.uintptr_t, set func(*cistern.Device, func(cuda.Ptr, uint64))) C.int {
	l, err := started()
	if err != nil {
		return fail(err)
	}
	dev, err := l.device(d)
	if err != nil {
		return fail(err)
	}
	if fn == 0 {
		set(dev, nil)
		return C.CISTERN_OK
	}
	set(dev, func(addr cuda.Ptr, size uint64) {
		C.shim_call_range(fn, ctx, d, C.uintptr_t(addr), C.size_t(size))
	})
	return C.CISTERN_OK
}
