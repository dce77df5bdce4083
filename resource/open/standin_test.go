//go:build linux && cgo

package open

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/nvidia/standin"
	driver "github.com/cistern-gpu/cistern/cuda/open"
	"github.com/cistern-gpu/cistern/resource"
	"github.com/cistern-gpu/cistern/resource/resourcetest"
)

// ncclTested: a process has one NCCL for good, whose file goes with the test, so that a second run of it in the process has none.
var ncclTested bool

// The suite over the binding and the stand-in libraries, which is what /real on a GPU is prepared by: a resource for each
// part of the binding that memory comes from.
func TestConformanceOfBinding(t *testing.T) {
	library := standin.Build(t)
	t.Setenv("STANDIN_NCCL_DRIVER", library)
	nccl := filepath.Join(t.TempDir(), "libnccl.so.2")
	out, err := exec.Command("cc", "-O1", "-fPIC", "-shared", "-o", nccl, "../nccl/testdata/libnccl.c", "-ldl").CombinedOutput()
	if err != nil {
		t.Fatalf("the tests need a C compiler: %v\n%s", err, out)
	}
	m := resourcetest.GPU(t, func() (cuda.Driver, error) { return driver.Open("nvidia:" + library) })
	all := cases(t, false)
	all["nccl"] = resourcetest.Case{Alike: true, New: func(m resourcetest.Machine) (resource.Resource, func() error, error) {
		r, err := Parse(m, 0, "nccl:library="+nccl)
		return r, nil, err
	}}
	names := []string{"device", "virtual", "async", "managed:prefetch=true", "pinned", "host_numa"}
	if !ncclTested {
		names, ncclTested = append(names, "nccl"), true
	}
	for _, name := range names {
		t.Run(name, func(t *testing.T) { resourcetest.Run(t, m, all[name]) })
	}
}
