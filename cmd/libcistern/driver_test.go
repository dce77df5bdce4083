//go:build linux && cgo

package main

import (
	"path/filepath"
	"testing"

	"github.com/cistern-gpu/cistern/cuda/nvidia/standin"
	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
)

// TestDriver: the whole way down to a library in the place of libcuda.so.1.
func TestDriver(t *testing.T) {
	t.Parallel()
	cuda := standin.Build(t)
	for _, conf := range []string{"", ",history:100", ",backend:malloc"} {
		passes(t, "driver:nvidia:"+cuda+conf, []string{"STANDIN_LOG=" + filepath.Join(t.TempDir(), "calls")},
			program(t, "driver.c", libraryPath(t)), cuda)
	}
}
