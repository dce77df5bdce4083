package lint

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/cistern-gpu/cistern"
	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/replay"
)

// TestOutsideProgram builds the README's Go program as a stranger would, in a module of its own that finds this one by
// a replace directive, without a network; runs it; and holds what it prints against what the README says it prints.
func TestOutsideProgram(t *testing.T) {
	if testing.Short() {
		t.Skip("links a program")
	}
	program, rest, ok := block(read(t, "README.md"), "go")
	if !ok {
		t.Fatal("the README has no Go program")
	}
	want, _, ok := block(rest, "text")
	if !ok {
		t.Fatal("the README does not say what its Go program prints")
	}
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("go.mod", "module example.com/outside\n\ngo 1.26\n\nrequire "+module+" v0.0.0\n\nreplace "+module+" => "+
		filepath.ToSlash(root(t))+"\n")
	write("main.go", program)
	command := func(cgo string, args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GOPROXY=off", "GOFLAGS=-mod=mod", "GOWORK=off", "CGO_ENABLED="+cgo)
		out, err := output(cmd)
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	for _, cgo := range []string{"0", "1"} {
		command(cgo, "go", "build", "-o", "outside.exe", ".")
		if got := command(cgo, filepath.Join(dir, "outside.exe")); strings.TrimSpace(got) != strings.TrimSpace(want) {
			t.Errorf("CGO_ENABLED=%s: the README's program printed\n%s\nbut the README says\n%s", cgo, got, want)
		}
	}
}

// TestReadmeJSON: the README's example of --json has the fields that the command prints, and the values that do not
// depend on the machine.
func TestReadmeJSON(t *testing.T) {
	example, _, ok := block(read(t, "README.md"), "json")
	if !ok {
		t.Fatal("the README shows no JSON")
	}
	var says any
	if err := json.Unmarshal([]byte(example), &says); err != nil {
		t.Fatal(err)
	}
	f, err := open.File(filepath.Join(root(t), "recording", "testdata", "detection.pickle.gz"))
	if err != nil {
		t.Fatal(err)
	}
	var all replay.Reports
	for _, tr := range f.Traces {
		tr.Path = filepath.Base(tr.Path)
		r, err := replay.Replay(tr, []replay.Spec{{Name: "torch"}}, replay.Options{Verify: true})
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range r.Results {
			x.NSPerEvent = 0
		}
		all.Traces = append(all.Traces, r)
	}
	data, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	var is any
	if err := json.Unmarshal(data, &is); err != nil {
		t.Fatal(err)
	}
	timeless(says)
	if d := cmp.Diff(is, says, cmpopts.EquateApprox(1e-6, 0)); d != "" {
		t.Errorf("the README's JSON (+) is not what is printed (-):\n%s", d)
	}
}

// timeless sets what depends on the machine's speed to 0.
func timeless(v any) {
	switch v := v.(type) {
	case map[string]any:
		if _, ok := v["ns_per_event"]; ok {
			v["ns_per_event"] = 0.0
		}
		for _, x := range v {
			timeless(x)
		}
	case []any:
		for _, x := range v {
			timeless(x)
		}
	}
}

// block is the first fenced block of a language in a Markdown text, and what follows it.
func block(text, language string) (body, rest string, ok bool) {
	_, text, ok = strings.Cut(text, "```"+language+"\n")
	if !ok {
		return "", "", false
	}
	return strings.Cut(text, "```")
}

// TestReadmeNames: every setting, policy and command has its place in the README.
func TestReadmeNames(t *testing.T) {
	text := read(t, "README.md")
	_, err := cistern.ParseOptions("no such key:1")
	if err == nil {
		t.Fatal("a setting that does not exist was accepted")
	}
	_, keys, ok := strings.Cut(err.Error(), "the keys are ")
	if !ok {
		t.Fatalf("no keys in %q", err)
	}
	for _, key := range strings.Split(keys, ", ") {
		if !strings.Contains(text, "| `"+key+"` |") {
			t.Errorf("the README's table of settings has no row for %s", key)
		}
	}
	for _, name := range replay.PolicyNames() {
		if !strings.Contains(text, "| `"+name+"` |") {
			t.Errorf("the README's table of policies has no row for %s", name)
		}
	}
}

// TestLinks: files that the documents point to exist.
func TestLinks(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#:]+)(#[^)]*)?\)`)
	for _, f := range sources(t, ".md") {
		for _, m := range link.FindAllStringSubmatch(read(t, f), -1) {
			to := filepath.Join(root(t), filepath.Dir(f), filepath.FromSlash(m[1]))
			if _, err := os.Stat(to); err != nil {
				t.Errorf("%s points to %s: %v", f, m[1], err)
			}
		}
	}
}

// TestMakeTargets: what the documents tell people to make can be made.
func TestMakeTargets(t *testing.T) {
	targets := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^([a-z-]+):( |$)`).FindAllStringSubmatch(read(t, "Makefile"), -1) {
		targets[m[1]] = true
	}
	use := regexp.MustCompile("`make ([a-z-]+)")
	for _, f := range sources(t, ".md", ".go") {
		for _, m := range use.FindAllStringSubmatch(read(t, f), -1) {
			if !targets[m[1]] {
				t.Errorf("%s: no make target %s", f, m[1])
			}
		}
	}
}
