//go:build linux && cgo

package main

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"

	"github.com/cistern-gpu/cistern/internal/text"
	"github.com/cistern-gpu/cistern/memory"
)

var tags = labels{most: memory.MaxTag}

//export coreTag
func coreTag(name *C.char, tag *C.uint32_t) (code C.int) {
	defer caught(&code)
	label := text.Clean(goString(name))
	n := tags.of(label)
	if n == 0 {
		return fail(&failure{C.CISTERN_INVALID, fmt.Sprintf("tag %q: all %d names are in use", label, tags.most)})
	}
	*tag = C.uint32_t(n)
	return C.CISTERN_OK
}

//export coreTagName
func coreTagName(tag C.uint32_t) (name *C.char) {
	var code C.int
	defer caught(&code)
	if name = tags.name(uint32(tag)); name == nil {
		fail(&failure{C.CISTERN_INVALID, fmt.Sprintf("there is no tag %d", uint32(tag))})
	}
	return name
}

// tagText is the name of a tag, "" where there is no such tag.
func tagText(tag uint32) string { return goString(tags.name(tag)) }
