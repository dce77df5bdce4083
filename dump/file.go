package dump

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/cistern-gpu/cistern/internal/outfile"
)

// WriteFile writes a recording, whole or not at all; a new one is for its owner only.
func WriteFile(name string, write func(io.Writer) error) error {
	err := writeFile(name, write)
	var at *os.PathError
	if errors.As(err, &at) { // of the name that was given, not of the one beside it
		return fmt.Errorf("%s: cannot be written: %w", name, at.Err)
	}
	return err
}

func writeFile(name string, write func(io.Writer) error) error {
	f, err := outfile.Create(name, outfile.Private)
	if err != nil {
		return err
	}
	defer f.Abandon()
	var w io.Writer = f
	if f.Replaces() { // else it has no size
		w = &bounded{f, largest()}
	}
	if err := buffered(w, write); err != nil {
		return err
	}
	return f.Commit()
}

var errTooLarge = errors.New("the file is larger than this process may write (ulimit -f)")

func buffered(f io.Writer, write func(io.Writer) error) error {
	b := bufio.NewWriterSize(f, 1<<16)
	return cmp.Or(write(b), b.Flush())
}

// bounded is a file that may not be larger than the process is allowed to make one: the kernel ends a process that tries (SIGXFSZ), and
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
