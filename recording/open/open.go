// Package open reads recorded runs of every format, which it recognises by their content.
package open

import (
	"bytes"
	"errors"
	"io"
	"os"

	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/input"
	"github.com/cistern-gpu/cistern/recording/native"
	"github.com/cistern-gpu/cistern/recording/pytorch"
	"github.com/cistern-gpu/cistern/recording/rmm"
)

// File reads the file at path, or standard input when path is "-". What kind it is, and whether gzip or zstd, is
// recognised by its content. Errors are of type *recording.Error.
func File(path string) (*recording.File, error) {
	if path == "-" {
		return Read(input.Pipe{Reader: os.Stdin}, path)
	}
	if path == "" {
		return nil, input.Named(input.Whole("an empty name; expected that of a file, or - for standard input"), `""`)
	}
	f, err := os.Open(path)
	if err != nil {
		var pe *os.PathError
		if errors.As(err, &pe) {
			e := input.Whole("%s", pe.Err)
			e.Err = err
			return nil, input.Named(e, path)
		}
		return nil, input.Named(err, path)
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.IsDir() {
		return nil, input.Named(input.Whole("a directory; %s", expected), path)
	}
	return Read(f, path)
}

const expected = "expected a PyTorch memory snapshot (pickle), an RMM log (CSV) or a Cistern trace"

// Read reads one file from r; path is how errors and traces name it. r is not used after Read has returned.
func Read(r io.Reader, path string) (*recording.File, error) {
	return input.File(r, path, func(in *input.Input) (*recording.File, error) {
		switch head := in.Peek(64); {
		case len(head) == 0 && in.Err != nil:
			return nil, in.Truncated("its beginning")
		case len(head) == 0:
			return nil, input.Whole("the file is empty; %s", expected)
		case pytorch.Is(head):
			return pytorch.Read(in, path)
		case native.Is(head):
			return native.Read(in, path)
		case rmm.Is(head):
			return rmm.Read(in, path)
		default:
			return nil, input.AtByte(0, "%s; %s", guess(head), expected)
		}
	})
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
