//go:build linux

package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/cistern-gpu/cistern/recording/native"
)

// peakOf is the most memory in MiB that a command has as a process by itself, on a machine with many processors.
func peakOf(t *testing.T, args ...string) uint64 {
	t.Helper()
	cmd, errs := selfCommand(t, args...)
	cmd.Env = append(cmd.Env, "CISTERN_TEST_PEAK=1", "GOMAXPROCS=16")
	out, err := cmd.Output()
	if code := codeOf(t, err); code != exitOK && code != exitBad {
		t.Fatalf("%v: code %d, %s", args, code, errs)
	}
	var kib uint64
	if _, err := fmt.Sscan(string(out), &kib); err != nil {
		t.Fatalf("%v: %v, %q, %s", args, err, out, errs)
	}
	return kib >> 10
}

// No command has more than the promise on any of them, however many processors there are.
func TestBoundedMemory(t *testing.T) {
	if testing.Short() {
		t.Skip("the race detector multiplies memory: measured without it")
	}
	t.Parallel()
	path := filepath.Join(t.TempDir(), "in")
	cases := boundedCases(t)
	for _, name := range []string{"chunks without end", "petabytes", "contexts that end", "streams used once"} { // those that take most
		var b bytes.Buffer
		if err := native.Write(&b, cases[name]); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
		for _, args := range [][]string{{"tune"}, {"report"}, {"replay", "--capacity", "2TiB", "--policy", "cistern", "--policy", "cistern:chunk:2MiB"}} {
			mib := peakOf(t, append(args, path)...)
			t.Logf("%s, %d bytes: %v: %d MiB", name, b.Len(), args, mib)
			if mib > 256 {
				t.Errorf("%s, %d bytes: %v has %d MiB; expected at most 256", name, b.Len(), args, mib)
			}
		}
	}
}
