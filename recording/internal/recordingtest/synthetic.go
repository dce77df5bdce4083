package recordingtest

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/driver"
	"github.com/cistern-gpu/cistern/recording/internal/tables"
	"github.com/cistern-gpu/cistern/recording/native"
)

// Written is the synthetic trace in Cistern's format, three events to a block, and where its blocks end: the number of
// events that are whole up to each byte.
func Written(t testing.TB, f *recording.File) (file []byte, whole func(n int) int) {
	t.Helper()
	var out bytes.Buffer
	w, err := native.NewWriter(&out)
	if err != nil {
		t.Fatal(err)
	}
	type mark struct{ off, events int }
	var marks []mark
	events := 0
	for _, tr := range f.Traces {
		i, err := w.Begin(tr)
		if err != nil {
			t.Fatal(err)
		}
		for k := 0; k < len(tr.Events); k += 3 {
			batch := tr.Events[k:min(k+3, len(tr.Events))]
			if err := w.Events(i, batch); err != nil {
				t.Fatal(err)
			}
			if err := w.Flush(); err != nil {
				t.Fatal(err)
			}
			events += len(batch)
			marks = append(marks, mark{out.Len(), events})
		}
		if err := w.End(i, tr); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes(), func(n int) (events int) {
		for _, m := range marks {
			if m.off <= n {
				events = m.events
			}
		}
		return events
	}
}

// DriverScript writes calls and returns the file as it is after each flush, every few calls, and at the end.
func DriverScript(tb testing.TB, calls []recording.Call, every int) (files [][]byte, whole *recording.Driver) {
	tb.Helper()
	var b bytes.Buffer
	w, err := driver.NewWriter(&b, 1000, []string{"program", "-x"})
	if err != nil {
		tb.Fatal(err)
	}
	p := []uint32{w.Process(recording.Process{PID: 10, Program: "/bin/program"}), w.Process(recording.Process{PID: 11, Parent: 10, StartNS: 5})}
	stack := []uint32{0, w.Stack([]recording.Frame{{File: "lib.so", Func: "f", Line: 0}}), w.Stack([]recording.Frame{{File: "lib.so", Func: "g", Line: 0}, {File: "lib.so", Func: "f", Line: 0}})}
	untraced := []recording.Untraced{{PID: 12, Program: "/usr/bin/python3", Why: "was started without LD_AUDIT"}, {PID: 13, Program: "server", Why: ""}}
	w.Untraced(untraced[0])
	gpus := []recording.GPU{{Number: 1, UUID: [16]byte{0xa1, 15: 7}, Name: "a GPU", Total: 80 << 30}, {Number: 0, UUID: [16]byte{0xa0}}}
	w.GPU(gpus[0])
	for i := range calls {
		c := calls[i]
		c.Process, c.Stack = p[c.Process%2], stack[c.Stack%3]
		calls[i] = c
		w.Call(&c)
		if i == every {
			w.ProcessEnded(p[1], 77)
		}
		if (i+1)%every == 0 {
			if err := w.Flush(); err != nil {
				tb.Fatal(err)
			}
			files = append(files, slices.Clone(b.Bytes()))
		}
	}
	if again := w.Stack([]recording.Frame{{File: "lib.so", Func: "f", Line: 0}}); again != stack[1] {
		tb.Errorf("the same stack is number %d and %d", stack[1], again)
	}
	w.Untraced(untraced[1])
	w.GPU(gpus[1])
	end := recording.DriverEnd{Dropped: 3, Lost: 1, Unknown: []string{"cuMemAlloc"}, Status: 139, Finished: 99, Spent: 12345}
	if err := w.Close(end); err != nil {
		tb.Fatal(err)
	}
	return append(files, b.Bytes()), &recording.Driver{WallNS: 1000, Program: []string{"program", "-x"}, GPUs: gpus, Untraced: untraced, Calls: calls, End: end, Ended: true}
}

// RandomCalls are n calls of the driver.
func RandomCalls(seed uint64, n int) []recording.Call {
	r := rand.New(rand.NewPCG(seed, 1))
	var calls []recording.Call
	for i := range n {
		c := recording.Call{Kind: recording.CallKind(1 + r.UintN(uint(recording.NumCallKinds)-1)), TimeNS: uint64(i * 1000), TookNS: uint64(r.UintN(5000)), Addr: uint64(1+r.UintN(16)) << 21,
			Size: uint64(1+r.UintN(8)) << 20, Stream: uint64(r.UintN(3)), Handle: uint64(1 + r.UintN(8)), Pool: uint64(1 + r.UintN(3)),
			Extra: uint64(r.UintN(2)), Process: uint32(r.UintN(2)), Thread: uint32(r.UintN(4)), Stack: uint32(r.UintN(3)), Device: int16(r.UintN(3)) - 1}
		if r.UintN(10) == 0 {
			c.Result = int32(r.UintN(3))
		}
		calls = append(calls, c)
	}
	return calls
}

// RMMLog is a log, whose first 39 bytes are its header.
const RMMLog = `Thread,Time,Action,Pointer,Size,Stream
19165,23:59:59.900000,allocate,0x7f8a00000000,1024,0x0
19166,23:59:59.999999,allocate,0x7f8a00000400,2048,0x7fab12345678
19165,23:59:59.999990,free,0x7f8a00000000,1024,0x0
19166,00:00:00.000004,allocate,0x7f8a00000000,512,0x7fab12345678
19165,00:00:01.500000,allocate failure,(nil),99999999999,0x0
19166,00:00:02.000000,free,0x7f8a00000000,512,0x7fab12345678
19166,00:00:02.000001,free,0x7f8a99990000,4096,0x2
`

// Synthetic has everything that a trace can have.
func Synthetic() *recording.File {
	t := &recording.Trace{
		Path: "made", Format: recording.FormatPyTorch, Device: 1,
		Streams: []uint64{0, 0x7f0000001234, 1<<63 + 5},
		Pools:   []recording.PoolID{{}, {0, 1}, {7, 1 << 40}},
		Frames:  []recording.Frame{{File: "a.py", Func: "f", Line: 1}, {File: "a.py", Func: "g", Line: 22}, {File: "ünï/b.py", Func: "<module>", Line: 300000}},
		Stacks:  []recording.Stack{nil, {0}, {0, 1}, {2, 1, 0, 1}},
		Settings: recording.Settings{Known: true, Conf: "expandable_segments:True,max_split_size_mb:64", Expandable: true,
			MaxSplitSize: 64 << 20, GCThreshold: 0.75, RoundupPow2: map[uint64]uint64{1: 2, 256: 4},
			Raw: map[string]string{"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64",
				"max_split_size": "67108864", "garbage_collection_threshold": "0.75", "expandable_segments": "True",
				"roundup_power2_divisions": "1:2,256:4", "pinned_num_register_threads": "1"}},
		Environment: recording.Environment{PyTorch: "2.11.0+cu130", CUDA: "13.0", Driver: "580.65.06", Device: "NVIDIA H100 80GB HBM3", DeviceTotal: 85017493504},
		Notes:       []string{"a note"},
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
	for i, l := range []tables.Label{{Thread: 4001, Tag: 0, Library: 0}, {Thread: 4001, Tag: 1, Library: 1}, {Thread: 4002, Tag: 0, Library: 3}, {}, {Thread: 4001, Tag: 1, Library: 1}, {Thread: 4001, Tag: 1, Library: 1}, {Thread: 1<<32 - 1, Tag: 2, Library: 1}, {Thread: 4002, Tag: 3, Library: 2}} {
		t.Events[i].Thread, t.Events[i].Tag, t.Events[i].Library = l.Thread, l.Tag, l.Library
	}
	t.Events[9].Tag = 2
	t.Failures = []*recording.Failure{{Event: 9, TimeUS: t.Events[9].TimeUS, PID: 77, Program: []string{"python", "a.py"}, Lines: []string{"one", "two"},
		Requested: 1 << 40, Need: 1 << 40, Pool: recording.PoolID{0, 1}, Stream: 1<<63 + 5, Tag: 2, Library: 1, Thread: 4001, Stack: 2,
		Steps: []recording.FailureStep{{Stage: "grow", Tries: 2, TookUS: 5, Note: "out of memory"}}, Limits: []recording.Limit{{Kind: "device", Bytes: 80 << 30, From: "cuMemGetInfo"}},
		Others: []recording.Neighbour{{PID: 77, Name: "python", Bytes: 1 << 30, Self: true}}}, {Event: -1, Lines: []string{"no history"}}}
	t.Final = []recording.Segment{
		{Addr: base, Size: 20 * mib, Large: true, Expandable: true, Stack: 1, Blocks: []recording.Block{
			{Addr: base, Size: 1024, Requested: 1000, State: recording.Inactive, Stack: 2},
			{Addr: base + 1024, Size: 5 * mib, Requested: 5 * mib, State: recording.PendingFree, Library: 3},
			{Addr: base + 1024 + 5*mib, Size: 15*mib - 1024, State: recording.Inactive}}},
		{Addr: base + 100*mib, Size: 2 * mib, Stream: 1, Pool: 1, Stack: 3, Blocks: []recording.Block{
			{Addr: base + 100*mib, Size: 512, Requested: 512, Stream: 1, Pool: 1, Stack: 3, State: recording.Active, Tag: 1, Library: 1},
			{Addr: base + 100*mib + 512, Size: 2*mib - 512, Stream: 1, Pool: 1}}},
		{Addr: 0xfffffff000000000, Size: 4 * mib, Stream: 2, Pool: 2, Large: true, Blocks: []recording.Block{
			{Addr: 0xfffffff000000000, Size: 4 * mib, Requested: 4*mib - 3, Stream: 2, Pool: 2, Stack: 1, State: recording.Active,
				Tag: 3, Library: 2}}},
	}
	return &recording.File{Path: "made", Format: recording.FormatPyTorch, Traces: []*recording.Trace{t}}
}
