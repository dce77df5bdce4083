package trace

import (
	"bytes"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// unlabelled is the synthetic trace without what files had no room for.
func unlabelled() *File {
	f := synthetic()
	t := f.Traces[0]
	t.Tags, t.Libraries, t.Threads, t.Failures = nil, nil, nil, nil
	for i := range t.Events {
		e := &t.Events[i]
		e.Tag, e.Library, e.Thread = 0, 0, 0
	}
	for i := range t.Final {
		for j := range t.Final[i].Blocks {
			b := &t.Final[i].Blocks[j]
			b.Tag, b.Library = 0, 0
		}
	}
	return f
}

// testdata/unlabelled.cistern was written before files could tell labels and failures. It reads as it did, and a trace
// that has none is written as it was, byte for byte but for what zstd may do differently.
func TestCisternFromBeforeLabels(t *testing.T) {
	old, err := os.ReadFile("testdata/unlabelled.cistern")
	if err != nil {
		t.Fatal(err)
	}
	got, err := Read(bytes.NewReader(old), "made")
	if err != nil {
		t.Fatal(err)
	}
	want := unlabelled()
	if d := cmp.Diff(want.Traces, got.Traces, cmpopts.EquateEmpty(), cmpopts.IgnoreFields(Trace{}, "Format", "Source", "StoredBytes")); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	now, _ := written(t, want)
	if a, b := blocksOf(old), blocksOf(now); !bytes.Equal(a, b) {
		t.Errorf("%d bytes of blocks are now %d", len(a), len(b))
	}
}

// What a run gains while it goes on is in the file by the next Sync: names, threads that are renamed, failures.
func TestCisternLabelsAsTheyCome(t *testing.T) {
	var out bytes.Buffer
	w, err := NewWriter(&out)
	if err != nil {
		t.Fatal(err)
	}
	tr := &Trace{Format: FormatCistern, Streams: []uint64{0}, Pools: []PoolID{{}}, Stacks: []Stack{nil}, Settings: Settings{MaxSplitSize: -1}}
	i, err := w.Begin(tr)
	if err != nil {
		t.Fatal(err)
	}
	add := func(tag uint16, library uint8, thread uint32) {
		t.Helper()
		e := event.Event{Kind: event.Alloc, Addr: uint64(len(tr.Events)+1) << 21, Size: 512, TimeUS: int64(len(tr.Events)), Tag: tag,
			Library: library, Thread: thread}
		tr.Events = append(tr.Events, e)
		if err := w.Events(i, tr.Events[len(tr.Events)-1:]); err != nil {
			t.Fatal(err)
		}
	}
	add(0, 0, 7)
	tr.Tags, tr.Threads = []string{"", "a"}, map[uint32]string{7: "python"}
	if err := w.Sync(i, tr); err != nil {
		t.Fatal(err)
	}
	add(1, 0, 7)
	tr.Tags, tr.Libraries = append(tr.Tags, strings.Repeat("long", 1<<18)), []string{"", "torch"}
	tr.Threads = map[uint32]string{7: "trainer", 8: "loader"}
	tr.Failures = append(tr.Failures, &Failure{Event: 1, Lines: []string{scrambled(3 * failurePart), "end"}})
	if err := w.Sync(i, tr); err != nil {
		t.Fatal(err)
	}
	add(2, 1, 8)
	tr.Failures = append(tr.Failures, &Failure{Event: 2, Tag: 2, Library: 1, Thread: 8})
	if err := w.End(i, tr); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	f, err := Read(&out, "x")
	if err != nil {
		t.Fatal(err)
	}
	got := f.Traces[0]
	tr.Tags[2] = tr.Tags[2][:blockMax/2]
	if !slices.Equal(got.Events, tr.Events) {
		t.Errorf("events %v", got.Events)
	}
	if d := cmp.Diff([]any{tr.Tags, tr.Libraries, tr.Threads, tr.Failures}, []any{got.Tags, got.Libraries, got.Threads, got.Failures}); d != "" {
		t.Errorf("(-want +got):\n%.2000s", d)
	}
}

// A label without a name in the file would make a file that no reader takes: the writer says so instead.
func TestCisternLabelWithoutName(t *testing.T) {
	for name, spoil := range map[string]func(t *Trace){
		"tag of an event":     func(t *Trace) { t.Events[2].Tag = 9 },
		"library of an event": func(t *Trace) { t.Events[2].Library = 9 },
		"tag of a block":      func(t *Trace) { t.Final[0].Blocks[0].Tag = 9 },
		"library of a block":  func(t *Trace) { t.Initial = []Block{{Addr: 1 << 50, Library: 9}} },
	} {
		f := synthetic()
		spoil(f.Traces[0])
		if err := WriteCistern(&bytes.Buffer{}, f); err == nil || !strings.Contains(err.Error(), "Sync writes") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A process that kept no history says what it held, and why a request failed.
func TestCisternWithoutEvents(t *testing.T) {
	f := synthetic()
	tr := f.Traces[0]
	tr.Events, tr.Failures = nil, tr.Failures[1:]
	tr.Initial, tr.InitialSegments = nil, nil
	if err := tr.FindStart(); err != nil {
		t.Fatal(err)
	}
	if len(tr.Initial) != 3 || len(tr.InitialSegments) != len(tr.Final) || tr.FromStart {
		t.Fatalf("%d blocks, %d segments at the start", len(tr.Initial), len(tr.InitialSegments))
	}
	says(t, tr, "no history was kept: the file says what was held, 3 blocks (")
	var out bytes.Buffer
	if err := WriteCistern(&out, f); err != nil {
		t.Fatal(err)
	}
	got, err := Read(&out, "made")
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(f.Traces, got.Traces, cmpopts.EquateEmpty(), cmpopts.IgnoreFields(Trace{}, "Format", "Source", "StoredBytes")); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	tr.Failures, tr.Initial = nil, nil
	out.Reset()
	if err := WriteCistern(&out, f); err != nil {
		t.Fatal(err)
	}
	refusedFile(t, out.Bytes(), "the trace has no events")
}

// user_metadata and compile_context of PyTorch are tags of what is allocated while they hold; a dict is Cistern's own.
func TestSnapshotLabels(t *testing.T) {
	at := func(action string, addr int, more ...any) []byte {
		return pk(append(append([]any{'}', '(', "action", action, "addr", addr, "size", 512, "stream", 0}, more...), 'u')...)[2:]
	}
	dict := func(more ...any) []byte { return pk(append(append([]any{'}', '('}, more...), 'u')...)[2:] }
	tr := readBytes(t, pk('}', '(', "device_traces", ']', '(', ']', '(',
		at("alloc", 1<<30, "user_metadata", "step 1", "compile_context", "0/0"),
		at("alloc", 2<<30, "user_metadata", "", "compile_context", "0/0"),
		at("alloc", 3<<30, "user_metadata", "", "compile_context", "N/A"),
		at("free_requested", 1<<30, "user_metadata", "step 2"), // of another block
		at("free_completed", 1<<30, "user_metadata", dict("tag", "step 1", "library", "torch", "thread", 12, "thread_name", "main")),
		at("alloc", 4<<30, "user_metadata", dict("tag", 7, "library", 'N', "thread", -1, "more", "x")),
		at("alloc", 5<<30, "user_metadata", ']'),
		'e', 'e', 'u', '.'))
	want := []label{{0, 1, 0}, {0, 2, 0}, {}, {}, {12, 1, 1}, {}, {}}
	for i := range want {
		if got := labelOf(&tr.Events[i]); got != want[i] {
			t.Errorf("event %d: %v; expected %v", i, got, want[i])
		}
	}
	if d := cmp.Diff([]any{[]string{"", "step 1", "torch.compile 0/0"}, []string{"", "torch"}, map[uint32]string{12: "main"}},
		[]any{tr.Tags, tr.Libraries, tr.Threads}); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// More libraries than can be told apart are said, not mixed up.
func TestSnapshotTooManyLibraries(t *testing.T) {
	parts := []any{'}', '(', "device_traces", ']', '(', ']', '('}
	for i := range 300 {
		parts = append(parts, '}', '(', "action", "alloc", "addr", (i+1)<<30, "size", 512, "stream", 0, "user_metadata",
			'}', '(', "library", "lib"+string(rune('a'+i/26))+string(rune('a'+i%26)), 'u', 'u')
	}
	tr := readBytes(t, pk(append(parts, 'e', 'e', 'u', '.')...))
	if len(tr.Libraries) != 256 || tr.Events[254].Library != 255 || tr.Events[255].Library != 0 {
		t.Errorf("%d libraries; %d, %d", len(tr.Libraries), tr.Events[254].Library, tr.Events[255].Library)
	}
	says(t, tr, "more tags or libraries than the 65535 and 255 that are told apart: the file names others 45 times")
}

func TestLabelNames(t *testing.T) {
	tr := &Trace{Tags: []string{"", "a", ""}, Libraries: []string{""}, Threads: map[uint32]string{5: "main"}}
	got := []string{tr.TagName(0), tr.TagName(1), tr.TagName(2), tr.TagName(9), tr.LibraryName(3), tr.ThreadName(0), tr.ThreadName(5), tr.ThreadName(6)}
	if want := []string{"", "a", "tag 2", "tag 9", "library 3", "", "main 5", "6"}; !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}

// The events of a driver trace are those of the threads that made the calls: one thread may free what another one got.
func TestDriverEventsHaveThreads(t *testing.T) {
	var b bytes.Buffer
	w, err := NewDriverWriter(&b, 0, []string{"program"})
	if err != nil {
		t.Fatal(err)
	}
	p := w.Process(Process{PID: 5})
	for i, c := range []Call{{Kind: MemAlloc, Addr: 1 << 40, Size: 1 << 20, Thread: 5}, {Kind: MemAlloc, Size: 1 << 40, Result: resultOutOfMemory, Thread: 7},
		{Kind: MemFree, Addr: 1 << 40, Thread: 6}} {
		c.Process, c.TimeNS = p, uint64(i+1)*1_000_000
		w.Call(&c)
	}
	if err := w.Close(DriverEnd{}); err != nil {
		t.Fatal(err)
	}
	f, err := Read(&b, "driver")
	if err != nil {
		t.Fatal(err)
	}
	got := map[event.Kind]uint32{}
	for _, e := range f.Traces[0].Events {
		got[e.Kind] = e.Thread
	}
	if want := map[event.Kind]uint32{event.Alloc: 5, event.OOM: 7, event.FreeRequested: 6, event.FreeCompleted: 6}; !maps.Equal(got, want) {
		t.Errorf("threads %v", got)
	}
}

// Spare chunks of the engine, which are mapped nowhere, are segments of a snapshot at addresses of their own; read again
// they are still nothing that the run began with.
func TestSnapshotOfSpareChunks(t *testing.T) {
	tr := &Trace{Format: FormatCistern, Streams: []uint64{0}, Pools: []PoolID{{}}, Stacks: []Stack{nil}, Settings: Settings{MaxSplitSize: -1},
		Events: []event.Event{{Kind: event.SegmentMap, Addr: 1 << 40, Size: 2 << 20, TimeUS: 1}}}
	tr.Final = []Segment{{Addr: 1 << 40, Size: 2 << 20, Expandable: true, Blocks: []Block{{Addr: 1 << 40, Size: 2 << 20}}}}
	for range 3 {
		tr.Final = append(tr.Final, Segment{Size: 2 << 20, Large: true, Blocks: []Block{{Size: 2 << 20}}})
	}
	if err := tr.FindStart(); err != nil || !tr.FromStart {
		t.Fatalf("%v, %v", err, tr.InitialSegments)
	}
	var out bytes.Buffer
	if err := WritePyTorch(&out, tr); err != nil {
		t.Fatal(err)
	}
	got := readBytes(t, out.Bytes())
	if len(got.Final) != 4 || got.Final[3].Addr != VirtualBase+4<<20 || got.Final[3].Blocks[0].Addr != got.Final[3].Addr || !got.FromStart {
		t.Errorf("%+v, from the start %v, %q", got.Final, got.FromStart, got.Notes)
	}
	tr.Final[0].Blocks[0].Size++
	if err := WritePyTorch(&out, tr); err == nil || !strings.Contains(err.Error(), "device 0: block 0 of the segment at 0x10000000000 lies outside it") {
		t.Errorf("%v", err)
	}
}

// scrambled is text of n letters that does not compress.
func scrambled(n int) string {
	b, x := make([]byte, n), uint64(1)
	for i := range b {
		x = x*6364136223846793005 + 1442695040888963407
		b[i] = 'a' + byte(x>>33)%26
	}
	return string(b)
}
