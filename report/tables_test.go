package report

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/driver"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/replay"
)

// TestTables reads the tables of pages with the page's own code (web/test/tables.mjs) and holds the moments that it
// computes from them against analyze's: totals, holders by stack, sizes, the address map, and the driver calls.
func TestTables(t *testing.T) {
	node := findNode(t)
	files, _ := filepath.Glob("../recording/testdata/*.pickle.gz")
	if dir := os.Getenv("CISTERN_TRACES"); dir != "" && !testing.Short() {
		more, _ := filepath.Glob(filepath.Join(dir, "*.pickle.gz"))
		files = append(files, more...)
	}
	traces := []*recording.Trace{smallTrace(), labelledTrace(), largeTrace(2 * manyEvents)}
	for _, path := range files {
		f, err := open.File(path)
		if err != nil {
			t.Fatal(err)
		}
		traces = append(traces, f.Traces...)
	}
	for _, tr := range traces {
		in := analyze.Inspect(tr)
		v, err := NewView(tr, in, &replay.Report{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		counts := tr.Counts()
		var calls []any
		for k := event.SegmentAlloc; k <= event.SegmentUnmap; k++ {
			if counts[k] > 0 {
				calls = append(calls, []any{k.String(), counts[k]})
			}
		}
		r := rand.New(rand.NewPCG(uint64(len(tr.Events)), 2))
		moments := []any{}
		for _, at := range []int{-1, in.Peak.Event, r.IntN(len(tr.Events)), r.IntN(len(tr.Events)), len(tr.Events) - 1} {
			moments = append(moments, expectedMoment(analyze.MomentAt(tr, at)))
		}
		runTables(t, node, tr.Path, map[string]any{"series": v.long.series, "all": v.long.curves, "tables": v.long.tables, "curves": len(v.Lines), "frames": v.Frames, "libraries": v.Libraries, "frame_libraries": v.FrameLibraries,
			"call_kinds": v.CallKinds, "tags": v.TagNames, "threads": v.ThreadNames,
			"events": len(tr.Events), "moments": moments, "calls": calls, "max_holders": analyze.MaxHolders})
	}
}

func findNode(t *testing.T) string {
	t.Helper()
	node, err := exec.LookPath("node")
	if err != nil {
		if os.Getenv("CISTERN_BROWSER_TEST") == "1" {
			t.Fatalf("the test needs node: %v", err)
		}
		t.Skipf("the test needs node: %v", err)
	}
	return node
}

// runTables has tables.mjs look at what was expected.
func runTables(t *testing.T, node, what string, expect map[string]any) {
	t.Helper()
	data, err := json.Marshal(expect)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "expect.json")
	if err := os.WriteFile(file, data, 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), node, "web/test/tables.mjs", file).CombinedOutput(); err != nil {
		t.Errorf("%s: %v\n%s", what, err, out)
	}
}

// The tables of a page of two runs, as the page reads them, are what analyze.Diff found.
func TestTablesOfTwoRuns(t *testing.T) {
	node := findNode(t)
	recorded := func(name string) *recording.Trace {
		f, err := open.File("../recording/testdata/" + name + ".pickle.gz")
		if err != nil {
			t.Fatal(err)
		}
		return f.Traces[0]
	}
	empty := &recording.Trace{Path: "empty", Stacks: []recording.Stack{nil}}
	for _, pair := range [][2]*recording.Trace{{smallTrace(), otherTrace()}, {otherTrace(), smallTrace()},
		{recorded("gpt2_varlen"), recorded("detection")}, {empty, smallTrace()}, {empty, empty}} {
		a, b := pair[0], pair[1]
		d := analyze.Diff(a, b, false)
		v, err := NewDifferenceView(a, b, d)
		if err != nil {
			t.Fatal(err)
		}
		changes := []any{}
		row := func(c analyze.Change) {
			frames := c.Frames
			if frames == nil {
				frames = []string{}
			}
			changes = append(changes, []any{frames, c.Size, c.BytesA, c.BytesB, c.BlocksA, c.BlocksB})
		}
		for _, c := range d.Stack {
			if len(c.Frames) > 0 {
				row(c)
			}
		}
		for _, c := range d.Bare {
			row(c)
		}
		runTables(t, node, v.Name, map[string]any{"series": v.long.series, "points": v.Points, "frames": v.Frames, "changes": changes,
			"peaks": []uint64{d.A.PeakLive, d.B.PeakLive}})
	}
}

// driverFile is a driver trace of a few calls of one process.
func driverFile(t *testing.T) *recording.File {
	t.Helper()
	var b bytes.Buffer
	w, err := driver.NewWriter(&b, 0, []string{"program"})
	if err != nil {
		t.Fatal(err)
	}
	p := w.Process(recording.Process{PID: 1})
	stack := w.Stack([]recording.Frame{{File: "libcudart.so.13", Func: "cudaMalloc"}, {File: "main.c", Func: "main", Line: 3}})
	for i, c := range []recording.Call{
		{Kind: recording.MemAlloc, TookNS: 30_000, Addr: 0x7f0000000000, Size: 4 * mib, Stack: stack},
		{Kind: recording.MemAddressReserve, TookNS: 2000, Addr: 0x7e0000000000, Size: 64 * mib, Device: -1},
		{Kind: recording.MemAlloc, TookNS: 1000, Size: 900 * mib, Result: 2, Stack: stack},
		{Kind: recording.MemAlloc, TookNS: 5000, Addr: 0x7c0000000000, Size: 2 * mib, Device: 1},
		{Kind: recording.MemAlloc, TookNS: 20_000, Addr: 0x7d0000000000, Size: 6 * mib, Stack: stack},
		{Kind: recording.MemFree, TookNS: 700_000, Addr: 0x7f0000000000},
	} {
		c.Process, c.TimeNS = p, uint64(1+i)*1_000_000
		w.Call(&c)
	}
	if err := w.Close(recording.DriverEnd{}); err != nil {
		t.Fatal(err)
	}
	f, err := open.Read(&b, "driver")
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// The calls of a driver trace take the place of segment events, with the time that each took.
func TestTablesOfDriverCalls(t *testing.T) {
	node := findNode(t)
	f := driverFile(t)
	tr := f.Traces[0]
	l := analyze.LifetimesOf(tr)
	l.Driver(tr, f.Driver)
	for i, want := range []int32{0, 0, 1, 2, 4} { // events: alloc, failure, alloc, free requested, free completed
		if l.Calls[i].Event != want {
			t.Errorf("call %d, %s, is after event %d, want %d", i, l.Calls[i].Name, l.Calls[i].Event, want)
		}
	}
	if got := strings.Join(l.Calls[0].Frames, ", "); got != "cudaMalloc libcudart.so.13, main main.c:3" {
		t.Errorf("the first call is by %s", got)
	}
	v, err := NewView(tr, analyze.Inspect(tr), &replay.Report{}, f.Driver)
	if err != nil {
		t.Fatal(err)
	}
	runTables(t, node, "driver calls", map[string]any{"series": v.long.series, "all": v.long.curves, "tables": v.long.tables, "curves": len(v.Lines), "frames": v.Frames,
		"libraries": v.Libraries, "frame_libraries": v.FrameLibraries, "call_kinds": v.CallKinds, "events": len(tr.Events),
		"tags": v.TagNames, "threads": v.ThreadNames, "moments": []any{expectedMoment(analyze.MomentAt(tr, 2))},
		"calls": []any{[]any{"cuMemAlloc", 2}, []any{"cuMemAddressReserve", 1}, []any{"cuMemAlloc (failed)", 1}, []any{"cuMemFree", 1}},
		"timed": []any{[]any{"cuMemAlloc", 1, 10 * mib, 50_000}, []any{"cuMemAddressReserve", 0, 64 * mib, 2000},
			[]any{"cuMemAlloc (failed)", 0, 900 * mib, 1000}, []any{"cuMemFree", -1, 4 * mib, 700_000}}})
}

// Of long lists a page and a terminal have what changed most, in either direction, and say how many others have changed.
func TestMostChanged(t *testing.T) {
	var all []analyze.Change
	for i := range 1000 {
		all = append(all, analyze.Change{Grew: int64(500-i/2) * int64(1-i%2*2), Named: analyze.Named{Name: strconv.Itoa(i)}})
	}
	all = append(all, analyze.Change{Named: analyze.Named{Name: "the same"}})
	list, left := mostChanged(all, mostChanges)
	if len(list) != mostChanges || list[0].Grew != 500 || list[399].Grew != -301 || left != 600 {
		t.Errorf("%d of the list, %d to %d; %d left", len(list), list[0].Grew, list[399].Grew, left)
	}
	if shown, left := changed(all); len(shown) != shownChanges || shown[14].Grew != 493 || left != 985 {
		t.Errorf("a terminal shows %d, to %d; %d left", len(shown), shown[len(shown)-1].Grew, left)
	}
	if shown, left := changed(all[998:]); len(shown) != 2 || left != 0 {
		t.Errorf("a terminal shows %v; %d left", shown, left)
	}
}

// labelledTrace is smallTrace as two threads made it: its blocks have tags and libraries, some of them none, and a name that
// must not become markup.
func labelledTrace() *recording.Trace {
	t := smallTrace()
	t.Path = "labelled.cistern"
	t.Tags, t.Libraries = []string{"", "weights", hostileName}, []string{"", "torch", "cupy"}
	t.Threads = map[uint32]string{4001: "MainThread"}
	for i := range t.Events {
		e := &t.Events[i]
		e.Thread = 4001 + uint32(i/50)
		switch e.Kind {
		case event.Alloc, event.FreeRequested, event.FreeCompleted:
			e.Tag, e.Library = uint16(e.Size/mib%3), uint8(e.Addr>>26&1)*uint8(1+e.Size/mib%2)
		}
	}
	t.Initial = []recording.Block{{Addr: 0x7e0000000000, Size: 3 * mib, Requested: 3 * mib, Tag: 1, Library: 2, State: recording.Active}}
	t.FromStart = false
	return t
}

// otherTrace is smallTrace run again in another folder, after an edit that moved its one line; blocks of a stack are
// twice as large, and some have no stack any more.
func otherTrace() *recording.Trace {
	t := smallTrace()
	t.Path, t.Streams = "other.pickle", []uint64{0}
	t.Frames = []recording.Frame{{File: "there/evil.py", Line: 7, Func: t.Frames[0].Func}}
	n := len(t.Events) - 2 // without the failures
	t.Events = t.Events[:n]
	for i := range t.Events {
		if e := &t.Events[i]; e.Stack == 1 && e.Size == 8*mib-100 {
			e.Stack = 0
		} else if e.Size == 6*mib {
			e.Size *= 2
		}
	}
	return t
}

// expectedMoment is a moment for tables.mjs.
func expectedMoment(m analyze.Moment) map[string]any {
	holders, sizes, segments := []any{}, []any{}, []any{}
	uses := func(list []analyze.LabelUse, none string) map[string]uint64 {
		if list == nil && m.Blocks > 0 {
			return map[string]uint64{none: m.Live}
		}
		by := map[string]uint64{}
		for _, x := range list {
			by[x.Name] = x.Bytes
		}
		return by
	}
	for _, h := range m.Holders {
		frames := h.Frames
		if frames == nil {
			frames = []string{}
		}
		holders = append(holders, []any{frames, h.Bytes, h.Blocks})
	}
	for _, x := range m.Sizes {
		sizes = append(sizes, []any{x.Bytes, x.Blocks})
	}
	for _, g := range m.Map.Segments {
		flags, pending, live := 0, 0, uint64(0)
		if g.Expandable {
			flags |= 1
		}
		if g.Inferred {
			flags |= 2
		}
		for _, b := range g.Blocks {
			live += b.Request
			if b.Pending {
				pending++
			}
		}
		segments = append(segments, []any{g.Addr, g.Size, g.Stream, g.Pool, flags, len(g.Blocks), live, pending})
	}
	return map[string]any{"event": m.Event, "live": m.Live, "blocks": m.Blocks, "free": m.FreeBytes, "pieces": m.FreePieces,
		"largest": m.LargestFree, "holders": holders, "others": []any{m.Others.Bytes, m.Others.Blocks}, "sizes": sizes,
		"segments": segments, "libraries": uses(m.Libraries, analyze.UnknownLibrary), "tags": uses(m.Tags, analyze.NoTag),
		"threads": uses(m.Threads, analyze.NoThread)}
}
