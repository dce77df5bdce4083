// Package standin is a stand-in for libcuda.so.1 in C, in testdata, so that tests of everything above the driver's C
// interface run where there is no GPU. The comment that opens libcuda.c says what it models and which environment variables
// steer it.
package standin

import (
	"embed"
	"path/filepath"
	"testing"

	"github.com/cistern-gpu/cistern/internal/standin"
)

//go:embed testdata
var source embed.FS

var library = standin.Library{Name: "libcuda.so.1", Source: source, Folder: "testdata"}

// Build compiles the stand-in, without the symbols named in missing, and returns the path of a library of the test's own.
func Build(tb testing.TB, missing ...string) string {
	tb.Helper()
	return library.Build(tb, missing...)
}

// Log makes the stand-in write every call to a file, and returns the file's path.
func Log(tb testing.TB) string {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "calls")
	tb.Setenv("STANDIN_LOG", path)
	return path
}
