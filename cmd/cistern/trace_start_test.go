//go:build linux && amd64

package main

import (
	"os/exec"
	"testing"
)

// TestTraceSignals: a program starts with the signals ignored that it would have ignored without being traced.
func TestTraceSignals(t *testing.T) {
	x := newTraced(t)
	const show = "grep Sig[BI] /proc/self/status; yes | head -1"
	for _, trap := range []string{"", "trap '' HUP INT; "} {
		want, err := exec.Command("sh", "-c", trap+show).CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, want)
		}
		traced := x.command("trace", "--", "sh", "-c", show+" 2>&1")
		cmd := exec.Command("sh", append([]string{"-c", trap + `exec "$@"`, "sh"}, traced.Args...)...)
		cmd.Env = traced.Env
		if got, err := cmd.Output(); err != nil || string(got) != string(want) {
			t.Errorf("after %q: %v\n%s\nwant\n%s", trap, err, got, want)
		}
	}
}
