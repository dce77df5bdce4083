package environ

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
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
	const other = 65534
	dir, err := os.MkdirTemp("/tmp", "environ") // where another user may go
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	var fs unix.Statfs_t
	nnp, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)
	if err != nil || unix.Statfs(dir, &fs) != nil {
		t.Fatal(err)
	}
	if os.Geteuid() != 0 || fs.Flags&(unix.ST_NOSUID|unix.ST_NOEXEC) != 0 || nnp != 0 {
		t.Skip("it takes root, and a /tmp with setuid programs")
	}
	program := filepath.Join(dir, "program")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("install", "-m", "4755", self, program).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	cmd := exec.Command(program, "print")
	cmd.Env = []string{"XDG_RUNTIME_DIR=/run/somewhere", "TMPDIR=/var/somewhere"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: other, Gid: other}}
	out, err := cmd.CombinedOutput()
	if err != nil || strings.TrimSpace(string(out)) != "true  /tmp" {
		t.Errorf("the program sees %q, %v", out, err)
	}
}
