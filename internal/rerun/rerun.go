// Package rerun tells the go command what a test depends on.
package rerun

import (
	"os"
	"path/filepath"
	"testing"
)

// OnChange names files that other programs read for a test, such as a compiler or an interpreter: the go command repeats
// what a test printed before, unless a file changed that the test itself had opened. A pattern without a file fails the test.
func OnChange(tb testing.TB, patterns ...string) {
	tb.Helper()
	for _, pattern := range patterns {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			tb.Fatalf("no file %s", pattern)
		}
		for _, file := range files {
			if _, err := os.ReadFile(file); err != nil {
				tb.Fatal(err)
			}
		}
	}
}
