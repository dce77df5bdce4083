// Package standin builds a stand-in for libnvidia-ml.so.1 out of the C file in testdata, so that tests of everything that
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
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

//go:embed testdata
var source embed.FS

var (
	mu    sync.Mutex
	built = map[string][]byte{} // the library by what it lacks: compiling takes longer than most tests
)

// Build compiles the stand-in and returns the path of a library of the test's own, named libnvidia-ml.so.1. The symbols named
// in absent are left out. Without a C compiler the test fails.
func Build(tb testing.TB, absent ...string) string {
	tb.Helper()
	library, err := compile(absent)
	if err != nil {
		tb.Fatal(err)
	}
	path := filepath.Join(tb.TempDir(), "libnvidia-ml.so.1")
	if err := os.WriteFile(path, library, 0o700); err != nil {
		tb.Fatal(err)
	}
	return path
}

func compile(absent []string) ([]byte, error) {
	key := strings.Join(absent, ",")
	mu.Lock()
	defer mu.Unlock()
	if library, ok := built[key]; ok {
		return library, nil
	}
	cc := os.Getenv("CC")
	if cc == "" {
		cc = "cc"
	}
	dir, err := os.MkdirTemp("", "standin")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	if err := os.CopyFS(dir, source); err != nil {
		return nil, err
	}
	out := filepath.Join(dir, "libnvidia-ml.so.1")
	args := append(strings.Fields(cc)[1:], "-O1", "-Wall", "-Werror", "-fPIC", "-shared", "-pthread", "-Wl,-Bsymbolic", "-o", out)
	for i, symbol := range absent {
		args = append(args, fmt.Sprintf("-D%s=absent_%d", symbol, i))
	}
	cmd := exec.Command(strings.Fields(cc)[0], append(args, filepath.Join(dir, "testdata", "libnvidia-ml.c"))...)
	if report, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("tests with a stand-in of NVML need a C compiler (gcc, or the one that CC names): %v: %v\n%s", cmd, err, report)
	}
	library, err := os.ReadFile(out)
	if err == nil {
		built[key] = library
	}
	return library, err
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
