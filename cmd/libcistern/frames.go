//go:build linux && cgo

package main

/*
#include <stdlib.h>
#include "stack.h"

#cgo noescape stack_place
#cgo nocallback stack_place
#cgo noescape stack_demangle
#cgo nocallback stack_demangle
*/
import "C"

import (
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unsafe"

	"github.com/cistern-gpu/cistern/internal/symbols"
	"github.com/cistern-gpu/cistern/trace"
)

// frames names the frames of stacks: what stack.c makes of them are numbers.
var frames frameNames

// frameNames remembers what native frames are called: finding that out takes reading the tables of whole libraries.
type frameNames struct {
	mu    sync.Mutex
	known map[uint64]trace.Frame // guarded by mu; as many as the engine's table of stacks has room for
}

// names are the names of frames.
func (f *frameNames) names(numbers []uint64) []trace.Frame {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.known == nil {
		f.known = map[uint64]trace.Frame{}
	}
	var unknown, addrs []uint64
	for _, n := range numbers {
		if n&C.STACK_PYTHON != 0 {
			continue
		}
		if _, known := f.known[n]; !known {
			f.known[n] = trace.Frame{} // once is enough
			unknown, addrs = append(unknown, n), append(addrs, n-1)
		}
	}
	for i, p := range symbols.Own(addrs) {
		f.known[unknown[i]] = trace.Frame{File: p.File, Func: demangled(p.Func)}
	}
	out := make([]trace.Frame, len(numbers))
	for i, n := range numbers {
		if n&C.STACK_PYTHON == 0 {
			out[i] = f.known[n]
			continue
		}
		var p C.stack_python_place
		if C.stack_place(C.uint64_t(n), &p) != 0 {
			out[i] = trace.Frame{File: goString(p.file), Func: goString(p.function), Line: int(p.line)}
		}
	}
	return out
}

// named is names as package dump wants them.
func (f *frameNames) named(numbers []uint64) [][]trace.Frame {
	names := f.names(numbers)
	out := make([][]trace.Frame, len(names))
	for i := range names {
		out[i] = names[i : i+1]
	}
	return out
}

// demangled is the name of a function as people write it.
func demangled(name string) string {
	if !strings.HasPrefix(name, "_Z") {
		return name
	}
	text := C.CString(name)
	defer C.free(unsafe.Pointer(text))
	if plain := C.stack_demangle(text); plain != nil {
		name = goString(plain)
		C.free(unsafe.Pointer(plain))
	}
	return name
}

// frameText is a frame as a line: "function file:line", or as much of it as is known.
func frameText(f trace.Frame) string {
	text := f.Func
	if f.File != "" {
		text += " " + f.File
		if f.Line > 0 {
			text += ":" + strconv.Itoa(f.Line)
		}
	}
	return text
}

// stackText is where a stack comes from in a few words: the frame of it that says most to the one who wrote the program, and
// its caller where that says as much. That frame is the innermost one in Python that is not of an installed library, else
// the innermost in Python; where there is no Python the innermost with a name that is not of the libraries between a program
// and its memory.
func (l *library) stackText(n uint32) string {
	numbers := l.StackFrames(n)
	// Finding out what native frames are called takes long, and where there is Python they are not what is looked for.
	if python := slices.DeleteFunc(slices.Clone(numbers), func(f uint64) bool { return f&C.STACK_PYTHON == 0 }); len(python) > 0 {
		numbers = python
	}
	list := frames.names(numbers)
	rank, best := 0, 0
	for i, f := range list {
		if r := telling(f); r > rank {
			rank, best = r, i
		}
	}
	if rank == 0 {
		return ""
	}
	f := list[best]
	text := f.Func
	if f.Line > 0 {
		text += " " + f.File + ":" + strconv.Itoa(f.Line)
	} else if f.File != "" {
		text += " in " + filepath.Base(f.File)
	}
	// Programs ask for memory through functions of their own: the caller tells one use of such a function from another.
	if best+1 < len(list) && telling(list[best+1]) == rank {
		caller := list[best+1]
		text += " < " + caller.Func
		if caller.Line > 0 {
			text += " " + filepath.Base(caller.File) + ":" + strconv.Itoa(caller.Line)
		}
	}
	return text
}

// telling is how much a frame says to the one who wrote the program.
func telling(f trace.Frame) int {
	python := f.Line > 0 || strings.HasPrefix(f.File, "<")
	switch {
	case f.Func == "":
		return 0
	case python && !installed(f.File):
		return 4
	case python:
		return 3
	case between(filepath.Base(f.File)) || strings.Contains(f.Func, "+0x") || strings.HasPrefix(f.Func, "0x"):
		return 1
	}
	return 2
}

// installed reports whether a file of Python source came with Python or was installed into it.
func installed(file string) bool {
	return strings.Contains(file, "/site-packages/") || strings.Contains(file, "/dist-packages/") ||
		strings.Contains(file, "/lib/python3") || strings.HasPrefix(file, "<frozen")
}

// between reports whether a library stands between programs and their memory.
func between(library string) bool {
	for _, begin := range []string{"libc.", "libc10", "libtorch", "libcuda", "libstdc++", "libgcc", "libpython", "libffi",
		"_ctypes", "libcistern", "cistern_torch", "python3", "librmm", "ld-linux", "libpthread"} {
		if strings.HasPrefix(library, begin) {
			return true
		}
	}
	return false
}
