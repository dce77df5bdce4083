package driver_test

import (
	"bytes"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/driver"
	"github.com/cistern-gpu/cistern/recording/internal/recordingtest"
	"github.com/cistern-gpu/cistern/recording/native"
	"github.com/cistern-gpu/cistern/recording/open"
)

func TestDriverRoundTrip(t *testing.T) {
	files, want := recordingtest.DriverScript(t, recordingtest.RandomCalls(1, 3000), 100)
	for i, b := range files {
		f := recordingtest.ReadDriver(t, b)
		n := min(len(want.Calls), (i+1)*100)
		if !slices.Equal(f.Driver.Calls, want.Calls[:n]) {
			t.Fatalf("after %d calls: %d were read, or others", n, len(f.Driver.Calls))
		}
		if n := len(f.Driver.Untraced); n == 0 || !slices.Equal(f.Driver.Untraced, want.Untraced[:n]) || n < 2 == (i == len(files)-1) {
			t.Errorf("after %d calls: untraced are %v", i*100, f.Driver.Untraced)
		}
		if f.Driver.Ended != (i == len(files)-1) {
			t.Errorf("after %d calls: ended is %v", n, f.Driver.Ended)
		}
	}
	f := recordingtest.ReadDriver(t, files[len(files)-1])
	if !reflect.DeepEqual(f.Driver.End, want.End) || !slices.Equal(f.Driver.Program, want.Program) || f.Driver.WallNS != 1000 ||
		len(f.Driver.Processes) != 2 || f.Driver.Processes[1] != (recording.Process{PID: 11, Parent: 10, StartNS: 5, EndNS: 77}) {
		t.Errorf("read %+v", f.Driver)
	}
	if got := f.Driver.StackFrames(2); len(got) != 2 || got[0].Func != "g" {
		t.Errorf("stack 2 is %v", got)
	}
	var again bytes.Buffer
	if err := native.Write(&again, f); err != nil {
		t.Fatal(err)
	}
	g := recordingtest.ReadDriver(t, again.Bytes())
	if !reflect.DeepEqual(g.Driver, f.Driver) {
		t.Error("written again it is another driver trace")
	}
	recordingtest.Diff(t, g.Traces, f.Traces)
}

// TestDriverCutAnywhere: whatever of a file is there can be read, up to its last whole block.
func TestDriverCutAnywhere(t *testing.T) {
	files, _ := recordingtest.DriverScript(t, recordingtest.RandomCalls(2, 400), 50)
	b := files[len(files)-1]
	before := 0
	for n := 0; n < len(b)-16; n += 1 + n%7 {
		f, err := open.Read(bytes.NewReader(b[:n]), "some.file")
		if err != nil {
			if n > 60 {
				t.Fatalf("cut at %d, after %d calls could be read: %v", n, before, err)
			}
			continue
		}
		if len(f.Driver.Calls) < before {
			t.Fatalf("cut at %d: %d calls, fewer than when cut earlier", n, len(f.Driver.Calls))
		}
		before = len(f.Driver.Calls)
	}
	if before != 400 {
		t.Errorf("%d calls in the end", before)
	}
}

// script runs calls through a Tracker and is what is held in the end.
func script(calls ...recording.Call) string {
	tr := driver.NewTracker()
	live := map[string]int{}
	for i := range calls {
		tr.Call(&calls[i], func(h *driver.Holding) { live[fmt.Sprintf("%s %d", h.Memory, h.Size)]++ },
			func(h *driver.Holding) { live[fmt.Sprintf("%s %d", h.Memory, h.Size)]-- })
	}
	var held []string
	tr.Held(func(h *driver.Holding) { held = append(held, fmt.Sprintf("%s %d", h.Memory, h.Size)) })
	slices.Sort(held)
	for _, h := range held {
		live[h]--
	}
	for h, n := range live {
		if n != 0 {
			held = append(held, fmt.Sprintf("told %d times too often of %s", n, h))
		}
	}
	return strings.Join(held, ", ")
}

func TestTracker(t *testing.T) {
	const mib = 1 << 20
	create := recording.Call{Kind: recording.MemCreate, Handle: 5, Size: 2 * mib, Extra: 1}
	mapped := recording.Call{Kind: recording.MemMap, Handle: 5, Addr: 64 * mib, Size: 2 * mib}
	again := recording.Call{Kind: recording.MemMap, Handle: 5, Addr: 96 * mib, Size: 2 * mib}
	release := recording.Call{Kind: recording.MemRelease, Handle: 5}
	unmap := recording.Call{Kind: recording.MemUnmap, Addr: 64 * mib, Size: 64 * mib}
	alloc := recording.Call{Kind: recording.MemAlloc, Addr: 4096, Size: 100}
	free := recording.Call{Kind: recording.MemFree, Addr: 4096}
	for _, c := range []struct {
		what  string
		calls []recording.Call
		want  string
	}{
		{"an allocation", []recording.Call{alloc}, "device 100"},
		{"freed", []recording.Call{alloc, free}, ""},
		{"failed calls change nothing", []recording.Call{alloc, {Kind: recording.MemFree, Addr: 4096, Result: 1}, {Kind: recording.MemAlloc, Addr: 1, Size: 7, Result: 2}}, "device 100"},
		{"the free is recorded after the address was given out again", []recording.Call{alloc, {Kind: recording.MemAlloc, Addr: 4096, Size: 200}, free}, "device 200"},
		{"and both frees", []recording.Call{alloc, {Kind: recording.MemAlloc, Addr: 4096, Size: 200}, free, free}, ""},
		{"an unknown free", []recording.Call{free, alloc}, "device 100"},
		{"another process's free", []recording.Call{alloc, {Kind: recording.MemFree, Addr: 4096, Process: 1}}, "device 100"},
		{"pooled memory freed by cuMemFree", []recording.Call{{Kind: recording.MemAllocAsync, Addr: 4096, Size: 9, Pool: 1}, free}, ""},
		{"a handle is memory before it is mapped", []recording.Call{create}, "virtual 2097152"},
		{"and after it is released, while mapped", []recording.Call{create, mapped, release}, "virtual 2097152"},
		{"not after both", []recording.Call{create, mapped, release, unmap}, ""},
		{"in whichever order", []recording.Call{create, mapped, unmap, release}, ""},
		{"twice mapped", []recording.Call{create, mapped, again, release, {Kind: recording.MemUnmap, Addr: 64 * mib, Size: 2 * mib}}, "virtual 2097152"},
		{"both unmapped at once", []recording.Call{create, mapped, again, release, unmap}, ""},
		{"unmapping everything there is", []recording.Call{create, mapped, release, {Kind: recording.MemUnmap, Size: 1 << 63}}, ""},
		{"retained", []recording.Call{create, {Kind: recording.MemRetainAllocationHandle, Handle: 5}, release}, "virtual 2097152"},
		{"a handle's number given out again", []recording.Call{create, mapped, release, {Kind: recording.MemCreate, Handle: 5, Size: 4 * mib, Extra: 1}, release}, "virtual 2097152"},
		{"and its release recorded after that", []recording.Call{create, {Kind: recording.MemCreate, Handle: 5, Size: 4 * mib, Extra: 1}, release}, "virtual 4194304"},
		{"and both releases", []recording.Call{create, {Kind: recording.MemCreate, Handle: 5, Size: 4 * mib, Extra: 1}, release, release}, ""},
		{"and what was mapped unmapped", []recording.Call{create, mapped, {Kind: recording.MemCreate, Handle: 5, Size: 4 * mib, Extra: 1}, release, unmap, release}, ""},
		{"mapped where something is, whose unmapping was not recorded", []recording.Call{create, mapped, release,
			{Kind: recording.MemCreate, Handle: 6, Size: 4 * mib, Extra: 1}, {Kind: recording.MemMap, Handle: 6, Addr: 64 * mib, Size: 4 * mib}}, "virtual 4194304"},
		{"released more often than it was had", []recording.Call{create, mapped, release, release, unmap}, ""},
		{"host memory", []recording.Call{{Kind: recording.MemCreate, Handle: 5, Size: 1, Extra: 3}, {Kind: recording.MemHostAlloc, Addr: 1, Size: 2}, {Kind: recording.MemHostRegister, Addr: 2, Size: 3}},
			"host 1, host 2, host 3"},
		{"imports are closed as often as opened", []recording.Call{{Kind: recording.IpcOpenMemHandle, Addr: 9}, {Kind: recording.IpcOpenMemHandle, Addr: 9}, {Kind: recording.IpcCloseMemHandle, Addr: 9}},
			"imported 0"},
		{"a reset takes plain memory", []recording.Call{alloc, create, {Kind: recording.DevicePrimaryCtxReset, Extra: 1}}, "virtual 2097152"},
		{"and no physical memory, wherever it is", []recording.Call{{Kind: recording.MemCreate, Handle: 5, Size: 2 * mib, Extra: 3}, mapped,
			{Kind: recording.MemImportFromShareableHandle, Handle: 6}, {Kind: recording.DevicePrimaryCtxReset, Extra: 1}, release, unmap}, "imported 0"},
		{"a release that leaves the context does not", []recording.Call{alloc, {Kind: recording.DevicePrimaryCtxRelease}}, "device 100"},
		{"arrays", []recording.Call{{Kind: recording.ArrayCreate, Handle: 5, Size: 8}, {Kind: recording.Array3DCreate, Handle: 6, Size: 9}, {Kind: recording.ArrayDestroy, Handle: 5}}, "device 9"},
	} {
		if got := script(c.calls...); got != c.want {
			t.Errorf("%s: %q, want %q", c.what, got, c.want)
		}
	}
}

// TestDriverEvents: device memory is requests, one after the other, that no two hold the same address.
func TestDriverEvents(t *testing.T) {
	for seed := range uint64(20) {
		files, _ := recordingtest.DriverScript(t, recordingtest.RandomCalls(seed, 500), 500)
		for _, tr := range recordingtest.ReadDriver(t, files[len(files)-1]).Traces {
			live := map[uint64]uint64{}
			for i, e := range tr.Events {
				switch e.Kind {
				case event.Alloc:
					if live[e.Addr] != 0 {
						t.Fatalf("seed %d, device %d, event %d: %#x is live", seed, tr.Device, i, e.Addr)
					}
					live[e.Addr] = e.Size
				case event.FreeCompleted:
					if live[e.Addr] != e.Size {
						t.Fatalf("seed %d, device %d, event %d: %d bytes freed of %d", seed, tr.Device, i, e.Size, live[e.Addr])
					}
					delete(live, e.Addr)
				}
			}
		}
	}
}

// The events of a driver trace are those of the threads that made the calls: one thread may free what another one got.
func TestDriverEventsHaveThreads(t *testing.T) {
	var b bytes.Buffer
	w, err := driver.NewWriter(&b, 0, []string{"program"})
	if err != nil {
		t.Fatal(err)
	}
	p := w.Process(recording.Process{PID: 5})
	for i, c := range []recording.Call{{Kind: recording.MemAlloc, Addr: 1 << 40, Size: 1 << 20, Thread: 5}, {Kind: recording.MemAlloc, Size: 1 << 40, Result: driver.ResultOutOfMemory, Thread: 7},
		{Kind: recording.MemFree, Addr: 1 << 40, Thread: 6}} {
		c.Process, c.TimeNS = p, uint64(i+1)*1_000_000
		w.Call(&c)
	}
	if err := w.Close(recording.DriverEnd{}); err != nil {
		t.Fatal(err)
	}
	f, err := open.Read(&b, "driver")
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

// TestNativeNames: names of C++ are readable in what is read and in messages to a program that is traced, and the file has them as
// they were.
func TestNativeNames(t *testing.T) {
	const mangled, plain = "_ZNSt6vectorIiSaIiEE9push_backERKi", "std::vector<int, std::allocator<int> >::push_back(int const&)"
	var file bytes.Buffer
	w, err := driver.NewWriter(&file, 0, []string{"p"})
	if err != nil {
		t.Fatal(err)
	}
	p := w.Process(recording.Process{PID: 1})
	stack := w.Stack([]recording.Frame{{File: "/lib/libx.so", Func: mangled}, {File: "x.py", Func: "_Zf", Line: 3}})
	w.Call(&recording.Call{Kind: recording.MemAlloc, Process: p, Addr: 1 << 30, Size: 1 << 20, Stack: stack})
	traced := w.Frames(stack)
	if err := w.Close(recording.DriverEnd{}); err != nil {
		t.Fatal(err)
	}
	read, err := open.Read(&file, "x.cistern")
	if err != nil {
		t.Fatal(err)
	}
	for name, frames := range map[string][]recording.Frame{"traced": traced, "calls": read.Driver.StackFrames(stack), "events": read.Traces[0].FramesOf(read.Traces[0].Events[0].Stack)} {
		if len(frames) != 2 || frames[0].Func != plain || frames[1].Func != "_Zf" {
			t.Errorf("%s: %+v", name, frames)
		}
	}
}
