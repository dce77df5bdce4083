package lint

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/cistern-gpu/cistern"
	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/replay"
)

// The pages whose samples are tested here; cmd/cistern tests the commands in all pages, cmd/libcistern the C program.
const (
	goPage       = "docs/go-api.md"
	linkPage     = "docs/getting-started/link.md"
	replayPage   = "docs/record-replay-tune.md"
	settingsPage = "docs/settings.md"
	indexPage    = "docs/index.md"
)

// goModEdit is a command by which a module finds this one.
var goModEdit = regexp.MustCompile(`(?m)^go mod edit (-[a-z]+) (\S+)$`)

// TestOutsideProgram builds the Go program of the documents as a stranger would, in a module of its own that finds this one as
// the documents say, without a network; runs it; and compares what it prints with what the page says it prints.
func TestOutsideProgram(t *testing.T) {
	if testing.Short() {
		t.Skip("links a program")
	}
	program, rest, ok := block(read(t, goPage), "go")
	if !ok {
		t.Fatal(goPage + " has no Go program")
	}
	want, _, ok := block(rest, "text")
	if !ok {
		t.Fatal(goPage + " does not say what its program prints")
	}
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
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
	command("1", "go", "mod", "init", "example.com/outside")
	edits := goModEdit.FindAllStringSubmatch(read(t, linkPage), -1)
	if len(edits) != 2 {
		t.Fatalf("%s has %d commands for go.mod", linkPage, len(edits))
	}
	for _, m := range edits {
		command("1", "go", "mod", "edit", m[1], strings.ReplaceAll(m[2], "../cistern", filepath.ToSlash(root(t))))
	}
	for _, cgo := range []string{"0", "1"} {
		command(cgo, "go", "build", "-o", "outside.exe", ".")
		if got := command(cgo, filepath.Join(dir, "outside.exe")); strings.TrimSpace(got) != strings.TrimSpace(want) {
			t.Errorf("CGO_ENABLED=%s: the program of %s printed\n%s\nbut the page says\n%s", cgo, goPage, got, want)
		}
	}
}

// TestJSONSample: the example of --json has the fields that the command prints, and the values that do not
// depend on the machine.
func TestJSONSample(t *testing.T) {
	example, _, ok := block(read(t, replayPage), "json")
	if !ok {
		t.Fatal(replayPage + " shows no JSON")
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
		t.Errorf("the JSON of %s (+) is not what is printed (-):\n%s", replayPage, d)
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

// TestDocumentedNames: every setting, policy and command has its row.
func TestDocumentedNames(t *testing.T) {
	_, err := cistern.ParseOptions("no such key:1")
	if err == nil {
		t.Fatal("a setting that does not exist was accepted")
	}
	_, keys, ok := strings.Cut(err.Error(), "the keys are ")
	if !ok {
		t.Fatalf("no keys in %q", err)
	}
	rows(t, settingsPage, "%s", strings.Split(keys, ", "))
	rows(t, replayPage, "%s", replay.PolicyNames())
	parents := map[string]string{"collect": "fleet ", "export": "fleet ", "metrics": "fleet ", "ls": "node ", "pause": "node ", "resume": "node ",
		"set": "node ", "stat": "node ", "rm": "node "} // of commands of commands
	var commands []string
	for _, m := range regexp.MustCompile(`(?m)^\s+Use:\s+"([a-z-]+)`).FindAllStringSubmatch(commandSource(t), -1) {
		if m[1] != "cistern" && m[1] != "version" && m[1] != "man" && !strings.HasPrefix(m[1], "check-") {
			commands = append(commands, parents[m[1]]+m[1])
		}
	}
	if len(commands) < 12 {
		t.Errorf("%d commands: this test no longer finds them", len(commands))
	}
	rows(t, indexPage, "cistern %s", commands)
}

// rows checks that tables of a page have a row for each name.
func rows(t *testing.T, page, form string, names []string) {
	t.Helper()
	text := read(t, page)
	for _, name := range names {
		if name = fmt.Sprintf(form, name); !strings.Contains(text, "| `"+name+"` |") {
			t.Errorf("no table of %s has a row for %s", page, name)
		}
	}
}

// commandSource is the code of the command line.
func commandSource(t *testing.T) string {
	var b strings.Builder
	for _, f := range sources(t, ".go") {
		if strings.HasPrefix(f, "cmd/cistern/") && !strings.HasSuffix(f, "_test.go") {
			b.WriteString(read(t, f))
		}
	}
	return b.String()
}

// TestReadmeResults: the figures of the README are those of the page of benchmarks.
func TestReadmeResults(t *testing.T) {
	page, rows := read(t, "docs/benchmarks.md"), 0
	for _, m := range regexp.MustCompile(`(?m)^\| ([a-z0-9_]+) \| ([0-9.]+) \| ([0-9.]+) \| ([0-9.]+) \| ([0-9.]+) \|$`).FindAllStringSubmatch(read(t, "README.md"), -1) {
		rows++
		// Native, expandable, the median of three of Cistern's, and its time.
		want := regexp.MustCompile(`(?m)^\| ` + m[1] + ` \([0-9]+\) \| [0-9.]+ GB \| ` + m[2] + ` \| ` + m[3] + ` \| [0-9.]+, ` + m[4] + `, [0-9.]+ \| ` + m[5] + ` \|`)
		if !want.MatchString(page) {
			t.Errorf("docs/benchmarks.md has other figures for %s", m[0])
		}
	}
	if rows != 4 {
		t.Errorf("%d rows of results", rows)
	}
}

// TestCNames: the functions of C that the documents name are in the header; a method of PyTorch's pools has such a name too, and
// metrics.
func TestCNames(t *testing.T) {
	header := read(t, "cmd/libcistern/cistern.h") + " cistern_stats(" + read(t, "internal/node/metrics/metrics.go") + read(t, "fleet/metrics.go")
	seen := 0
	for _, f := range readerPages(t) {
		for _, m := range regexp.MustCompile("`[^`\n]*?\\b(cistern_[a-z_]+)").FindAllStringSubmatch(read(t, f), -1) {
			seen++
			if !regexp.MustCompile(`\b` + m[1] + `\b`).MatchString(header) {
				t.Errorf("%s names %s, which is neither in cistern.h nor a metric", f, m[1])
			}
		}
	}
	if seen < 40 {
		t.Errorf("%d names: this test no longer finds them", seen)
	}
}

// TestReadmeSize: the README is for the first minute; the rest is in docs.
func TestReadmeSize(t *testing.T) {
	const mostBytes, mostLines = 8192, 150
	text := read(t, "README.md")
	if n := len(text); n > mostBytes {
		t.Errorf("README.md has %d bytes, at most %d", n, mostBytes)
	}
	if n := strings.Count(text, "\n"); n > mostLines {
		t.Errorf("README.md has %d lines, at most %d", n, mostLines)
	}
}

// TestLinks: files and headings that the documents point to exist.
func TestLinks(t *testing.T) {
	links := 0
	for _, f := range sources(t, ".md") {
		text := withoutCode(read(t, f))
		for _, m := range markdownLink.FindAllStringSubmatch(text, -1) {
			links++
			if err := resolves(t, f, m[1], m[2]); err != nil {
				t.Errorf("%s: %v", f, err)
			}
		}
	}
	if links < 80 {
		t.Errorf("%d links: this test no longer finds them", links)
	}
	for _, bad := range [][2]string{{"no-such-file.md", ""}, {"docs/pytorch.md", "no-such-heading"}, {"", "no-such-heading"}} {
		if resolves(t, "README.md", bad[0], bad[1]) == nil {
			t.Errorf("a link to %s#%s resolves", bad[0], bad[1])
		}
	}
}

// markdownLink is a link or picture in the tree, with its file and its heading.
var markdownLink = regexp.MustCompile(`\]\(([^)#:\s]*)(?:#([^)\s]*))?\)`)

// resolves reports why a link of a document leads nowhere.
func resolves(t *testing.T, from, file, heading string) error {
	to := from
	if file != "" {
		to = path.Join(path.Dir(from), file)
		if _, err := os.Stat(filepath.Join(root(t), filepath.FromSlash(to))); err != nil {
			return err
		}
	}
	if heading == "" || !strings.HasSuffix(to, ".md") {
		return nil
	}
	for _, m := range headingLine.FindAllStringSubmatch(read(t, to), -1) {
		if slug(m[1]) == heading {
			return nil
		}
	}
	return fmt.Errorf("%s has no heading %s", to, heading)
}

var headingLine = regexp.MustCompile(`(?m)^#+ (.*)$`)

// slug is the name that GitHub and mkdocs give a heading.
func slug(heading string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case unicode.IsLetter(r), unicode.IsDigit(r), r == '-', r == '_':
			return unicode.ToLower(r)
		}
		return -1
	}, heading)
}

// TestMakeTargets: what the documents tell people to make can be made.
func TestMakeTargets(t *testing.T) {
	targets := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^([a-z-]+):( |$)`).FindAllStringSubmatch(read(t, "Makefile"), -1) {
		targets[m[1]] = true
	}
	// In sentences, and on lines of their own in samples.
	use := regexp.MustCompile("(?m)(?:`|^)make ([a-z-]+)(?:`| *$| +[#A-Z])")
	for _, f := range sources(t, ".md", ".go") {
		for _, m := range use.FindAllStringSubmatch(read(t, f), -1) {
			if !targets[m[1]] {
				t.Errorf("%s: no make target %s", f, m[1])
			}
		}
	}
}
