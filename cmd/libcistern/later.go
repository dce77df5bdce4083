//go:build linux && cgo

package main

/*
#include "shim.h"
*/
import "C"

func later() C.int {
	return fail(&failure{C.CISTERN_UNSUPPORTED, "not there yet"})
}

//export coreLargestFree
func coreLargestFree(d C.int, h C.uintptr_t, bytes *C.uint64_t) C.int { return later() }

//export corePoolBlocks
func corePoolBlocks(d C.int, p0, p1 C.uint64_t, out *C.cistern_block, capacity C.size_t, n *C.size_t) C.int {
	return later()
}

//export corePoolRestore
func corePoolRestore(d C.int, p0, p1 C.uint64_t, b *C.cistern_block, n C.size_t) C.int {
	return later()
}
