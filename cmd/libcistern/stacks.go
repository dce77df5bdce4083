//go:build linux && cgo

package main

/*
#include "stack.h"

#cgo noescape stack_set
#cgo nocallback stack_set
#cgo nocallback stack_thread
#cgo nocallback stack_watch_set
#cgo nocallback stack_taken
*/
import "C"

import (
	"fmt"
	"strings"
	"sync"
	"unsafe"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
)

// coreStart starts the library for a request that wants to know first whether its stack is asked for.
//
//export coreStart
func coreStart() {
	var code C.int
	defer caught(&code)
	_, _ = started()
}

// stackOf is the engine's number of the stack of a request, 0 where none was taken.
func (l *library) stackOf(by *C.stack_origin) uint32 {
	if by.n == 0 {
		return 0
	}
	return l.Stacks.Of(unsafe.Slice((*uint64)(unsafe.Pointer(&by.frames[0])), by.n))
}

// kindsOf is what cistern.h calls the kinds of a setting.
func kindsOf(stacks string) C.uint32_t {
	switch stacks {
	case config.StacksNative:
		return C.CISTERN_STACKS_NATIVE
	case config.StacksPython:
		return C.CISTERN_STACKS_PYTHON
	case config.StacksAll:
		return C.CISTERN_STACKS_NATIVE | C.CISTERN_STACKS_PYTHON
	}
	return 0
}

// takeStacks has stacks of these kinds taken from now on, and kept; the error says why that cannot be.
func (l *library) takeStacks(kinds C.uint32_t, sample uint64) error {
	var why *C.char
	switch C.stack_set(kinds, C.uint64_t(sample), &why) {
	case C.CISTERN_STACKS_NATIVE:
		return &failure{C.CISTERN_UNSUPPORTED, "native stacks: " + goString(why)}
	case C.CISTERN_STACKS_PYTHON:
		return &failure{C.CISTERN_UNSUPPORTED, "stacks of Python's functions: " + goString(why)}
	}
	l.keepStacks()
	return nil
}

// keepStacks has blocks keep stacks while they are taken, by whichever call.
func (l *library) keepStacks() {
	l.keeping.Lock()
	defer l.keeping.Unlock()
	l.Stacks.Keep(C.stack_taken() != 0)
}

// stacksAsSet is takeStacks by the settings. The program may not know Cistern, so a message names kinds that are not
// available, and the others are taken.
func (l *library) stacksAsSet(o config.Options) {
	for kinds := kindsOf(o.Stacks); kinds != 0; {
		err := l.takeStacks(kinds, o.StackSample)
		if err == nil {
			return
		}
		say("cistern: " + err.Error())
		if kinds&C.CISTERN_STACKS_PYTHON == 0 {
			break
		}
		kinds &^= C.CISTERN_STACKS_PYTHON
	}
	l.keepStacks()
}

//export coreStacks
func coreStacks(kinds C.uint32_t, sample C.uint64_t) (code C.int) {
	defer caught(&code)
	if kinds&^(C.CISTERN_STACKS_NATIVE|C.CISTERN_STACKS_PYTHON) != 0 {
		return fail(&failure{C.CISTERN_INVALID, fmt.Sprintf("kinds is %#x, which has unknown flags: expected those of CISTERN_STACKS_", uint32(kinds))})
	}
	l, err := started()
	if err != nil {
		return fail(err)
	}
	if err := l.takeStacks(kinds, uint64(sample)); err != nil {
		return fail(err)
	}
	return C.CISTERN_OK
}

//export coreStackUsage
func coreStackUsage(d C.int, out *C.cistern_stack_use, capacity C.size_t, n *C.size_t) (code C.int) {
	defer caught(&code)
	_, dev, err := ifUsed(d)
	if err != nil {
		return fail(err)
	}
	if dev == nil {
		return C.CISTERN_OK
	}
	use := dev.Views.StackUsage()
	*n = C.size_t(len(use))
	to := unsafe.Slice(out, min(uint64(capacity), uint64(len(use))))
	for i := range to {
		u := &use[i]
		to[i] = C.cistern_stack_use{stack: C.uint32_t(u.Stack), blocks: C.int64_t(u.Blocks), requested: C.uint64_t(u.Requested),
			allocated: C.uint64_t(u.Allocated)}
	}
	return C.CISTERN_OK
}

//export coreStackText
func coreStackText(n C.uint32_t, buf *C.char, size C.size_t) (code C.int) {
	defer caught(&code)
	l, err := started()
	if err != nil {
		return fail(err)
	}
	numbers := l.Stacks.Frames(uint32(n))
	if numbers == nil {
		return fail(&failure{C.CISTERN_INVALID, fmt.Sprintf("there is no stack %d: cistern_stack_usage gives the numbers", uint32(n))})
	}
	if size > 0 {
		to := unsafe.Slice((*byte)(unsafe.Pointer(buf)), min(size, 1<<30))
		to[copy(to[:len(to)-1], stackLines(numbers))] = 0
	}
	return C.CISTERN_OK
}

// stackLines is the frames of a stack, one a line, innermost first.
func stackLines(numbers []uint64) string {
	var b strings.Builder
	for i, f := range frames.names(numbers) {
		if i > 0 {
			b.WriteByte('\n')
		}
		b.WriteString(f.String())
	}
	return b.String()
}

// histories are the devices whose history is on: while there is one, requests and frees say of which thread they are.
var histories struct {
	mu sync.Mutex
	on map[cuda.Device]bool // +checklocks:mu
}

// record says whether a device's history is on.
func record(d cuda.Device, on bool) {
	r := &histories
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.on == nil {
		r.on = map[cuda.Device]bool{}
	}
	if on {
		r.on[d] = true
	} else {
		delete(r.on, d)
	}
	watch := C.int(0)
	if len(r.on) > 0 {
		watch = 1
	}
	C.stack_watch_set(C.WATCH_EVENTS, watch)
}
