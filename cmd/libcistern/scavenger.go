//go:build linux && cgo

package main

/*
#include "shim.h"
*/
import "C"

import (
	"runtime"
	"strings"
	"sync/atomic"
	"unsafe"
)

// The scavenger of Go's runtime gives free memory back to the kernel after collections, from a goroutine that waits in between.
// That takes a timer, the first of which opens the runtime's poller, which ends the process where it gets no descriptor, or where
// the program closes those that it has. So the scavenger is made to stop whenever it begins; what is free is given back by
// debug.FreeOSMemory (tidy), and by requests near the limit of the heap.
//
// Its state is a variable of the runtime's with pointers to three functions in a row, the second of which says whether to stop. It
// has no name outside of the runtime; it is known by the names of the functions. Where it is not found all stays as it is.

// stopped is what the scavenger asks.
var stopped = func() bool { return true }

// stopScavenger stops the scavenger, and reports whether it found it.
func stopScavenger() bool {
	var data C.shim_data
	C.shim_find_data(&data)
	const far = 1 << 20 // all variables of Go's with pointers are neighbours
	here := uintptr(unsafe.Pointer(&stopped))
	from, to := max(uintptr(data.from), here-min(here, far))&^7, min(uintptr(data.to), here+far)
	stop := *(*uintptr)(unsafe.Pointer(&stopped))
	for {
		var code [3]C.uintptr_t
		row := uintptr(C.shim_functions(&data, C.uintptr_t(from), C.uintptr_t(to), &code[0]))
		if row == 0 {
			return false
		}
		second := (*uintptr)(at(row + unsafe.Sizeof(row)))
		if scavenges(code[0]) && (*second == stop || scavenges(code[1])) && scavenges(code[2]) {
			atomic.StoreUintptr(second, stop)
			return true
		}
		from = row
	}
}

// scavenges reports whether this is the code of one of the scavenger's functions.
func scavenges(code C.uintptr_t) bool {
	f := runtime.FuncForPC(uintptr(code))
	return f != nil && strings.HasPrefix(f.Name(), "runtime.(*scavengerState).init.func")
}

// at is the memory at an address outside of Go's heap.
func at(p uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&p)) }
