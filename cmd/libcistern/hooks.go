//go:build linux && cgo

package main

/*
#include "shim.h"
*/
import "C"

import "sync"

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
