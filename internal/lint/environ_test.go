package lint

import (
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const environmentDoc = "docs/environment.md"

// noVariables are words in capitals in files that read variables.
var noVariables = []string{"C", "CS_GNU_LIBC_VERSION", "G", "M", "MIG", "PROBLEM", "UTF8"}

// readElsewhere are variables that a standard library reads for Cistern.
var readElsewhere = []string{"HOME", "TMPDIR"}

// TestEnvironment: docs/environment.md lists the variables that Cistern reads and no others, and each is read in a way that a
// program with more rights than its user's is safe with.
func TestEnvironment(t *testing.T) {
	cmd := exec.Command("git", "ls-files", "--cached", "--others", "--exclude-standard", "*.go", "*.c", "*.h", "*.cpp", "*.py")
	cmd.Dir = root(t)
	out, err := cmd.Output()
	if err != nil {
		t.Skip("no git: ", err)
	}
	aside := regexp.MustCompile(`_test\.go$|/testdata/|^(lab|examples|python/tests|recording/internal/recordingtest|internal/(gpu|standin|nvml/standin|slow|testkit|lint|environ))/|^scripts/(try_)?release\.py$`)
	reads := regexp.MustCompile(`getenv|environ\.Get|os\.environ|/proc/self/environ|\benvironment\(|\benv func\(string\) string`)
	word := regexp.MustCompile(`"(_?[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*)(?:=?"|\\x00)`)
	unsafe := regexp.MustCompile(`\bos\.(Getenv|LookupEnv|TempDir|UserHomeDir|UserCacheDir|UserConfigDir|ExpandEnv)\b|\b(MkdirTemp|CreateTemp)\(""|\bgetenv\(`)
	found, files := map[string]string{}, 0
	for _, file := range strings.Fields(string(out)) {
		if aside.MatchString(file) {
			continue
		}
		text := read(t, file)
		if !strings.HasSuffix(file, ".py") {
			for _, line := range strings.Split(text, "\n") {
				code, _, _ := strings.Cut(line, "//")
				inC := !strings.HasSuffix(file, ".go")
				if m := unsafe.FindString(code); m != "" && (inC || m != "getenv(") {
					t.Errorf("%s: %s: use internal/environ, or secure_getenv in C", file, m)
				}
			}
		}
		if !reads.MatchString(text) {
			continue
		}
		files++
		for _, m := range word.FindAllStringSubmatch(text, -1) {
			found[m[1]] = file
		}
	}
	if files < 20 {
		t.Errorf("only %d files read variables: this test no longer finds them", files)
	}
	listed := map[string]bool{}
	for _, line := range strings.Split(read(t, environmentDoc), "\n") {
		cells := strings.Split(line, "|")
		if len(cells) != 6 {
			continue
		}
		for _, m := range regexp.MustCompile("`([A-Z][A-Z0-9_]*|_[A-Z0-9_]+)`").FindAllStringSubmatch(cells[1], -1) {
			listed[m[1]] = true
			if found[m[1]] == "" && !slices.Contains(readElsewhere, m[1]) {
				t.Errorf("%s lists %s, which nothing reads", environmentDoc, m[1])
			}
			if how := strings.TrimSpace(cells[4]); !regexp.MustCompile(`^(ignored|used|not used)\b`).MatchString(how) {
				t.Errorf("%s: %s is %q under AT_SECURE: want ignored, used or not used", environmentDoc, m[1], how)
			}
		}
	}
	for name, file := range found {
		if !listed[name] && !slices.Contains(noVariables, name) {
			t.Errorf("%s reads %s, which %s does not list", file, name, environmentDoc)
		}
	}
}
