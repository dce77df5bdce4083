//go:build linux && amd64

package audit

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/internal/environ/setuidtest"
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
	dir := setuidtest.Dir(t)
	source, program := filepath.Join(dir, "asks.c"), filepath.Join(dir, "asks")
	if err := os.WriteFile(source, []byte(asks), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"cc", source, "-o", program, "-ldl"}, {"install", "-m", "755", library(t), filepath.Join(dir, Library)},
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
		out, err := setuidtest.Command(program, filepath.Join(dir, Library)).CombinedOutput()
		if got := strings.TrimSpace(string(out)); err != nil || got != c.want {
			t.Errorf("mode %v: %q, %v; want %s", c.mode, got, err, c.want)
		}
	}
}
