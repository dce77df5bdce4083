//go:build linux && cgo

package main

/*
#include "magazine.h"
#include "shim.h"

#cgo noescape shim_fail
#cgo nocallback shim_fail
#cgo noescape shim_fail_oom
#cgo nocallback shim_fail_oom
#cgo noescape shim_report
#cgo nocallback shim_report
#cgo nocallback magazine_stop
#cgo nocallback shim_failed
*/
import "C"

import (
	"errors"
	"fmt"
	"path"
	"runtime"
	"runtime/cgo"
	"strings"
	"unsafe"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/memory"
)

// failure is an error of this package, with its code.
type failure struct {
	code  C.int
	words string
}

func (f *failure) Error() string { return f.words }

// fail keeps an error as the calling thread's last and returns its code. A goroutine that C called into stays on its
// thread, so that is the thread of the caller.
func fail(err error) C.int {
	var oom *memory.OutOfMemoryError
	if errors.As(err, &oom) {
		lines := oomLines(oom)
		file := report(oom, lines)
		code := failOOM(oom, lines)
		keepReport(file)
		return code
	}
	return failWords(codeOf(err), err.Error())
}

// failRequest is fail for what a thread has asked for: what is to be written down of it is, once C has found out from where it
// was asked for (coreFailed).
func failRequest(err error) C.int {
	var oom *memory.OutOfMemoryError
	if !errors.As(err, &oom) || !reporting() {
		return fail(err)
	}
	lines := oomLines(oom)
	code := failOOM(oom, lines)
	C.shim_failed(C.uintptr_t(cgo.NewHandle(&failedRequest{oom, lines})))
	return code
}

func failOOM(oom *memory.OutOfMemoryError, lines []string) C.int {
	words, f := strings.Join(lines, "\n"), oomFigures(oom)
	return C.shim_fail_oom(&f, (*C.char)(unsafe.Pointer(unsafe.StringData(words))), C.size_t(len(words)))
}

// keepReport keeps the name of the file of the calling thread's last failure, for cistern_last_report.
func keepReport(file string) {
	if file != "" {
		C.shim_report((*C.char)(unsafe.Pointer(unsafe.StringData(file))), C.size_t(len(file)))
	}
}

// oomLines are the message of a request that failed.
func oomLines(oom *memory.OutOfMemoryError) []string {
	names := memory.Names{Tag: tagText, Library: libraryText}
	if l := current.Load(); l != nil {
		names.Stack = l.stackText
	}
	return append([]string{oom.Error()}, oom.Findings(names)...)
}

func failWords(code C.int, words string) C.int {
	if words == "" {
		words = "unknown failure"
	}
	return C.shim_fail(code, (*C.char)(unsafe.Pointer(unsafe.StringData(words))), C.size_t(len(words)))
}

func codeOf(err error) C.int {
	var f *failure
	var code cuda.Code
	var stays *memory.PauseError
	switch {
	case errors.As(err, &f):
		return f.code
	case errors.As(err, &stays):
		return C.CISTERN_UNSUPPORTED
	case errors.Is(err, memory.ErrUnknownPointer), errors.Is(err, cuda.ErrInvalidDevice):
		return C.CISTERN_INVALID
	case errors.Is(err, cuda.ErrNotSupported), errors.Is(err, cuda.ErrPeerAccessUnsupported):
		return C.CISTERN_UNSUPPORTED
	case errors.As(err, &code):
		return C.CISTERN_DRIVER
	}
	return C.CISTERN_INVALID // the engine's own words about a call that it refused
}

func oomFigures(e *memory.OutOfMemoryError) C.cistern_oom {
	return C.cistern_oom{
		device:      C.int32_t(e.Device),
		tried:       C.uint32_t(e.Tried),
		pool:        [2]C.uint64_t{C.uint64_t(e.Pool[0]), C.uint64_t(e.Pool[1])},
		requested:   C.uint64_t(e.Requested),
		reserved:    C.uint64_t(e.Reserved),
		allocated:   C.uint64_t(e.Allocated),
		pending:     C.uint64_t(e.Pending),
		pinned:      C.uint64_t(e.Pinned),
		largest:     C.uint64_t(e.Largest),
		limit:       C.uint64_t(e.Limit),
		device_free: C.uint64_t(e.DriverFree),

		device_total: C.uint64_t(e.DriverTotal),
	}
}

// caught makes a panic the failure of the call that defers it, and of every later one.
func caught(code *C.int) {
	if r := recover(); r != nil {
		*code = broke(r)
	}
}

func broke(r any) C.int {
	words := fmt.Sprintf("a bug in Cistern %s, please report it: %v, at %s", cistern.Version, r, where())
	broken.CompareAndSwap(nil, &words)
	current.Store(nil)
	C.magazine_stop()
	return failWords(C.CISTERN_INTERNAL, words)
}

// where is the functions of Cistern on the stack of a panic, innermost first.
func where() string {
	pcs := make([]uintptr, 64)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(0, pcs)])
	var at []string
	for panicked := false; ; {
		f, more := frames.Next()
		switch {
		case strings.HasPrefix(f.Function, "runtime."):
			panicked = panicked || f.Function == "runtime.gopanic"
		case panicked && len(at) < 12:
			at = append(at, fmt.Sprintf("%s (%s:%d)", path.Base(f.Function), path.Base(f.File), f.Line))
		}
		if !more {
			return strings.Join(at, " < ")
		}
	}
}
