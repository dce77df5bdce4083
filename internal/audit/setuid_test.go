//go:build linux && amd64

package audit

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// asks prints what the audit library, named by its argument, tells the dynamic linker that asks for its version: 0 is that it
// wants to see nothing.
const asks = `#include <dlfcn.h>
#include <stdio.h>
int main(int argc, char **argv) {
  void *library = dlopen(argv[argc - 1], RTLD_NOW);
  unsigned (*version)(unsigned) = library ? (unsigned (*)(unsigned))dlsym(library, "la_version") : 0;
  if (!version)
    return puts(dlerror()), 1;
  printf("%u\n", version(1));
  return 0;
}
`

// A program with more rights than its user's is not traced: its user named the ring.
func TestSetuid(t *testing.T) {
	const other = 65534
	dir, err := os.MkdirTemp("/tmp", "audit") // where another user may go
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
	source, program := filepath.Join(dir, "asks.c"), filepath.Join(dir, "asks")
	if err := os.WriteFile(source, []byte(asks), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"cc", source, "-o", program, "-ldl"}, {"install", "-m", "755", library(t), filepath.Join(dir, Library)}, {"chmod", "755", dir},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	for _, c := range []struct {
		mode os.FileMode
		want string
	}{{0o755, "1"}, {0o755 | os.ModeSetuid, "0"}} {
		if err := os.Chmod(program, c.mode); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(program, filepath.Join(dir, Library))
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: other, Gid: other}}
		out, err := cmd.CombinedOutput()
		if got := strings.TrimSpace(string(out)); err != nil || got != c.want {
			t.Errorf("mode %v: %q, %v; want %s", c.mode, got, err, c.want)
		}
	}
}
