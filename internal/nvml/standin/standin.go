// Package standin is a stand-in for libnvidia-ml.so.1 in C, in testdata, so that tests of everything that
// asks NVML run where there is no GPU. The comment that opens libnvidia-ml.c says how the machine is written down that it
// plays. A program under test finds the stand-in when LD_LIBRARY_PATH names its folder and STANDIN_NVML the description:
//
//	library := standin.Build(t)
//	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+filepath.Dir(library), "STANDIN_NVML="+file)
//
// The description is read anew whenever the devices are counted, so a test may change it while the program runs (by renaming
// another file over it, as half a file is a broken one).
package standin

import (
	"embed"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/internal/standin"
)

//go:embed testdata
var source embed.FS

var library = standin.Library{Name: "libnvidia-ml.so.1", Source: source, Folder: "testdata"}

// Build compiles the stand-in, without the symbols named in missing, and returns the path of a library of the test's own.
func Build(tb testing.TB, missing ...string) string {
	tb.Helper()
	return library.Build(tb, missing...)
}

// Describe writes a machine down for the stand-in of this process and of those it starts, and returns the file's path.
func Describe(tb testing.TB, lines ...string) string {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "machine")
	Change(tb, path, lines...)
	tb.Setenv("STANDIN_NVML", path)
	return path
}

// Change puts another description into the place of one, at once.
func Change(tb testing.TB, path string, lines ...string) {
	tb.Helper()
	if err := os.WriteFile(path+".new", []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		tb.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		tb.Fatal(err)
	}
}
