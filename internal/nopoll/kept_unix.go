//go:build unix

package nopoll

import (
	"io"
	"os"
	"syscall"
)

// Kept is a file that stays open in a program which may close its descriptor and open another file under the number. Each
// operation first asks whether the file is still the one; between that and the operation it may change, so contents that
// matter have checksums of their own. It is not an os.File, as that closes the number when it is collected.
type Kept struct {
	name string
	fd   int
	dev  uint64
	ino  uint64
	pin  []byte // a mapping, so that no other file gets the inode when the descriptor is closed
}

// Keep is OpenFile for a file that stays open.
func Keep(name string, flag int, perm os.FileMode) (*Kept, error) {
	fd, err := open(name, flag, perm)
	if err != nil {
		return nil, err
	}
	f := &Kept{name: name, fd: fd}
	var st syscall.Stat_t
	if err := syscall.Fstat(fd, &st); err != nil {
		syscall.Close(fd)
		return nil, &os.PathError{Op: "fstat", Path: name, Err: err}
	}
	f.dev, f.ino = uint64(st.Dev), st.Ino
	f.pin, _ = syscall.Mmap(fd, 0, syscall.Getpagesize(), syscall.PROT_NONE, syscall.MAP_SHARED) // refused for what may not be read
	return f, nil
}

// same is the file's status, or ErrGone.
func (f *Kept) same() (st syscall.Stat_t, err error) {
	if syscall.Fstat(f.fd, &st) != nil || uint64(st.Dev) != f.dev || st.Ino != f.ino {
		return st, ErrGone
	}
	return st, nil
}

// mayGrow is an error where the file may not grow to a size: the kernel would send a signal that ends the program.
func mayGrow(size int64) error {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &limit); err == nil && uint64(size) > uint64(limit.Cur) {
		return syscall.EFBIG
	}
	return nil
}

// all makes a call until it has gone through all of b.
func (f *Kept) all(op string, b []byte, call func(b []byte, done int) (int, error)) (int, error) {
	for done := 0; done < len(b); {
		n, err := call(b[done:], done)
		switch {
		case err == syscall.EINTR:
		case err != nil:
			return done, &os.PathError{Op: op, Path: f.name, Err: err}
		case n == 0:
			return done, &os.PathError{Op: op, Path: f.name, Err: io.ErrUnexpectedEOF}
		default:
			done += n
		}
	}
	return len(b), nil
}

// ReadAt fills b.
func (f *Kept) ReadAt(b []byte, at int64) (int, error) {
	if _, err := f.same(); err != nil {
		return 0, err
	}
	return f.all("read", b, func(b []byte, done int) (int, error) { return syscall.Pread(f.fd, b, at+int64(done)) })
}

// WriteAt writes b.
func (f *Kept) WriteAt(b []byte, at int64) (int, error) {
	if _, err := f.same(); err != nil {
		return 0, err
	}
	if err := mayGrow(at + int64(len(b))); err != nil {
		return 0, &os.PathError{Op: "write", Path: f.name, Err: err}
	}
	return f.all("write", b, func(b []byte, done int) (int, error) { return syscall.Pwrite(f.fd, b, at+int64(done)) })
}

// Write writes b where the file ends, or where it was opened to be written.
func (f *Kept) Write(b []byte) (int, error) {
	st, err := f.same()
	if err != nil {
		return 0, err
	}
	if err := mayGrow(st.Size + int64(len(b))); err != nil {
		return 0, &os.PathError{Op: "write", Path: f.name, Err: err}
	}
	return f.all("write", b, func(b []byte, _ int) (int, error) { return syscall.Write(f.fd, b) })
}

// Close closes the file, and nothing that has its number now.
func (f *Kept) Close() error {
	_, err := f.same()
	if err == nil {
		err = syscall.Close(f.fd)
	}
	if f.pin != nil {
		_ = syscall.Munmap(f.pin)
		f.pin = nil
	}
	return err
}
