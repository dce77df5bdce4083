//go:build linux && cgo

package main

import (
	"os"
	"testing"
)

// TestPython: processes, signals and crashes of a Python program that uses the library are what they are without it.
func TestPython(t *testing.T) {
	python := need(t, "python3")
	const script = "testdata/process.py"
	if _, err := os.ReadFile(script); err != nil { // the go command runs this again when it changes
		t.Fatal(err)
	}
	for _, what := range []string{"forked_workers", "children_of_their_own", "signals", "ends", "interruptible"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			passes(t, "driver:sim:8GiB", nil, python, script, libraryPath(t), what)
		})
	}
}
