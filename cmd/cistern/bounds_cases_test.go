package main

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/cputime"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/driver"
	"github.com/cistern-gpu/cistern/recording/native"
	"github.com/cistern-gpu/cistern/recording/open"
)

// boundedCases are small files that once took minutes, or gigabytes.
func boundedCases(t *testing.T) map[string]*recording.File {
	t.Helper()
	const n = 50_000
	one := func(make func(i int) event.Event, count int) *recording.File {
		tr := &recording.Trace{Streams: []uint64{0}, Pools: []recording.PoolID{{}}, Stacks: []recording.Stack{nil}, FromStart: true}
		for i := range count {
			tr.Events = append(tr.Events, make(i))
		}
		return &recording.File{Traces: []*recording.Trace{tr}}
	}
	turns := func(i int) event.Kind {
		if i%2 == 0 {
			return event.Alloc
		}
		return event.FreeCompleted
	}
	streams := one(func(i int) event.Event {
		return event.Event{Kind: turns(i), Addr: 1 << 40, Size: 1 << 20, Stream: uint32(i / 2), TimeUS: int64(i)}
	}, 20_000)
	for i := range 10_000 {
		streams.Traces[0].Streams = append(streams.Traces[0].Streams, uint64(i+1))
	}
	chunks := one(func(i int) event.Event {
		return event.Event{Kind: event.Alloc, Addr: uint64(i+1) << 42, Size: 1<<39 - 1<<30, Stream: uint32(i % 2), TimeUS: int64(i)}
	}, 5)
	chunks.Traces[0].Streams, chunks.Traces[0].Events[4].Kind = []uint64{0, 1}, event.OOM
	// call is repeated n times after n allocations in another context.
	driver := func(call recording.Call) *recording.File {
		var b bytes.Buffer
		w, err := driver.NewWriter(&b, 0, []string{"program"})
		if err != nil {
			t.Fatal(err)
		}
		w.Process(recording.Process{PID: 7, Program: "program"})
		for i := range n {
			w.Call(&recording.Call{Kind: recording.MemAlloc, Addr: uint64(i+1) << 21, Size: 1 << 20, TimeNS: uint64(i), Extra: 1, Device: 1})
		}
		for i := range n {
			call.TimeNS = uint64(n + i)
			w.Call(&call)
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
	return map[string]*recording.File{
		"a request beyond any device": one(func(i int) event.Event { return event.Event{Kind: turns(i), Addr: 1 << 40, Size: 16 << 40} }, 2),
		"a failure beyond any device": one(func(i int) event.Event {
			return event.Event{Kind: []event.Kind{event.Alloc, event.OOM}[i], Addr: 1 << 40, Size: 1 << (9 + 31*i)}
		}, 2),
		"terabytes that move": one(func(i int) event.Event {
			return event.Event{Kind: turns(i), Addr: 1 << 40, Size: 1<<40 - 1, Pool: 0, TimeUS: int64(i)}
		}, 2000),
		"chunks without end": chunks,
		"petabytes": one(func(i int) event.Event {
			return event.Event{Kind: event.Alloc, Addr: uint64(i+1) << 42, Size: 1<<40 - 1}
		}, 3000),
		"streams used once": streams,
		"segments falling": one(func(i int) event.Event {
			return event.Event{Kind: event.SegmentAlloc, Addr: uint64(2*(n-i)) << 21, Size: 1 << 21}
		}, n),
		"segments in turns": one(func(i int) event.Event {
			return event.Event{Kind: event.SegmentAlloc + event.Kind(i%2), Addr: uint64(2*(n-i/2)) << 21, Size: 1 << 21}
		}, n),
		"failures": one(func(i int) event.Event {
			return event.Event{Kind: event.OOM, Addr: 1 << 30, Size: 1 << 30, TimeUS: int64(i)}
		}, n),
		"contexts that end":     driver(recording.Call{Kind: recording.CtxDestroy, Handle: 2, Device: 1}),
		"devices that reset":    driver(recording.Call{Kind: recording.DevicePrimaryCtxReset, Extra: 1, Device: 2}),
		"arrays that end":       driver(recording.Call{Kind: recording.ArrayDestroy, Handle: 3, Device: 1}),
		"ranges that unmap":     driver(recording.Call{Kind: recording.MemUnmap, Addr: 1 << 21, Size: 1 << 60, Device: 1}),
		"a pool on each device": driver(recording.Call{Kind: recording.MemPoolTrimTo, Pool: 5, Extra: 1 << 30, Device: 255}),
	}
}

// Each command ends on each of them, in a time that has room for a busy machine and is far below what it was.
func TestBoundedCases(t *testing.T) {
	if testing.Short() {
		t.Skip("the race detector slows the engine twenty times: measured without it")
	}
	dir := t.TempDir()
	path := filepath.Join(dir, "in")
	for name, f := range boundedCases(t) {
		var b bytes.Buffer
		if err := native.Write(&b, f); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
		for _, args := range []string{"inspect IN", "replay IN", "replay --policy torch-async --policy rmm-pool --policy direct IN", "tune IN", "report IN", "diff IN IN",
			"convert IN -o OUT.csv", "convert IN -o OUT.pickle", "convert IN -o OUT.pftrace"} {
			words := strings.Fields(strings.NewReplacer("IN", path, "OUT", filepath.Join(dir, "out")).Replace(args))
			cpu := cputime.Process()
			var errs bytes.Buffer
			run(t.Context(), words, strings.NewReader(""), io.Discard, &errs)
			cpu = cputime.Process() - cpu
			t.Logf("%s, %d bytes: %s: %v %.200s", name, b.Len(), args, cpu, errs.String())
			if cpu > hostileCPU {
				t.Errorf("%s, %d bytes: %s took %v", name, b.Len(), args, cpu)
			}
		}
	}
}
