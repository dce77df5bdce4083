package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cistern-gpu/cistern/report"
)

// output is a file that appears whole or not at all: it is written beside its place and renamed into it. What is there
// already and is no regular file (a pipe, a device) is written as it is.
type output struct {
	path string
	file *os.File
	w    *bufio.Writer
	temp string // "" where path itself is written
}

// createOutput opens an output, before the work whose result goes there: so that a place that cannot be written is
// known at once.
func createOutput(path string) (*output, error) {
	st, err := os.Stat(path)
	if err == nil && st.IsDir() {
		return nil, fmt.Errorf("%s: is a directory, want a file to write", path)
	}
	if err == nil && !st.Mode().IsRegular() {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return nil, cannotWrite(path, err)
		}
		return &output{path: path, file: f, w: bufio.NewWriterSize(f, 1<<16)}, nil
	}
	// A link keeps pointing where it did.
	real := path
	if r, err := filepath.EvalSymlinks(path); err == nil {
		real = r
	}
	mode := fs.FileMode(0o644)
	if err == nil {
		mode = st.Mode().Perm()
		// A file that its owner made read-only is not to be replaced, though its folder would allow that.
		f, err := os.OpenFile(real, os.O_WRONLY, 0)
		if err != nil {
			return nil, cannotWrite(path, err)
		}
		f.Close()
	}
	f, err := os.CreateTemp(filepath.Dir(real), ".cistern-*")
	if err != nil {
		return nil, cannotWrite(path, err)
	}
	if err := f.Chmod(mode); err != nil && !errors.Is(err, errors.ErrUnsupported) {
		f.Close()
		os.Remove(f.Name())
		return nil, cannotWrite(path, err)
	}
	return &output{path: real, file: f, w: bufio.NewWriterSize(f, 1<<16), temp: f.Name()}, nil
}

func cannotWrite(path string, err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		err = pe.Err
	}
	return fmt.Errorf("%s: cannot be written: %w", path, err)
}

func (o *output) Write(p []byte) (int, error) { return o.w.Write(p) }

// commit puts the file in its place. What was written is gone if it fails.
func (o *output) commit() error {
	err := o.w.Flush()
	if o.file != nil {
		if cerr := o.file.Close(); err == nil {
			err = cerr
		}
	}
	if err == nil && o.temp != "" {
		err = os.Rename(o.temp, o.path)
	}
	if err != nil {
		if o.temp != "" {
			os.Remove(o.temp)
		}
		return cannotWrite(o.path, err)
	}
	o.file = nil
	return nil
}

// abandon drops the output unless it was committed.
func (o *output) abandon() {
	if o == nil || o.file == nil {
		return
	}
	o.file.Close()
	if o.temp != "" {
		os.Remove(o.temp)
	}
	o.file = nil
}

// openOutput is createOutput, with "-" for standard output.
func (a *app) openOutput(path string) (*output, error) {
	if path == "-" {
		return &output{path: "standard output", file: nil, w: bufio.NewWriterSize(a.out, 1<<16)}, nil
	}
	return createOutput(path)
}

// openPage is openOutput for a page, nil where none is wanted (""). That this command has none is said before any work.
func (a *app) openPage(path string) (*output, error) {
	if path == "" {
		return nil, nil
	}
	if err := report.CheckBundle(); err != nil {
		return nil, err
	}
	return a.openOutput(path)
}

// writeJSON prints a value: indented for a person to read, or on one line.
func writeJSON(w io.Writer, v any, indent bool) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	if indent {
		e.SetIndent("", "  ")
	}
	return e.Encode(v)
}
