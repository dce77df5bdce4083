//go:build linux && cgo

package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/cuda/nvidia/standin"
)

// The real machine's half, over the binding and a stand-in library, whose kernels really fill and compare.
func TestRunOverBinding(t *testing.T) {
	var out, errs bytes.Buffer
	args := []string{"-driver", "nvidia:" + standin.Build(t), "-queries", "2", "-rounds", "1", "-resident", "1MiB", "-scale", "0.001", "-threads", "2"}
	if code := run(args, &out, &errs); code != 0 || !strings.Contains(out.String(), "times direct") {
		t.Fatalf("status %d: %s\n%s", code, errs.String(), out.String())
	}
}
