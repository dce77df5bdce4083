package pytorch_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/cistern-gpu/cistern/recording/internal/recordingtest"
	"github.com/cistern-gpu/cistern/recording/open"
)

// However a snapshot was pickled, the same is read from it.
func TestEveryPickler(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		if os.Getenv("CISTERN_TOOLS_TEST") == "1" {
			t.Fatal(err)
		}
		t.Skip("python3 is not installed")
	}
	sources := []string{"../testdata/multistream_prefetch.pickle.gz"}
	if dir := recordingtest.TracesDir(); dir != "" {
		sources = append(sources, filepath.Join(dir, "gpt2_varlen.stacks.pickle.gz"), filepath.Join(dir, "two_devices.pickle.gz"),
			filepath.Join(dir, "pools_graphs.pickle.gz"), filepath.Join(dir, "gnn.cap11.pickle.gz"))
	}
	for _, src := range sources {
		want := recordingtest.Read(t, src)
		dir := t.TempDir()
		if out, err := exec.Command(python, "testdata/repickle.py", src, dir).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		files, err := os.ReadDir(dir)
		if err != nil || len(files) < 10 {
			t.Fatalf("%d files: %v", len(files), err)
		}
		for _, f := range files {
			t.Run(filepath.Base(src)+"/"+f.Name(), func(t *testing.T) {
				got, err := open.File(filepath.Join(dir, f.Name()))
				if err != nil {
					t.Fatal(err)
				}
				recordingtest.Diff(t, got.Traces, want.Traces)
			})
		}
	}
}
