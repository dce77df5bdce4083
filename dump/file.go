package dump

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"

	"github.com/cistern-gpu/cistern/internal/nopoll"
)

// WriteFile writes a file beside its place and moves it there once it is whole, so that nobody finds half of one. What
// exists and is no regular file (a pipe, a device) is written to as it is.
func WriteFile(name string, write func(io.Writer) error) error {
	err := writeFile(name, write)
	var at *os.PathError
	if errors.As(err, &at) { // of the name that was given, not of the one beside it
		return fmt.Errorf("%s: cannot be written: %w", name, at.Err)
	}
	return err
}

func writeFile(name string, write func(io.Writer) error) error {
	st, err := os.Stat(name)
	if err == nil && !st.Mode().IsRegular() {
		f, err := nopoll.OpenFile(name, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		return cmp.Or(buffered(f, write), f.Close()) // which has no size
	}
	place := name
	if err == nil {
		if place, err = filepath.EvalSymlinks(name); err != nil {
			return err
		}
	}
	beside := fmt.Sprintf("%s.%d-%d", place, os.Getpid(), unfinished.Add(1))
	f, err := nopoll.OpenFile(beside, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return err
	}
	err = cmp.Or(buffered(&bounded{f, largest()}, write), f.Close())
	if err == nil {
		err = os.Rename(beside, place)
	}
	if err != nil {
		os.Remove(beside)
	}
	return err
}

var errTooLarge = errors.New("files of this process may not be as large (ulimit -f)")

// unfinished numbers the files that are being written.
var unfinished atomic.Int64

func buffered(f io.Writer, write func(io.Writer) error) error {
	b := bufio.NewWriterSize(f, 1<<16)
	return cmp.Or(write(b), b.Flush())
}

// bounded is a file that may not be larger than the process is allowed to make one: the kernel ends who tries (SIGXFSZ), and
// this process is not ours.
type bounded struct {
	w    io.Writer
	left uint64
}

func (b *bounded) Write(p []byte) (int, error) {
	if uint64(len(p)) > b.left {
		return 0, errTooLarge
	}
	n, err := b.w.Write(p)
	b.left -= uint64(n)
	return n, err
}
