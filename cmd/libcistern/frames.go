//go:build linux && cgo

package main

/*
#include <stdlib.h>
#include "stack.h"

#cgo noescape stack_place
#cgo nocallback stack_place
#cgo nocallback stack_find_demangler
#cgo noescape stack_demangle
#cgo nocallback stack_demangle
*/
import "C"

import (
	"slices"
	"strings"
	"sync"
	"unsafe"

	"github.com/cistern-gpu/cistern/internal/symbols"
	"github.com/cistern-gpu/cistern/recording"
)

// pythonFrame is in the numbers of Python's frames. The mask is for clang, which tells cgo of a negative constant.
const pythonFrame = C.STACK_PYTHON & (1<<64 - 1)

// frames names the frames of stacks: what stack.c makes of them are numbers.
var frames frameNames

// frameNames remembers what native frames are called: finding that out takes reading the tables of whole libraries.
type frameNames struct {
	mu sync.Mutex
	// +checklocks:mu
	known map[uint64]recording.Frame // as many as the engine's table of stacks has room for
}

// names are the names of frames.
func (f *frameNames) names(numbers []uint64) []recording.Frame {
	f.mu.Lock()
	defer f.mu.Unlock()
	if slices.ContainsFunc(numbers, f.unknown) {
		f.mu.Unlock() // the dynamic linker's lock comes before it
		C.stack_find_demangler()
		f.mu.Lock()
	}
	if f.known == nil {
		f.known = map[uint64]recording.Frame{}
	}
	var unknown, addrs []uint64
	for _, n := range numbers {
		if f.unknown(n) {
			f.known[n] = recording.Frame{} // once is enough
			unknown, addrs = append(unknown, n), append(addrs, n-1)
		}
	}
	for i, p := range symbols.Own(addrs) {
		f.known[unknown[i]] = recording.Frame{File: p.File, Func: demangled(p.Func)}
	}
	out := make([]recording.Frame, len(numbers))
	for i, n := range numbers {
		if n&pythonFrame == 0 {
			out[i] = f.known[n]
			continue
		}
		var p C.stack_python_place
		if C.stack_place(C.uint64_t(n), &p) != 0 { // +checklocksignore: cgo makes function literals of calls
			out[i] = recording.Frame{File: goString(p.file), Func: goString(p.function), Line: int(p.line)}
		}
	}
	return out
}

// unknown reports whether a frame is a native one that is to be named yet. The caller holds mu.
//
// +checklocks:f.mu
func (f *frameNames) unknown(n uint64) bool {
	_, known := f.known[n]
	return !known && n&pythonFrame == 0
}

// named is names as package dump wants them.
func (f *frameNames) named(numbers []uint64) [][]recording.Frame {
	names := f.names(numbers)
	out := make([][]recording.Frame, len(names))
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

// stackText is where a stack comes from in a few words: the frame of it that says most to the author of the program, and
// the one that tells uses of that function apart (recording.Telling, recording.Caller).
func (l *library) stackText(n uint32) (place, from string) {
	numbers := l.Stacks.Frames(n)
	// Finding out what native frames are called takes long, and where there is Python they are not what is looked for.
	if python := slices.DeleteFunc(slices.Clone(numbers), func(f uint64) bool { return f&pythonFrame == 0 }); len(python) > 0 {
		numbers = python
	}
	list := frames.names(numbers)
	telling := recording.Telling(list)
	if telling < 0 {
		return "", ""
	}
	if caller := recording.Caller(list, telling); caller >= 0 {
		from = list[caller].Short()
	}
	return list[telling].Short(), from
}
