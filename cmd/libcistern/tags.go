//go:build linux && cgo

package main

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/cistern-gpu/cistern"
)

// tags numbers the names of tags, from 1. A name stays for the life of the process.
var tags struct {
	mu     sync.Mutex
	number map[string]uint32         // guarded by mu
	names  atomic.Pointer[[]*C.char] // by number - 1; replaced under mu, read without
}

//export coreTag
func coreTag(name *C.char, tag *C.uint32_t) (code C.int) {
	defer caught(&code)
	text := goString(name)
	t := &tags
	t.mu.Lock()
	defer t.mu.Unlock()
	if n, ok := t.number[text]; ok {
		*tag = C.uint32_t(n)
		return C.CISTERN_OK
	}
	var names []*C.char
	if old := t.names.Load(); old != nil {
		names = *old
	}
	if len(names) >= cistern.MaxTag {
		return fail(&failure{C.CISTERN_INVALID, fmt.Sprintf("tag %q: %d names are in use, and there are no more", text, len(names))})
	}
	names = append(names, C.CString(text)) // readers see a length, so what they see never changes
	t.names.Store(&names)
	if t.number == nil {
		t.number = map[string]uint32{}
	}
	t.number[text] = uint32(len(names))
	*tag = C.uint32_t(len(names))
	return C.CISTERN_OK
}

// tagName is the C string of a tag's name, nil where there is no such tag.
func tagName(tag uint32) *C.char {
	names := tags.names.Load()
	if names == nil || tag == 0 || int(tag) > len(*names) {
		return nil
	}
	return (*names)[tag-1]
}

//export coreTagName
func coreTagName(tag C.uint32_t) (name *C.char) {
	var code C.int
	defer caught(&code)
	if name = tagName(uint32(tag)); name == nil {
		fail(&failure{C.CISTERN_INVALID, fmt.Sprintf("there is no tag %d", uint32(tag))})
	}
	return name
}

// tagText is tagName for Go, "" where there is no such tag.
func tagText(tag uint32) string { return goString(tagName(tag)) }
