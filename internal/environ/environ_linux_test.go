package environ

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/internal/environ/setuidtest"
)

// TestMain: in the program that TestSetuid starts it prints what that program sees.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == "print" {
		println(Secure(), Get("XDG_RUNTIME_DIR"), TempDir())
		return
	}
	os.Exit(m.Run())
}

func TestPlain(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", "/run/somewhere")
	t.Setenv("TMPDIR", "/var/somewhere")
	if Secure() || Get("XDG_RUNTIME_DIR") != "/run/somewhere" || TempDir() != "/var/somewhere" {
		t.Errorf("secure %v, %q, %q", Secure(), Get("XDG_RUNTIME_DIR"), TempDir())
	}
}

// A program with its owner's rights relies on no variable.
func TestSetuid(t *testing.T) {
	dir := setuidtest.Dir(t)
	program := filepath.Join(dir, "program")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("install", "-m", "4755", self, program).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	cmd := setuidtest.Command(program, "print")
	cmd.Env = []string{"XDG_RUNTIME_DIR=/run/somewhere", "TMPDIR=/var/somewhere"}
	out, err := cmd.CombinedOutput()
	if err != nil || strings.TrimSpace(string(out)) != "true  /tmp" {
		t.Errorf("the program sees %q, %v", out, err)
	}
}
