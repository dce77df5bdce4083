package environ

import _ "unsafe" // for go:linkname

// auxv is what the kernel told the program at its start, pairs of a key and a value. The runtime lets x/sys/unix have it too.
//
//go:linkname auxv runtime.getAuxv
func auxv() []uintptr

const atSecure = 23

func secure() bool { return valueOf(auxv(), atSecure) != 0 }

func valueOf(pairs []uintptr, key uintptr) uintptr {
	for ; len(pairs) >= 2; pairs = pairs[2:] {
		if pairs[0] == key {
			return pairs[1]
		}
	}
	return 0
}
