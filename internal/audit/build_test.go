//go:build linux && amd64

package audit

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/cistern-gpu/cistern/cuda/nvidia/standin"
	"github.com/cistern-gpu/cistern/internal/rerun"
)

// library builds the audit library.
func library(t *testing.T) string {
	t.Helper()
	rerun.OnChange(t, "../../audit/*", "../../scripts/audit.sh", "../../cmd/libcistern/pystack.*")
	file := filepath.Join(t.TempDir(), Library)
	if out, err := exec.Command("../../scripts/audit.sh", file).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return file
}

// build compiles a program that calls the stand-in driver, and is the environment that it wants.
func build(t *testing.T) (program string, env []string) {
	t.Helper()
	rerun.OnChange(t, "../../cmd/cistern/testdata/traced.c")
	program = filepath.Join(t.TempDir(), "traced")
	if out, err := exec.Command("cc", "-O1", "-w", "../../cmd/cistern/testdata/traced.c", "-o", program, "-ldl", "-pthread").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return program, []string{"STANDIN=" + standin.Build(t)}
}
