//go:build linux && cgo

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/cuda/nvidia/standin"
)

// What lab/native tries on a GPU holds over the stand-in library too, whose memory is real, for every upstream but the
// one that needs a library of NCCL's.
func TestBehaviours(t *testing.T) {
	t.Parallel()
	source := filepath.Join("..", "..", "lab", "native", "behaviours.c")
	if _, err := os.ReadFile(source); err != nil { // so that the go command knows that the result depends on it
		t.Fatal(err)
	}
	lib := filepath.Dir(libraryPath(t))
	program := build(t, "native/behaviours", func(out string) error {
		return quiet(exec.Command(compiler("CC", "cc"), "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-I.", source,
			"-L"+lib, "-lcistern", "-ldl", "-Wl,-rpath,"+lib, "-o", out))
	})
	driver := standin.Build(t)
	r := run(t, "driver:nvidia:"+driver, []string{"CUDA_LIBRARY=" + driver}, program, "32")
	if r.err != nil || r.report != "" {
		t.Fatalf("%v\n%s%s", r.err, r.out, r.report)
	}
	if n := len(regexp.MustCompile(`(?m)^ok: `).FindAllString(r.out, -1)); n != 11 || strings.Count(r.out, "note: nccl: ") != 1 {
		t.Errorf("want 11 that are ok, and a note about NCCL:\n%s", r.out)
	}
}
