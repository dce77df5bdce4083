package export

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
)

const (
	mib  = 1 << 20
	base = 0x7f0000000000
)

// sampleRun is a short run on two devices that has everything the outputs distinguish: streams, pools, blocks from before
// the first event, a free that waits, a lost free, a free without an alloc, a failed request, a handle that is mapped
// twice, an event without a time, and names that need care.
func sampleRun() *recording.File {
	t := &recording.Trace{Path: "run.pickle", Format: recording.FormatPyTorch, Device: 0, Streams: []uint64{0, 0x5581a2c0},
		Pools: []recording.PoolID{{}, {1, 7}},
		Frames: []recording.Frame{{File: "??", Func: "at::empty<int, long>"}, {File: `dir, "quoted"/train.py`, Line: 12, Func: "forward"},
			{File: "train.py", Line: 40, Func: "<module>"}, {Func: ""}},
		Stacks: []recording.Stack{nil, {0, 1, 2}, {2}, {3}},
		Initial: []recording.Block{{Addr: base, Size: 2 * mib, Requested: 2*mib - 100, Stack: 2, State: recording.Active},
			{Addr: base + 2*mib, Size: 512, Requested: 500, State: recording.PendingFree}},
		InitialSegments: []recording.Segment{{Addr: base, Size: 20 * mib, Large: true}},
		Settings:        recording.Settings{Known: true, Conf: "expandable_segments:True"},
		Notes:           []string{"recording began mid-run"},
	}
	add := func(us int64, e event.Event) {
		if e.TimeUS = 0; us > 0 {
			e.TimeUS = 1_700_000_000_000_000 + us
		}
		t.Events = append(t.Events, e)
	}
	add(0, event.Event{Kind: event.Alloc, Addr: base + 4*mib, Size: 1000, Stack: 1})
	add(100, event.Event{Kind: event.SegmentMap, Addr: base + 64*mib, Size: 20 * mib, Stream: 1, Pool: 1, Handle: 9})
	add(110, event.Event{Kind: event.Alloc, Addr: base + 64*mib, Size: 16 * mib, Stream: 1, Pool: 1, Stack: 1})
	add(120, event.Event{Kind: event.Alloc, Addr: base + 5*mib, Size: 3 * mib, Stack: 2})
	add(130, event.Event{Kind: event.FreeRequested, Addr: base + 64*mib, Size: 16 * mib, Stream: 1, Pool: 1, Stack: 1})
	add(140, event.Event{Kind: event.OOM, Addr: 5 * mib, Size: 32 * mib, Stack: 3})
	add(140, event.Event{Kind: event.Retry, Size: 32 * mib, Flags: 2})
	add(150, event.Event{Kind: event.FreeCompleted, Addr: base + 64*mib, Size: 16 * mib, Stream: 1, Pool: 1, Stack: 1})
	add(160, event.Event{Kind: event.SegmentMap, Addr: base + 128*mib, Size: 20 * mib, Stream: 1, Pool: 1, Handle: 9})
	add(170, event.Event{Kind: event.SegmentUnmap, Addr: base + 64*mib, Size: 20 * mib, Stream: 1, Pool: 1, Handle: 9})
	add(180, event.Event{Kind: event.Alloc, Addr: base + 5*mib, Size: 100, Stack: 3}) // its free was lost
	add(190, event.Event{Kind: event.FreeCompleted, Addr: base + 12*mib, Size: 4096}) // its alloc was lost
	add(200, event.Event{Kind: event.FreeRequested, Addr: base, Size: 2*mib - 100})
	add(200, event.Event{Kind: event.FreeCompleted, Addr: base, Size: 2*mib - 100})
	add(210, event.Event{Kind: event.SegmentFree, Addr: base + 256*mib, Size: 2 * mib}) // got before the first event
	add(220, event.Event{Kind: event.Snapshot})

	u := &recording.Trace{Path: t.Path, Format: t.Format, Device: 1, Streams: []uint64{0}, Pools: []recording.PoolID{{}},
		Stacks: []recording.Stack{nil}, FromStart: true}
	u.Events = []event.Event{
		{Kind: event.SegmentAlloc, Addr: base, Size: 2 * mib, TimeUS: 1_700_000_000_000_050},
		{Kind: event.Alloc, Addr: base, Size: 0, TimeUS: 1_700_000_000_000_060},
		{Kind: event.Alloc, Addr: base + 512, Size: 700, TimeUS: 1_700_000_000_000_070},
		{Kind: event.FreeRequested, Addr: base + 512, Size: 700, TimeUS: 1_700_000_000_000_080},
		{Kind: event.FreeCompleted, Addr: base + 512, Size: 700, TimeUS: 1_700_000_000_000_080},
	}
	return &recording.File{Path: t.Path, Format: t.Format, Traces: []*recording.Trace{t, u}}
}

// sampleLabels is a run of two threads on two devices with labels: tags and libraries with and without a
// name, blocks from before the first event, and a failure that says whose process it was.
func sampleLabels() *recording.File {
	t := &recording.Trace{Path: "run.cistern", Format: recording.FormatCistern, Streams: []uint64{0}, Pools: []recording.PoolID{{}},
		Frames: []recording.Frame{{File: "train.py", Line: 12, Func: "forward"}}, Stacks: []recording.Stack{nil, {0}},
		Tags: []string{"", "weights", "optimizer, state"}, Libraries: []string{"", "torch"}, Threads: map[uint32]string{4001: "MainThread"},
		Initial:  []recording.Block{{Addr: base, Size: mib, Requested: mib, Tag: 1, Library: 1, State: recording.Active}},
		Failures: []*recording.Failure{{Event: 6, PID: 4001, Program: []string{"/usr/bin/python3", "train.py"}, Thread: 4001, Tag: 2, Library: 1}},
	}
	u := &recording.Trace{Path: t.Path, Format: t.Format, Device: 1, Streams: t.Streams, Pools: t.Pools, Stacks: t.Stacks, Frames: t.Frames,
		Libraries: t.Libraries, FromStart: true}
	add := func(t *recording.Trace, us int64, e event.Event) {
		e.TimeUS = 1_700_000_000_000_000 + us
		t.Events = append(t.Events, e)
	}
	add(t, 10, event.Event{Kind: event.SegmentAlloc, Addr: base, Size: 20 * mib, Thread: 4001})
	add(t, 20, event.Event{Kind: event.Alloc, Addr: base + mib, Size: 3000, Thread: 4001, Tag: 1, Library: 1, Stack: 1})
	add(t, 30, event.Event{Kind: event.Alloc, Addr: base + 2*mib, Size: 2 * mib, Thread: 4002, Tag: 2, Library: 1, Stack: 1})
	add(t, 40, event.Event{Kind: event.Alloc, Addr: base + 5*mib, Size: 700, Thread: 4002, Library: 3})
	add(t, 50, event.Event{Kind: event.FreeRequested, Addr: base, Size: mib, Thread: 4002, Tag: 1, Library: 1})
	add(t, 50, event.Event{Kind: event.FreeCompleted, Addr: base, Size: mib, Thread: 4002, Tag: 1, Library: 1})
	add(t, 60, event.Event{Kind: event.OOM, Size: 1 << 40, Thread: 4001, Tag: 2, Library: 1, Stack: 1})
	add(u, 5, event.Event{Kind: event.Alloc, Addr: base, Size: 4096, Thread: 4001, Library: 1})
	add(u, 70, event.Event{Kind: event.Alloc, Addr: base + mib, Size: 100})
	return &recording.File{Path: t.Path, Format: t.Format, Traces: []*recording.Trace{t, u}}
}

// sampleCalls is the calls of two processes, one of which has two threads.
func sampleCalls() *recording.Driver {
	return &recording.Driver{WallNS: 1_700_000_000_000_000_000, Program: []string{"python", "train.py"},
		Processes: []recording.Process{{PID: 100, Program: "/usr/bin/python3"}, {PID: 200, Parent: 100, Program: "/opt/worker"}},
		Stacks:    []recording.Stack{nil, {0}}, Frames: []recording.Frame{{File: "/usr/lib/libfoo.so", Func: "foo_init"}},
		Calls: []recording.Call{
			{TimeNS: 1000, TookNS: 500, Kind: recording.MemAlloc, Addr: base, Size: 2 * mib, Thread: 100, Stack: 1},
			{TimeNS: 1600, TookNS: 100, Kind: recording.MemAlloc, Size: 1 << 40, Result: 2, Thread: 100},
			{TimeNS: 1200, TookNS: 900, Kind: recording.MemCreate, Handle: 0xabc, Size: 20 * mib, Extra: 1, Thread: 101, Device: 1},
			{TimeNS: 2000, TookNS: 250, Kind: recording.MemAllocAsync, Addr: base + mib, Size: 512, Stream: 0x77, Pool: 0x99, Process: 1, Thread: 200},
			{TimeNS: 3000, TookNS: 7000, Kind: recording.MemFree, Addr: base, Thread: 100, Device: -1},
		}}
}

// recorded are the traces of the tree, and those of the folder that CISTERN_TRACES names.
func recorded(t *testing.T, f func(t *testing.T, f *recording.File)) {
	paths, err := filepath.Glob("../recording/testdata/*.pickle.gz")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no traces: %v", err)
	}
	if dir := os.Getenv("CISTERN_TRACES"); dir != "" && !testing.Short() {
		more, err := filepath.Glob(filepath.Join(dir, "*.pickle.gz"))
		if err != nil || len(more) == 0 {
			t.Fatalf("no traces in %s: %v", dir, err)
		}
		paths = append(paths, more...)
	}
	for _, p := range paths {
		t.Run(filepath.Base(p), func(t *testing.T) {
			file, err := open.File(p)
			if err != nil {
				t.Fatal(err)
			}
			f(t, file)
		})
	}
}

// written is what a writer wrote.
func written(t testing.TB, write func(b *bytes.Buffer) error) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := write(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// failing takes n bytes and no more.
type failing struct{ n int }

func (f *failing) Write(p []byte) (int, error) {
	if len(p) > f.n {
		return 0, fmt.Errorf("no space left on device")
	}
	f.n -= len(p)
	return len(p), nil
}

// A writer that fails at any byte fails the whole.
func TestFailingWriters(t *testing.T) {
	f := sampleRun()
	for name, write := range map[string]func(w *failing) error{
		"pprof":    func(w *failing) error { return WritePprof(w, f, Moment{}) },
		"perfetto": func(w *failing) error { return WritePerfetto(w, f) },
		"csv":      func(w *failing) error { return WriteCSV(w, f, Tables[0]) },
		"parquet":  func(w *failing) error { return WriteParquet(w, f, Tables[1]) },
	} {
		for _, n := range []int{0, 1, 100, 300} {
			if err := write(&failing{n}); err == nil {
				t.Errorf("%s wrote all to a disk that holds %d bytes", name, n)
			}
		}
	}
}
