package native_test

import (
	"bytes"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/initial"
	"github.com/cistern-gpu/cistern/recording/internal/recordingtest"
	"github.com/cistern-gpu/cistern/recording/native"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// unlabelled is the synthetic trace without what files had no room for.
func unlabelled() *recording.File {
	f := recordingtest.Synthetic()
	t := f.Traces[0]
	t.Tags, t.Libraries, t.Threads, t.Failures = nil, nil, nil, nil
	t.Environment = recording.Environment{}
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

// testdata/unlabelled.cistern was written before files could tell labels, failures and environments. It reads as it did, and a trace
// that has none is written as it was, byte for byte but for what zstd may do differently.
func TestCisternFromBeforeLabels(t *testing.T) {
	old, err := os.ReadFile("testdata/unlabelled.cistern")
	if err != nil {
		t.Fatal(err)
	}
	got, err := open.Read(bytes.NewReader(old), "made")
	if err != nil {
		t.Fatal(err)
	}
	want := unlabelled()
	if d := cmp.Diff(want.Traces, got.Traces, cmpopts.EquateEmpty(), cmpopts.IgnoreFields(recording.Trace{}, "Format", "Source", "StoredBytes")); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	now, _ := recordingtest.Written(t, want)
	if a, b := blocksOf(old), blocksOf(now); !bytes.Equal(a, b) {
		t.Errorf("%d bytes of blocks are now %d", len(a), len(b))
	}
}

// What a run gains while it goes on is in the file by the next Sync: names, threads that are renamed, failures.
func TestCisternLabelsAsTheyCome(t *testing.T) {
	var out bytes.Buffer
	w, err := native.NewWriter(&out)
	if err != nil {
		t.Fatal(err)
	}
	tr := &recording.Trace{Format: recording.FormatCistern, Streams: []uint64{0}, Pools: []recording.PoolID{{}}, Stacks: []recording.Stack{nil}, Settings: recording.Settings{MaxSplitSize: -1}}
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
	tr.Failures = append(tr.Failures, &recording.Failure{Event: 1, Lines: []string{scrambled(3 * native.FailurePart), "end"}})
	if err := w.Sync(i, tr); err != nil {
		t.Fatal(err)
	}
	add(2, 1, 8)
	tr.Failures = append(tr.Failures, &recording.Failure{Event: 2, Tag: 2, Library: 1, Thread: 8})
	if err := w.End(i, tr); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	f, err := open.Read(&out, "x")
	if err != nil {
		t.Fatal(err)
	}
	got := f.Traces[0]
	tr.Tags[2] = tr.Tags[2][:native.BlockMax/2]
	if !slices.Equal(got.Events, tr.Events) {
		t.Errorf("events %v", got.Events)
	}
	if d := cmp.Diff([]any{tr.Tags, tr.Libraries, tr.Threads, tr.Failures}, []any{got.Tags, got.Libraries, got.Threads, got.Failures}); d != "" {
		t.Errorf("(-want +got):\n%.2000s", d)
	}
}

// A label without a name in the file would make a file that no reader takes: the writer says so instead.
func TestCisternLabelWithoutName(t *testing.T) {
	for name, spoil := range map[string]func(t *recording.Trace){
		"tag of an event":     func(t *recording.Trace) { t.Events[2].Tag = 9 },
		"library of an event": func(t *recording.Trace) { t.Events[2].Library = 9 },
		"tag of a block":      func(t *recording.Trace) { t.Final[0].Blocks[0].Tag = 9 },
		"library of a block":  func(t *recording.Trace) { t.Initial = []recording.Block{{Addr: 1 << 50, Library: 9}} },
	} {
		f := recordingtest.Synthetic()
		spoil(f.Traces[0])
		if err := native.Write(&bytes.Buffer{}, f); err == nil || !strings.Contains(err.Error(), "Sync writes") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A process that kept no history says what it held, and why a request failed.
func TestCisternWithoutEvents(t *testing.T) {
	f := recordingtest.Synthetic()
	tr := f.Traces[0]
	tr.Events, tr.Failures = nil, tr.Failures[1:]
	tr.Initial, tr.InitialSegments = nil, nil
	if err := initial.Find(tr, initial.Options{}); err != nil {
		t.Fatal(err)
	}
	if len(tr.Initial) != 3 || len(tr.InitialSegments) != len(tr.Final) || tr.FromStart {
		t.Fatalf("%d blocks, %d segments at the start", len(tr.Initial), len(tr.InitialSegments))
	}
	recordingtest.Says(t, tr, "no history was kept: the file says what was held, 3 blocks (")
	var out bytes.Buffer
	if err := native.Write(&out, f); err != nil {
		t.Fatal(err)
	}
	got, err := open.Read(&out, "made")
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(f.Traces, got.Traces, cmpopts.EquateEmpty(), cmpopts.IgnoreFields(recording.Trace{}, "Format", "Source", "StoredBytes")); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	tr.Failures, tr.Initial = nil, nil
	out.Reset()
	if err := native.Write(&out, f); err != nil {
		t.Fatal(err)
	}
	recordingtest.Refused(t, out.Bytes(), "the trace has no events")
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
