//go:build linux

// Package setuidtest runs programs for tests with more rights than those of their user.
package setuidtest

import (
	"os"
	"os/exec"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// other is a user without rights.
const other = 65534

// Dir is a new folder that every user may enter and whose setuid programs have their owner's rights. Without it, or without root,
// the test is skipped, unless CISTERN_TOOLS_TEST=1 makes that a failure.
func Dir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "setuid")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	var fs unix.Statfs_t
	noNew, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)
	if err != nil || unix.Statfs(dir, &fs) != nil {
		t.Fatal(err)
	}
	if os.Geteuid() != 0 || fs.Flags&(unix.ST_NOSUID|unix.ST_NOEXEC) != 0 || noNew != 0 {
		const why = "it takes root, and a /tmp with setuid programs"
		if os.Getenv("CISTERN_TOOLS_TEST") == "1" {
			t.Fatal(why)
		}
		t.Skip(why)
	}
	return dir
}

// Command is a command that another user starts.
func Command(program string, args ...string) *exec.Cmd {
	cmd := exec.Command(program, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: other, Gid: other}}
	return cmd
}
