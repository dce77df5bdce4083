//go:build linux && cgo

package main

/*
#include "magazine.h"
#include "shim.h"

#cgo noescape magazine_add
#cgo nocallback magazine_add
#cgo nocallback magazine_forget_all
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

// magazines are those that C knows. They and the flags of their devices are pinned for the life of the process.
var magazines struct {
	mu     sync.Mutex
	count  uint32         // +checklocks:mu
	pinner runtime.Pinner // +checklocks:mu
}

// noIndex is the index of a magazine that C does not take.
const noIndex = ^uint32(0)

// magazineToken is a token as C has it: the mark above the index by which C knows the magazine, 0 if it does not.
func magazineToken(d *engine.Device, t magazine.Token) C.uint32_t {
	m := t.Magazine
	if m == nil {
		return 0
	}
	i := m.Index()
	if i == 0 {
		i = addMagazine(d, m)
	}
	if i == noIndex {
		return 0
	}
	return C.uint32_t(i | t.Mark<<16)
}

func addMagazine(d *engine.Device, m *magazine.Magazine) uint32 {
	magazines.mu.Lock()
	defer magazines.mu.Unlock()
	if i := m.Index(); i != 0 {
		return i
	}
	if magazines.count == C.MAGAZINE_MAX {
		m.SetIndex(noIndex)
		return noIndex
	}
	if magazines.count == 0 {
		sameLayout()
	}
	magazines.count++
	flags := d.Magazines.Flags()
	magazines.pinner.Pin(m)
	magazines.pinner.Pin(flags)
	C.magazine_add(C.uint32_t(magazines.count), (*C.magazine)(unsafe.Pointer(m)), (*C.magazine_flags)(unsafe.Pointer(flags)))
	m.SetIndex(magazines.count)
	d.Magazines.OnTokensEnd(func() { C.magazine_forget_all() })
	return magazines.count
}

// sameLayout panics unless C and Go see the same structure.
func sameLayout() {
	layout := magazine.Layout()
	if len(layout) != C.MAGAZINE_LAYOUT {
		panic(fmt.Sprintf("magazine.h tells %d offsets, internal/magazine %d", C.MAGAZINE_LAYOUT, len(layout)))
	}
	for i, at := range layout {
		if c := uint64(C.magazine_layout[i]); c != uint64(at) {
			panic(fmt.Sprintf("offset %d of a magazine is %d in C, %d in Go", i, c, at))
		}
	}
	for i, n := range magazine.Constants() {
		if c := int(C.magazine_constants[i]); c != n {
			panic(fmt.Sprintf("constant %d of magazines is %d in C, %d in Go", i, c, n))
		}
	}
}

// coreAllocMagazine is coreAlloc from the default pool without a tag. The token says, unless it is 0, that the block may be
// put into a magazine.
//
//export coreAllocMagazine
func coreAllocMagazine(out *C.uintptr_t, size C.size_t, d C.int, h C.uintptr_t, token *C.uint32_t) (code C.int) {
	defer caught(&code)
	l, dev, err := inUse(d)
	if err != nil {
		return fail(err)
	}
	st, err := l.stream(dev, cuda.Stream(h))
	if err != nil {
		return fail(err)
	}
	p, t, err := dev.Magazines.Alloc(uint64(size), st)
	if err != nil {
		return failRequest(err)
	}
	*out = C.uintptr_t(p)
	*token = magazineToken(dev, t)
	return C.CISTERN_OK
}
