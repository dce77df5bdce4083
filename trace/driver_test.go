package trace

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/event"
)

// TestCallNumbers: the audit library and this package number the driver's functions alike.
func TestCallNumbers(t *testing.T) {
	header, err := os.ReadFile("../audit/audit.h")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?s)enum call \{\s*CALL_NONE,(.*?)\}`).FindSubmatch(header)
	if m == nil {
		t.Fatal("audit.h has no enum call")
	}
	var names []string
	for _, name := range strings.Split(string(m[1]), ",") {
		if name = strings.TrimSpace(name); name != "" {
			names = append(names, "cu"+strings.ToLower(strings.ReplaceAll(name, "_", "")))
		}
	}
	var want []string
	for k := CallNone + 1; k < NumCallKinds; k++ {
		want = append(want, strings.ToLower(k.String()))
	}
	if !slices.Equal(names, want) {
		t.Errorf("audit.h has %v\nwant %v", names, want)
	}
}

// driverScript writes calls and returns the file as it is after each flush, every few calls, and at the end.
func driverScript(tb testing.TB, calls []Call, every int) (files [][]byte, whole *Driver) {
	tb.Helper()
	var b bytes.Buffer
	w, err := NewDriverWriter(&b, 1000, []string{"program", "-x"})
	if err != nil {
		tb.Fatal(err)
	}
	p := []uint32{w.Process(Process{PID: 10, Program: "/bin/program"}), w.Process(Process{PID: 11, Parent: 10, StartNS: 5})}
	stack := []uint32{0, w.Stack([]Frame{{"lib.so", "f", 0}}), w.Stack([]Frame{{"lib.so", "g", 0}, {"lib.so", "f", 0}})}
	untraced := []Untraced{{12, "/usr/bin/python3", "was started without LD_AUDIT"}, {13, "server", ""}}
	w.Untraced(untraced[0])
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
	if again := w.Stack([]Frame{{"lib.so", "f", 0}}); again != stack[1] {
		tb.Errorf("the same stack is number %d and %d", stack[1], again)
	}
	w.Untraced(untraced[1])
	end := DriverEnd{Dropped: 3, Lost: 1, Unknown: []string{"cuMemAlloc"}, Status: 139, Finished: 99, Spent: 12345}
	if err := w.Close(end); err != nil {
		tb.Fatal(err)
	}
	return append(files, b.Bytes()), &Driver{WallNS: 1000, Program: []string{"program", "-x"}, Untraced: untraced, Calls: calls, End: end, Ended: true}
}

func randomCalls(seed uint64, n int) []Call {
	r := rand.New(rand.NewPCG(seed, 1))
	var calls []Call
	for i := range n {
		c := Call{Kind: CallKind(1 + r.UintN(uint(NumCallKinds)-1)), TimeNS: uint64(i * 1000), TookNS: uint64(r.UintN(5000)), Addr: uint64(1+r.UintN(16)) << 21,
			Size: uint64(1+r.UintN(8)) << 20, Stream: uint64(r.UintN(3)), Handle: uint64(1 + r.UintN(8)), Pool: uint64(1 + r.UintN(3)),
			Extra: uint64(r.UintN(2)), Process: uint32(r.UintN(2)), Thread: uint32(r.UintN(4)), Stack: uint32(r.UintN(3)), Device: int16(r.UintN(3)) - 1}
		if r.UintN(10) == 0 {
			c.Result = int32(r.UintN(3))
		}
		calls = append(calls, c)
	}
	return calls
}

func readDriverFile(t *testing.T, b []byte) *File {
	t.Helper()
	f, err := Read(bytes.NewReader(b), "some.file")
	if err != nil {
		t.Fatal(err)
	}
	if f.Driver == nil {
		t.Fatal("no driver trace was read")
	}
	return f
}

func TestDriverRoundTrip(t *testing.T) {
	files, want := driverScript(t, randomCalls(1, 3000), 100)
	for i, b := range files {
		f := readDriverFile(t, b)
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
	f := readDriverFile(t, files[len(files)-1])
	if !reflect.DeepEqual(f.Driver.End, want.End) || !slices.Equal(f.Driver.Program, want.Program) || f.Driver.WallNS != 1000 ||
		len(f.Driver.Processes) != 2 || f.Driver.Processes[1] != (Process{PID: 11, Parent: 10, StartNS: 5, EndNS: 77}) {
		t.Errorf("read %+v", f.Driver)
	}
	if got := f.Driver.StackFrames(2); len(got) != 2 || got[0].Func != "g" {
		t.Errorf("stack 2 is %v", got)
	}
	var again bytes.Buffer
	if err := WriteCistern(&again, f); err != nil {
		t.Fatal(err)
	}
	g := readDriverFile(t, again.Bytes())
	if !reflect.DeepEqual(g.Driver, f.Driver) {
		t.Error("written again it is another driver trace")
	}
	diffTraces(t, g.Traces, f.Traces)
}

// TestDriverCutAnywhere: whatever of a file is there can be read, up to its last whole block.
func TestDriverCutAnywhere(t *testing.T) {
	files, _ := driverScript(t, randomCalls(2, 400), 50)
	b := files[len(files)-1]
	before := 0
	for n := 0; n < len(b)-16; n += 1 + n%7 {
		f, err := Read(bytes.NewReader(b[:n]), "some.file")
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
func script(calls ...Call) string {
	tr := NewTracker()
	live := map[string]int{}
	for i := range calls {
		tr.Call(&calls[i], func(h *Holding) { live[fmt.Sprintf("%s %d", h.Memory, h.Size)]++ },
			func(h *Holding) { live[fmt.Sprintf("%s %d", h.Memory, h.Size)]-- })
	}
	var held []string
	tr.Held(func(h *Holding) { held = append(held, fmt.Sprintf("%s %d", h.Memory, h.Size)) })
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
	create := Call{Kind: MemCreate, Handle: 5, Size: 2 * mib, Extra: 1}
	mapped := Call{Kind: MemMap, Handle: 5, Addr: 64 * mib, Size: 2 * mib}
	again := Call{Kind: MemMap, Handle: 5, Addr: 96 * mib, Size: 2 * mib}
	release := Call{Kind: MemRelease, Handle: 5}
	unmap := Call{Kind: MemUnmap, Addr: 64 * mib, Size: 64 * mib}
	alloc := Call{Kind: MemAlloc, Addr: 4096, Size: 100}
	free := Call{Kind: MemFree, Addr: 4096}
	for _, c := range []struct {
		what  string
		calls []Call
		want  string
	}{
		{"an allocation", []Call{alloc}, "device 100"},
		{"freed", []Call{alloc, free}, ""},
		{"failed calls change nothing", []Call{alloc, {Kind: MemFree, Addr: 4096, Result: 1}, {Kind: MemAlloc, Addr: 1, Size: 7, Result: 2}}, "device 100"},
		{"the free is recorded after the address was given out again", []Call{alloc, {Kind: MemAlloc, Addr: 4096, Size: 200}, free}, "device 200"},
		{"and both frees", []Call{alloc, {Kind: MemAlloc, Addr: 4096, Size: 200}, free, free}, ""},
		{"an unknown free", []Call{free, alloc}, "device 100"},
		{"another process's free", []Call{alloc, {Kind: MemFree, Addr: 4096, Process: 1}}, "device 100"},
		{"pooled memory freed by cuMemFree", []Call{{Kind: MemAllocAsync, Addr: 4096, Size: 9, Pool: 1}, free}, ""},
		{"a handle is memory before it is mapped", []Call{create}, "virtual 2097152"},
		{"and after it is released, while mapped", []Call{create, mapped, release}, "virtual 2097152"},
		{"not after both", []Call{create, mapped, release, unmap}, ""},
		{"in whichever order", []Call{create, mapped, unmap, release}, ""},
		{"twice mapped", []Call{create, mapped, again, release, {Kind: MemUnmap, Addr: 64 * mib, Size: 2 * mib}}, "virtual 2097152"},
		{"both unmapped at once", []Call{create, mapped, again, release, unmap}, ""},
		{"unmapping everything there is", []Call{create, mapped, release, {Kind: MemUnmap, Size: 1 << 63}}, ""},
		{"retained", []Call{create, {Kind: MemRetainAllocationHandle, Handle: 5}, release}, "virtual 2097152"},
		{"a handle's number given out again", []Call{create, mapped, release, {Kind: MemCreate, Handle: 5, Size: 4 * mib, Extra: 1}, release}, "virtual 2097152"},
		{"and its release recorded after that", []Call{create, {Kind: MemCreate, Handle: 5, Size: 4 * mib, Extra: 1}, release}, "virtual 4194304"},
		{"and both releases", []Call{create, {Kind: MemCreate, Handle: 5, Size: 4 * mib, Extra: 1}, release, release}, ""},
		{"and what was mapped unmapped", []Call{create, mapped, {Kind: MemCreate, Handle: 5, Size: 4 * mib, Extra: 1}, release, unmap, release}, ""},
		{"mapped where something is, whose unmapping was not recorded", []Call{create, mapped, release,
			{Kind: MemCreate, Handle: 6, Size: 4 * mib, Extra: 1}, {Kind: MemMap, Handle: 6, Addr: 64 * mib, Size: 4 * mib}}, "virtual 4194304"},
		{"released more often than it was had", []Call{create, mapped, release, release, unmap}, ""},
		{"host memory", []Call{{Kind: MemCreate, Handle: 5, Size: 1, Extra: 3}, {Kind: MemHostAlloc, Addr: 1, Size: 2}, {Kind: MemHostRegister, Addr: 2, Size: 3}},
			"host 1, host 2, host 3"},
		{"imports are closed as often as opened", []Call{{Kind: IpcOpenMemHandle, Addr: 9}, {Kind: IpcOpenMemHandle, Addr: 9}, {Kind: IpcCloseMemHandle, Addr: 9}},
			"imported 0"},
		{"a reset takes plain memory", []Call{alloc, create, {Kind: DevicePrimaryCtxReset, Extra: 1}}, "virtual 2097152"},
		{"and no physical memory, wherever it is", []Call{{Kind: MemCreate, Handle: 5, Size: 2 * mib, Extra: 3}, mapped,
			{Kind: MemImportFromShareableHandle, Handle: 6}, {Kind: DevicePrimaryCtxReset, Extra: 1}, release, unmap}, "imported 0"},
		{"a release that leaves the context does not", []Call{alloc, {Kind: DevicePrimaryCtxRelease}}, "device 100"},
		{"arrays", []Call{{Kind: ArrayCreate, Handle: 5, Size: 8}, {Kind: Array3DCreate, Handle: 6, Size: 9}, {Kind: ArrayDestroy, Handle: 5}}, "device 9"},
	} {
		if got := script(c.calls...); got != c.want {
			t.Errorf("%s: %q, want %q", c.what, got, c.want)
		}
	}
}

// TestDriverEvents: device memory is requests, one after the other, that no two hold the same address.
func TestDriverEvents(t *testing.T) {
	for seed := range uint64(20) {
		files, _ := driverScript(t, randomCalls(seed, 500), 500)
		for _, tr := range readDriverFile(t, files[len(files)-1]).Traces {
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

// FuzzDriver is the blocks of driver traces, as FuzzCistern is those of all; what is read is followed call by call.
func FuzzDriver(f *testing.F) {
	files, _ := driverScript(f, randomCalls(3, 60), 20)
	f.Add(blocksOf(files[len(files)-1]), true)
	f.Add(blocksOf(files[0]), false)
	f.Fuzz(func(t *testing.T, in []byte, end bool) {
		b := fileOf(in, end)
		anyFile(t, b)
		file, err := Read(bytes.NewReader(b), "some.file")
		if err != nil || file.Driver == nil {
			return
		}
		tr := NewTracker()
		for i := range file.Driver.Calls {
			tr.Call(&file.Driver.Calls[i], func(*Holding) {}, func(*Holding) {})
		}
	})
}

// fullDisk takes so many bytes and no more.
type fullDisk int

func (f *fullDisk) Write(b []byte) (int, error) {
	if len(b) > int(*f) {
		return 0, errors.New("no space left on device")
	}
	*f -= fullDisk(len(b))
	return len(b), nil
}

// TestDriverFullDisk: a program goes on for days after its disk was full, and what cannot be written is not kept.
func TestDriverFullDisk(t *testing.T) {
	room := fullDisk(10000)
	w, err := NewDriverWriter(&room, 0, []string{"program"})
	if err != nil {
		t.Fatal(err)
	}
	p := w.Process(Process{PID: 10, Program: "/bin/program"})
	failed := 0
	for i := range uint64(200000) {
		w.Call(&Call{Kind: MemAlloc, Addr: (i + 1) << 12, Size: 4096, TimeNS: i, Process: p})
		w.Call(&Call{Kind: MemFree, Addr: (i + 1) << 12, TimeNS: i, Process: p})
		if i%100 == 0 && w.Flush() != nil {
			failed++
		}
	}
	kept := cap(w.d.Calls)
	for _, dt := range w.order {
		kept += cap(dt.pending)
	}
	if failed < 1000 || kept > 5000 {
		t.Errorf("%d flushes failed, %d calls and events are kept", failed, kept)
	}
	if w.Close(DriverEnd{}) == nil {
		t.Error("it was closed as if all had been written")
	}
}
