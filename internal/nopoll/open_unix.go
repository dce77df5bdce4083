//go:build unix

package nopoll

import (
	"os"
	"syscall"
)

// OpenFile is os.OpenFile. What is opened without waiting for it (O_NONBLOCK) would be polled all the same.
func OpenFile(name string, flag int, perm os.FileMode) (*os.File, error) {
	for {
		fd, err := syscall.Open(name, flag&^syscall.O_NONBLOCK|syscall.O_CLOEXEC, uint32(perm.Perm()))
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return nil, &os.PathError{Op: "open", Path: name, Err: err}
		}
		return os.NewFile(uintptr(fd), name), nil
	}
}
