package export

import (
	"bytes"
	"cmp"
	"encoding/csv"
	"maps"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/pprof/profile"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/event"
	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/driver"
	"github.com/cistern-gpu/cistern/recording/open"
)

// TestOutputs shows what every format makes of the sample, as text. `go test ./export -rewrite` takes what it sees.
func TestOutputs(t *testing.T) {
	datadriven.RunTest(t, "testdata/outputs", func(t *testing.T, d *datadriven.TestData) string {
		f := sampleRun()
		if d.HasArg("calls") {
			f = &recording.File{Path: "run.cistern", Format: recording.FormatCistern, Driver: sampleCalls()}
		}
		if d.HasArg("labels") {
			f = sampleLabels()
		}
		var b bytes.Buffer
		var err error
		switch d.Cmd {
		case "pprof":
			var at string
			d.ScanArgs(t, "at", &at)
			var m Moment
			if m, err = ParseMoment(at); err == nil {
				err = WritePprof(&b, f, m)
			}
			if err == nil {
				return profileText(t, b.Bytes())
			}
		case "perfetto":
			if err = WritePerfetto(&b, f); err == nil {
				var lines []string
				for _, p := range packets(t, b.Bytes()) {
					lines = append(lines, p.String())
				}
				return strings.Join(lines, "\n") + "\n"
			}
		case "csv":
			var table *Table
			if table, err = TableNamed(d.CmdArgs[0].Key); err == nil {
				err = WriteCSV(&b, f, table)
			}
			if err == nil {
				return b.String()
			}
		default:
			d.Fatalf(t, "unknown command %s", d.Cmd)
		}
		return "error: " + err.Error() + "\n"
	})
}

// A profile's sums are what analyze says of the same moment: in all, and for every stack.
func TestPprofAgreesWithAnalyze(t *testing.T) {
	recorded(t, func(t *testing.T, f *recording.File) {
		for _, tr := range f.Traces {
			_, peak := tr.PeakLive()
			for _, at := range []struct {
				name  string
				event int
			}{{"peak", peak}, {"start", -1}, {"end", len(tr.Events) - 1}, {strconv.Itoa(len(tr.Events) / 3), len(tr.Events) / 3}} {
				m, err := ParseMoment(at.name)
				if err != nil {
					t.Fatal(err)
				}
				one := &recording.File{Path: f.Path, Traces: []*recording.Trace{tr}}
				p, err := profile.Parse(bytes.NewReader(written(t, func(b *bytes.Buffer) error { return WritePprof(b, one, m) })))
				if err != nil {
					t.Fatal(err)
				}
				want := analyze.MomentAt(tr, at.event)
				var sum [numValues]int64
				byStack := map[string][2]int64{}
				for _, s := range p.Sample {
					for k, v := range s.Value {
						sum[k] += v
					}
					var names []string
					for _, l := range s.Location {
						fr := recording.Frame{Func: l.Line[0].Function.Name, File: l.Line[0].Function.Filename, Line: int(l.Line[0].Line)}
						names = append(names, fr.String())
					}
					key := strings.Join(names, ";")
					n := byStack[key]
					byStack[key] = [2]int64{n[0] + s.Value[inuseSpace], n[1] + s.Value[inuseObjects]}
				}
				if uint64(sum[inuseSpace]) != want.Live || sum[inuseObjects] != int64(want.Blocks) {
					t.Errorf("%s: %d bytes in %d blocks, analyze says %d in %d", at.name, sum[inuseSpace], sum[inuseObjects], want.Live, want.Blocks)
				}
				allocs, bytes := len(tr.Initial), tr.InitialLive()
				for _, e := range tr.Events[:at.event+1] {
					if e.Kind == event.Alloc {
						allocs, bytes = allocs+1, bytes+e.Size
					}
				}
				if uint64(sum[allocSpace]) != bytes || sum[allocObjects] != int64(allocs) {
					t.Errorf("%s: allocated %d bytes in %d blocks, want %d in %d", at.name, sum[allocSpace], sum[allocObjects], bytes, allocs)
				}
				// Several stacks of a trace may read the same.
				holders := map[string][2]int64{}
				for _, h := range want.Holders {
					key := strings.Join(h.Frames, ";")
					if key == "" {
						key = unknownStack.Func
					}
					n := holders[key]
					holders[key] = [2]int64{n[0] + int64(h.Bytes), n[1] + int64(h.Blocks)}
				}
				for key, n := range holders {
					if want.Others.Blocks == 0 && byStack[key] != n {
						t.Errorf("%s: %v bytes and blocks at %q, analyze says %v", at.name, byStack[key], key, n)
					}
				}
			}
		}
	})
}

// What tags, libraries and threads hold adds up to the whole, in every output.
func TestLabelsAddUp(t *testing.T) {
	f := sampleLabels()
	for i, tr := range f.Traces {
		one := &recording.File{Path: f.Path, Traces: f.Traces[i : i+1]}
		for _, at := range []string{"start", "peak", "1"} {
			m, err := ParseMoment(at)
			if err != nil {
				t.Fatal(err)
			}
			p, err := profile.Parse(bytes.NewReader(written(t, func(b *bytes.Buffer) error { return WritePprof(b, one, m) })))
			if err != nil {
				t.Fatal(err)
			}
			index, err := m.index(tr, clockOf(one))
			if err != nil {
				t.Fatal(err)
			}
			got, want := map[string]int64{}, map[string]int64{}
			for _, s := range p.Sample {
				for _, key := range []string{"tag", "library", "thread"} {
					got[key+"="+strings.TrimPrefix(strings.Join(s.Label[key], ","), "MainThread ")] += s.Value[inuseSpace]
				}
			}
			w := newWalker(tr)
			for k := range index + 1 {
				w.apply(k)
			}
			for _, b := range w.live {
				want["tag="+tr.TagName(b.tag)] += int64(b.size)
				want["library="+tr.LibraryName(b.library)] += int64(b.size)
				want["thread="+strings.TrimPrefix(tr.ThreadName(b.thread), "MainThread ")] += int64(b.size)
			}
			maps.DeleteFunc(got, func(_ string, n int64) bool { return n == 0 })
			if d := gocmp.Diff(want, got); d != "" {
				t.Errorf("device %d at %s (-want +got):\n%s", tr.Device, at, d)
			}
		}
		// The tables: the same in Parquet, and of the peak what analyze says.
		for _, table := range Tables[:2] {
			text := written(t, func(b *bytes.Buffer) error { return WriteCSV(b, one, table) })
			packed, _ := parquetText(t, written(t, func(b *bytes.Buffer) error { return WriteParquet(b, one, table) }))
			if packed != string(text) {
				t.Errorf("%s: Parquet and CSV differ: %s", table.Name, firstDifference(packed, string(text)))
			}
			if table.Name != "allocations" {
				continue
			}
			rows, err := csv.NewReader(bytes.NewReader(text)).ReadAll()
			if err != nil {
				t.Fatal(err)
			}
			col := func(name string) int { return slices.Index(rows[0], name) }
			byTag, byLibrary := map[string]uint64{}, map[string]uint64{}
			for _, row := range rows[1:] {
				if n, err := strconv.ParseUint(row[col("bytes")], 10, 64); err == nil && row[col("at_peak")] == "true" {
					byTag[cmp.Or(row[col("tag")], analyze.NoTag)] += n
					byLibrary[cmp.Or(row[col("library")], analyze.UnknownLibrary)] += n
				}
			}
			peak := analyze.Inspect(tr).Peak
			for _, x := range peak.Tags {
				if byTag[x.Name] != x.Bytes {
					t.Errorf("device %d: tag %s holds %d, analyze says %d", tr.Device, x.Name, byTag[x.Name], x.Bytes)
				}
			}
			for _, x := range peak.Libraries {
				if byLibrary[x.Name] != x.Bytes {
					t.Errorf("device %d: library %s holds %d, analyze says %d", tr.Device, x.Name, byLibrary[x.Name], x.Bytes)
				}
			}
		}
		groupsAddUp(t, one)
	}
}

// Both tables add up to what analyze says, and are the same in Parquet, read by a library, as in CSV.
func TestTablesAgreeWithAnalyze(t *testing.T) {
	recorded(t, func(t *testing.T, f *recording.File) {
		for _, table := range Tables[:2] {
			text := written(t, func(b *bytes.Buffer) error { return WriteCSV(b, f, table) })
			packed, _ := parquetText(t, written(t, func(b *bytes.Buffer) error { return WriteParquet(b, f, table) }))
			if packed != string(text) {
				t.Fatalf("%s: Parquet and CSV differ: %s", table.Name, firstDifference(packed, string(text)))
			}
			rows, err := csv.NewReader(bytes.NewReader(text)).ReadAll()
			if err != nil {
				t.Fatal(err)
			}
			col := func(name string) int { return slices.Index(rows[0], name) }
			number := func(row []string, name string) uint64 {
				n, err := strconv.ParseUint(row[col(name)], 10, 64)
				if err != nil {
					t.Fatal(err)
				}
				return n
			}
			for _, tr := range f.Traces {
				in := analyze.Inspect(tr)
				var peak, reserved, live, atEnd uint64
				n, blocks, allocs := 0, 0, 0
				for _, row := range rows[1:] {
					if row[0] != strconv.Itoa(tr.Device) {
						continue
					}
					n++
					if table.Name == "events" {
						peak = max(peak, number(row, "live_bytes"))
						reserved = max(reserved, number(row, "reserved_bytes"))
						continue
					}
					if row[col("alloc_event")] != "" {
						allocs++
					}
					if row[col("at_peak")] == "true" {
						live += number(row, "bytes")
						blocks++
					}
					if row[col("at_end")] == "true" {
						atEnd += number(row, "bytes")
					}
				}
				if table.Name == "events" {
					if n != len(tr.Events) || peak != in.PeakLive || reserved != in.RecordedReserved {
						t.Errorf("device %d: %d events with at most %d live and %d reserved, analyze says %d, %d, %d", tr.Device, n, peak,
							reserved, in.Events, in.PeakLive, in.RecordedReserved)
					}
					continue
				}
				end := analyze.MomentAt(tr, len(tr.Events)-1).Live
				if live != in.Peak.Live || blocks != in.Peak.Blocks || atEnd != end || allocs != in.Kinds["alloc"] {
					t.Errorf("device %d: %d allocations; %d bytes in %d blocks at the peak, %d at the end; analyze says %d; %d in %d, %d",
						tr.Device, allocs, live, blocks, atEnd, in.Kinds["alloc"], in.Peak.Live, in.Peak.Blocks, end)
				}
			}
		}
	})
}

func firstDifference(a, b string) string {
	x, y := strings.Split(a, "\n"), strings.Split(b, "\n")
	for i := range min(len(x), len(y)) {
		if x[i] != y[i] {
			return "line " + strconv.Itoa(i+1) + "\n" + x[i] + "\n" + y[i]
		}
	}
	return "lengths " + strconv.Itoa(len(x)) + " and " + strconv.Itoa(len(y))
}

// The program that people will open profiles with reads them, and says what inspect says.
func TestGoToolPprof(t *testing.T) {
	if testing.Short() {
		t.Skip("builds pprof the first time")
	}
	tool, err := exec.LookPath("go")
	if err != nil {
		t.Skip("no go command")
	}
	f := sampleRun()
	f.Traces = f.Traces[:1]
	file := filepath.Join(t.TempDir(), "sample.pb.gz")
	writeFile(t, file, written(t, func(b *bytes.Buffer) error { return WritePprof(b, f, Moment{}) }))
	in := analyze.Inspect(f.Traces[0])
	for index, want := range map[string]uint64{"inuse_space": in.PeakLive, "inuse_objects": uint64(in.Peak.Blocks)} {
		args := []string{"tool", "pprof", "-top", "-unit=B", "-nodefraction=0", "-sample_index=" + index, file}
		cmd := exec.Command(tool, args...)
		cmd.Env = append(cmd.Environ(), "PPROF_TMPDIR="+t.TempDir())
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		m := regexp.MustCompile(`Total samples = (\d+)`).FindSubmatch(out)
		if m == nil || string(m[1]) != strconv.FormatUint(want, 10) {
			t.Errorf("%s: want a total of %d in\n%s", index, want, out)
		}
		if index != "inuse_space" {
			continue
		}
		// By stack: 16 MiB and 1000 bytes where tensors are made, the rest at the module's level.
		for _, line := range []string{`16778216B +\S+ +\S+ +16778216B .* at::empty<int, long>`, `5242780B .* 22020996B .* <module>`} {
			if !regexp.MustCompile(line).Match(out) {
				t.Errorf("want a line %s in\n%s", line, out)
			}
		}
	}
}

// -tagfocus and -tagroot take the labels.
func TestGoToolPprofLabels(t *testing.T) {
	if testing.Short() {
		t.Skip("builds pprof the first time")
	}
	tool, err := exec.LookPath("go")
	if err != nil {
		t.Skip("no go command")
	}
	file := filepath.Join(t.TempDir(), "sample.pb.gz")
	writeFile(t, file, written(t, func(b *bytes.Buffer) error { return WritePprof(b, sampleLabels(), Moment{}) }))
	for _, c := range []struct{ flag, want string }{
		{"-tagfocus=tag=weights", `1051576B, 33.35% of 3153624B total`},
		{"-tagfocus=library=torch", `3152824B, .* of 3153624B total`},
		{"-tagfocus=thread=MainThread 4001", `7096B, .* of 3153624B total`},
		{"-tagroot=tag", `1051576B .* weights\n`},
	} {
		cmd := exec.Command(tool, "tool", "pprof", "-top", "-unit=B", "-nodefraction=0", c.flag, file)
		cmd.Env = append(cmd.Environ(), "PPROF_TMPDIR="+t.TempDir())
		out, err := cmd.CombinedOutput()
		if err != nil || !regexp.MustCompile(c.want).Match(out) {
			t.Errorf("%s: want %q in\n%s%v", c.flag, c.want, out, err)
		}
	}
}

func TestMoments(t *testing.T) {
	f := sampleRun()
	c := clockOf(f)
	for _, x := range []struct {
		at   string
		want int
	}{{"peak", 3}, {"start", -1}, {"end", 15}, {"7", 7}, {"0s", 0}, {"60us", 2}, {"79us", 3}, {"1h", 15}} {
		m, err := ParseMoment(x.at)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := m.index(f.Traces[0], c); err != nil || got != x.want {
			t.Errorf("%s is event %d, %v; want %d", x.at, got, err, x.want)
		}
	}
	for _, bad := range []string{"", "-1", "-5ms", "now", "1.5", "99999999999999999999"} {
		if m, err := ParseMoment(bad); err == nil {
			t.Errorf("%q is %+v", bad, m)
		}
	}
	m, _ := ParseMoment("oom")
	if i, err := m.index(&recording.Trace{Events: f.Traces[0].Events[:5]}, c); err == nil || !strings.Contains(err.Error(), "no request failed on device 0") {
		t.Errorf("event %d, %v", i, err)
	}
	died := *f.Traces[0]
	died.Events = append(slices.Clone(died.Events[:5]), event.Event{Kind: event.OOM, Size: 7}, event.Event{Kind: event.Alloc, Addr: 1 << 40, Size: 9},
		event.Event{Kind: event.OOM, Size: 8, Addr: 3}, event.Event{Kind: event.Alloc, Addr: 1 << 41, Size: 8})
	if i, err := m.index(&died, c); err != nil || i != 5 {
		t.Errorf("event %d, %v; want 5, as what failed later was met after all", i, err)
	}
	died.Failures = []*recording.Failure{{Event: -1}}
	if i, err := m.index(&died, c); err != nil || i != len(died.Events)-1 {
		t.Errorf("event %d, %v; want the last, where a process wrote down what it held", i, err)
	}
	m, _ = ParseMoment("5ms")
	if _, err := m.index(&recording.Trace{Events: make([]event.Event, 3)}, clock{}); err == nil {
		t.Error("a time in a trace without times")
	}
}

// What has no times cannot be put on a timeline, but into all else; what has no events at all makes empty outputs.
func TestWithoutTimes(t *testing.T) {
	f := &recording.File{Path: "x", Traces: []*recording.Trace{{Events: []event.Event{{Kind: event.Alloc, Addr: base, Size: 5}}}}}
	if err := WritePerfetto(&bytes.Buffer{}, f); err == nil || !strings.Contains(err.Error(), "no times") {
		t.Errorf("%v", err)
	}
	if text := written(t, func(b *bytes.Buffer) error { return WriteCSV(b, f, Tables[0]) }); !strings.HasSuffix(string(text),
		"\n0,,0,,,alloc,139637976727552,5,,0,default,,,,,,5,512,0,,,\n") {
		t.Errorf("%s", text)
	}
	profileText(t, written(t, func(b *bytes.Buffer) error { return WritePprof(b, f, Moment{}) }))
	for _, none := range [][]*recording.Trace{nil, {{}}} { // which is another thing
		if err := WritePerfetto(&bytes.Buffer{}, &recording.File{Path: "x", Traces: none}); err == nil || !strings.Contains(err.Error(), "no events") {
			t.Errorf("%v", err)
		}
	}
	f.Traces = nil
	for _, table := range Tables[:2] {
		if text, groups := parquetText(t, written(t, func(b *bytes.Buffer) error { return WriteParquet(b, f, table) })); groups != 0 ||
			strings.Count(text, "\n") != 1 {
			t.Errorf("%d groups of %q", groups, text)
		}
	}
	profileText(t, written(t, func(b *bytes.Buffer) error { return WritePprof(b, f, Moment{}) }))
}

// The calls of a driver trace are the same in Parquet as in CSV, and an error where there are none.
func TestCalls(t *testing.T) {
	f := &recording.File{Driver: sampleCalls()}
	table, err := TableNamed("calls")
	if err != nil {
		t.Fatal(err)
	}
	text := written(t, func(b *bytes.Buffer) error { return WriteCSV(b, f, table) })
	if packed, _ := parquetText(t, written(t, func(b *bytes.Buffer) error { return WriteParquet(b, f, table) })); packed != string(text) {
		t.Errorf("Parquet and CSV differ: %s", firstDifference(packed, string(text)))
	}
	if err := WriteCSV(&bytes.Buffer{}, sampleRun(), table); err == nil || !strings.Contains(err.Error(), "cistern trace") {
		t.Errorf("%v", err)
	}
}

// The columns' names are distinct, and fit what the documentation says of types.
func TestColumns(t *testing.T) {
	for _, table := range Tables {
		var names []string
		for _, c := range table.Columns {
			names = append(names, c.Name)
			if c.Doc == "" || c.Type.String() == "" {
				t.Errorf("%s.%s is not described", table.Name, c.Name)
			}
		}
		slices.Sort(names)
		if diff := gocmp.Diff(slices.Compact(slices.Clone(names)), names); diff != "" {
			t.Errorf("%s: %s", table.Name, diff)
		}
	}
}

// The counters of a driver trace are on the clock of its calls, which is the time of day, and so are the events' times.
func TestDriverTimes(t *testing.T) {
	const wall = 1_700_000_000_000_000_000
	var b bytes.Buffer
	w, err := driver.NewWriter(&b, wall, []string{"program"})
	if err != nil {
		t.Fatal(err)
	}
	p := w.Process(recording.Process{PID: 7})
	for i := range uint64(20) {
		w.Call(&recording.Call{Kind: recording.MemAlloc, TimeNS: 31_000_000_000 + i*1_000_000, TookNS: 500_000, Addr: (i + 1) << 30, Size: 1 << 20, Process: p, Thread: 7})
	}
	if err := w.Close(recording.DriverEnd{}); err != nil {
		t.Fatal(err)
	}
	f, err := open.Read(&b, "run.cistern")
	if err != nil {
		t.Fatal(err)
	}
	from, to := uint64(wall+31_000_000_000), uint64(wall+31_020_000_000)
	timed := map[string]int{}
	for _, p := range packets(t, written(t, func(b *bytes.Buffer) error { return WritePerfetto(b, f) })) {
		e := p.get("track_event").m
		if e == nil {
			continue
		}
		if at := p.get("timestamp").n; at < from || at > to {
			t.Fatalf("an event of type %d is at %d, the calls are from %d to %d", e.get("type").n, at, from, to)
		}
		timed[map[uint64]string{typeCounter: "counter", typeBegin: "call"}[e.get("type").n]]++
	}
	if timed["counter"] < 20 || timed["call"] != 20 {
		t.Errorf("%v", timed)
	}
	rows, err := csv.NewReader(bytes.NewReader(written(t, func(b *bytes.Buffer) error { return WriteCSV(b, f, Tables[0]) }))).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	for i, row := range rows[1:] {
		if want := strconv.FormatUint(from/1000+uint64(i)*1000+500, 10); row[3] != want || row[4] != strconv.Itoa(i*1000) {
			t.Fatalf("event %d is at %s, %s since the first; want %s, %d", i, row[3], row[4], want, i*1000)
		}
	}
}

// Each process of a driver trace has a device of its own on the timeline, and its name says whose it is.
func TestProcessesOfADevice(t *testing.T) {
	var b bytes.Buffer
	w, err := driver.NewWriter(&b, 0, []string{"program"})
	if err != nil {
		t.Fatal(err)
	}
	for i, pid := range []uint32{70, 80} {
		p := w.Process(recording.Process{PID: pid, Program: []string{"/bin/worker", ""}[i]}) // which the kernel may not say
		w.Call(&recording.Call{Kind: recording.MemAlloc, TimeNS: uint64(i+1) * 1000, Addr: 1 << 30, Size: 1 << 20, Process: p, Thread: pid + 1})
	}
	if err := w.Close(recording.DriverEnd{}); err != nil {
		t.Fatal(err)
	}
	f, err := open.Read(&b, "run.cistern")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, p := range packets(t, written(t, func(b *bytes.Buffer) error { return WritePerfetto(b, f) })) {
		if d := p.get("track_descriptor").m; d != nil && d.get("process").m != nil && strings.HasPrefix(d.get("process").m.get("process_name").s, "GPU") {
			names = append(names, d.get("process").m.get("process_name").s)
		}
	}
	if want := []string{"GPU 0 of worker 70: run.cistern", "GPU 0 of process 80: run.cistern"}; !slices.Equal(names, want) {
		t.Errorf("%q, want %q", names, want)
	}

	// Numbers of events and addresses are each process's own: rows and samples say whose they are.
	for _, table := range Tables[:2] {
		var b bytes.Buffer
		if err := WriteCSV(&b, f, table); err != nil {
			t.Fatal(err)
		}
		rows, err := csv.NewReader(&b).ReadAll()
		if err != nil {
			t.Fatal(err)
		}
		var pids []string
		for _, r := range rows {
			pids = append(pids, r[1])
		}
		if want := []string{"pid", "70", "80"}; !slices.Equal(pids, want) {
			t.Errorf("%s: %q, want %q", table.Name, pids, want)
		}
	}
	var labels []string
	p, err := profile.Parse(bytes.NewReader(written(t, func(b *bytes.Buffer) error { return WritePprof(b, f, Moment{}) })))
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range p.Sample {
		labels = append(labels, s.Label["process"]...)
	}
	if want := []string{"worker 70", "process 80"}; !slices.Equal(labels, want) {
		t.Errorf("labels are %q, want %q", labels, want)
	}
}

// A caller is a line of the program where one is known, though the libraries between it and the driver have files too.
func TestCaller(t *testing.T) {
	tr := &recording.Trace{Frames: []recording.Frame{{Func: "libcudart.so.13+0x41b5d", File: "/nv/libcudart.so.13"}, {Func: "at::empty_cuda", File: "/x/libtorch_cuda.so"},
		{Func: "forward", File: "/x/layer.py", Line: 7}, {Func: "<module>", File: "/x/train.py", Line: 9}, {Func: "0x7f00"}},
		Stacks: []recording.Stack{nil, {0, 1, 2, 3}, {0, 1}, {4}}}
	for stack, want := range []string{"", "forward /x/layer.py:7", "at::empty_cuda /x/libtorch_cuda.so", "0x7f00"} {
		if got := callerText(tr, uint32(stack)); got != want {
			t.Errorf("stack %d: %q, want %q", stack, got, want)
		}
	}
}
