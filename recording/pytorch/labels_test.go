package pytorch_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/initial"
	"github.com/cistern-gpu/cistern/recording/internal/recordingtest"
	"github.com/cistern-gpu/cistern/recording/internal/tables"
	"github.com/cistern-gpu/cistern/recording/pytorch"
	"github.com/google/go-cmp/cmp"
)

// user_metadata and compile_context of PyTorch are tags of what is allocated while they hold; a dict is Cistern's own.
func TestSnapshotLabels(t *testing.T) {
	at := func(action string, addr int, more ...any) []byte {
		return recordingtest.Pickle(append(append([]any{'}', '(', "action", action, "addr", addr, "size", 512, "stream", 0}, more...), 'u')...)[2:]
	}
	dict := func(more ...any) []byte {
		return recordingtest.Pickle(append(append([]any{'}', '('}, more...), 'u')...)[2:]
	}
	tr := recordingtest.ReadBytes(t, recordingtest.Pickle('}', '(', "device_traces", ']', '(', ']', '(',
		at("alloc", 1<<30, "user_metadata", "step 1", "compile_context", "0/0"),
		at("alloc", 2<<30, "user_metadata", "", "compile_context", "0/0"),
		at("alloc", 3<<30, "user_metadata", "", "compile_context", "N/A"),
		at("free_requested", 1<<30, "user_metadata", "step 2"), // of another block
		at("free_completed", 1<<30, "user_metadata", dict("tag", "step 1", "library", "torch", "thread", 12, "thread_name", "main")),
		at("alloc", 4<<30, "user_metadata", dict("tag", 7, "library", 'N', "thread", -1, "more", "x")),
		at("alloc", 5<<30, "user_metadata", ']'),
		'e', 'e', 'u', '.'))
	want := []tables.Label{{Thread: 0, Tag: 1, Library: 0}, {Thread: 0, Tag: 2, Library: 0}, {}, {}, {Thread: 12, Tag: 1, Library: 1}, {}, {}}
	for i := range want {
		if got := tables.LabelOf(&tr.Events[i]); got != want[i] {
			t.Errorf("event %d: %v; expected %v", i, got, want[i])
		}
	}
	if d := cmp.Diff([]any{[]string{"", "step 1", "torch.compile 0/0"}, []string{"", "torch"}, map[uint32]string{12: "main"}},
		[]any{tr.Tags, tr.Libraries, tr.Threads}); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// More libraries than can be distinguished are noted, not mixed up.
func TestSnapshotTooManyLibraries(t *testing.T) {
	parts := []any{'}', '(', "device_traces", ']', '(', ']', '('}
	for i := range 300 {
		parts = append(parts, '}', '(', "action", "alloc", "addr", (i+1)<<30, "size", 512, "stream", 0, "user_metadata",
			'}', '(', "library", "lib"+string(rune('a'+i/26))+string(rune('a'+i%26)), 'u', 'u')
	}
	tr := recordingtest.ReadBytes(t, recordingtest.Pickle(append(parts, 'e', 'e', 'u', '.')...))
	if len(tr.Libraries) != 256 || tr.Events[254].Library != 255 || tr.Events[255].Library != 0 {
		t.Errorf("%d libraries; %d, %d", len(tr.Libraries), tr.Events[254].Library, tr.Events[255].Library)
	}
	recordingtest.Says(t, tr, "more tags or libraries than the 65535 and 255 that are distinguished: the file names others 45 times")
}

// Spare chunks of the engine, which are mapped nowhere, are segments of a snapshot at addresses of their own; read again
// they are still nothing that the run began with.
func TestSnapshotOfSpareChunks(t *testing.T) {
	tr := &recording.Trace{Format: recording.FormatCistern, Streams: []uint64{0}, Pools: []recording.PoolID{{}}, Stacks: []recording.Stack{nil}, Settings: recording.Settings{MaxSplitSize: -1},
		Events: []event.Event{{Kind: event.SegmentMap, Addr: 1 << 40, Size: 2 << 20, TimeUS: 1}}}
	tr.Final = []recording.Segment{{Addr: 1 << 40, Size: 2 << 20, Expandable: true, Blocks: []recording.Block{{Addr: 1 << 40, Size: 2 << 20}}}}
	for range 3 {
		tr.Final = append(tr.Final, recording.Segment{Size: 2 << 20, Large: true, Blocks: []recording.Block{{Size: 2 << 20}}})
	}
	if err := initial.Find(tr, initial.Options{}); err != nil || !tr.FromStart {
		t.Fatalf("%v, %v", err, tr.InitialSegments)
	}
	var out bytes.Buffer
	if err := pytorch.Write(&out, tr); err != nil {
		t.Fatal(err)
	}
	got := recordingtest.ReadBytes(t, out.Bytes())
	if len(got.Final) != 4 || got.Final[3].Addr != recording.VirtualBase+4<<20 || got.Final[3].Blocks[0].Addr != got.Final[3].Addr || !got.FromStart {
		t.Errorf("%+v, from the start %v, %q", got.Final, got.FromStart, got.Notes)
	}
	tr.Final[0].Blocks[0].Size++
	if err := pytorch.Write(&out, tr); err == nil || !strings.Contains(err.Error(), "device 0: block 0 of the segment at 0x10000000000 lies outside it") {
		t.Errorf("%v", err)
	}
}
