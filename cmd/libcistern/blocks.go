//go:build linux && cgo

package main

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
)

// blockOf is an allocation in C.
func blockOf(b memory.Block) C.cistern_block {
	c := C.cistern_block{
		addr:      C.uint64_t(b.Base),
		size:      C.uint64_t(b.Size),
		requested: C.uint64_t(b.Requested),
		pool:      poolOf(b.Pool),
		device:    C.int32_t(b.Device),
		state:     C.CISTERN_BLOCK_USED,
		tag:       C.uint32_t(b.Tag),
		library:   C.uint8_t(b.Library),
	}
	putHandle(&c.stream, b.Handle)
	return c
}

//export corePoolBlocks
func corePoolBlocks(d C.int, pool0, pool1 C.uint64_t, out *C.cistern_block, capacity C.size_t, n *C.size_t) (code C.int) {
	defer caught(&code)
	return onPool(d, pool0, pool1, func(_ *library, _ *engine.Device, p *engine.Pool) error {
		blocks := p.Blocks()
		*n = C.size_t(len(blocks))
		blocks = blocks[:min(uint64(capacity), uint64(len(blocks)))]
		to := unsafe.Slice(out, len(blocks))
		for i, b := range blocks {
			to[i] = blockOf(b)
		}
		return nil
	})
}

// maxBlocks bounds the blocks of cistern_pool_restore; a device has addresses for fewer.
const maxBlocks = 1 << 32

//export corePoolRestore
func corePoolRestore(d C.int, pool0, pool1 C.uint64_t, list *C.cistern_block, n C.size_t) (code C.int) {
	defer caught(&code)
	return onPool(d, pool0, pool1, func(_ *library, _ *engine.Device, p *engine.Pool) error {
		if n > maxBlocks {
			return &failure{C.CISTERN_INVALID, fmt.Sprintf("%d blocks are more than a pool can have", uint64(n))}
		}
		blocks := make([]memory.Block, n)
		for i, c := range unsafe.Slice(list, n) {
			blocks[i] = memory.Block{Base: cuda.Ptr(c.addr), Size: uint64(c.size), Requested: uint64(c.requested), Tag: uint32(c.tag),
				Library: uint8(c.library)}
		}
		return p.Restore(blocks)
	})
}

//export coreLargestFree
func coreLargestFree(d C.int, h C.uintptr_t, bytes *C.uint64_t) (code C.int) {
	defer caught(&code)
	return onStream(d, h, func(dev *engine.Device, st *engine.Stream) error {
		*bytes = C.uint64_t(dev.Views.LargestFree(st))
		return nil
	})
}
