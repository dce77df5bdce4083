//go:build !amd64 && !arm64

package lockrank

import (
	"bytes"
	"runtime"
	"strconv"
)

// goroutine is a number that no other goroutine has: the one that a trace of its stack begins with.
func goroutine() uintptr {
	var buf [64]byte
	text := bytes.TrimPrefix(buf[:runtime.Stack(buf[:], false)], []byte("goroutine "))
	text, _, _ = bytes.Cut(text, []byte(" "))
	n, err := strconv.ParseUint(string(text), 10, 64)
	if err != nil {
		panic(err)
	}
	return uintptr(n)
}
