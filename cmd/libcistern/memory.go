//go:build linux && cgo

package main

/*
#include "shim.h"
*/
import "C"

import (
	"errors"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
)

//export coreFree
func coreFree(p C.uintptr_t, thread C.uint32_t) (code C.int) {
	defer caught(&code)
	l, err := started()
	if err != nil {
		return fail(err)
	}
	if err := l.FreeWith(cuda.Ptr(p), engine.FreeOptions{Thread: uint32(thread)}); err != nil {
		return fail(err)
	}
	return C.CISTERN_OK
}

//export coreFreeOn
func coreFreeOn(p, h C.uintptr_t, thread C.uint32_t) (code C.int) {
	defer caught(&code)
	l, st, err := user("free", cuda.Ptr(p), cuda.Stream(h))
	if err == nil {
		err = l.FreeWith(cuda.Ptr(p), engine.FreeOptions{Stream: st, Thread: uint32(thread)})
	}
	if err != nil {
		return fail(err)
	}
	return C.CISTERN_OK
}

//export coreRecordStream
func coreRecordStream(p, h C.uintptr_t) (code C.int) {
	defer caught(&code)
	l, st, err := user("record stream", cuda.Ptr(p), cuda.Stream(h))
	if err == nil {
		err = l.RecordStream(cuda.Ptr(p), st)
	}
	if err != nil {
		return fail(err)
	}
	return C.CISTERN_OK
}

// user is the stream of a handle that the caller names as a user of an allocation: of the allocation's device, or
// of another.
func user(op string, p cuda.Ptr, h cuda.Stream) (*library, *engine.Stream, error) {
	l, err := started()
	if err != nil {
		return nil, nil, err
	}
	b, err := l.Base(p)
	if err != nil {
		var unknown *memory.PointerError
		if errors.As(err, &unknown) {
			unknown.Op = op
		}
		return nil, nil, err
	}
	dev, err := l.Device(b.Device)
	if err != nil {
		return nil, nil, err
	}
	st, err := l.anyStream(dev, h)
	return l, st, err
}

//export coreBase
func coreBase(p C.uintptr_t, size *C.size_t) (found C.int) {
	var code C.int
	defer caught(&code)
	l, err := started()
	if err != nil {
		fail(err)
		return 0
	}
	b, err := l.Base(cuda.Ptr(p))
	if err != nil {
		fail(err)
		return 0
	}
	if size != nil {
		*size = C.size_t(b.Size)
	}
	return 1
}

//export coreSegmentBase
func coreSegmentBase(p C.uintptr_t, base *C.uintptr_t, size *C.size_t) (code C.int) {
	defer caught(&code)
	l, err := started()
	if err != nil {
		return fail(err)
	}
	b, n, err := l.SegmentBase(cuda.Ptr(p))
	if err != nil {
		return fail(err)
	}
	*base, *size = C.uintptr_t(b), C.size_t(n)
	return C.CISTERN_OK
}

//export coreFind
func coreFind(p C.uintptr_t, out *C.cistern_block) (code C.int) {
	defer caught(&code)
	l, err := started()
	if err != nil {
		return fail(err)
	}
	b, err := l.Base(cuda.Ptr(p))
	if err != nil {
		return fail(err)
	}
	*out = blockOf(b)
	return C.CISTERN_OK
}

func poolOf(id memory.PoolID) [2]C.uint64_t {
	return [2]C.uint64_t{C.uint64_t(id[0]), C.uint64_t(id[1])}
}

//export coreTrim
func coreTrim(d C.int) (code C.int) {
	defer caught(&code)
	l, err := started()
	if err != nil {
		return fail(err)
	}
	if d == -1 {
		err = l.Trim()
	} else {
		var dev *engine.Device
		if dev, err = l.idle(d); dev != nil {
			err = dev.Trim()
		}
	}
	if err != nil {
		return fail(err)
	}
	return C.CISTERN_OK
}

//export coreSetLimit
func coreSetLimit(d C.int, bytes C.uint64_t) (code C.int) {
	defer caught(&code)
	_, dev, err := inUse(d)
	if err != nil {
		return fail(err)
	}
	dev.SetLimit(uint64(bytes))
	return C.CISTERN_OK
}

//export coreGetLimit
func coreGetLimit(d C.int, bytes *C.uint64_t) (code C.int) {
	defer caught(&code)
	l, dev, err := ifUsed(d)
	if err != nil {
		return fail(err)
	}
	*bytes = C.uint64_t(l.Options().Limit)
	if dev != nil {
		*bytes = C.uint64_t(dev.Limit())
	}
	return C.CISTERN_OK
}

//export coreMemInfo
func coreMemInfo(d C.int, free, total *C.uint64_t) (code C.int) {
	defer caught(&code)
	l, err := started()
	if err != nil {
		return fail(err)
	}
	if _, err := l.idle(d); err != nil {
		return fail(err)
	}
	f, t, err := l.Driver().MemInfo(cuda.Device(d))
	if errors.Is(err, cuda.ErrInvalidContext) { // the device is not in use yet, and the driver knows only then
		if _, err = l.device(d); err == nil {
			f, t, err = l.Driver().MemInfo(cuda.Device(d))
		}
	}
	if err != nil {
		return fail(err)
	}
	*free, *total = C.uint64_t(f), C.uint64_t(t)
	return C.CISTERN_OK
}

//export corePeer
func corePeer(d, peer C.int) (code C.int) {
	defer caught(&code)
	l, err := started()
	if err != nil {
		return fail(err)
	}
	for _, x := range []C.int{d, peer} {
		if _, err := l.device(x); err != nil {
			return fail(err)
		}
	}
	dev, _ := l.device(d)
	if err := dev.Peers.Enable(cuda.Device(peer)); err != nil {
		return fail(err)
	}
	return C.CISTERN_OK
}
