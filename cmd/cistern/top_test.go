package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/charmbracelet/x/ansi"
	"github.com/cockroachdb/datadriven"

	"github.com/cistern-gpu/cistern/internal/top"
)

// topOf runs cistern top --once or --json over a scene.
func topOf(t *testing.T, s *scene, f topFlags, width int) (string, error) {
	t.Helper()
	var out bytes.Buffer
	a := &app{out: &checkedWriter{w: &out}, err: io.Discard}
	f.once, f.interval = true, topOften
	if f.sort == "" {
		f.sort = "reserved"
	}
	f.count = max(1, f.count)
	f.sleep = func(context.Context, time.Duration) error { return nil }
	if err := f.check(false); err != nil {
		t.Fatal(err)
	}
	err := a.topOnce(t.Context(), s, &f, width)
	return out.String(), err
}

// TestTopOnce compares the tables and the object with testdata/top/once.
func TestTopOnce(t *testing.T) {
	datadriven.RunTest(t, "testdata/top/once", func(t *testing.T, d *datadriven.TestData) string {
		width, f := 0, topFlags{device: -1, json: d.Cmd == "json", details: d.HasArg("details")}
		if d.HasArg("width") {
			d.ScanArgs(t, "width", &width)
		}
		if d.HasArg("sort") {
			d.ScanArgs(t, "sort", &f.sort)
		}
		if d.HasArg("device") {
			d.ScanArgs(t, "device", &f.device)
		}
		if d.HasArg("count") {
			d.ScanArgs(t, "count", &f.count)
		}
		s := newStage(t, 80, 24)
		if d.HasArg("change") {
			var change string
			d.ScanArgs(t, "change", &change)
			s.change(change)
		}
		out, err := topOf(t, s.scene, f, width)
		if err != nil {
			return "error: " + err.Error() + "\n"
		}
		for l := range strings.Lines(out) {
			if w := ansi.StringWidth(strings.TrimSuffix(l, "\n")); width > 0 && w > width {
				t.Errorf("%d columns: %q", w, l)
			}
		}
		return out
	})
}

// Columns begin where they began, whatever is in them, so that what reads them by place goes on working.
func TestTopOnceColumnsStay(t *testing.T) {
	heads := make(map[string]bool)
	for _, change := range []string{"", "no-nvml", "simulated", "nobody", "many"} {
		s := newStage(t, 80, 24)
		s.change(change)
		out, err := topOf(t, s.scene, topFlags{device: -1}, 80)
		if err != nil {
			t.Fatal(err)
		}
		for l := range strings.Lines(out) {
			if strings.Contains(l, "PROGRAM") {
				heads[l] = true
			}
		}
	}
	if len(heads) != 1 {
		t.Errorf("%d different headings: %v", len(heads), heads)
	}
}

// The shape of --json is a contract: these names, in this order.
func TestTopJSONShape(t *testing.T) {
	out, err := topOf(t, newScene(), topFlags{device: -1, json: true, details: true}, 0)
	if err != nil {
		t.Fatal(err)
	}
	var doc struct{ GPUs, Processes []json.RawMessage }
	if err := json.Unmarshal([]byte(out), &doc); err != nil || len(doc.GPUs) != 2 || len(doc.Processes) != 5 {
		t.Fatalf("%v in %s", err, out)
	}
	var p struct{ Devices []json.RawMessage }
	if err := json.Unmarshal(doc.Processes[1], &p); err != nil || len(p.Devices) != 2 {
		t.Fatalf("%v in %s", err, doc.Processes[1])
	}
	const memory = "used_bytes other_bytes reserved_bytes allocated_bytes active_bytes cached_bytes paused_bytes peak_reserved_bytes " +
		"peak_allocated_bytes limit_bytes driver_calls driver_calls_per_s retries ooms requests request_us "
	var v struct{ Details json.RawMessage }
	if err := json.Unmarshal(p.Devices[0], &v); err != nil {
		t.Fatal(err)
	}
	var details struct{ Tags, Stacks []json.RawMessage }
	if err := json.Unmarshal(v.Details, &details); err != nil || len(details.Tags) == 0 || len(details.Stacks) == 0 {
		t.Fatalf("%v in %s", err, v.Details)
	}
	var stack topStack
	if err := json.Unmarshal(details.Stacks[0], &stack); err != nil || len(stack.Frames) < 2 || strings.Contains(strings.Join(stack.Frames, ""), "\n") {
		t.Errorf("%v: the frames of %s", err, details.Stacks[0])
	}
	if none := topStacks([]top.Use{{Name: "", Bytes: 1}}); none[0].Frames == nil || len(none[0].Frames) != 0 {
		t.Errorf("without a stack there are %q", none[0].Frames)
	}
	withNode := newStage(t, 80, 24)
	withNode.change("node")
	out2, err := topOf(t, withNode.scene, topFlags{device: -1, json: true}, 0)
	if err != nil {
		t.Fatal(err)
	}
	var node struct {
		Node json.RawMessage
		Of   struct{ GPUs, Clients []json.RawMessage } `json:"-"`
	}
	if err := json.Unmarshal([]byte(out2), &node); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(node.Node, &node.Of); err != nil || len(node.Of.GPUs) != 2 || len(node.Of.Clients) != 1 {
		t.Fatalf("%v in %s", err, node.Node)
	}
	description, err := os.ReadFile("../../docs/top-json.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		raw  json.RawMessage
		want string
	}{
		{json.RawMessage(out), "time interval_s gpus processes unreadable_processes notes node"},
		{doc.GPUs[0], "uuid index name simulated total_bytes used_bytes free_bytes utilization_percent reserved_bytes allocated_bytes cached_bytes traced_bytes"},
		{doc.Processes[0], "pid kind program arguments version settings age_s stale events_dropped " + memory + "devices"},
		{p.Devices[0], "uuid ordinal " + memory + "details"},
		{v.Details, "tags libraries pools stacks calls"},
		{details.Tags[0], "name blocks bytes"},
		{details.Stacks[0], "frames blocks bytes"},
		{node.Node, "socket gpus clients"},
		{node.Of.GPUs[0], "device total_bytes clients reserved_bytes active_bytes cached_bytes paused_bytes pausable_bytes spare_bytes granted_bytes waiting met partly_met " +
			"unmet abandoned refaults missed given_bytes pauses pressure_s pressure_percent"},
		{node.Of.Clients[0], "client pid uid name label version device total_bytes reserved_bytes active_bytes cached_bytes pinned_bytes paused_bytes pausable_bytes " +
			"floor_bytes granted_bytes gave_bytes got_bytes refaults pauses missed skipped min_bytes weight priority"},
	} {
		for _, key := range keysOf(t, c.raw) {
			if !strings.Contains(string(description), "`"+key+"`") {
				t.Errorf("docs/top-json.md does not say what %s is", key)
			}
		}
		if got := strings.Join(keysOf(t, c.raw), " "); got != c.want {
			t.Errorf("has %s\nwant %s", got, c.want)
		}
	}
}

// An unknown figure is null, and a process that holds nothing at the moment is not one without names for what it holds.
func TestTopOfATracedProcessWithoutNVML(t *testing.T) {
	v := top.Table{GPUs: []top.GPU{{Index: 0, Utilization: -1}}}
	out, err := json.Marshal(newTopDocument(v, &top.Look{}, time.Second).GPUs[0])
	if err != nil || !strings.Contains(string(out), `"total_bytes":null`) {
		t.Errorf("%v: %s", err, out)
	}
	for allocated, want := range map[uint64]string{0: "has allocated nothing", 5: "no details"} {
		var b strings.Builder
		r := top.Row{Title: "train.py", Holdings: []top.Holding{{Details: &top.Details{}}}}
		r.Sum.Page, r.Sum.Allocated = true, allocated
		if writeDetails(&b, &r, 80); !strings.Contains(b.String(), want) {
			t.Errorf("with %d bytes: %q, want %s", allocated, b.String(), want)
		}
	}
}

func TestTopCountIsOneLineForEachLook(t *testing.T) {
	out, err := topOf(t, newScene(), topFlags{device: -1, json: true, count: 3}, 0)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
	if len(lines) != 3 {
		t.Fatalf("%d lines, want 3", len(lines))
	}
	last := time.Time{}
	for _, l := range lines {
		var doc struct {
			Time      time.Time
			Processes []struct {
				PID  int
				Rate *float64 `json:"driver_calls_per_s"`
			}
		}
		if err := json.Unmarshal([]byte(l), &doc); err != nil {
			t.Fatal(err)
		}
		if !doc.Time.After(last) {
			t.Errorf("%v does not come after %v", doc.Time, last)
		}
		last = doc.Time
		if r := doc.Processes[1].Rate; r == nil || *r != 12 {
			t.Errorf("the trainer's rate is %v, want 12", r)
		}
	}
}

// Where a process says something too seldom for the interval, it is waited for, but not for ever.
func TestTopOnceWaitsForAnswers(t *testing.T) {
	s := newScene()
	s.step = 10 * time.Millisecond
	began := s.at
	s.change = func(n int, l *top.Look) {
		for i := range l.Processes[:3] {
			l.Processes[i].Updated = began.Add(time.Duration(n/4) * 40 * time.Millisecond) // every fourth look sees something new
			l.Processes[i].Devices[0].Details = nil
		}
	}
	out, err := topOf(t, s, topFlags{device: -1, json: true}, 0)
	if err != nil || !strings.Contains(out, `"driver_calls_per_s": `) || s.looks != 5 {
		t.Errorf("%v after %d looks, want 5:\n%s", err, s.looks, out)
	}
	s = newScene()
	s.change = func(_ int, l *top.Look) {
		for i := range l.Processes {
			for j := range l.Processes[i].Devices {
				l.Processes[i].Devices[j].Details = nil
			}
		}
	}
	out, err = topOf(t, s, topFlags{device: -1, details: true}, 80)
	if err != nil || !strings.Contains(out, "no details: it did not answer in time") || s.looks > 12 {
		t.Errorf("%v after %d looks:\n%s", err, s.looks, out)
	}
}

func TestTopUsage(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"top", "cistern: top: standard input is not a terminal: use cistern top --once for a table, or --json"},
		{"top x", `cistern: top takes no arguments, got "x"`},
		{"top --once --sort size", `cistern: --sort "size": expected one of reserved, allocated, cached, peak, used, rate, ooms, pid, name`},
		{"top --once --interval 1ms", "cistern: --interval 1ms: expected from 100ms to 1h0m0s"},
		{"top --once --device -3", "cistern: --device -3: expected the number of a GPU, from 0"},
		{"top --count 3", "cistern: --count: goes with --once or --json"},
		{"top --json --count 0", "cistern: --count 0: expected 1 or more"},
		{"top --details", "cistern: --details: goes with --once or --json; else press enter on a process"},
		{"top --batch", "cistern: unknown flag: --batch: top takes --color, --count, --details, --device, --help, --interval, --json, --once, --socket, --sort"},
	} {
		out, errs, code := cistern(t, "", strings.Fields(c.args)...)
		if out != "" || errs != c.want+"\n" || code != exitBad {
			t.Errorf("%s: code %d, %q\nwant %q", c.args, code, out+errs, c.want)
		}
	}
}

func TestTopWidth(t *testing.T) {
	for v, want := range map[string]int{"": 0, "80": 80, "-3": 0, "wide": 0} {
		if got := outputWidth(io.Discard, func(string) string { return v }); got != want {
			t.Errorf("COLUMNS=%s: %d, want %d", v, got, want)
		}
	}
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if got := outputWidth(f, func(string) string { return "" }); got != 0 {
		t.Errorf("no terminal has %d columns", got)
	}
}

// Numbers stay within their columns.
func TestTopNumbers(t *testing.T) {
	for _, c := range []struct {
		n    uint64
		want string
	}{{0, "0"}, {1, "1B"}, {999, "999B"}, {1000, "0.98K"}, {1 << 20, "1.00M"}, {512 << 20, "512M"}, {1023 << 20, "1.00G"}, {140 * gib, "140G"},
		{99<<30 + 1<<29, "99.5G"}, {1 << 40, "1.00T"}, {^uint64(0), "16.0E"}} {
		if got := amount(c.n); got != c.want {
			t.Errorf("amount(%d) = %s, want %s", c.n, got, c.want)
		}
	}
	for shift := range 64 {
		for _, n := range []uint64{1 << shift, 1<<shift - 1, 1<<shift + 1<<shift/2} {
			if s := amount(n); len(s) > 5 {
				t.Errorf("amount(%d) = %s", n, s)
			}
			if s := count(n); len(s) > 5 {
				t.Errorf("count(%d) = %s", n, s)
			}
			if s := few(n); len(s) > 4 {
				t.Errorf("few(%d) = %s", n, s)
			}
			if s := rate(float64(n)); len(s) > 6 {
				t.Errorf("rate(%d) = %s", n, s)
			}
		}
	}
	for _, c := range []struct {
		n    float64
		want string
	}{{0, "0"}, {0.01, "<0.1"}, {0.25, "0.2"}, {12.4, "12"}, {2345, "2345"}, {23456, "23.5k"}} {
		if got := rate(c.n); got != c.want {
			t.Errorf("rate(%v) = %s, want %s", c.n, got, c.want)
		}
	}
	for d, want := range map[time.Duration]string{72 * time.Second: "1m", 3 * time.Second: "3s", 5 * time.Hour: "5h", 1000 * time.Hour: "41d"} {
		if got := age(d); got != want {
			t.Errorf("age(%v) = %s, want %s", d, got, want)
		}
	}
	if got := fmt.Sprint(indices([]int{3, 0, 1, 2, 7, 9, 10, 9})); got != "0-3,7,9,10" {
		t.Errorf("indices: %s", got)
	}
}

func TestTopUseName(t *testing.T) {
	for s, want := range map[string]string{"": "(none)", "weights": "weights", "/not/a/stack": "/not/a/stack",
		"f /srv/my app/train.py:3\ng /usr/lib/libx.so\n/opt/h.py:4\nmain.run": "f train.py:3 < h.py:4",
		"malloc /lib/libc.so.6\nmain.run\n/x/lib.so+0x3":                      "malloc < main.run < lib.so+0x3", "a\x1b\nb": "a\uFFFD < b"} {
		if got := useName(s); got != want {
			t.Errorf("%q: %q, want %q", s, got, want)
		}
	}
}

func TestTopDrawing(t *testing.T) {
	if got := curve([]float64{-1, 0, 1, 4, 8}); got != " ▁▁▄█" {
		t.Errorf("curve %q", got)
	}
	if got := area([]float64{0, 4, 8, 16}, 2, 16); strings.Join(got, "|") != "   █|▁▄██" {
		t.Errorf("area %q", got)
	}
	// What is there at all is seen, and the parts add up.
	u := &top.GPU{Total: 100 * gib, Used: 50 * gib, Known: true, Reserved: 21 * gib, Allocated: 60 * gib, Cached: gib, Traced: 1 << 20}
	if got := ansi.Strip(gpuBar(10, u)); got != "██▓▞▒·····" {
		t.Errorf("bar %q", got)
	}
	for _, whole := range []uint64{0, 1, gib} {
		if got := ansi.Strip(bar(7, whole, part{gib, "#", plainStyle}, part{gib, "+", plainStyle})); len([]rune(got)) != 7 {
			t.Errorf("of %d: %q", whole, got)
		}
	}
	env := func(name, value string) func(string) string {
		return func(n string) string {
			if n == name {
				return value
			}
			return ""
		}
	}
	for _, c := range []struct {
		name, value string
		want        bool
	}{{"LANG", "C", true}, {"LANG", "en_US.UTF-8", false}, {"LC_ALL", "C.utf8", false}, {"LC_ALL", "POSIX", true}, {"TERM", "xterm", false}} {
		if got := asciiOnly(env(c.name, c.value)); got != c.want {
			t.Errorf("%s=%s: %v, want %v", c.name, c.value, got, c.want)
		}
	}
	if got := toASCII("█…网é \x1b[1m▂"); got != "#~??? \x1b[1m." {
		t.Errorf("in ASCII %q", got)
	}
}
