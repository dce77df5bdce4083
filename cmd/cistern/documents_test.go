package main

import (
	"bytes"
	"context"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/native"
)

// documents are the texts for readers, from the root of the tree.
func documents(t *testing.T) (names []string) {
	t.Helper()
	for _, pattern := range []string{"README.md", "python/README.md", "docs/*.md", "docs/*/*.md"} {
		found, err := filepath.Glob(filepath.Join("..", "..", pattern))
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, found...)
	}
	if len(names) < 20 {
		t.Fatalf("%d documents: this test no longer finds them", len(names))
	}
	return names
}

func readDocument(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

var (
	consoleBlock = regexp.MustCompile("(?s)(```console\n)(.*?)(```)")
	shellBlock   = regexp.MustCompile("(?s)```sh\n(.*?)```")
	textBlock    = regexp.MustCompile("(?s)```text\n(.*?)```")
	codeSpan     = regexp.MustCompile("`cistern ([a-z-]+)([^`]*)`")
	flagName     = regexp.MustCompile(`(?:^|\s)--?([a-z][a-z-]*)`)
	headCommand  = regexp.MustCompile(`^(.*?) \| head -n ([0-9]+)$`)
	// replayTime differs from run to run.
	replayTime = regexp.MustCompile(`[0-9,]+ replays? in [0-9.]+ m?s\.`)
)

// TestDocuments runs the commands of every console sample in the root of the tree and compares what they print with the
// sample. `go test ./cmd/cistern -run TestDocuments -rewrite` takes what it sees.
func TestDocuments(t *testing.T) {
	if testing.Short() {
		t.Skip("commands of the documents run without the race detector")
	}
	names := documents(t)
	for i := range names {
		names[i], _ = filepath.Abs(names[i])
	}
	t.Chdir(filepath.Join("..", ".."))
	samples := 0
	for _, name := range names {
		text := readDocument(t, name)
		now := consoleBlock.ReplaceAllStringFunc(text, func(block string) string {
			samples++
			m := consoleBlock.FindStringSubmatch(block)
			return m[1] + rerunSample(t, name, m[2]) + m[3]
		})
		if replayTime.ReplaceAllString(now, "") == replayTime.ReplaceAllString(text, "") {
			continue
		}
		if flag.Lookup("rewrite").Value.String() != "true" {
			t.Errorf("%s: a sample is not what its command prints now, which is\n%s", name, now)
		} else if err := os.WriteFile(name, []byte(now), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if samples < 5 {
		t.Errorf("%d console samples: this test no longer finds them", samples)
	}
}

// rerunSample is a sample with the output that its commands have now.
func rerunSample(t *testing.T, name, sample string) string {
	var b strings.Builder
	for line := range strings.Lines(sample) {
		command, ok := strings.CutPrefix(strings.TrimSpace(line), "$ ")
		if !ok {
			continue
		}
		most := -1
		b.WriteString(line)
		if m := headCommand.FindStringSubmatch(command); m != nil {
			command = m[1]
			most, _ = strconv.Atoi(m[2])
		}
		args := strings.Fields(command)
		if args[0] != "cistern" {
			t.Errorf("%s: %q is no command of Cistern's", name, command)
			continue
		}
		out, errs, code := cistern(t, "", args[1:]...)
		if code != 0 {
			t.Errorf("%s: %s: exit %d: %s", name, command, code, errs)
		}
		lines := strings.SplitAfter(strings.TrimRight(out, "\n")+"\n", "\n")
		if lines = lines[:len(lines)-1]; most >= 0 && most < len(lines) {
			lines = lines[:most]
		}
		b.WriteString(strings.Join(lines, ""))
	}
	return b.String()
}

// readers are the commands that need nothing but files.
var readers = []string{"replay", "tune", "inspect", "report", "diff", "convert"}

// TestDocumentCommands: every command of Cistern's in a shell sample runs, over files of the names that the documents use, where it
// needs nothing but files. Of all others the command and its flags exist.
func TestDocumentCommands(t *testing.T) {
	if testing.Short() {
		t.Skip("commands of the documents run without the race detector")
	}
	names := documents(t)
	texts := map[string]string{}
	for _, name := range names {
		texts[name] = readDocument(t, name)
	}
	run := readDocument(t, filepath.Join("..", "..", "docs", "samples", "oom.pickle.gz"))
	t.Chdir(t.TempDir())
	for _, file := range []string{"run.pickle", "run.oom1.pickle", "before.pickle", "after.pickle"} {
		if err := os.WriteFile(file, []byte(run), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	writeFailure(t, "oom")
	ran := 0
	for _, name := range names {
		for _, block := range shellBlock.FindAllStringSubmatch(texts[name], -1) {
			for line := range strings.Lines(block[1]) {
				line, _, _ = strings.Cut(line, " #")
				if args := strings.Fields(line); len(args) > 1 && args[0] == "cistern" {
					ran++
					tryCommand(t, name, args[1:])
				}
			}
		}
		for _, span := range codeSpan.FindAllStringSubmatch(texts[name], -1) {
			knownFlags(t, name, span[1], span[2])
		}
	}
	if ran < 20 {
		t.Errorf("%d commands in shell samples: this test no longer finds them", ran)
	}
}

// TestDocumentTop: the tables of docs/top.md are those that the command prints of the scene in topscene_test.go.
func TestDocumentTop(t *testing.T) {
	printed := readDocument(t, filepath.Join("testdata", "top", "once"))
	samples := textBlock.FindAllStringSubmatch(readDocument(t, filepath.Join("..", "..", "docs", "top.md")), -1)
	if len(samples) < 2 {
		t.Errorf("%d tables in docs/top.md", len(samples))
	}
	for _, sample := range samples {
		if !strings.Contains(printed, sample[1]) {
			t.Errorf("docs/top.md: nothing in testdata/top/once is\n%s", sample[1])
		}
	}
}

// writeFailure makes a folder with a file of a failed request.
func writeFailure(t *testing.T, folder string) {
	t.Helper()
	trace := tinyTrace(0)
	trace.Failures = []*recording.Failure{{Event: 8, Requested: 16 * mib, Need: 16 * mib, DeviceTotal: 42 * mib, DeviceFree: 2 * mib, Reserved: 40 * mib,
		Allocated: 20 * mib, Cached: 20 * mib, Largest: 12 * mib}}
	var file bytes.Buffer
	if err := native.Write(&file, &recording.File{Traces: []*recording.Trace{trace}}); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "oom-4711-1.cistern"), file.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
}

// tryCommand runs a command that reads files; of another one it parses the flags.
func tryCommand(t *testing.T, name string, args []string) {
	t.Helper()
	if slices.Contains(readers, args[0]) {
		if _, errs, code := cistern(t, "", args...); code != 0 {
			t.Errorf("%s: cistern %s: exit %d: %s", name, strings.Join(args, " "), code, errs)
		}
		return
	}
	root := newRoot(&app{in: strings.NewReader(""), out: &checkedWriter{w: &bytes.Buffer{}}, err: &bytes.Buffer{}})
	root.SetContext(context.Background())
	command, rest, err := root.Find(args)
	if err == nil {
		err = command.ParseFlags(rest)
	}
	if err != nil {
		t.Errorf("%s: cistern %s: %v", name, strings.Join(args, " "), err)
	}
}

// knownFlags checks a command in a sentence: it exists, as do its flags. What follows -- is another program's.
func knownFlags(t *testing.T, name, word, rest string) {
	t.Helper()
	root := newRoot(&app{in: strings.NewReader(""), out: &checkedWriter{w: &bytes.Buffer{}}, err: &bytes.Buffer{}})
	args := []string{word}
	if words := strings.Fields(rest); len(words) > 0 && !strings.HasPrefix(words[0], "-") {
		args = append(args, words[0]) // it may be a command of that command
	}
	command, _, err := root.Find(args)
	if err != nil || command == root {
		t.Errorf("%s: there is no command cistern %s", name, word)
		return
	}
	rest, _, _ = strings.Cut(rest, " -- ")
	for _, m := range flagName.FindAllStringSubmatch(rest, -1) {
		if f := command.Flags().Lookup(m[1]); f == nil && m[1] != "help" && (len(m[1]) != 1 || command.Flags().ShorthandLookup(m[1]) == nil) {
			t.Errorf("%s: cistern %s has no flag %s", name, word, m[1])
		}
	}
}

// The tests of documents find commands, flags and outputs that are wrong.
func TestDocumentChecks(t *testing.T) {
	inFolder(t)
	if got, want := rerunSample(t, "a", "$ cistern version | head -n 1\nother\n"), "$ cistern version | head -n 1\n"; !strings.HasPrefix(got, want) || strings.Contains(got, "other") {
		t.Errorf("%q", got)
	}
	if m := headCommand.FindStringSubmatch("cistern report a | head -n 30"); m == nil || m[1] != "cistern report a" || m[2] != "30" {
		t.Errorf("%q", m)
	}
	var flags []string
	for _, m := range flagName.FindAllStringSubmatch(" run.pickle -o a --max-entries 3 x-y --json", -1) {
		flags = append(flags, m[1])
	}
	if !slices.Equal(flags, []string{"o", "max-entries", "json"}) {
		t.Errorf("%q", flags)
	}
}
