package trace

import (
	"bytes"
	"errors"
	"io"
	"os"
)

// File is what one file holds.
type File struct {
	Path   string // as named; "-" is standard input
	Format string // "pytorch-snapshot", "rmm-csv", "cistern"
	Traces []*Trace
	// Driver is what a driver trace says beside; nil elsewhere. Such a file may have no Traces: the program that it is of
	// got no memory on a device.
	Driver *Driver
	// DecodedBytes is the size of the file after decompression.
	DecodedBytes int64
}

// Names of the formats, as in Trace.Format.
const (
	FormatPyTorch = "pytorch-snapshot"
	FormatRMM     = "rmm-csv"
	FormatCistern = "cistern"
)

// ReadFile reads the file at path, or standard input when path is "-". What kind it is, and whether gzip or zstd, is
// recognised by its content. Errors are of type *Error.
func ReadFile(path string) (*File, error) {
	if path == "-" {
		// A pipe that stays open must not hold up the report of what is wrong with its beginning.
		return readFrom(os.Stdin, path, false)
	}
	if path == "" {
		return nil, named(whole("an empty name; expected that of a file, or - for standard input"), `""`)
	}
	f, err := os.Open(path)
	if err != nil {
		var pe *os.PathError
		if errors.As(err, &pe) {
			e := whole("%s", pe.Err)
			e.Err = err
			return nil, named(e, path)
		}
		return nil, named(err, path)
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.IsDir() {
		return nil, named(whole("a directory; %s", expected), path)
	}
	return Read(f, path)
}

const expected = "expected a PyTorch memory snapshot (pickle), an RMM log (CSV) or a Cistern trace"

// Read reads one file from r; path is how errors and traces name it. r is not used after Read has returned.
func Read(r io.Reader, path string) (*File, error) {
	return readFrom(r, path, true)
}

// readFrom is Read; wait says whether the decompressor must be done with r on return.
func readFrom(r io.Reader, path string, wait bool) (*File, error) {
	in, err := newInput(r)
	if err != nil {
		return nil, named(err, path)
	}
	defer in.close(wait)
	f, err := read(in, path)
	if err != nil {
		return nil, named(err, path)
	}
	return f, nil
}

func read(in *input, path string) (*File, error) {
	in.need(64)
	head := in.buf[in.pos:in.end]
	f := &File{Path: path}
	var err error
	switch {
	case len(head) == 0 && in.err != nil:
		return nil, in.truncated("its beginning")
	case len(head) == 0:
		return nil, whole("the file is empty; %s", expected)
	case head[0] == opProto:
		f.Format = FormatPyTorch
		m := newMachine(in)
		if err = m.run(); err == nil {
			err = in.ended("the pickle's end")
		}
		if err == nil {
			f.Traces, err = m.traces(path, f.Format)
		}
	case bytes.HasPrefix(head, []byte(cisternMagic[:7])):
		f.Format = FormatCistern
		f.Traces, f.Driver, err = readCistern(in, path)
	case isRMM(head):
		f.Format = FormatRMM
		f.Traces, err = readRMM(in, path)
	default:
		return nil, atByte(0, "%s; %s", guess(head), expected)
	}
	f.DecodedBytes = in.offset()
	for _, t := range f.Traces {
		t.StoredBytes = in.stored()
	}
	if err != nil {
		return nil, err
	}
	return f, nil
}

// guess says what a file that we do not read seems to be.
func guess(head []byte) string {
	text := bytes.TrimLeft(head, " \t\r\n\ufeff")
	for _, g := range []struct{ magic, what string }{
		{"PK\x03\x04", "a zip file (torch.save?)"}, {"\x89PNG", "a PNG picture"}, {"\x1f\x8b", "gzip inside of gzip"},
		{"\x28\xb5\x2f\xfd", "zstd inside of compression"}, {"BZh", "bzip2"}, {"\xfd7zXZ", "xz"}, {"\x7fELF", "a program"},
		{"SQLite format", "a SQLite database"}, {"\xff\xd8\xff", "a JPEG picture"}, {"%PDF", "a PDF"}, {"PAR1", "Parquet"},
	} {
		if bytes.HasPrefix(head, []byte(g.magic)) {
			return g.what
		}
	}
	switch {
	case len(text) > 0 && (text[0] == '{' || text[0] == '['):
		return "JSON"
	case bytes.HasPrefix(head, []byte("(d")), bytes.HasPrefix(head, []byte("(l")), bytes.HasPrefix(head, []byte("}q")):
		return "a pickle of protocol 0 or 1?"
	case len(text) > 0 && text[0] == '<':
		return "HTML or XML"
	}
	return "a file of unknown kind"
}

// isRMM says whether a file begins with the header of RMM's log.
func isRMM(head []byte) bool {
	if i := bytes.IndexByte(head, '\n'); i >= 0 {
		head = head[:i]
	}
	_, ok := rmmHeader(head)
	return ok
}
