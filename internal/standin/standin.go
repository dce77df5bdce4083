// Package standin compiles stand-ins in C for libraries of NVIDIA's, so that tests of what calls them run where there is no
// GPU. What they model is written beside them: cuda/nvidia/standin has the driver, internal/nvml/standin the management
// library.
package standin

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// Library is a stand-in for the library with this name, of all the C files in a folder.
type Library struct {
	Name   string
	Source fs.FS
	Folder string // in Source

	mu sync.Mutex
	// +checklocks:mu
	built map[string][]byte // the library by what it lacks, as compiling takes longer than most tests
}

// Build compiles the stand-in and returns the path of a library of the test's own: the dynamic linker gives every
// file its own state, so that no test sees what another did. The symbols named in missing are left out. Without a C
// compiler the test fails.
func (l *Library) Build(tb testing.TB, missing ...string) string {
	tb.Helper()
	library, err := l.compile(missing)
	if err != nil {
		tb.Fatal(err)
	}
	path := filepath.Join(tb.TempDir(), l.Name)
	if err := os.WriteFile(path, library, 0o700); err != nil {
		tb.Fatal(err)
	}
	return path
}

func (l *Library) compile(missing []string) ([]byte, error) {
	key := strings.Join(missing, ",")
	l.mu.Lock()
	defer l.mu.Unlock()
	if library, ok := l.built[key]; ok {
		return library, nil
	}
	cc := os.Getenv("CC")
	if cc == "" {
		cc = "cc"
	}
	dir, err := os.MkdirTemp("", "standin")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	if err := os.CopyFS(dir, l.Source); err != nil {
		return nil, err
	}
	files, err := filepath.Glob(filepath.Join(dir, l.Folder, "*.c"))
	if err != nil {
		return nil, err
	}
	out := filepath.Join(dir, l.Name)
	args := append(strings.Fields(cc)[1:], "-O1", "-Wall", "-Wno-format-zero-length", "-Werror", "-fPIC", "-shared", "-pthread", "-Wl,-Bsymbolic", "-o", out)
	for i, symbol := range missing {
		args = append(args, fmt.Sprintf("-D%s=missing_%d", symbol, i))
	}
	cmd := exec.Command(strings.Fields(cc)[0], append(args, files...)...)
	if report, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("tests with a stand-in of %s need a C compiler (gcc, or the one that CC names): %v: %v\n%s", l.Name, cmd, err, report)
	}
	library, err := os.ReadFile(out)
	if err == nil {
		if l.built == nil {
			l.built = map[string][]byte{}
		}
		l.built[key] = library
	}
	return library, err
}
