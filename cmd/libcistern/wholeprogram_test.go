//go:build linux && cgo

package main

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/cistern-gpu/cistern/cuda/nvidia/standin"
	"github.com/cistern-gpu/cistern/internal/rerun"
)

// userAllocator compiles a user's allocator and returns its path.
func userAllocator(t *testing.T) string {
	t.Helper()
	source := filepath.Join("..", "..", "lab", "torch", "allocator.c")
	rerun.OnChange(t, source)
	return build(t, "lib/liballocator.so", func(out string) error {
		return quiet(exec.Command(compiler("CC", "cc"), "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread", source, "-o", out, "-ldl"))
	})
}

// TestWholeProgram: a user's functions are the upstream of all memory of a program, over the simulated device and over cuMemAlloc.
func TestWholeProgram(t *testing.T) {
	t.Parallel()
	lib, p, cuda := userAllocator(t), program(t, "wholeprogram.c", libraryPath(t)), standin.Build(t)
	named := ",upstream:external:library=" + lib + ";alloc=my_alloc;free=my_free"
	for _, more := range []string{"", ",magazine:off", ",history:1000"} {
		passes(t, "driver:sim:80GiB"+named+more, nil, p, lib, "named")
	}
	passes(t, "driver:sim:80GiB", nil, p, lib, "functions")
	passes(t, "driver:nvidia:"+cuda+named, []string{"ALLOCATOR_CUDA=" + cuda}, p, lib, "named", "20")
}

// TestBadUpstreams: the error of the first call is one line.
func TestBadUpstreams(t *testing.T) {
	t.Parallel()
	p := program(t, "settings.c", libraryPath(t))
	for conf, words := range map[string]string{
		"upstream:teapot": `CISTERN_CONF: upstream "teapot": "teapot" is not an upstream: choose`,
		"upstream:external:library=/nowhere.so;alloc=a;free=b":  "external: /nowhere.so: cannot open shared object file",
		"upstream:external:library=libc.so.6;alloc=malloc":      "external needs external:free=",
		"upstream:external:library=libc.so.6;alloc=no;free=no2": "libc.so.6 has no function no",
		"upstream:managed,backend:malloc":                       `upstream "managed": excludes backend malloc`,
	} {
		passes(t, conf, nil, p, words)
	}
}
