package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/native"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/recording/pytorch"
	"github.com/cistern-gpu/cistern/report"
)

// keysOf lists the keys of a JSON object as they stand in the text.
func keysOf(t *testing.T, raw json.RawMessage) []string {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(raw))
	var keys []string
	if _, err := d.Token(); err != nil {
		t.Fatal(err)
	}
	for d.More() {
		k, err := d.Token()
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, k.(string))
		var skip json.RawMessage
		if err := d.Decode(&skip); err != nil {
			t.Fatal(err)
		}
	}
	return keys
}

// The shape of --json is a contract: these names, in this order, and nothing else.
func TestJSONShape(t *testing.T) {
	inFolder(t)
	out, _, code := cistern(t, "", "replay", "--policy", "torch", "--verify", "--json", "tiny.pickle")
	if code != exitOK {
		t.Fatalf("code %d", code)
	}
	var doc struct{ Traces []json.RawMessage }
	if err := json.Unmarshal([]byte(out), &doc); err != nil || len(doc.Traces) != 1 {
		t.Fatalf("%v in %s", err, out)
	}
	var tr struct {
		Recorded, Verify json.RawMessage
		Results          []json.RawMessage
	}
	if err := json.Unmarshal(doc.Traces[0], &tr); err != nil || len(tr.Results) != 1 {
		t.Fatalf("%v in %s", err, out)
	}
	for _, c := range []struct {
		what string
		raw  json.RawMessage
		want string
	}{
		{"document", json.RawMessage(out), "traces"},
		{"trace", doc.Traces[0], "path device format events streams duration_us peak_live_bytes recorded notes results verify warning"},
		{"recorded", tr.Recorded, "peak_reserved_bytes segment_events ooms settings"},
		{"result", tr.Results[0], "policy conf capacity_bytes capacity_from completed failed_event ooms ooms_avoided " +
			"peak_live_bytes peak_reserved_bytes ratio mean_reserved_bytes request_us driver_calls driver_time_us driver_time_least_us stream_syncs device_syncs retries ns_per_event odds"},
		{"verify", tr.Verify, "recorded matched placements placements_matched first_mismatch"},
	} {
		if got := strings.Join(keysOf(t, c.raw), " "); got != c.want {
			t.Errorf("%s has %s\nwant %s", c.what, got, c.want)
		}
	}
}

func TestNDJSONIsOneLineForEachTrace(t *testing.T) {
	inFolder(t)
	out, _, code := cistern(t, "", "replay", "--policy", "direct", "--ndjson", "two.pickle", "tiny.pickle")
	lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
	if code != exitOK || len(lines) != 3 {
		t.Fatalf("code %d, %d lines, want 3", code, len(lines))
	}
	for i, want := range []string{"two.pickle 0", "two.pickle 1", "tiny.pickle 0"} {
		var tr struct {
			Path   string
			Device int
		}
		if err := json.Unmarshal([]byte(lines[i]), &tr); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(tr.Path, " ", tr.Device); got != want {
			t.Errorf("line %d is %s, want %s", i, got, want)
		}
	}
}

func TestInspectAndTuneJSON(t *testing.T) {
	inFolder(t)
	for _, c := range []string{"inspect", "tune"} {
		for _, flag := range []string{"--json", "--ndjson"} {
			out, errs, code := cistern(t, "", c, flag, "two.pickle")
			if code != exitOK || errs != "" {
				t.Fatalf("%s %s: code %d, %s", c, flag, code, errs)
			}
			d := json.NewDecoder(strings.NewReader(out))
			n := 0
			for d.More() {
				var doc struct {
					Traces []any
					Device *int
				}
				if err := d.Decode(&doc); err != nil {
					t.Fatalf("%s %s: %v", c, flag, err)
				}
				n += len(doc.Traces)
				if doc.Device != nil {
					n++
				}
			}
			if n != 2 {
				t.Errorf("%s %s: %d traces, want 2", c, flag, n)
			}
		}
	}
}

// An empty name is not that of standard input.
func TestEmptyName(t *testing.T) {
	inFolder(t)
	for _, args := range [][]string{{"inspect", ""}, {"replay", ""}, {"convert", "", "-o", "out.csv"}, {"diff", "tiny.pickle", ""}, {"tune", ""}} {
		_, errs, code := cistern(t, "", args...)
		if want := "cistern: \"\": an empty name; expected that of a file, or - for standard input\n"; code != exitBad || errs != want {
			t.Errorf("%q: code %d, %q", args, code, errs)
		}
	}
}

func TestStandardInput(t *testing.T) {
	inFolder(t)
	data, err := os.ReadFile("tiny.pickle")
	if err != nil {
		t.Fatal(err)
	}
	out, errs, code := cistern(t, string(data), "replay", "--policy", "direct", "-")
	if code != exitOK || !strings.HasPrefix(out, "standard input, device 0") {
		t.Errorf("code %d, %s%s", code, out, errs)
	}
	_, errs, code = cistern(t, "nonsense", "replay", "--policy", "direct", "-")
	if code != exitBad || !strings.HasPrefix(errs, "cistern: standard input: byte 0") {
		t.Errorf("code %d, %s", code, errs)
	}
}

// A record that PyTorch's model does not reproduce is code 1, and all is printed nevertheless.
func TestVerifyMismatch(t *testing.T) {
	inFolder(t)
	tr := tinyTrace(0)
	tr.Events[2].Addr += 2 * mib // best fit would not have put it there
	tr.Events[6].Addr += 2 * mib
	tr.Events[7].Addr += 2 * mib
	tr.Events[5].Addr += 2 * mib
	tr.Final = nil
	var b bytes.Buffer
	if err := native.Write(&b, &recording.File{Traces: []*recording.Trace{tr}}); err != nil {
		t.Fatal(err)
	}
	tr.Format = recording.FormatPyTorch
	b.Reset()
	if err := pytorch.Write(&b, tr); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile("odd.pickle", b.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	out, errs, code := cistern(t, "", "replay", "--policy", "torch", "--verify", "odd.pickle", "tiny.pickle")
	if code != exitMismatch || errs != "" || !strings.Contains(out, "differs from the record") ||
		!strings.Contains(out, "first mismatch: ") || !strings.Contains(out, "tiny.pickle") {
		t.Errorf("code %d, want %d:\n%s%s", code, exitMismatch, out, errs)
	}
	// A file that cannot be read counts more.
	if _, _, code = cistern(t, "", "replay", "--policy", "torch", "--verify", "odd.pickle", "empty"); code != exitBad {
		t.Errorf("code %d, want %d", code, exitBad)
	}
}

// What --record writes is what the policy did: replaying PyTorch's model over it matches its own record.
func TestRecord(t *testing.T) {
	inFolder(t)
	if _, errs, code := cistern(t, "", "replay", "--policy", "torch", "--record", "out.pickle", "two.pickle"); code != exitOK {
		t.Fatalf("code %d: %s", code, errs)
	}
	f, err := open.File("out.pickle")
	if err != nil {
		t.Fatal(err)
	}
	if len(f.Traces) != 2 || f.Traces[0].RecordedPeakReserved() != 40*mib {
		t.Errorf("%d devices, the first with %d bytes reserved at the peak; want 2 and %d", len(f.Traces),
			f.Traces[0].RecordedPeakReserved(), 40*mib)
	}
	// The recording has the settings it was made with: the model that they name does the same again.
	for _, conf := range []string{"default", "expandable_segments:True", "roundup_power2_divisions:[1:2,2:4,>:8],max_split_size_mb:32"} {
		if _, errs, code := cistern(t, "", "replay", "--policy", "torch:"+conf, "--record", "conf.pickle", "tiny.pickle"); code != exitOK {
			t.Fatalf("%s: code %d: %s", conf, code, errs)
		}
		out, errs, code := cistern(t, "", "replay", "--policy", "torch", "--verify", "--capacity", "42MiB", "conf.pickle")
		if code != exitOK || !strings.Contains(out, "matches the record") {
			t.Errorf("%s: code %d: %s%s", conf, code, out, errs)
		}
	}
}

// An output is whole or missing: what was there stays when the work fails, and nothing is left beside it.
func TestOutputsAreWholeOrMissing(t *testing.T) {
	inFolder(t)
	if err := os.WriteFile("kept.cistern", []byte("as it was"), 0o600); err != nil {
		t.Fatal(err)
	}
	before := names(t)
	for _, args := range [][]string{
		{"convert", "cut.pickle", "-o", "kept.cistern"},
		{"convert", "cut.pickle", "-o", "new.cistern"},
		{"convert", "tiny.pickle", "-o", "new.pb.gz", "--at", "1000"},
		{"convert", "cut.pickle", "-o", "new.parquet"},
		{"replay", "--policy", "torch", "--record", "new.pickle", "cut.pickle"},
	} {
		if _, _, code := cistern(t, "", args...); code != exitBad {
			t.Errorf("%v: code %d, want %d", args, code, exitBad)
		}
	}
	if data, err := os.ReadFile("kept.cistern"); err != nil || string(data) != "as it was" {
		t.Errorf("the old file holds %q, %v", data, err)
	}
	if after := names(t); !slices.Equal(before, after) {
		t.Errorf("files before %v\nafter %v", before, after)
	}
	if _, errs, code := cistern(t, "", "convert", "tiny.pickle", "-o", "kept.cistern"); code != exitOK {
		t.Fatalf("code %d: %s", code, errs)
	}
	st, err := os.Stat("kept.cistern")
	if err != nil {
		t.Fatal(err)
	}
	if runtime.GOOS != "windows" && st.Mode().Perm() != 0o600 {
		t.Errorf("the file's permissions became %v", st.Mode())
	}
	if _, err := open.File("kept.cistern"); err != nil {
		t.Error(err)
	}
	if after := names(t); !slices.Equal(before, after) {
		t.Errorf("files before %v\nafter %v", before, after)
	}
}

func names(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

func TestConvertToStandardOutput(t *testing.T) {
	inFolder(t)
	out, errs, code := cistern(t, "", "convert", "tiny.pickle", "-o", "-", "--to", "cistern")
	if code != exitOK {
		t.Fatalf("code %d: %s", code, errs)
	}
	f, err := open.Read(strings.NewReader(out), "-")
	if err != nil || len(f.Traces) != 1 || len(f.Traces[0].Events) != len(tinyTrace(0).Events) {
		t.Errorf("%v: %+v", err, f)
	}
}

type fullDisk struct{}

func (fullDisk) Write(p []byte) (int, error) { return 0, fmt.Errorf("no space left on device") }

func TestStandardOutputThatCannotBeWritten(t *testing.T) {
	inFolder(t)
	for _, flag := range []string{"--json", "--ndjson", "--verify"} {
		var errs bytes.Buffer
		code := run(context.Background(), []string{"replay", "--policy", "direct", flag, "tiny.pickle"}, strings.NewReader(""),
			fullDisk{}, &errs)
		if want := "cistern: standard output: cannot be written: no space left on device\n"; code != exitBad || errs.String() != want {
			t.Errorf("%s: code %d, %q, want %d, %q", flag, code, errs.String(), exitBad, want)
		}
	}
}

// A disk that fills up while a format is written is one line, with the output's name.
func TestConvertToAFullDisk(t *testing.T) {
	inFolder(t)
	if _, err := os.Stat("/dev/full"); err != nil {
		t.Skip("there is no /dev/full")
	}
	for _, to := range formatNames() {
		_, errs, code := cistern(t, "", "convert", "tiny.pickle", "-o", "/dev/full", "--to", to)
		if code != exitBad || !strings.Contains(errs, "/dev/full: cannot be written: no space left on device") ||
			strings.Count(errs, "\n") != 1 {
			t.Errorf("%s: code %d, %q", to, code, errs)
		}
	}
}

type closedPipe struct{}

func (closedPipe) Write(p []byte) (int, error) {
	return 0, &os.PathError{Op: "write", Path: "|1", Err: syscall.EPIPE}
}

// The reader of the output may stop (head); the files asked for are written all the same, without a word.
func TestReaderThatStops(t *testing.T) {
	inFolder(t)
	var errs bytes.Buffer
	code := run(context.Background(), []string{"replay", "--policy", "torch", "--record", "out.pickle", "tiny.pickle"},
		strings.NewReader(""), closedPipe{}, &errs)
	if _, err := open.File("out.pickle"); code != exitBad || errs.Len() > 0 || err != nil {
		t.Errorf("code %d, %q, %v", code, errs.String(), err)
	}
}

// Many files at once come out in the order in which they were named.
func TestManyFilesKeepTheirOrder(t *testing.T) {
	inFolder(t)
	data, err := os.ReadFile("tiny.pickle")
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"replay", "--policy", "direct", "--ndjson"}
	var want []string
	for i := range 40 {
		name := fmt.Sprintf("%02d.pickle", (i*17)%40)
		if err := os.WriteFile(name, data, 0o644); err != nil {
			t.Fatal(err)
		}
		args, want = append(args, name), append(want, name)
	}
	out, errs, code := cistern(t, "", args...)
	if code != exitOK {
		t.Fatalf("code %d: %s", code, errs)
	}
	var got []string
	for line := range strings.Lines(out) {
		var tr struct{ Path string }
		if err := json.Unmarshal([]byte(line), &tr); err != nil {
			t.Fatal(err)
		}
		got = append(got, tr.Path)
	}
	if !slices.Equal(got, want) {
		t.Errorf("order %v\nwant %v", got, want)
	}
}

// File names and stack names cannot steer the terminal.
func TestControlCharacters(t *testing.T) {
	inFolder(t)
	if runtime.GOOS == "windows" {
		t.Skip("such file names do not exist here")
	}
	name := "evil\x1b[2J\nname"
	_, errs, _ := cistern(t, "", "inspect", name)
	if strings.ContainsRune(errs, '\x1b') || strings.Count(errs, "\n") != 1 {
		t.Errorf("standard error is %q", errs)
	}
	tr := tinyTrace(0)
	tr.Frames[0].Func = "evil\x1b[2J\nname"
	var b bytes.Buffer
	if err := pytorch.Write(&b, tr); err != nil {
		t.Fatal(err)
	}
	out, _, code := cistern(t, b.String(), "inspect", "-")
	if code != exitOK || strings.ContainsRune(out, '\x1b') || !strings.Contains(out, "evil\uFFFD[2J\uFFFDname") {
		t.Errorf("code %d, standard output is %q", code, out)
	}
}

func TestInterrupt(t *testing.T) {
	inFolder(t)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	var out, errs bytes.Buffer
	code := run(ctx, []string{"convert", "tiny.pickle", "-o", "x.cistern"}, strings.NewReader(""), &out, &errs)
	if _, err := os.Stat("x.cistern"); code == exitOK && err != nil || code != exitOK && err == nil {
		t.Errorf("code %d, but the output's state is %v", code, err)
	}
	if left, _ := filepath.Glob(".cistern-*"); left != nil {
		t.Errorf("%v is left", left)
	}
}

func TestVersionAndCompletion(t *testing.T) {
	out, _, code := cistern(t, "", "version")
	if code != exitOK || !strings.HasPrefix(out, "cistern ") || !strings.Contains(out, runtime.Version()) {
		t.Errorf("code %d, %q", code, out)
	}
	if flag, errs, code := cistern(t, "", "--version"); flag != out || errs != "" || code != exitOK {
		t.Errorf("--version says %q, version %q; %s, code %d", flag, out, errs, code)
	}
	out, _, code = cistern(t, "", "version", "--json")
	var v versionInfo
	if err := json.Unmarshal([]byte(out), &v); err != nil || code != exitOK || v.Version == "" {
		t.Errorf("code %d, %v, %q", code, err, out)
	}
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if out, _, code := cistern(t, "", "completion", shell); code != exitOK || len(out) < 100 {
			t.Errorf("%s: code %d, %d bytes", shell, code, len(out))
		}
	}
	out, _, _ = cistern(t, "", "__complete", "replay", "--policy", "torch-")
	if !strings.Contains(out, "torch-async") {
		t.Errorf("completing a policy says %q", out)
	}
}

// Help begins with what a command does and examples of it; the columns of tables are a topic of their own.
func TestHelp(t *testing.T) {
	for _, c := range newRoot(&app{}).Commands() {
		if !c.IsAvailableCommand() || c.Name() == "version" || c.Name() == "completion" {
			continue
		}
		out, errs, code := cistern(t, "", c.Name(), "--help")
		example, usage := strings.Index(out, "\n\n  cistern "+c.Name()), strings.Index(out, "\nUsage:\n")
		if code != exitOK || errs != "" || !strings.HasPrefix(out, c.Short+"\n") || example < 0 || usage < example {
			t.Errorf("%s: code %d, %s, examples at %d, usage at %d", c.Name(), code, errs, example, usage)
		}
		if strings.Contains(out, "VARCHAR") {
			t.Errorf("%s: help has the columns of tables", c.Name())
		}
	}
	for args, want := range map[string]string{"formts": `unknown command "formts"`, "repaly": "did you mean replay?", "run python": `help run: there is no command "python" below it`} {
		if out, errs, code := cistern(t, "", append([]string{"help"}, strings.Fields(args)...)...); code != exitBad || out != "" || !strings.Contains(errs, want) {
			t.Errorf("help %s: code %d, %q, %q", args, code, out, errs)
		}
	}
	if out, _, code := cistern(t, "", "help", "formats"); code != exitOK || !strings.Contains(out, "--table events ") || !strings.Contains(out, "inuse_space") || strings.Contains(out, "VARCHAR") {
		t.Errorf("code %d, %q", code, out)
	}
}

// A page needs the bundle; without it both ways to ask for one say what to run, and leave nothing behind.
func TestPage(t *testing.T) {
	inFolder(t)
	before := names(t)
	for _, args := range [][]string{
		{"replay", "--policy", "torch", "--html", "page.html", "tiny.pickle", "rmm.csv"},
		{"report", "--policy", "torch", "tiny.pickle", "rmm.csv", "-o", "page.html"},
		{"report", "--policy", "torch", "tiny.pickle", "rmm.csv", "--html", "page.html"},
		{"report", "--policy", "torch", "tiny.pickle", "rmm.csv", "--html", "page.html", "-o", "page.html"},
	} {
		out, errs, code := cistern(t, "", args...)
		if bundle := report.CheckBundle(); bundle != nil {
			if code != exitBad || errs != "cistern: "+bundle.Error()+"\n" || !slices.Equal(before, names(t)) {
				t.Errorf("%v: code %d, %q", args, code, errs)
			}
			continue
		}
		page, err := os.ReadFile("page.html")
		if want := "torch:default"; err != nil || code != exitOK || !strings.Contains(out, want) {
			t.Fatalf("%v: code %d, %v, %s%s", args, code, err, out, errs)
		}
		for _, want := range []string{"<!doctype html>", "tiny.pickle", "rmm.csv", "cistern-series-1"} {
			if !bytes.Contains(page, []byte(want)) {
				t.Errorf("%v: the page has no %s", args, want)
			}
		}
		os.Remove("page.html")
	}
	if _, errs, code := cistern(t, "", "report", "rmm.csv"); code != exitBad || !strings.Contains(errs, "-o FILE") {
		t.Errorf("code %d, %q", code, errs)
	}
}
