//go:build linux || darwin

package sim

import "syscall"

// hostMemory is memory of the process outside of Go's heap, in whole pages, of which only what is touched is really taken.
func hostMemory(size uint64) ([]byte, error) {
	const prot = syscall.PROT_READ | syscall.PROT_WRITE
	return syscall.Mmap(-1, 0, int(size), prot, syscall.MAP_ANON|syscall.MAP_PRIVATE|syscall.MAP_NORESERVE)
}

func freeHostMemory(b []byte) { _ = syscall.Munmap(b) }
