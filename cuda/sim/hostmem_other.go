//go:build !linux && !darwin

package sim

import (
	"errors"
	"unsafe"
)

// hostMemory is memory of the process in whole pages, not collected while the slice is kept: Go does not
// move what is on its heap.
func hostMemory(size uint64) ([]byte, error) {
	if size > 1<<40 {
		return nil, errors.New("out of memory")
	}
	b := make([]byte, size+hostPage)
	off := -uintptr(unsafe.Pointer(&b[0])) % hostPage
	return b[off : off+uintptr(size) : off+uintptr(size)], nil
}

func freeHostMemory([]byte) {}
