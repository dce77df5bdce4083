package lint

import (
	"bytes"
	"fmt"
	"go/format"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

func TestGofmt(t *testing.T) {
	for _, f := range sources(t, ".go") {
		text := []byte(read(t, f))
		want, err := format.Source(text)
		if err != nil {
			t.Errorf("%s: %v", f, err)
		} else if !bytes.Equal(text, want) {
			t.Errorf("%s: not as gofmt writes it", f)
		}
	}
}

func TestVet(t *testing.T) {
	if _, err := inModules("go", "vet", "./..."); err != nil {
		t.Error(err)
	}
}

func TestStaticcheck(t *testing.T) {
	if testing.Short() {
		t.Skip("static analysis takes a minute the first time")
	}
	if _, err := inModules(tool(t, "staticcheck"), "./..."); err != nil {
		t.Error(err)
	}
}

// TestPackageComments: every package says what it is for.
func TestPackageComments(t *testing.T) {
	for _, p := range packages(t) {
		begin := "Package " + p.Name + " "
		if p.Name == "main" {
			begin = "Command " + filepath.Base(p.Dir) + " "
		}
		if !strings.HasPrefix(p.Doc, begin) {
			t.Errorf("%s: its package comment begins with %q, want %q", p.short(), p.Doc, begin)
		}
	}
}

// code is what people write that a machine runs.
var code = []string{".go", ".c", ".h", ".cc", ".cpp", ".py", ".js", ".mjs", ".css", ".sh"}

// TestFileLength: a file has one subject.
func TestFileLength(t *testing.T) {
	const most = 700
	for _, f := range sources(t, code...) {
		if n := strings.Count(read(t, f), "\n"); n > most {
			t.Errorf("%s has %d lines, at most %d", f, n, most)
		}
	}
}

// TestPromises: what is left to do stands in an issue, not in the code.
func TestPromises(t *testing.T) {
	mark := regexp.MustCompile(`\b(TO` + `DO|FIX` + `ME|XX` + `X|HA` + `CK)\b`)
	for _, f := range sources(t, append(code, ".md", "")...) {
		for i, line := range strings.Split(read(t, f), "\n") {
			if m := mark.FindString(line); m != "" {
				t.Errorf("%s:%d: %s", f, i+1, m)
			}
		}
	}
}

// TestMachinePaths: nothing in the tree knows on which machine it was written.
func TestMachinePaths(t *testing.T) {
	patterns := []string{`/root/`, `/home/[a-z]`, `/Users/[a-z]`, `[A-Z]:\\Users\\`}
	dir := root(t)
	patterns = append(patterns, regexp.QuoteMeta(dir)+`\b`)
	// The folder that the clone lies in, unless it is one that every machine has.
	if parent := filepath.Dir(dir); parent != filepath.Dir(parent) && parent != filepath.Clean(os.TempDir()) {
		patterns = append(patterns, regexp.QuoteMeta(parent+string(filepath.Separator)))
	}
	// Only where a path begins: report/web/src is not in /src.
	machine := regexp.MustCompile(`(?:^|[^\w./~*}-])(?:` + strings.Join(patterns, "|") + `)`)
	for _, f := range sources(t, append(code, ".md", ".json", "")...) {
		if f == "internal/lint/files_test.go" {
			continue // the patterns
		}
		for i, line := range strings.Split(read(t, f), "\n") {
			if m := machine.FindString(line); m != "" {
				t.Errorf("%s:%d: %s", f, i+1, m)
			}
		}
	}
}

// TestTestsCanFail: a test function that states nothing cannot.
func TestTestsCanFail(t *testing.T) {
	head := regexp.MustCompile(`(?m)^func (Test\w+)\((\w+) \*testing\.T\) \{`)
	for _, f := range sources(t, ".go") {
		if !strings.HasSuffix(f, "_test.go") {
			continue
		}
		text := read(t, f)
		for _, m := range head.FindAllStringSubmatchIndex(text, -1) {
			name, arg := text[m[2]:m[3]], text[m[4]:m[5]]
			body := text[m[1]:]
			if end := strings.Index(body, "\n}"); end >= 0 {
				body = body[:end]
			}
			// It reports itself, or passes t on.
			if !regexp.MustCompile(`\b` + arg + `(\.(Error|Errorf|Fatal|Fatalf|Fail|FailNow|Run)\(|[,)])`).MatchString(body) {
				t.Errorf("%s: %s never uses %s to fail", f, name, arg)
			}
		}
	}
}

// TestNoBinaries: what the build makes is not in the tree, and no file is larger than a trace.
func TestNoBinaries(t *testing.T) {
	const most = 2 << 20
	dir := root(t)
	for _, f := range sources(t) {
		st, err := os.Stat(filepath.Join(dir, f))
		if err != nil {
			t.Error(err)
			continue
		}
		if st.Size() > most {
			t.Errorf("%s has %d bytes, at most %d", f, st.Size(), most)
		}
		if base := filepath.Base(f); base == "package-lock.json" {
			t.Errorf("%s: pin versions in package.json", f)
		}
		head := make([]byte, 4)
		if file, err := os.Open(filepath.Join(dir, f)); err == nil {
			n, _ := file.Read(head)
			file.Close()
			if s := fmt.Sprintf("%q", head[:n]); s == `"\x7fELF"` {
				t.Errorf("%s is a binary", f)
			}
		}
	}
}
