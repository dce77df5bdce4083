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

// The scavenger of Go's runtime gives free memory back to the kernel after collections, from a goroutine that sleeps in between.
// That takes a timer, the first of which opens the runtime's poller, which ends the process where it gets no descriptor, or where
// the program closes those that it has. So the scavenger is told to stop whenever it begins; what is free is given back by
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
	if from >= to {
		return false
	}
	words := unsafe.Slice((*uintptr)(at(from)), (to-from)/unsafe.Sizeof(from))
	inside := func(p uintptr) bool { return p >= uintptr(data.low) && p < uintptr(data.high)-8 && p%8 == 0 }
	for i := 1; i+3 <= len(words); i++ {
		if words[i-1] != 0 || !inside(words[i]) || !inside(words[i+1]) || !inside(words[i+2]) {
			continue
		}
		if stop := *(*uintptr)(unsafe.Pointer(&stopped)); scavenges(words[i]) && (words[i+1] == stop || scavenges(words[i+1])) && scavenges(words[i+2]) {
			atomic.StoreUintptr(&words[i+1], stop)
			return true
		}
	}
	return false
}

// scavenges reports whether a word that points into this library is one of the scavenger's functions.
func scavenges(word uintptr) bool {
	f := runtime.FuncForPC(*(*uintptr)(at(word)))
	return f != nil && strings.HasPrefix(f.Name(), "runtime.(*scavengerState).init.func")
}

// at is the memory at an address outside of Go's heap.
func at(p uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&p)) }
