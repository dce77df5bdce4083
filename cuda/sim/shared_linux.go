package sim

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"syscall"
)

// lockedFile is an open file with a lock. Package os is not used: its files open the poller of Go's runtime, which the C library must
// not.
type lockedFile struct {
	fd       int
	dev, ino uint64
}

// openLocked opens a regular file, which it makes where there is none.
func openLocked(path string) (*lockedFile, error) {
	const flags = syscall.O_RDWR | syscall.O_CREAT | syscall.O_CLOEXEC | syscall.O_NONBLOCK | syscall.O_NOCTTY
	fd, err := retried(func() (int, error) { return syscall.Open(path, flags, 0o600) })
	if err != nil {
		return nil, fmt.Errorf("open: %w", err)
	}
	var st syscall.Stat_t
	if err = syscall.Fstat(fd, &st); err == nil && st.Mode&syscall.S_IFMT != syscall.S_IFREG {
		err = errors.New("expected a regular file")
	}
	if err != nil {
		syscall.Close(fd)
		return nil, err
	}
	return &lockedFile{fd: fd, dev: uint64(st.Dev), ino: st.Ino}, nil
}

// retried makes a system call again where a signal ended it.
func retried(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if err != syscall.EINTR {
			return n, err
		}
	}
}

// size is the file's. A program may have closed the descriptor, whose number may be another file's now.
func (f *lockedFile) size() (int64, error) {
	var st syscall.Stat_t
	if err := syscall.Fstat(f.fd, &st); err != nil || uint64(st.Dev) != f.dev || st.Ino != f.ino {
		return 0, errors.New("the program closed the file's descriptor")
	}
	return st.Size, nil
}

// reopened opens the file of a descriptor anew, with a lock of its own, and closes the descriptor.
func reopened(fd int) (*lockedFile, error) {
	defer syscall.Close(fd)
	return openLocked("/proc/self/fd/" + strconv.Itoa(fd))
}

// number is the descriptor, by which other processes find the file in /proc.
func (f *lockedFile) number() uint64 { return uint64(f.fd) }

// read fills b from an offset on. What lies beyond the end of the file is left as it is.
func (f *lockedFile) read(b []byte, at int64) error {
	for len(b) > 0 {
		n, err := retried(func() (int, error) { return syscall.Pread(f.fd, b, at) })
		if err != nil || n == 0 {
			return err
		}
		b, at = b[n:], at+int64(n)
	}
	return nil
}

func (f *lockedFile) lock() error {
	if _, err := f.size(); err != nil {
		return err
	}
	_, err := retried(func() (int, error) { return 0, syscall.Flock(f.fd, syscall.LOCK_EX) })
	return err
}

func (f *lockedFile) unlock() error { return syscall.Flock(f.fd, syscall.LOCK_UN) }

func (f *lockedFile) close() {
	if _, err := f.size(); err == nil {
		syscall.Close(f.fd)
	}
}

// contents appends the file to b, which it reads in one call, and at most limit bytes of it.
func (f *lockedFile) contents(b []byte, limit int) ([]byte, error) {
	size, err := f.size()
	if err != nil {
		return nil, err
	}
	n := int(min(size, int64(limit)))
	if cap(b) < n {
		b = make([]byte, n, 2*n)
	}
	b = b[:n]
	got, err := retried(func() (int, error) { return syscall.Pread(f.fd, b, 0) })
	if err == nil && got != n {
		err = fmt.Errorf("read %d bytes of %d", got, n)
	}
	return b, err
}

// write writes a block. A disk that is full takes none of it: blocks are aligned to their size, as those of file systems are.
func (f *lockedFile) write(b []byte, at int64) error {
	n, err := retried(func() (int, error) { return syscall.Pwrite(f.fd, b, at) })
	if err == nil && n != len(b) {
		err = fmt.Errorf("wrote %d bytes of %d", n, len(b))
	}
	return err
}

// thisProcess is the number and the start of this process.
func thisProcess() (pid, start uint64, err error) {
	pid = uint64(syscall.Getpid())
	start, _, err = processStat(pid)
	return pid, start, err
}

// processEnded reports whether the process is gone, or has ended and waits for its parent. One whose /proc entry is hidden counts as
// alive while it is there.
func processEnded(pid, start uint64) bool {
	began, over, err := processStat(pid)
	if err != nil {
		return syscall.Kill(int(pid), 0) == syscall.ESRCH
	}
	return over || began != start
}

// processStat reads when a process started, in clock ticks since boot, and whether its last thread has ended.
func processStat(pid uint64) (start uint64, over bool, err error) {
	path := "/proc/" + strconv.FormatUint(pid, 10) + "/stat"
	fd, err := retried(func() (int, error) { return syscall.Open(path, syscall.O_RDONLY|syscall.O_CLOEXEC, 0) })
	if err != nil {
		return 0, false, fmt.Errorf("%s: %w", path, err)
	}
	defer syscall.Close(fd)
	var b [1024]byte
	n, err := retried(func() (int, error) { return syscall.Read(fd, b[:]) })
	if err != nil {
		return 0, false, fmt.Errorf("%s: %w", path, err)
	}
	text := string(b[:n])
	// The name, in parentheses, may have any character. After it come the state, field 3, the number of threads, 20, and the
	// start, 22. A process whose first thread alone has ended is in state Z too.
	f := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(f) < 20 {
		return 0, false, fmt.Errorf("%s: %d fields: expected 20 or more after the name", path, len(f))
	}
	threads, err := strconv.ParseUint(f[17], 10, 64)
	if err == nil {
		start, err = strconv.ParseUint(f[19], 10, 64)
	}
	if err != nil {
		return 0, false, fmt.Errorf("%s: %w", path, err)
	}
	return start, f[0] == "X" || f[0] == "Z" && threads <= 1, nil
}
