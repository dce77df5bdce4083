//go:build linux && cgo

package main

/*
#include "shim.h"
#include "stack.h"
*/
import "C"

import (
	"cmp"
	"fmt"
	"slices"
	"sync/atomic"
	"unicode"
	"unicode/utf8"
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
)

// libraries numbers those that draw on the cache. Number 1 is that of C callers that name none, until a default
// is set.
var (
	libraries      = labels{most: memory.MaxLibrary}
	firstLibrary   = libraries.of("c")
	libraryDefault atomic.Uint32 // 0: firstLibrary
)

const maxLibraryName = 64 // bytes

// libraryNumber is the number of a library, which it gets if it has none.
func libraryNumber(name *C.char) (uint32, error) {
	text := goString(name)
	bad := func(r rune) bool { return !unicode.IsPrint(r) }
	switch {
	case text == "" || len(text) > maxLibraryName:
		return 0, &failure{C.CISTERN_INVALID, fmt.Sprintf("a library's name of %[2]d bytes: expected 1 to %[1]d", maxLibraryName, len(text))}
	case !utf8.ValidString(text) || slices.ContainsFunc([]rune(text), bad):
		return 0, &failure{C.CISTERN_INVALID, fmt.Sprintf("library %q: a name is printable UTF-8", text)}
	}
	n := libraries.of(text)
	if n == 0 {
		return 0, &failure{C.CISTERN_INVALID, fmt.Sprintf("library %q: all %d names are in use", text, libraries.most)}
	}
	return n, nil
}

// defaultLibrary is the number for callers that name no library.
func defaultLibrary() uint32 { return cmp.Or(libraryDefault.Load(), firstLibrary) }

// libraryText is the name of a library as statistics and errors show it, 0 for callers that named none.
func libraryText(n uint8) string {
	return goString(libraries.name(cmp.Or(uint32(n), defaultLibrary())))
}

//export coreLibrary
func coreLibrary(name *C.char) (n C.uint32_t) {
	var code C.int
	defer caught(&code) // n is 0 then
	number, err := libraryNumber(name)
	if err != nil {
		fail(err)
		return 0
	}
	return C.uint32_t(number)
}

//export coreLibraryName
func coreLibraryName(n C.uint32_t) (name *C.char) {
	var code C.int
	defer caught(&code)
	if name = libraries.name(cmp.Or(uint32(n), defaultLibrary())); name == nil {
		fail(&failure{C.CISTERN_INVALID, noLibrary(uint32(n))})
	}
	return name
}

func noLibrary(n uint32) string {
	return fmt.Sprintf("there is no library %d: cistern_library gives the numbers", n)
}

//export coreLibraryDefault
func coreLibraryDefault(name *C.char) (code C.int) {
	defer caught(&code)
	n, err := libraryNumber(name)
	if err != nil {
		return fail(err)
	}
	libraryDefault.Store(n)
	return C.CISTERN_OK
}

// coreAlloc is coreAllocMagazine with options. C has checked their size; by is nil where no stack or thread is
// recorded.
//
//export coreAlloc
func coreAlloc(out *C.uintptr_t, size C.size_t, d C.int, h C.uintptr_t, with *C.cistern_alloc_options, tag C.uint32_t, by *C.stack_origin) (code C.int) {
	defer caught(&code)
	cached := with.flags&C.CISTERN_ALLOC_CACHED != 0
	find := inUse
	if cached {
		find = ifUsed // starting a device takes long
	}
	l, dev, err := find(d)
	if err != nil {
		return fail(err)
	}
	if dev == nil {
		return C.CISTERN_OUT_OF_MEMORY
	}
	switch n := uint32(with.library); {
	case n != 0 && libraries.name(n) == nil:
		return fail(&failure{C.CISTERN_INVALID, "options.library: " + noLibrary(n)})
	case with.flags&^(C.CISTERN_ALLOC_HOST_ORDER|C.CISTERN_ALLOC_CACHED) != 0:
		return fail(&failure{C.CISTERN_INVALID, fmt.Sprintf("options.flags: %#x has unknown flags: expected those of CISTERN_ALLOC_", uint32(with.flags))})
	case with.reserved != 0:
		return fail(&failure{C.CISTERN_INVALID, fmt.Sprintf("options.reserved is %d: expected 0", uint32(with.reserved))})
	}
	o := engine.AllocOptions{Tag: uint32(tag), Library: uint8(with.library), HostOrder: with.flags&C.CISTERN_ALLOC_HOST_ORDER != 0, Cached: cached}
	if by != nil {
		o.Thread, o.Stack = uint32(by.thread), l.stackOf(by)
	}
	p, err := l.alloc(dev, uint64(size), cuda.Stream(h), memory.PoolID{uint64(with.pool[0]), uint64(with.pool[1])}, o)
	if err != nil {
		return failRequest(err)
	}
	if p == 0 && cached && size > 0 {
		return C.CISTERN_OUT_OF_MEMORY // words would take longer than all the rest
	}
	*out = C.uintptr_t(p)
	return C.CISTERN_OK
}

// alloc is AllocWith where stream and pool are what C calls them.
func (l *library) alloc(dev *engine.Device, size uint64, h cuda.Stream, pool memory.PoolID, o engine.AllocOptions) (p cuda.Ptr, err error) {
	if pool != (memory.PoolID{}) {
		if o.Pool, err = l.pool(dev, pool); err != nil {
			return 0, err
		}
	}
	st, err := l.stream(dev, h)
	if err != nil {
		return 0, err
	}
	return dev.AllocWith(size, st, o)
}

// libraryUsage adds up a device's live blocks by library, the most bytes first. Blocks of callers that named none count
// under the default's name.
func libraryUsage(dev *engine.Device) []C.cistern_library_use {
	var out []C.cistern_library_use
	for _, u := range dev.Views.LibraryUsage() {
		n := C.uint32_t(cmp.Or(uint32(u.Library), defaultLibrary()))
		i := slices.IndexFunc(out, func(o C.cistern_library_use) bool { return o.library == n })
		if i < 0 {
			i = len(out)
			out = append(out, C.cistern_library_use{library: n})
		}
		out[i].blocks += C.int64_t(u.Blocks)
		out[i].requested += C.uint64_t(u.Requested)
		out[i].allocated += C.uint64_t(u.Allocated)
	}
	slices.SortStableFunc(out, func(a, b C.cistern_library_use) int { return cmp.Compare(b.allocated, a.allocated) })
	return out
}

//export coreLibraryUsage
func coreLibraryUsage(d C.int, out *C.cistern_library_use, capacity C.size_t, n *C.size_t) (code C.int) {
	defer caught(&code)
	_, dev, err := ifUsed(d)
	if err != nil {
		return fail(err)
	}
	if dev == nil {
		return C.CISTERN_OK
	}
	use := libraryUsage(dev)
	*n = C.size_t(len(use))
	copy(unsafe.Slice(out, min(uint64(capacity), uint64(len(use)))), use)
	return C.CISTERN_OK
}
