//go:build linux && cgo

package main

/*
#include <string.h>
#include "shim.h"

#cgo nocallback shim_share_opened
#cgo nocallback shim_share_closing
#cgo noescape shim_share_listening
#cgo nocallback shim_share_listening
*/
import "C"

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/share"
)

// shareGuard tells C what a child of fork must close and what must go when the process exits (guard.c).
type shareGuard struct{}

func (shareGuard) Opened(fd int)  { C.shim_share_opened(C.int(fd)) }
func (shareGuard) Closing(fd int) { C.shim_share_closing(C.int(fd)) }
func (shareGuard) Panicked(v any) { broke(v) }

func (shareGuard) Listening(path string) {
	C.shim_share_listening((*C.char)(unsafe.Pointer(unsafe.StringData(path))), C.size_t(len(path)))
}

//export coreShare
func coreShare(p C.uintptr_t, handle *C.char, capacity C.size_t) (code C.int) {
	defer caught(&code)
	l, err := started()
	if err != nil {
		return fail(err)
	}
	text, err := l.sharing().Share(cuda.Ptr(p))
	if err != nil {
		var file *os.PathError
		var call *os.SyscallError
		if errors.As(err, &file) || errors.As(err, &call) { // no place for a socket
			err = &failure{C.CISTERN_UNSUPPORTED, err.Error()}
		}
		return fail(err)
	}
	if uint64(len(text)) >= uint64(capacity) {
		return fail(&failure{C.CISTERN_INVALID, fmt.Sprintf("the handle has %d characters and does not fit into %d bytes: use CISTERN_HANDLE_MAX",
			len(text), uint64(capacity))})
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(handle)), len(text)+1), text+"\x00")
	return C.CISTERN_OK
}

//export coreOpen
func coreOpen(handle *C.char, d C.int, p *C.uintptr_t) (code C.int) {
	defer caught(&code)
	l, err := started()
	if err != nil {
		return fail(err)
	}
	// A handle that is not one may be of any length.
	text := C.GoStringN(handle, C.int(C.strnlen(handle, C.CISTERN_HANDLE_MAX)))
	if _, err := l.device(d); err != nil {
		return fail(err)
	}
	ptr, err := l.sharing().Open(text, cuda.Device(d))
	if err != nil {
		return fail(err)
	}
	*p = C.uintptr_t(ptr)
	return C.CISTERN_OK
}

//export coreClose
func coreClose(p C.uintptr_t) (code C.int) {
	defer caught(&code)
	l, err := started()
	if err != nil {
		return fail(err)
	}
	if err := l.sharing().Close(cuda.Ptr(p)); err != nil {
		return fail(err)
	}
	return C.CISTERN_OK
}

var _ [share.MaxHandle + 1 - C.CISTERN_HANDLE_MAX]struct{} // the header's promise
var _ [C.CISTERN_HANDLE_MAX - share.MaxHandle - 1]struct{}
