//go:build linux && cgo

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/cistern-gpu/cistern/internal/rerun"
	"github.com/cistern-gpu/cistern/internal/testkit"
)

// pythons are the interpreters that this machine has: those on PATH, those that pyenv keeps, and those that
// CISTERN_PYTHONS names, with colons between them.
func pythons() []string {
	var out []string
	for _, name := range []string{"python3", "python3.10", "python3.11", "python3.12", "python3.13", "python3.14"} {
		if path, err := exec.LookPath(name); err == nil {
			out = append(out, path)
		}
	}
	if root, err := exec.Command("pyenv", "root").Output(); err == nil {
		kept, _ := filepath.Glob(filepath.Join(strings.TrimSpace(string(root)), "versions", "3.*", "bin", "python3"))
		out = append(out, kept...)
	}
	return append(out, filepath.SplitList(os.Getenv("CISTERN_PYTHONS"))...)
}

// TestPythonFrames holds the frames that pystack.c reads against Python's own, in every Python that there is.
func TestPythonFrames(t *testing.T) {
	need(t, "python3")
	lib := program(t, "pystack.c", "", "-shared", "-fPIC", "-O2")
	const script = "testdata/pystack.py"
	rerun.OnChange(t, script, "pystack.c", "pystack.h", "kernel.h")
	seed := testkit.Seed(t) % 100000
	versions := map[string]bool{}
	for _, python := range pythons() {
		out, err := exec.Command(python, "-c", "import sys, ctypes; print(sys.version)").Output()
		version, _, _ := strings.Cut(string(out), " ")
		if err != nil || versions[string(out)] {
			continue // a name without an interpreter behind it, or the same again
		}
		versions[string(out)] = true
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			r := run(t, "", nil, python, script, lib, fmt.Sprint(seed))
			var major, minor int
			fmt.Sscanf(version, "%d.%d", &major, &minor)
			want := "checked "
			if minor < 10 || minor > 14 {
				want = "refused: its frames are known from"
			}
			if r.err != nil || !strings.HasPrefix(r.out, want) {
				t.Errorf("seed %d: %v\n%s%s", seed, r.err, r.out, r.report)
			}
			t.Log(strings.TrimSpace(r.out))
		})
	}
	if len(versions) == 0 {
		t.Error("no Python was tried")
	}
}

// TestPythonFramesOfNoise: what is no Python, or no such one, is refused and nothing of it is stumbled over.
func TestPythonFramesOfNoise(t *testing.T) {
	t.Parallel()
	seed := testkit.Seed(t)
	noise := program(t, "pyfuzz.c", "", "-O1", "-fsanitize=undefined", "-fno-sanitize-recover=undefined")
	passes(t, "", nil, noise, "1000", fmt.Sprint(seed))
	// A sandbox that forbids process_vm_readv, by any of the errors that sandboxes give, takes nothing of this away.
	for _, forbidden := range []syscall.Errno{syscall.EPERM, syscall.ENOSYS, syscall.EACCES} {
		passes(t, "", nil, noise, "1000", fmt.Sprint(seed), fmt.Sprint(int(forbidden)))
	}
}
