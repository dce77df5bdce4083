//go:build linux && cgo

package examples

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/cuda/nvidia/standin"
)

// build builds the module in a folder of examples, without a network.
func build(t *testing.T, folder string) string {
	t.Helper()
	dir, err := filepath.Abs(filepath.Join("..", "..", "examples", folder))
	if err != nil {
		t.Fatal(err)
	}
	// Read here, so that the go command knows that the result depends on them.
	for _, f := range []string{"main.go", "go.mod"} {
		if _, err := os.ReadFile(filepath.Join(dir, f)); err != nil {
			t.Fatal(err)
		}
	}
	out := filepath.Join(t.TempDir(), folder)
	cmd := exec.CommandContext(t.Context(), "go", "build", "-tags=lockrank", "-o", out, ".")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOPROXY=off", "GOWORK=off", "GOFLAGS=")
	if report, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, report)
	}
	return out
}

// run runs a program with settings.
func run(t *testing.T, conf, program string) (out, report string, err error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program)
	cmd.Env = append(os.Environ(), "CISTERN_CONF="+conf)
	var o, e bytes.Buffer
	cmd.Stdout, cmd.Stderr = &o, &e
	err = cmd.Run()
	return o.String(), e.String(), err
}

func TestGo(t *testing.T) {
	if testing.Short() {
		t.Skip("links a program")
	}
	program := build(t, "go")
	const rest = `
the freed memory is handed out again: true; driver calls for memory: 0
16 MiB are allocated, 8 MiB of that from the pool, which holds 20 MiB of the 64 MiB that it may
held after a trim: 0 bytes
`
	for _, c := range []struct{ name, conf, want string }{
		{"simulated", "driver:sim", "kernels need a GPU: the host computes the squares\n1048576 squares on Cistern simulated GPU, read back and right" + rest},
		{"stand-in", "driver:nvidia:" + standin.Build(t), "1048576 squares on Stand-in GPU 0, read back and right" + rest},
	} {
		t.Run(c.name, func(t *testing.T) {
			out, report, err := run(t, c.conf, program)
			if err != nil || out != c.want || report != "" {
				t.Errorf("%v\n%s%s\nwant\n%s", err, out, report, c.want)
			}
		})
	}
	t.Run("no GPU", func(t *testing.T) {
		out, report, err := run(t, "driver:nvidia:/nowhere/libcuda.so.1", program)
		if err == nil || out != "" || strings.Count(report, "\n") != 1 || !strings.Contains(report, "/nowhere/libcuda.so.1") {
			t.Errorf("%v\n%s%s", err, out, report)
		}
	})
}
