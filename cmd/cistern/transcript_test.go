package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/native"
	"github.com/cistern-gpu/cistern/recording/pytorch"
)

const mib = 1 << 20

// base is where the tiny trace's segments begin.
const base = 0x7f0000000000

// tinyTrace is a run of a few events with one stack, one stream and one caught out-of-memory: 40 MiB in two segments,
// 28 MiB live at the peak.
func tinyTrace(device int) *recording.Trace {
	t := &recording.Trace{Format: recording.FormatPyTorch, Device: device, Streams: []uint64{0}, Pools: []recording.PoolID{{}},
		Frames:    []recording.Frame{{File: "train.py", Line: 12, Func: "forward"}, {File: "train.py", Line: 40, Func: "main"}},
		Stacks:    []recording.Stack{nil, {0, 1}},
		FromStart: true}
	us := int64(1_000_000)
	add := func(k event.Kind, addr, size uint64, stack uint32) {
		us += 1000
		t.Events = append(t.Events, event.Event{Kind: k, Addr: addr, Size: size, TimeUS: us, Stack: stack})
	}
	add(event.SegmentAlloc, base, 20*mib, 0)
	add(event.Alloc, base, 8*mib, 1)
	add(event.Alloc, base+8*mib, 8*mib, 1)
	add(event.SegmentAlloc, base+64*mib, 20*mib, 0)
	add(event.Alloc, base+64*mib, 8*mib, 1)
	add(event.Alloc, base+16*mib, 4*mib, 0)
	add(event.FreeRequested, base+8*mib, 8*mib, 1)
	add(event.FreeCompleted, base+8*mib, 8*mib, 1)
	add(event.OOM, 2*mib, 16*mib, 0)
	add(event.FreeRequested, base, 8*mib, 1)
	add(event.FreeCompleted, base, 8*mib, 1)
	t.Final = []recording.Segment{
		{Addr: base, Size: 20 * mib, Large: true, Blocks: []recording.Block{
			{Addr: base, Size: 16 * mib},
			{Addr: base + 16*mib, Size: 4 * mib, Requested: 4 * mib, State: recording.Active}}},
		{Addr: base + 64*mib, Size: 20 * mib, Large: true, Blocks: []recording.Block{
			{Addr: base + 64*mib, Size: 8 * mib, Requested: 8 * mib, Stack: 1, State: recording.Active},
			{Addr: base + 72*mib, Size: 12 * mib}}},
	}
	return t
}

// laterTrace is tinyTrace after its program was edited, which moved every line: a block is 2 MiB larger and another one
// is of a line that is new.
func laterTrace() *recording.Trace {
	t := tinyTrace(0)
	t.Frames = []recording.Frame{{File: "train.py", Line: 15, Func: "forward"}, {File: "train.py", Line: 43, Func: "main"},
		{File: "train.py", Line: 21, Func: "forward"}}
	t.Stacks = append(t.Stacks, recording.Stack{2, 1})
	t.Events[4].Size = 10 * mib
	t.Events[5].Stack = 2
	t.Final[0].Blocks[1].Stack = 2
	t.Final[1].Blocks = []recording.Block{{Addr: base + 64*mib, Size: 10 * mib, Requested: 10 * mib, Stack: 1, State: recording.Active},
		{Addr: base + 74*mib, Size: 10 * mib}}
	return t
}

// tagged is a trace whose blocks have labels.
func tagged(t *recording.Trace) *recording.Trace {
	t.Tags, t.Libraries, t.Threads = []string{"", "weights", "activations"}, []string{"", "torch"}, map[uint32]string{4001: "MainThread"}
	for i := range t.Events {
		e := &t.Events[i]
		e.Thread = 4001
		switch {
		case e.Kind != event.Alloc && e.Kind != event.FreeRequested && e.Kind != event.FreeCompleted:
		case e.Size >= 8*mib:
			e.Tag, e.Library = uint16(1+e.Addr>>23&1), 1
		}
	}
	t.Final[1].Blocks[0].Tag, t.Final[1].Blocks[0].Library = 1, 1
	return t
}

// inFolder fills a fresh folder with the files that tests name, and goes there.
func inFolder(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	write := func(name string, devices ...*recording.Trace) []byte {
		var b bytes.Buffer
		if err := pytorch.Write(&b, devices...); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	whole := write("tiny.pickle", tinyTrace(0))
	write("two.pickle", tinyTrace(0), tinyTrace(1))
	write("later.pickle", laterTrace())
	known := tinyTrace(0)
	known.Environment = recording.Environment{PyTorch: "2.9.1+cu128", CUDA: "12.8", Driver: "580.65.06", Device: "NVIDIA T4", DeviceTotal: 16 << 30}
	write("known.pickle", known)
	write("tagged.pickle", tagged(tinyTrace(0)))
	write("tagged-later.pickle", tagged(laterTrace()))
	oom := tagged(tinyTrace(0))
	oom.Failures = []*recording.Failure{{Event: 8, Requested: 16 * mib, Need: 16 * mib, DeviceTotal: 42 * mib, DeviceFree: 2 * mib, Reserved: 40 * mib,
		Allocated: 20 * mib, Cached: 20 * mib, Largest: 12 * mib}}
	var own bytes.Buffer
	if err := native.Write(&own, &recording.File{Traces: []*recording.Trace{oom}}); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "oom.cistern"), own.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	write("later-two.pickle", laterTrace(), tinyTrace(2))
	for name, data := range map[string]string{
		"cut.pickle": string(whole[:len(whole)/2]),
		"empty":      "",
		"words.txt":  "the quick brown fox\n",
		"rmm.csv": "Thread,Time,Action,Pointer,Size,Stream\n" +
			"1,10:00:00.000001,allocate,0x7f8a00000000,1048576,0x0\n" +
			"1,10:00:00.000005,allocate,0x7f8a00200000,2048,0x1\n" +
			"1,10:00:01.000009,free,0x7f8a00000000,1048576,0x0\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(data), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "folder"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Chdir(dir)
}

// ns hides the one figure that differs from run to run.
var ns = regexp.MustCompile(`("ns_per_event": ?)[0-9.e+-]+`)

// engine hides the figures of Cistern itself, which improve: transcripts are about the command.
var engine = regexp.MustCompile(`(?m)^cistern  .*$`)

// took hides how long the replays of a report took, and how many there were: the floors are searched in as many steps as
// the engine's own figures make it.
var took = regexp.MustCompile(`(?m)^  [0-9,]+ replays? in [0-9.]+ s\.$`)

// engineRemedy hides the engine's figures in a report.
var engineRemedy = regexp.MustCompile(`(?m)(cistern run -- PROGRAM\n)     peak .*\n(?:       .*\n)*`)

// cistern runs the command and returns what it wrote and its exit code.
func cistern(t *testing.T, stdin string, args ...string) (out, err string, code int) {
	t.Helper()
	var o, e bytes.Buffer
	code = run(context.Background(), args, strings.NewReader(stdin), &o, &e)
	return ns.ReplaceAllString(o.String(), "${1}0"), e.String(), code
}

// TestTranscripts runs the command lines of testdata/transcripts and compares all that they print, and their exit
// codes. `go test ./cmd/cistern -rewrite` takes what it sees.
func TestTranscripts(t *testing.T) {
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	datadriven.Walk(t, filepath.Join(here, "testdata/transcripts"), func(t *testing.T, path string) {
		inFolder(t)
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd != "run" {
				d.Fatalf(t, "unknown command %s", d.Cmd)
			}
			var b strings.Builder
			for line := range strings.Lines(d.Input) {
				args := strings.Fields(line)
				out, errs, code := cistern(t, "", args[1:]...)
				b.WriteString(out)
				for line := range strings.Lines(errs) {
					b.WriteString("stderr: " + line)
				}
				if code != 0 {
					b.WriteString("exit " + string(rune('0'+code)) + "\n")
				}
			}
			text := took.ReplaceAllString(engineRemedy.ReplaceAllString(b.String(), "${1}     peak ...\n"), "  ... replays in ... s.")
			return engine.ReplaceAllString(text, "cistern ...")
		})
	})
}
