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

// mapChunk maps a file whole, shared; grown: after giving it that size. What was never written takes no memory.
func mapChunk(fd int, size uint64, grow bool) ([]byte, error) {
	if grow {
		if err := syscall.Ftruncate(fd, int64(size)); err != nil {
			return nil, err
		}
	}
	var st syscall.Stat_t
	if err := syscall.Fstat(fd, &st); err != nil || uint64(st.Size) != size {
		return nil, syscall.EINVAL
	}
	return syscall.Mmap(fd, 0, int(size), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED|syscall.MAP_NORESERVE)
}

func unmapChunk(b []byte) { _ = syscall.Munmap(b) }

func closeFile(fd int) { syscall.Close(fd) }

// copyFile is another descriptor of a file, closed on exec.
func copyFile(fd int) (int, error) {
	n, _, errno := syscall.Syscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_DUPFD_CLOEXEC, 0)
	if errno != 0 {
		return -1, errno
	}
	return int(n), nil
}

// readHead fills b from the start of a regular file.
func readHead(fd int, b []byte) bool {
	var st syscall.Stat_t
	if syscall.Fstat(fd, &st) != nil || st.Mode&syscall.S_IFMT != syscall.S_IFREG {
		return false
	}
	n, err := syscall.Pread(fd, b, 0)
	return err == nil && n == len(b)
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
