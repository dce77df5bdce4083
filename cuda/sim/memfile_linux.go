//go:build amd64 || arm64

package sim

import (
	"runtime"
	"syscall"
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
)

const exportable = cuda.HandlePosix

// memoryFile is a descriptor of a new file in memory with the given contents, closed on exec.
func memoryFile(contents []byte) (int, error) {
	memfdCreate := uintptr(319) // package syscall has the number for newer systems only
	if runtime.GOARCH == "arm64" {
		memfdCreate = 279
	}
	name := []byte("cistern-sim-chunk\x00")
	const closeOnExec = 1
	fd, _, errno := syscall.Syscall(memfdCreate, uintptr(unsafe.Pointer(&name[0])), closeOnExec, 0)
	if errno != 0 {
		return -1, errno
	}
	if n, err := syscall.Write(int(fd), contents); err != nil || n != len(contents) {
		syscall.Close(int(fd))
		return -1, err
	}
	return int(fd), nil
}

// readFile fills b from the start of the file and reports whether the file has exactly as many bytes.
func readFile(fd int, b []byte) bool {
	var st syscall.Stat_t
	if syscall.Fstat(fd, &st) != nil || st.Size != int64(len(b)) {
		return false
	}
	n, err := syscall.Pread(fd, b, 0)
	return err == nil && n == len(b)
}
