package pytorch_test

import (
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/recordingtest"
	"github.com/cistern-gpu/cistern/recording/pytorch"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// Newer PyTorch names the pool of each event and has marks of users; unknown actions are noted.
func TestNewerSnapshot(t *testing.T) {
	pool := func(a, b int) []byte { return recordingtest.Pickle(a, b, byte(pytorch.OpTuple2))[2:] }
	tr := recordingtest.ReadBytes(t, recordingtest.Pickle('}', '(', "device_traces", ']', '(', ']', '(',
		'}', '(', "action", "segment_alloc", "addr", 1<<30, "size", 2<<20, "stream", 0, "time_us", 7, "compile_context", "N/A",
		"user_metadata", "", "pool_id", pool(0, 3), 'u',
		'}', '(', "action", "annotate", "user_metadata", "step 1", "time_us", 8, 'u',
		'}', '(', "action", "teleport", "addr", 1, "size", 2, 'u',
		'}', '(', "action", "alloc", "addr", 1<<30, "size", 100, "stream", -1, "time_us", 9, "pool_id", pool(0, 3), 'u',
		'}', '(', "action", "oom", "device_free", 12345, "size", 1<<40, "stream", 0, "time_us", 10, "pool_id", pool(0, 0), 'u',
		'}', '(', "action", "segment_free", "addr", 1<<30, "size", 2<<20, "stream", 0, "time_us", 11, "pool_id", pool(9, 9), 'u',
		'e', 'e', "segments", ']', "user_metadata", 'N', 'u', '.'))
	want := []event.Event{
		{Kind: event.SegmentAlloc, Addr: 1 << 30, Size: 2 << 20, TimeUS: 7, Pool: 1},
		{Kind: event.Annotation, TimeUS: 8},
		{Kind: event.Alloc, Addr: 1 << 30, Size: 100, TimeUS: 9, Stream: 1, Pool: 1},
		{Kind: event.OOM, Addr: 12345, Size: 1 << 40, TimeUS: 10},
		{Kind: event.SegmentFree, Addr: 1 << 30, Size: 2 << 20, TimeUS: 11, Pool: 2},
	}
	if d := cmp.Diff(want, tr.Events); d != "" {
		t.Errorf("events (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]recording.PoolID{{}, {0, 3}, {9, 9}}, tr.Pools); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]uint64{0, 1<<64 - 1}, tr.Streams); d != "" {
		t.Error(d)
	}
	recordingtest.Says(t, tr, `1 events of unknown action "teleport" were left out`, "no allocator_settings",
		"1 allocs without a free or a block at the end")
}

// Older PyTorch has no times, no block addresses, no pools, other words.
func TestOlderSnapshot(t *testing.T) {
	tr := recordingtest.ReadBytes(t, recordingtest.Pickle('}', '(', "segments", ']', '(', '}', '(', "device", 0, "address", 1<<30, "total_size", 4096,
		"allocated_size", 1024, "active_size", 1024, "stream", 0, "segment_type", "small", "blocks", ']', '(',
		'}', '(', "size", 1024, "state", "active_allocated", "history", ']', 'u',
		'}', '(', "size", 512, "state", "active_awaiting_free", 'u',
		'}', '(', "size", 2560, "state", "inactive", 'u', 'e', 'u', 'e',
		"device_traces", ']', '(', ']', '(',
		'}', '(', "action", "alloc", "addr", 1<<30, "size", 1000, "stream", 0, "frames", ']', '(',
		'}', '(', "filename", "a.py", "name", "f", "line", 3, 'u', 'e', 'u', 'e', 'e', 'u', '.'))
	final := []recording.Segment{{Addr: 1 << 30, Size: 4096, Blocks: []recording.Block{
		{Addr: 1 << 30, Size: 1024, Requested: 1024, State: recording.Active},
		{Addr: 1<<30 + 1024, Size: 512, Requested: 512, State: recording.PendingFree},
		{Addr: 1<<30 + 1536, Size: 2560, Requested: 2560}}}}
	if d := cmp.Diff(final, tr.Final, cmpopts.EquateEmpty()); d != "" {
		t.Errorf("final (-want +got):\n%s", d)
	}
	if d := cmp.Diff(final[0].Blocks[1:2], tr.Initial); d != "" || tr.FromStart {
		t.Errorf("initial (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]recording.Frame{{File: "a.py", Func: "f", Line: 3}}, tr.Frames); d != "" || tr.Events[0].Stack != 1 {
		t.Errorf("frames (-want +got):\n%s", d)
	}
	recordingtest.Says(t, tr, "1 events have no time", "no allocator_settings", "recording began mid-run")

	tr = recordingtest.ReadBytes(t, recordingtest.Pickle('}', '(', "device_traces", ']', '(', ']', '(', recordingtest.Entry("free_requested", 512, 99),
		recordingtest.Entry("free_completed", 512, 99), 'e', 'e', 'u', '.'))
	recordingtest.Says(t, tr, "the file has no segments")
	if tr.Final != nil || len(tr.Initial) != 1 || tr.FromStart {
		t.Errorf("final %v, initial %v", tr.Final, tr.Initial)
	}
}

// The settings as PyTorch had parsed them, and as its user wrote them.
func TestSettings(t *testing.T) {
	tr := recordingtest.ReadBytes(t, recordingtest.Pickle('}', '(', "allocator_settings", '}', '(', "PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64",
		"max_split_size", 64<<20, "garbage_collection_threshold", byte(pytorch.OpBinfloat), []byte{0x3f, 0xe8, 0, 0, 0, 0, 0, 0},
		"expandable_segments", byte(pytorch.OpNewtrue), "roundup_power2_divisions", '}', '(', "1", 4, "256", 8, 'u', "new", 5, 'u',
		"device_traces", ']', ']', '(', recordingtest.Entry("alloc", 1<<30, 5), recordingtest.Entry("free_requested", 1<<30, 5),
		recordingtest.Entry("free_completed", 1<<30, 5), 'e', 'a', 'u', '.'))
	want := recording.Settings{Known: true, Conf: "max_split_size_mb:64", Expandable: true, MaxSplitSize: 64 << 20, GCThreshold: 0.75,
		RoundupPow2: map[uint64]uint64{1: 4, 256: 8}, Raw: map[string]string{
			"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "max_split_size": "67108864",
			"garbage_collection_threshold": "0.75", "expandable_segments": "True", "new": "5",
			"roundup_power2_divisions": "1:4,256:8"}}
	if d := cmp.Diff(want, tr.Settings); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}
