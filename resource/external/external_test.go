//go:build linux && cgo

package external_test

import (
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/nvidia/standin"
	"github.com/cistern-gpu/cistern/cuda/open"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/rerun"
	"github.com/cistern-gpu/cistern/resource"
	"github.com/cistern-gpu/cistern/resource/external"
	"github.com/cistern-gpu/cistern/resource/resourcetest"
)

// allocator compiles a user's library.
func allocator(t *testing.T) external.Options {
	t.Helper()
	source := filepath.Join("..", "..", "lab", "torch", "allocator.c")
	rerun.OnChange(t, source)
	lib := filepath.Join(t.TempDir(), "liballocator.so")
	out, err := exec.Command("cc", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread", source, "-o", lib, "-ldl").CombinedOutput()
	if err != nil {
		t.Fatalf("the tests need a C compiler: %v\n%s", err, out)
	}
	return external.Options{Library: lib, Alloc: "my_alloc", Free: "my_free"}
}

// The suite of all resources, over a library that calls cuMemAlloc of the stand-in.
func TestConformance(t *testing.T) {
	driver := standin.Build(t)
	t.Setenv("ALLOCATOR_CUDA", driver)
	o := allocator(t)
	m := resourcetest.GPU(t, func() (cuda.Driver, error) { return open.Open("nvidia:" + driver) })
	resourcetest.Run(t, m, resourcetest.Case{Alike: true, New: func(m resourcetest.Machine) (resource.Resource, func() error, error) {
		r, err := external.New(m, 0, o)
		return r, nil, err
	}})
}

func TestErrors(t *testing.T) {
	o := allocator(t)
	for _, c := range []struct {
		change func(*external.Options)
		want   string
	}{
		{func(o *external.Options) { o.Library = "/nowhere.so" }, "external: /nowhere.so: cannot open shared object file"},
		{func(o *external.Options) { o.Alloc = "no_alloc" }, "has no function no_alloc"},
		{func(o *external.Options) { o.Free = "no_free" }, "has no function no_free"},
		{func(o *external.Options) { o.Library = "external_test.go" }, "external: "},
	} {
		bad := o
		c.change(&bad)
		if err := external.Load(bad); err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%+v: %v, want %q", bad, err, c.want)
		}
	}
	if err := external.Load(o); err != nil {
		t.Error(err)
	}
	d := sim.New(sim.Options{})
	r, err := external.New(d, 0, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("ALLOCATOR_CUDA", standin.Build(t))
	if _, err := r.Alloc(100<<30, 0, 0); !errors.Is(err, cuda.ErrOutOfMemory) { // it has 64 GiB
		t.Errorf("100 GiB: %v", err)
	}
	other := o
	other.Alloc = "my_free"
	if x, err := external.New(d, 0, other); err != nil || r.Equal(x) {
		t.Errorf("%v: memory of other functions is alike", err)
	}
}
