//go:build linux && cgo

package external

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "library.h"
*/
import "C"

import (
	"errors"
	"strings"
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
)

// functions are the two of a library that is loaded. It is never closed: its memory may be out.
type functions struct{ c C.external_functions }

// load takes no lock: a library's constructor may come back here.
func load(o Options) (*functions, error) {
	path, alloc, free := C.CString(o.Library), C.CString(o.Alloc), C.CString(o.Free)
	defer func() {
		for _, s := range []*C.char{path, alloc, free} {
			C.free(unsafe.Pointer(s))
		}
	}()
	var f functions
	var reason [512]C.char
	if C.external_load(path, alloc, free, &f.c, &reason[0], C.size_t(len(reason))) == 0 {
		return nil, errors.New("external: " + strings.Join(strings.Fields(C.GoString(&reason[0])), " "))
	}
	return &f, nil
}

func (f *functions) alloc(size uint64, dev cuda.Device, st cuda.Stream) cuda.Ptr {
	return cuda.Ptr(C.external_alloc(f.c.alloc, C.size_t(size), C.int(dev), C.uintptr_t(st)))
}

func (f *functions) dealloc(p cuda.Ptr, size uint64, dev cuda.Device, st cuda.Stream) {
	C.external_free(f.c.free, C.uintptr_t(p), C.size_t(size), C.int(dev), C.uintptr_t(st))
}
