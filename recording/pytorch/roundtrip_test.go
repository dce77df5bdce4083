package pytorch_test

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/recordingtest"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/recording/pytorch"
)

func TestPyTorchRoundTrip(t *testing.T) {
	check := func(t *testing.T, f *recording.File) *recording.File {
		var out bytes.Buffer
		if err := pytorch.Write(&out, f.Traces...); err != nil {
			t.Fatal(err)
		}
		again, err := open.Read(&out, f.Path)
		if err != nil {
			t.Fatal(err)
		}
		recordingtest.Diff(t, again.Traces, f.Traces)
		return again
	}
	t.Run("synthetic", func(t *testing.T) { check(t, recordingtest.Synthetic()) })
	for _, path := range recordingtest.Samples(t) {
		t.Run(filepath.Base(path), func(t *testing.T) { check(t, recordingtest.Read(t, path)) })
	}
}

// What we write is opened by Python's pickle, has the shape that PyTorch's tools need, and uses only opcodes that the
// viewer's own unpickler knows.
func TestPyTorchSnapshotInPython(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		if os.Getenv("CISTERN_TOOLS_TEST") == "1" {
			t.Fatal(err)
		}
		t.Skip("python3 is not installed")
	}
	for _, f := range append([]*recording.File{recordingtest.Synthetic()}, recordingtest.Read(t, "../testdata/multistream_prefetch.pickle.gz"),
		recordingtest.Read(t, "../testdata/detection.pickle.gz")) {
		path := filepath.Join(t.TempDir(), "snapshot.pickle")
		w, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := pytorch.Write(w, f.Traces...); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command(python, "testdata/check_snapshot.py", path).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", f.Path, err, out)
		}
		var got struct{ Events, Devices, Segments, Reserved uint64 }
		if err := json.Unmarshal(out, &got); err != nil {
			t.Fatal(err)
		}
		tr := f.Traces[0]
		var reserved uint64
		for _, s := range tr.Final {
			reserved += s.Size
		}
		want := got
		want.Events, want.Devices = uint64(len(tr.Events)), uint64(tr.Device+1)
		want.Segments, want.Reserved = uint64(len(tr.Final)), reserved
		if got != want {
			t.Errorf("%s: Python sees %+v; expected %+v", f.Path, got, want)
		}
	}
}
