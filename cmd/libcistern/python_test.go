//go:build linux && cgo

package main

import (
	"testing"

	"github.com/cistern-gpu/cistern/internal/rerun"
)

// TestPython: processes, signals and crashes of a Python program that uses the library are what they are without it.
func TestPython(t *testing.T) {
	python := need(t, "python3")
	const script = "testdata/process.py"
	rerun.OnChange(t, script)
	for _, what := range []string{"forked_workers", "children_of_their_own", "signals", "own_threads", "ends", "interruptible"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			passes(t, "driver:sim:8GiB", nil, python, script, libraryPath(t), what)
		})
	}
}
