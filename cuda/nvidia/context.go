//go:build linux && cgo

package nvidia

/*
#include "internal.h"
*/
import "C"

import (
	"runtime"

	"github.com/cistern-gpu/cistern/cuda"
)

// WithContext calls f on a thread that has the device's primary context current, for calls of libraries that look for one
// (NCCL, by way of cudaGetDevice), in relaxed capture mode. Both are restored afterwards. The error is f's, or says why
// it was not called.
func (d *Driver) WithContext(dev cuda.Device, f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var scope C.nv_scope
	r := C.nv_enter(d.c, C.intptr_t(dev), &scope)
	if r != 0 {
		return d.check(C.nv_leave(d.c, &scope, r), dev)
	}
	done := false
	defer func() {
		if !done { // f panicked
			C.nv_leave(d.c, &scope, 0)
		}
	}()
	err := f()
	done = true
	if r := C.nv_leave(d.c, &scope, 0); err == nil {
		err = d.check(r, dev)
	}
	return err
}
