//go:build linux && cgo

package soak

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda/nvidia/standin"
	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
)

// The test runs over the simulated device, whose checker judges, and over the stand-in library, whose kernels compare. The
// limit there is too low for the measurement of host time, which comes last.
func TestRun(t *testing.T) {
	for _, c := range []struct {
		driver, limit string
		checked       bool
	}{{"sim", "40GiB", false}, {"nvidia:" + standin.Build(t), "64MiB", true}} {
		file := filepath.Join(t.TempDir(), "soak.json")
		args := []string{"-driver", c.driver, "-limit", c.limit, "-ops", "2000", "-seed", "1", "-duration", "1h", "-json", file}
		err := Run(args, t.Output())
		if oom := new(cistern.OutOfMemoryError); err != nil && !(c.checked && errors.As(err, &oom)) {
			t.Errorf("%s: %v", c.driver, err)
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var r report
		if err := json.Unmarshal(text, &r); err != nil {
			t.Fatal(err)
		}
		if r.Checked != c.checked || r.Operations < 2000 || len(r.Phases) != 2 || len(r.Phases[0].Calls) < 10 {
			t.Errorf("%s: %s", c.driver, text)
		}
	}
}
