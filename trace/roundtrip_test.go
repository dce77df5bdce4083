package trace

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// samples are the files that round trips are tried on.
func samples(t *testing.T) []string {
	t.Helper()
	paths, err := filepath.Glob("testdata/*.pickle.gz")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no traces in testdata: %v", err)
	}
	if dir := tracesDir(); dir != "" {
		for _, w := range largeTraces {
			paths = append(paths, filepath.Join(dir, w.name+".pickle.gz"))
		}
	}
	return paths
}

func mustRead(t testing.TB, path string) *File {
	t.Helper()
	f, err := ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// synthetic has everything that a trace can have.
func synthetic() *File {
	t := &Trace{
		Path: "made", Format: FormatPyTorch, Device: 1,
		Streams: []uint64{0, 0x7f0000001234, 1<<63 + 5},
		Pools:   []PoolID{{}, {0, 1}, {7, 1 << 40}},
		Frames:  []Frame{{"a.py", "f", 1}, {"a.py", "g", 22}, {"ünï/b.py", "<module>", 300000}},
		Stacks:  []Stack{nil, {0}, {0, 1}, {2, 1, 0, 1}},
		Settings: Settings{Known: true, Conf: "expandable_segments:True,max_split_size_mb:64", Expandable: true,
			MaxSplitSize: 64 << 20, GCThreshold: 0.75, RoundupPow2: map[uint64]uint64{1: 2, 256: 4},
			Raw: map[string]string{"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64",
				"max_split_size": "67108864", "garbage_collection_threshold": "0.75", "expandable_segments": "True",
				"roundup_power2_divisions": "1:2,256:4", "pinned_num_register_threads": "1"}},
		Notes: []string{"a note"},
	}
	const mib = 1 << 20
	add := func(k event.Kind, addr, size uint64, stream, pool, stack uint32) *event.Event {
		t.Events = append(t.Events, event.Event{Kind: k, Addr: addr, Size: size, TimeUS: 1_700_000_000_000_000 +
			int64(len(t.Events))*7, Stream: stream, Pool: pool, Stack: stack})
		return &t.Events[len(t.Events)-1]
	}
	base := uint64(0x7f0000000000)
	add(event.SegmentMap, base, 20*mib, 0, 0, 1).Handle = 1
	add(event.Alloc, base, 1000, 0, 0, 2)
	add(event.Alloc, base+1024, 5*mib, 0, 0, 0)
	add(event.SegmentAlloc, base+100*mib, 2*mib, 1, 1, 3)
	add(event.Alloc, base+100*mib, 512, 1, 1, 3)
	add(event.FreeRequested, base, 1000, 0, 0, 0)
	add(event.SegmentAlloc, 0xfffffff000000000, 4*mib, 2, 2, 0)
	add(event.Alloc, 0xfffffff000000000, 4*mib-3, 2, 2, 1)
	add(event.FreeCompleted, base, 1000, 0, 0, 0)
	add(event.OOM, 123456789, 1<<40, 1, 0, 2)
	add(event.Retry, 0, 3*mib, 0, 0, 0).Flags = 4
	add(event.FreeRequested, base+1024, 5*mib, 0, 0, 0)
	add(event.SegmentMap, base+20*mib, 20*mib, 0, 0, 1).Handle = 1 << 40
	add(event.SegmentUnmap, base+20*mib, 20*mib, 0, 0, 1).Handle = 1 << 40
	add(event.Snapshot, 0, 0, 0, 0, 0)
	add(event.Annotation, 0, 0, 0, 0, 0)
	t.FromStart = true
	t.Tags = []string{"", "weights", "größe", ""}
	t.Libraries = []string{"", "torch", "", "cupy"}
	t.Threads = map[uint32]string{4001: "MainThread", 1<<32 - 1: "pt_autograd_0"}
	for i, l := range []label{{4001, 0, 0}, {4001, 1, 1}, {4002, 0, 3}, {}, {4001, 1, 1}, {4001, 1, 1}, {1<<32 - 1, 2, 1}, {4002, 3, 2}} {
		t.Events[i].Thread, t.Events[i].Tag, t.Events[i].Library = l.thread, l.tag, l.library
	}
	t.Events[9].Tag = 2
	t.Failures = []*Failure{{Event: 9, TimeUS: t.Events[9].TimeUS, PID: 77, Program: []string{"python", "a.py"}, Lines: []string{"one", "two"},
		Requested: 1 << 40, Need: 1 << 40, Pool: PoolID{0, 1}, Stream: 1<<63 + 5, Tag: 2, Library: 1, Thread: 4001, Stack: 2,
		Steps: []FailureStep{{Rung: "grow", Tries: 2, TookUS: 5, Note: "out of memory"}}, Limits: []Limit{{"device", 80 << 30, "cuMemGetInfo"}},
		Others: []Neighbour{{77, "python", 1 << 30, true}}}, {Event: -1, Lines: []string{"no history"}}}
	t.Final = []Segment{
		{Addr: base, Size: 20 * mib, Large: true, Expandable: true, Stack: 1, Blocks: []Block{
			{Addr: base, Size: 1024, Requested: 1000, State: Inactive, Stack: 2},
			{Addr: base + 1024, Size: 5 * mib, Requested: 5 * mib, State: PendingFree, Library: 3},
			{Addr: base + 1024 + 5*mib, Size: 15*mib - 1024, State: Inactive}}},
		{Addr: base + 100*mib, Size: 2 * mib, Stream: 1, Pool: 1, Stack: 3, Blocks: []Block{
			{Addr: base + 100*mib, Size: 512, Requested: 512, Stream: 1, Pool: 1, Stack: 3, State: Active, Tag: 1, Library: 1},
			{Addr: base + 100*mib + 512, Size: 2*mib - 512, Stream: 1, Pool: 1}}},
		{Addr: 0xfffffff000000000, Size: 4 * mib, Stream: 2, Pool: 2, Large: true, Blocks: []Block{
			{Addr: 0xfffffff000000000, Size: 4 * mib, Requested: 4*mib - 3, Stream: 2, Pool: 2, Stack: 1, State: Active,
				Tag: 3, Library: 2}}},
	}
	return &File{Path: "made", Format: FormatPyTorch, Traces: []*Trace{t}}
}

// plain is a trace with every index replaced by what it means, so that traces whose tables are ordered differently
// compare equal.
type plain struct {
	Device                 int
	Events                 []plainEvent
	Initial                []plainBlock
	InitialSegments, Final []plainSegment
	FromStart, HasFinal    bool
	Settings               Settings
	PeakLive, PeakReserved uint64
	Duration               int64
}

type plainEvent struct {
	Addr, Size, Handle, Stream uint64
	TimeUS                     int64
	Pool                       PoolID
	Kind                       event.Kind
	Flags                      uint8
	Stack                      string
	Tag, Library, Thread       string
}

type plainBlock struct {
	Addr, Size, Requested, Stream uint64
	Pool                          PoolID
	State                         BlockState
	Stack                         []Frame
	Tag, Library                  string
}

type plainSegment struct {
	Addr, Size, Stream uint64
	Pool               PoolID
	Large, Expandable  bool
	Stack              []Frame
	Blocks             []plainBlock
}

func plainOf(t *Trace) plain {
	stack := func(i uint32) (out []Frame) {
		for _, f := range t.Stacks[i] {
			out = append(out, t.Frames[f])
		}
		return out
	}
	blocks := func(in []Block) (out []plainBlock) {
		for _, b := range in {
			out = append(out, plainBlock{b.Addr, b.Size, b.Requested, t.Streams[b.Stream], t.Pools[b.Pool], b.State,
				stack(b.Stack), t.TagName(b.Tag), t.LibraryName(b.Library)})
		}
		return out
	}
	segments := func(in []Segment) (out []plainSegment) {
		for _, s := range in {
			out = append(out, plainSegment{s.Addr, s.Size, t.Streams[s.Stream], t.Pools[s.Pool], s.Large, s.Expandable,
				stack(s.Stack), blocks(s.Blocks)})
		}
		return out
	}
	p := plain{Device: t.Device, FromStart: t.FromStart, HasFinal: t.Final != nil, Settings: t.Settings,
		Initial: blocks(t.Initial), InitialSegments: segments(t.InitialSegments), Final: segments(t.Final),
		PeakReserved: t.RecordedPeakReserved(), Duration: t.Duration()}
	p.PeakLive, _ = t.PeakLive()
	text := make([]string, len(t.Stacks))
	for i := range text {
		text[i] = fmt.Sprint(stack(uint32(i)))
	}
	for _, e := range t.Events {
		p.Events = append(p.Events, plainEvent{e.Addr, e.Size, e.Handle, t.Streams[e.Stream], e.TimeUS, t.Pools[e.Pool],
			e.Kind, e.Flags, text[e.Stack], t.TagName(e.Tag), t.LibraryName(e.Library), t.ThreadName(e.Thread)})
	}
	return p
}

// diffTraces reports the first differences between two lists of traces by what they mean.
func diffTraces(t testing.TB, got, want []*Trace) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%d traces; expected %d", len(got), len(want))
	}
	for i := range want {
		g, w := plainOf(got[i]), plainOf(want[i])
		if len(g.Events) != len(w.Events) {
			t.Fatalf("%d events; expected %d", len(g.Events), len(w.Events))
		}
		for j := range w.Events {
			if w.Events[j] != g.Events[j] {
				t.Fatalf("event %d: got\n%+v; expected\n%+v", j, g.Events[j], w.Events[j])
			}
		}
		g.Events, w.Events = nil, nil
		if d := cmp.Diff(w, g, cmpopts.EquateEmpty()); d != "" {
			t.Fatalf("device %d (-want +got):\n%s", want[i].Device, d)
		}
	}
}

func TestPyTorchRoundTrip(t *testing.T) {
	check := func(t *testing.T, f *File) *File {
		var out bytes.Buffer
		if err := WritePyTorch(&out, f.Traces...); err != nil {
			t.Fatal(err)
		}
		again, err := Read(&out, f.Path)
		if err != nil {
			t.Fatal(err)
		}
		diffTraces(t, again.Traces, f.Traces)
		return again
	}
	t.Run("synthetic", func(t *testing.T) { check(t, synthetic()) })
	for _, path := range samples(t) {
		t.Run(filepath.Base(path), func(t *testing.T) { check(t, mustRead(t, path)) })
	}
}

func TestCisternRoundTrip(t *testing.T) {
	check := func(t *testing.T, f *File) {
		var out bytes.Buffer
		if err := WriteCistern(&out, f); err != nil {
			t.Fatal(err)
		}
		size := out.Len()
		again, err := Read(&out, f.Path)
		if err != nil {
			t.Fatal(err)
		}
		if again.Format != FormatCistern || len(again.Traces) != len(f.Traces) {
			t.Fatalf("%d traces of %s", len(again.Traces), again.Format)
		}
		for i, g := range again.Traces {
			if g.Source != FormatPyTorch {
				t.Errorf("source %q", g.Source)
			}
			if d := cmp.Diff(f.Traces[i], g, cmpopts.EquateEmpty(), cmpopts.IgnoreFields(Trace{}, "Format", "Source", "StoredBytes",
				"Events")); d != "" {
				t.Fatalf("(-want +got):\n%s", d)
			}
			for j := range g.Events {
				if g.Events[j] != f.Traces[i].Events[j] {
					t.Fatalf("event %d: %+v; expected %+v", j, g.Events[j], f.Traces[i].Events[j])
				}
			}
		}
		if st, err := os.Stat(f.Path); err == nil && int64(size) >= st.Size() {
			t.Errorf("%d bytes; the gzipped pickle has %d", size, st.Size())
		} else if err == nil {
			t.Logf("%d bytes, gzipped pickle %d", size, st.Size())
		}
	}
	t.Run("synthetic", func(t *testing.T) { check(t, synthetic()) })
	for _, path := range samples(t) {
		t.Run(filepath.Base(path), func(t *testing.T) { check(t, mustRead(t, path)) })
	}
}

// What we write is opened by Python's pickle, has the shape that PyTorch's tools need, and uses only opcodes that the
// viewer's own unpickler knows.
func TestPyTorchSnapshotInPython(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		if os.Getenv("CISTERN_TOOLS_TEST") == "1" {
			t.Fatal(err)
		}
		t.Skip("python3 is not installed")
	}
	for _, f := range append([]*File{synthetic()}, mustRead(t, "testdata/multistream_prefetch.pickle.gz"),
		mustRead(t, "testdata/detection.pickle.gz")) {
		path := filepath.Join(t.TempDir(), "snapshot.pickle")
		w, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := WritePyTorch(w, f.Traces...); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command(python, "testdata/check_snapshot.py", path).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", f.Path, err, out)
		}
		var got struct{ Events, Devices, Segments, Reserved uint64 }
		if err := json.Unmarshal(out, &got); err != nil {
			t.Fatal(err)
		}
		tr := f.Traces[0]
		var reserved uint64
		for _, s := range tr.Final {
			reserved += s.Size
		}
		want := got
		want.Events, want.Devices = uint64(len(tr.Events)), uint64(tr.Device+1)
		want.Segments, want.Reserved = uint64(len(tr.Final)), reserved
		if got != want {
			t.Errorf("%s: Python sees %+v; expected %+v", f.Path, got, want)
		}
	}
}
