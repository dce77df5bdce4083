//go:build linux && cgo

package main

/*
#include "front.h"
#include "shim.h"

#cgo noescape front_add
#cgo nocallback front_add
#cgo nocallback front_forget_all
*/
import "C"

import (
	"fmt"
	"runtime"
	"sync"
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/internal/magazine"
)

// fronts are those that C knows. They and the flags of their devices are pinned for the life of the process.
var fronts struct {
	mu     sync.Mutex
	count  uint32         // +checklocks:mu
	pinner runtime.Pinner // +checklocks:mu
}

// noIndex is the index of a front that C does not take.
const noIndex = ^uint32(0)

// frontTicket is a ticket as C has it: the mark above the index by which C knows the front, 0 if it does not.
func frontTicket(d *engine.Device, t magazine.Token) C.uint32_t {
	f := t.Magazine
	if f == nil {
		return 0
	}
	i := f.Index()
	if i == 0 {
		i = addFront(d, f)
	}
	if i == noIndex {
		return 0
	}
	return C.uint32_t(i | t.Mark<<16)
}

func addFront(d *engine.Device, f *magazine.Magazine) uint32 {
	fronts.mu.Lock()
	defer fronts.mu.Unlock()
	if i := f.Index(); i != 0 {
		return i
	}
	if fronts.count == C.FRONT_MAX {
		f.SetIndex(noIndex)
		return noIndex
	}
	if fronts.count == 0 {
		sameLayout()
	}
	fronts.count++
	flags := d.MagazineFlags()
	fronts.pinner.Pin(f)
	fronts.pinner.Pin(flags)
	C.front_add(C.uint32_t(fronts.count), (*C.front)(unsafe.Pointer(f)), (*C.front_flags)(unsafe.Pointer(flags)))
	f.SetIndex(fronts.count)
	d.OnTokensEnd(func() { C.front_forget_all() })
	return fronts.count
}

// sameLayout panics unless C and Go see the same structure.
func sameLayout() {
	layout := magazine.Layout()
	if len(layout) != C.FRONT_LAYOUT {
		panic(fmt.Sprintf("front.h tells %d offsets, internal/magazine %d", C.FRONT_LAYOUT, len(layout)))
	}
	for i, at := range layout {
		if c := uint64(C.front_layout[i]); c != uint64(at) {
			panic(fmt.Sprintf("offset %d of a front is %d in C, %d in Go", i, c, at))
		}
	}
	for i, n := range magazine.Constants() {
		if c := int(C.front_constants[i]); c != n {
			panic(fmt.Sprintf("constant %d of fronts is %d in C, %d in Go", i, c, n))
		}
	}
}

// coreAllocFront is coreAlloc from the default pool without a tag. The ticket says, unless it is 0, that the block may be
// put into the tray of a front.
//
//export coreAllocFront
func coreAllocFront(out *C.uintptr_t, size C.size_t, d C.int, h C.uintptr_t, ticket *C.uint32_t) (code C.int) {
	defer caught(&code)
	l, dev, err := inUse(d)
	if err != nil {
		return fail(err)
	}
	st, err := l.stream(dev, cuda.Stream(h))
	if err != nil {
		return fail(err)
	}
	p, t, err := dev.AllocMagazine(uint64(size), st)
	if err != nil {
		return failRequest(err)
	}
	*out = C.uintptr_t(p)
	*ticket = frontTicket(dev, t)
	return C.CISTERN_OK
}
