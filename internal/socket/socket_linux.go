package socket

import (
	"os"
	"syscall"
	"time"
	"unsafe"
)

// Events of a PollFD.
const (
	In  = 1
	Out = 4
)

// PollFD is a descriptor to wait for, as ppoll has it.
type PollFD struct {
	FD      int32
	Events  int16
	Revents int16
}

// Poll waits until one of the descriptors is ready, for so long at most; negative is for ever.
func Poll(fds []PollFD, d time.Duration) error {
	var timeout *syscall.Timespec
	if d >= 0 {
		ts := syscall.NsecToTimespec(int64(d))
		timeout = &ts
	}
	_, _, errno := syscall.Syscall6(syscall.SYS_PPOLL, uintptr(unsafe.Pointer(unsafe.SliceData(fds))), uintptr(len(fds)),
		uintptr(unsafe.Pointer(timeout)), 0, 0, 0)
	if errno != 0 && errno != syscall.EINTR {
		return os.NewSyscallError("ppoll", errno)
	}
	return nil
}

// Socket is a socket known by its inode: the program may close it and open another file under its number.
type Socket struct {
	FD    int
	inode uint64
}

// Of is the socket of a descriptor.
func Of(fd int) (Socket, error) {
	var st syscall.Stat_t
	if err := syscall.Fstat(fd, &st); err != nil {
		return Socket{}, os.NewSyscallError("fstat", err)
	}
	return Socket{fd, st.Ino}, nil
}

// Ours reports whether the descriptor is still the socket.
func (s Socket) Ours() bool {
	var st syscall.Stat_t
	return syscall.Fstat(s.FD, &st) == nil && st.Mode&syscall.S_IFMT == syscall.S_IFSOCK && st.Ino == s.inode
}

// CloseBy closes the descriptor if it is still the socket.
func (s Socket) CloseBy(g Guard) {
	g.Closing(s.FD)
	if s.Ours() {
		syscall.Close(s.FD)
	}
}
