//go:build linux && cgo

package main

import "C"

import (
	"sync/atomic"

	"github.com/cistern-gpu/cistern/internal/stackspace"
)

// readied is how often threads were made ready for Go.
var readied atomic.Uint64

// coreReady makes space on the stack of the calling thread's goroutine. C calls it before anything else, with the thread's
// signals blocked.
//
//export coreReady
func coreReady() {
	stackspace.Make()
	if readied.Add(1)%readyBatch == 0 {
		fitLimit()
	}
}

// readyBatch threads have stacks of stackStep.
const readyBatch = stackStep / (256 << 10)
