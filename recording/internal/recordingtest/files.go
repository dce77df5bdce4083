package recordingtest

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
)

// ReadDriver reads a driver trace.
func ReadDriver(t *testing.T, b []byte) *recording.File {
	t.Helper()
	f, err := open.Read(bytes.NewReader(b), "some.file")
	if err != nil {
		t.Fatal(err)
	}
	if f.Driver == nil {
		t.Fatal("no driver trace was read")
	}
	return f
}

// ReadRMM reads the text of a log.
func ReadRMM(t *testing.T, s, path string) *recording.Trace {
	t.Helper()
	f, err := open.Read(strings.NewReader(s), path)
	if err != nil {
		t.Fatal(err)
	}
	if f.Format != recording.FormatRMM || len(f.Traces) != 1 || f.DecodedBytes != int64(len(s)) {
		t.Fatalf("format %s, %d traces, %d bytes", f.Format, len(f.Traces), f.DecodedBytes)
	}
	Check(t, f.Traces[0])
	return f.Traces[0]
}

// Samples are the files that round trips are tried on.
func Samples(t *testing.T) []string {
	t.Helper()
	paths, err := filepath.Glob("../testdata/*.pickle.gz")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no traces in testdata: %v", err)
	}
	if dir := TracesDir(); dir != "" {
		more, err := filepath.Glob(filepath.Join(dir, "*.pickle.gz"))
		if err != nil || len(more) == 0 {
			t.Fatalf("no traces in %s: %v", dir, err)
		}
		paths = append(paths, more...)
	}
	return paths
}

// Read reads a file that can be read.
func Read(t testing.TB, path string) *recording.File {
	t.Helper()
	f, err := open.File(path)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// TracesDir is the folder of the large recorded traces; a test that needs it fails where the variable is set and the
// folder is not there.
func TracesDir() string { return os.Getenv("CISTERN_TRACES") }

// ReadBytes reads a file of one trace, and checks that.
func ReadBytes(t *testing.T, b []byte) *recording.Trace {
	t.Helper()
	f, err := open.Read(bytes.NewReader(b), "some.file")
	if err != nil {
		t.Fatal(err)
	}
	Check(t, f.Traces[0])
	return f.Traces[0]
}
