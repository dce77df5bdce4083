//go:build linux && cgo

package query

import (
	"bytes"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/cuda/nvidia/standin"
)

// The real machine's half, over the binding and a stand-in library, whose kernels really fill and compare.
func TestRunOverBinding(t *testing.T) {
	var out bytes.Buffer
	args := []string{"-driver", "nvidia:" + standin.Build(t), "-queries", "2", "-rounds", "1", "-resident", "1MiB", "-scale", "0.001", "-threads", "2"}
	if err := Run(args, &out); err != nil || !strings.Contains(out.String(), "times direct") {
		t.Fatalf("%v\n%s", err, out.String())
	}
}
