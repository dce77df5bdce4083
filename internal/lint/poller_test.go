package lint

import (
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// mayPoll are the files of packages in the C library that may use the poller of Go's runtime: what they do is not done there.
var mayPoll = []string{
	"dump/child.go", "dump/child_unix.go", // what the child of a process does
	"internal/deadline/nap_other.go",
	"internal/live/layout.go", "internal/live/reader_linux.go", // readers of others' pages
	"internal/nopoll/kept_other.go", "internal/nopoll/open_other.go",
	"recording/open/open.go",
}

// TestNoPoller: the C library uses nothing that opens the poller of Go's runtime, which ends the program where it gets no
// descriptor, or where its descriptors are closed: files of package os, timers, and packages that use those.
func TestNoPoller(t *testing.T) {
	polls := regexp.MustCompile(`\bos\.(Open|OpenFile|OpenRoot|Create|CreateTemp|ReadFile|WriteFile|ReadDir|Pipe|CopyFS|StartProcess)\(|` +
		`\btime\.(Sleep|After|AfterFunc|NewTimer|NewTicker|Tick)\(|\bcontext\.With(Timeout|Deadline)|` +
		`\bfilepath\.(Glob|Walk|WalkDir)\(|"net"|"os/exec"|"os/signal"|"crypto/rand"`)
	cmd := exec.Command("go", "list", "-deps", "-f", `{{$d := .Dir}}{{range .GoFiles}}{{$d}}/{{.}}
{{end}}{{range .CgoFiles}}{{$d}}/{{.}}
{{end}}`, "./cmd/libcistern")
	cmd.Dir = root(t)
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	looked, allowed := 0, map[string]bool{}
	for _, path := range strings.Fields(string(out)) {
		name, err := filepath.Rel(root(t), path)
		if err != nil || strings.HasPrefix(name, "..") {
			continue // the standard library's
		}
		looked++
		for i, line := range strings.Split(read(t, name), "\n") {
			code, _, _ := strings.Cut(line, "//")
			m := polls.FindString(code)
			if m == "" {
				continue
			}
			if slices.Contains(mayPoll, name) {
				allowed[name] = true
				continue
			}
			t.Errorf("%s:%d: %s polls: use internal/nopoll or package deadline", name, i+1, m)
		}
	}
	if looked < 100 || len(allowed) == 0 {
		t.Errorf("looked at %d files, %d of which may poll", looked, len(allowed))
	}
}
