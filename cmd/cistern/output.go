package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/cistern-gpu/cistern/internal/outfile"
	"github.com/cistern-gpu/cistern/report"
)

// output is where a result goes: a file that appears whole or not at all, or standard output.
type output struct {
	path string
	file *outfile.File // nil for standard output
	w    *bufio.Writer
}

// createOutput opens an output, before the work whose result goes there: so that a place that cannot be written is
// known at once.
func createOutput(path string, mode fs.FileMode) (*output, error) {
	if st, err := os.Stat(path); err == nil && st.IsDir() {
		return nil, fmt.Errorf("%s: is a directory: expected a file to write", path)
	}
	f, err := outfile.Create(path, mode)
	if err != nil {
		return nil, cannotWrite(path, err)
	}
	return &output{path: path, file: f, w: bufio.NewWriterSize(f, 1<<16)}, nil
}

func cannotWrite(path string, err error) error {
	var pe *fs.PathError
	var le *os.LinkError
	switch {
	case errors.As(err, &pe):
		err = pe.Err
	case errors.As(err, &le): // of the temporary name
		err = le.Err
	}
	return fmt.Errorf("%s: cannot be written: %w", path, err)
}

func (o *output) Write(p []byte) (int, error) { return o.w.Write(p) }

// commit puts the file in its place. What was written is gone if it fails.
func (o *output) commit() error {
	err := o.w.Flush()
	if o.file != nil && err == nil {
		err = o.file.Commit()
	}
	if err != nil {
		o.abandon()
		return cannotWrite(o.path, err)
	}
	return nil
}

// abandon drops the output unless it was committed.
func (o *output) abandon() {
	if o != nil && o.file != nil {
		o.file.Abandon()
	}
}

// openOutput is createOutput, with "-" for standard output: also under its name in the file system, by which a file that a
// shell sent it to would be written from its beginning, and not from where it is by now.
//
// Standard output then has that alone: what the command says otherwise goes to standard error.
//
// A recording cannot be made again: none of the inputs is overwritten by what is made of it.
func (a *app) openOutput(path string, inputs []string) (*output, error) {
	if path == "-" || path == "/dev/stdout" {
		o := &output{path: "standard output", w: bufio.NewWriterSize(a.out, 1<<16)}
		a.out, a.terminal = a.err, false
		return o, nil
	}
	if st, err := os.Stat(path); err == nil && st.Mode().IsRegular() {
		for _, in := range inputs {
			if other, err := os.Stat(in); err == nil && os.SameFile(st, other) {
				return nil, fmt.Errorf("%s: is an input as well: expected another file to write", path)
			}
		}
	}
	mode := outfile.Shared
	if a.private {
		mode = outfile.Private
	}
	return createOutput(path, mode)
}

// openPage is openOutput for a page, nil where none is wanted (""). A command without a page fails before any work.
func (a *app) openPage(path string, inputs []string) (*output, error) {
	if path == "" {
		return nil, nil
	}
	if err := report.CheckBundle(); err != nil {
		return nil, err
	}
	return a.openOutput(path, inputs)
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
