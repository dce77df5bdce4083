// Package standin builds a stand-in for libcuda.so.1 out of the C files in testdata, so that tests of everything above the
// driver's C interface run where there is no GPU. The comment that opens libcuda.c says what it models and which
// environment variables steer it.
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

// Build compiles the stand-in and returns the path of a library of the test's own: the dynamic linker gives every
// file its own state, so that no test sees what another did. The symbols named in absent are left out. Without a C
// compiler the test fails.
func Build(tb testing.TB, absent ...string) string {
	tb.Helper()
	library, err := compile(absent)
	if err != nil {
		tb.Fatal(err)
	}
	path := filepath.Join(tb.TempDir(), "libcuda.so.1")
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
	out := filepath.Join(dir, "libcuda.so.1")
	args := append(strings.Fields(cc)[1:], "-O1", "-Wall", "-Wno-format-zero-length", "-Werror", "-fPIC", "-shared", "-pthread", "-Wl,-Bsymbolic", "-o", out)
	for i, symbol := range absent {
		args = append(args, fmt.Sprintf("-D%s=absent_%d", symbol, i))
	}
	args = append(args, filepath.Join(dir, "testdata", "libcuda.c"), filepath.Join(dir, "testdata", "work.c"),
		filepath.Join(dir, "testdata", "share.c"), filepath.Join(dir, "testdata", "memory.c"),
		filepath.Join(dir, "testdata", "more.c"), filepath.Join(dir, "testdata", "graphs.c"))
	cmd := exec.Command(strings.Fields(cc)[0], args...)
	if report, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("the tests of the driver binding need a C compiler (gcc, or the one that CC names): %v: %v\n%s", cmd, err, report)
	}
	library, err := os.ReadFile(out)
	if err == nil {
		built[key] = library
	}
	return library, err
}

// Log makes the stand-in write every call to a file, and returns the file's path.
func Log(tb testing.TB) string {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "calls")
	tb.Setenv("STANDIN_LOG", path)
	return path
}
