//go:build linux && cgo

package nccl

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "library.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
)

// soname is what the library is called, also among those that are loaded.
const soname = "libnccl.so.2"

// library is an NCCL that is open. It is never closed: its memory may be out.
type library struct{ c *C.nccl_library }

var (
	mu sync.Mutex
	// +checklocks:mu
	open *library // one for the process, as NCCL itself is
)

// load finds NCCL: loaded already, at the path, or where it may lie.
func load(path string) (*library, error) {
	mu.Lock()
	defer mu.Unlock()
	if open != nil {
		if err := open.is(path); err != nil {
			return nil, fmt.Errorf("nccl: %w", err)
		}
		return open, nil
	}
	l, loaded := try(soname, true)
	var tried error
	if loaded == nil {
		tried = l.is(path)
	}
	if loaded != nil {
		places := []string{path}
		if path == "" {
			places = append([]string{soname}, installed()...)
		}
		for _, p := range places {
			if l, tried = try(p, false); tried == nil {
				break
			}
		}
		if tried != nil && path == "" {
			tried = fmt.Errorf("no %s is loaded or found (%w): name it with nccl:library=/path/to/%s", soname, tried, soname)
		}
	}
	if tried != nil {
		return nil, fmt.Errorf("nccl: %w", tried)
	}
	open = l
	return l, nil
}

// is reports, as an error, that a path is not that of the library: a process has one NCCL.
func (l *library) is(path string) error {
	if path == "" {
		return nil
	}
	want, err := os.Stat(path)
	if err != nil {
		return err
	}
	file := C.GoString(C.nccl_file(l.c))
	if have, err := os.Stat(file); err == nil && os.SameFile(have, want) {
		return nil
	}
	return fmt.Errorf("the process already uses the NCCL of %s, which is not %s", file, path)
}

func try(path string, loaded bool) (*library, error) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	var reason [512]C.char
	only := C.int(0)
	if loaded {
		only = 1
	}
	c := C.nccl_open(name, only, &reason[0], C.size_t(len(reason)))
	if c == nil {
		return nil, errors.New(strings.Join(strings.Fields(C.GoString(&reason[0])), " "))
	}
	return &library{c}, nil
}

func (l *library) alloc(size uint64) (cuda.Ptr, int) {
	var p C.uintptr_t
	code := C.nccl_alloc(l.c, &p, C.size_t(size))
	return cuda.Ptr(p), int(code)
}

func (l *library) free(p cuda.Ptr) int { return int(C.nccl_free(l.c, C.uintptr_t(p))) }

func (l *library) words(code int) string { return C.GoString(C.nccl_words(l.c, C.int(code))) }
