package report

import (
	"bytes"
	"cmp"
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/event"
	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
	"github.com/cistern-gpu/cistern/internal/slow"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/replay"
)

// needBrowser finds what it takes to look at pages in a headless Chromium: the bundled front end, node with the packages of
// web/package.json, and Chromium. Where one is missing the test is skipped, unless CISTERN_BROWSER_TEST=1 makes that a
// failure.
func needBrowser(t *testing.T) (node, chromium string) {
	t.Helper()
	missing := func(format string, args ...any) {
		t.Helper()
		if os.Getenv("CISTERN_BROWSER_TEST") == "1" {
			t.Fatalf(format, args...)
		}
		t.Skipf(format, args...)
	}
	if err := CheckBundle(); err != nil {
		missing("%v", err)
	}
	node, err := exec.LookPath("node")
	if err != nil {
		missing("the test needs node: %v", err)
	}
	if _, err := os.Stat("web/node_modules/playwright-core"); err != nil {
		missing("the test needs playwright-core: run npm install in report/web: %v", err)
	}
	if chromium = findChromium(); chromium == "" {
		missing("the test needs Chromium: install it, or name it in CISTERN_CHROMIUM")
	}
	return node, chromium
}

// TestSlowPageInBrowser opens pages in a headless Chromium and looks at what is drawn (web/test/page.mjs).
func TestSlowPageInBrowser(t *testing.T) {
	slow.Only(t)
	node, chromium := needBrowser(t)
	dir := t.TempDir()
	small, second, large := smallTrace(), smallTrace(), largeTrace(3_000_000) // a million allocations
	second.Path = "second.pickle"
	second.Events = second.Events[:len(second.Events)-2] // its failures are left out
	torch := []replay.Spec{{Name: "torch", Conf: "default", HasConf: true}}
	v1, small1 := viewOf(t, small, torch, replay.Options{Capacity: smallLimit})
	v2, _ := viewOf(t, second, torch, replay.Options{})
	writePageFile(t, filepath.Join(dir, "small.html"), v1, v2)
	v3, _ := viewOf(t, large, torch, replay.Options{})
	writePageFile(t, filepath.Join(dir, "large.html"), v3)

	d := analyze.Diff(small, otherTrace(), false)
	dv, err := NewDifferenceView(small, otherTrace(), d)
	if err != nil {
		t.Fatal(err)
	}
	var both bytes.Buffer
	if err := WriteDifferencePage(&both, []*DifferenceView{dv}); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "differences.html"), both.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}

	driver := driverFile(t)
	rep, err := replay.Replay(driver.Traces[0], torch, replay.Options{})
	if err != nil {
		t.Fatal(err)
	}
	vd, err := NewView(driver.Traces[0], analyze.Inspect(driver.Traces[0]), rep, driver.Driver)
	if err != nil {
		t.Fatal(err)
	}
	writePageFile(t, filepath.Join(dir, "driver.html"), vd)

	labels := labelledTrace()
	vl, _ := viewOf(t, labels, torch, replay.Options{})
	writePageFile(t, filepath.Join(dir, "labels.html"), vl)
	atPeak := analyze.Inspect(labels).Peak
	labelSums := map[string]any{}
	for by, list := range map[string][]analyze.LabelUse{"tag": atPeak.Tags, "library": atPeak.Libraries, "thread": atPeak.Threads} {
		rows := []any{}
		for _, x := range list {
			rows = append(rows, []any{x.Name, x.Bytes})
		}
		labelSums[by] = rows
	}

	peakLive, peakEvent := large.PeakLive()
	_, smallPeak := small.PeakLive()
	expect := map[string]any{
		"small": map[string]any{
			"page": filepath.Join(dir, "small.html"),
			"colors": map[string]string{"live": "--live", "the policy": "--p0", "the record": "--recorded",
				"the failure": "--bad"},
			"hover":       smallHover(small, small1),
			"peak_us":     small.Events[smallPeak].TimeUS - small.Events[0].TimeUS,
			"duration_us": small.Duration(),
			// The first segment is 20 of the 90 MiB at the peak: its first block is 8 MiB of that, and the last 8 are free.
			"block":   map[string]any{"at": 0.05, "free_at": 19. / 90, "bytes": 8*mib - 100, "texts": []string{"block 0x7f0000000000", "8.00 MiB", hostileName}},
			"oom":     []string{"recorded: 30.00 MiB refused at event", "torch:default: 30.00 MiB refused", "fragmentation"},
			"table":   []string{"torch", "default", "died at event", "recorded"},
			"facts":   []string{"small.pickle", "something is missing <b>here</b>"},
			"hostile": hostileName,
			"peak":    smallMoment(small, smallPeak),
			"moments": []any{smallMoment(small, 2), smallMoment(small, 77), smallMoment(small, 0)},
			"flame": map[string]any{"names": []string{"all", noStackName}, "search": "EVIL.PY",
				"bytes": 3 * (8*mib - 100)},
			"calls":  []any{[]any{"segment_alloc", 3, 60 * mib}},
			"growth": smallGrowth(small, 2, smallPeak),
			"second": "second.pickle",
		},
		"differences": map[string]any{
			"page": filepath.Join(dir, "differences.html"), "grew": int64(d.B.PeakLive) - int64(d.A.PeakLive),
			"before": d.A.Live, "after": d.B.Live, "hover_us": small.Duration() / 2,
			"by": map[string]any{"by_stack": changedRows(d.Stack), "by_exact_size": changedRows(d.Exact), "by_pool": changedRows(d.Pool)},
		},
		"labels": map[string]any{"page": filepath.Join(dir, "labels.html"), "live": atPeak.Live, "by": labelSums, "moment": smallMoment(labels, 30),
			"first": []string{"3.00 MiB", "weights", "cupy", analyze.NoThread, "before the first event"}},
		"names": namedPages(t, dir),
		"driver": map[string]any{"page": filepath.Join(dir, "driver.html"), "calls": []any{[]any{"cuMemFree", 700_000}, []any{"cuMemAlloc", 50_000},
			[]any{"cuMemAddressReserve", 2000}, []any{"cuMemAlloc (failed)", 1000}}},
		"large": map[string]any{
			"page": filepath.Join(dir, "large.html"), "painted_ms": 1000, "ready_ms": 4000, "frame_ms": 500, "pan_ms": 33,
			"peak_live": peakLive, "peak_event": peakEvent,
		},
	}
	data, err := json.Marshal(expect)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "expect.json")
	if err := os.WriteFile(file, data, 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), node, "web/test/page.mjs", chromium, file)
	out, err := cmd.CombinedOutput()
	t.Logf("%s", bytes.TrimSpace(out))
	if err != nil {
		t.Fatalf("the page is not as it should be: %v", err)
	}
}

// TestPageScript runs the tests of the page's script that need no browser.
func TestPageScript(t *testing.T) {
	node, err := exec.LookPath("node")
	if err != nil {
		if os.Getenv("CISTERN_BROWSER_TEST") == "1" {
			t.Fatalf("the test needs node: %v", err)
		}
		t.Skipf("the test needs node: %v", err)
	}
	out, err := exec.CommandContext(t.Context(), node, "--test", "web/test/series.test.mjs",
		"web/test/lives.test.mjs").CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("# fail 0")) {
		t.Fatalf("%v\n%s", err, out)
	}
}

// smallMoment is what the page says of a moment.
func smallMoment(t *recording.Trace, event int) map[string]any {
	m := analyze.MomentAt(t, event)
	return map[string]any{"event": event, "live": m.Live, "blocks": m.Blocks, "reserved": m.Reserved, "free": m.FreeBytes,
		"pieces": m.FreePieces}
}

// changedRows are the rows of the page's table of changes, the largest first: name and bytes.
func changedRows(all []analyze.Change) []any {
	rows := []any{}
	for _, c := range all {
		if c.Grew != 0 {
			rows = append(rows, []any{c.Name, c.Grew})
		}
	}
	return rows
}

func abs(n int64) int64 { return max(n, -n) }

// smallGrowth is what the page says grew between two moments of smallTrace, from plain sums: name, bytes, bytes that were
// handed out in between, the largest change first.
func smallGrowth(t *recording.Trace, a, b int) map[string]any {
	type row struct{ grew, kept int64 }
	byStack, bySize, byLibrary := map[string]row{}, map[string]row{}, map[string]row{}
	add := func(m map[string]row, key string, grew, kept int64) {
		r := m[key]
		m[key] = row{r.grew + grew, r.kept + kept}
	}
	total := int64(0)
	for _, x := range analyze.LifetimesOf(t).Blocks {
		stack, size := noStackName, "up to 64 MiB"
		if x.Stack != 0 {
			stack = analyze.FrameNames(t, x.Stack)[0]
		}
		if x.Size <= 10*mib {
			size = "up to 10 MiB"
		}
		was, is := int(x.From) <= a && (x.To == analyze.Never || int(x.To) > a), int(x.From) <= b && (x.To == analyze.Never || int(x.To) > b)
		grew, kept := int64(0), int64(0)
		if was {
			grew -= int64(x.Size)
		}
		if is {
			grew += int64(x.Size)
			if int(x.From) > a {
				kept = int64(x.Size)
			}
		}
		total += grew
		add(byStack, stack, grew, kept)
		add(bySize, size, grew, kept)
		add(byLibrary, analyze.StackLibrary(t, x.Stack), grew, kept)
	}
	rows := func(m map[string]row) []any {
		var out []any
		for _, k := range slices.SortedFunc(maps.Keys(m), func(x, y string) int {
			return cmp.Or(cmp.Compare(abs(m[y].grew), abs(m[x].grew)), cmp.Compare(m[y].grew, m[x].grew))
		}) {
			if m[k] != (row{}) {
				out = append(out, []any{k, m[k].grew, m[k].kept})
			}
		}
		return out
	}
	return map[string]any{"a": a, "b": b, "grew": total, "by": map[string]any{"stack": rows(byStack), "range": rows(bySize),
		"library": rows(byLibrary)}}
}

func findChromium() string {
	if path := os.Getenv("CISTERN_CHROMIUM"); path != "" {
		return path
	}
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	return ""
}

const (
	mib         = 1 << 20
	smallLimit  = 68 * mib
	noStackName = "no stack was recorded"
	hostileName = "</script><img src=x onerror=\"window.hacked=1\"> evil.py:1"
)

// smallTrace is three segments of 20 MiB that fill with blocks of 8 and 4 MiB, some of which come and go; at the end a
// request of 30 MiB fails, once caught by the program and once fatal to a replay.
func smallTrace() *recording.Trace {
	t := &recording.Trace{Path: "small.pickle", Format: recording.FormatPyTorch, Streams: []uint64{0}, Pools: []recording.PoolID{{}},
		Frames:    []recording.Frame{{File: "evil.py", Line: 1, Func: `</script><img src=x onerror="window.hacked=1">`}},
		Stacks:    []recording.Stack{nil, {0}},
		FromStart: true, Notes: []string{"something is missing <b>here</b>"}}
	us := int64(1_000_000)
	add := func(k event.Kind, addr, size uint64, stack uint32) {
		us += 1000
		t.Events = append(t.Events, event.Event{Kind: k, Addr: addr, Size: size, TimeUS: us, Stack: stack})
	}
	const base = 0x7f0000000000
	for s := range uint64(3) {
		at := base + s*64*mib
		add(event.SegmentAlloc, at, 20*mib, 0)
		add(event.Alloc, at, 8*mib-100, 1)
		add(event.Alloc, at+8*mib, 4*mib, 0)
	}
	for i := range uint64(60) {
		at := base + (i%3)*64*mib + 12*mib
		size := 4*mib + (i%5)*mib/2
		add(event.Alloc, at, size, 1)
		add(event.FreeRequested, at, size, 1)
		add(event.FreeCompleted, at, size, 1)
	}
	for s := range uint64(3) {
		add(event.Alloc, base+s*64*mib+12*mib, 6*mib, 1)
	}
	for s := range uint64(3) {
		add(event.FreeRequested, base+s*64*mib+12*mib, 6*mib, 1)
		add(event.FreeCompleted, base+s*64*mib+12*mib, 6*mib, 1)
	}
	add(event.OOM, 8*mib, 30*mib, 0)
	add(event.Alloc, base+1024*mib, 30*mib, 0) // the peak; fatal within smallLimit, and of no segment
	return t
}

// smallHover says what the chart shows at some events, from plain sums.
func smallHover(t *recording.Trace, rep *replay.Report) []map[string]any {
	var at []map[string]any
	var live, reserved, policy uint64
	curve := rep.Results[0].Curve
	for i, e := range t.Events {
		switch e.Kind {
		case event.Alloc:
			live += e.Size
		case event.FreeCompleted:
			live -= e.Size
		case event.SegmentAlloc:
			reserved += e.Size
		}
		for k, us := range curve.TimeUS {
			if us <= e.TimeUS-t.Events[0].TimeUS {
				policy = curve.Reserved[k]
			}
		}
		if i == 1 || i%23 == 17 {
			at = append(at, map[string]any{"event": i, "bytes": map[string]uint64{"live": live,
				"reserved when recorded": reserved, "reserved by torch:default": policy}})
		}
	}
	return at
}

// largeTrace is n events: blocks of odd sizes that come and go in a ring, one of them once very large for an instant.
func largeTrace(n int) *recording.Trace {
	t := &recording.Trace{Path: "large.pickle", Format: recording.FormatPyTorch, Streams: []uint64{0}, Pools: []recording.PoolID{{}},
		Stacks: []recording.Stack{nil}, FromStart: true, Events: make([]event.Event, 0, n)}
	const ring = 5000
	var addr [ring]uint64
	var size [ring]uint64
	state := uint64(1)
	us := int64(1)
	add := func(k event.Kind, at, bytes uint64) {
		us += int64(state >> 60)
		t.Events = append(t.Events, event.Event{Kind: k, Addr: at, Size: bytes, TimeUS: us})
	}
	for i := 0; len(t.Events) < n-3; i++ {
		slot := i % ring
		if addr[slot] != 0 {
			add(event.FreeRequested, addr[slot], size[slot])
			add(event.FreeCompleted, addr[slot], size[slot])
		}
		state = state*6364136223846793005 + 1442695040888963407
		size[slot] = 512 + (state>>40)%(256<<10)
		if i == n/5 {
			size[slot] = 5<<30 + 1
		}
		addr[slot] = 0x7f0000000000 + uint64(slot)<<33
		add(event.Alloc, addr[slot], size[slot])
		if i == n/5 { // given back at once
			add(event.FreeRequested, addr[slot], size[slot])
			add(event.FreeCompleted, addr[slot], size[slot])
			addr[slot] = 0
		}
	}
	return t
}

func viewOf(t *testing.T, tr *recording.Trace, specs []replay.Spec, opt replay.Options) (*View, *replay.Report) {
	t.Helper()
	opt.Samples = CurveSamples
	rep, err := replay.Replay(tr, specs, opt)
	if err != nil {
		t.Fatal(err)
	}
	v, err := NewView(tr, analyze.Inspect(tr), rep, nil)
	if err != nil {
		t.Fatal(err)
	}
	return v, rep
}

func writePageFile(t *testing.T, path string, views ...*View) {
	t.Helper()
	var b bytes.Buffer
	if err := WritePage(&b, views); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}
