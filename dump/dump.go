// Package dump writes down what an allocator holds and what led to it, in Cistern's format, for `cistern report`, `replay`
// and the others to read: on request (Write), and when a request has failed (Reporter).
//
// The process that runs out of memory may be about to end, so what is done in it is little and bounded: it copies what
// the engine knows (dump.go), asks its surroundings what else bounds memory and which other processes have some (limits.go, failure.go),
// and writes one file, whole or not at all (file.go). What follows from that is computed later, or in
// another process (child.go).
//
// A Reporter may be used by several threads at once. Its one lock is held while a file is made, by one of them, and no thread
// waits for it longer than a few seconds.
package dump

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/environ"
	"github.com/cistern-gpu/cistern/internal/nopoll"
	"github.com/cistern-gpu/cistern/internal/text"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/identity"
	"github.com/cistern-gpu/cistern/recording/initial"
	"github.com/cistern-gpu/cistern/recording/native"
)

// Names say what the numbers mean that an allocator was given. Functions may be nil.
type Names struct {
	Tag     func(tag uint32) string
	Library func(library uint8) string
	// DefaultLibrary is the library of callers that name none, 0 for none.
	DefaultLibrary uint8
	// Frames names frames of stacks: for each number what it stands for, innermost first, as one call may stand for
	// several that were inlined. Nil: numbers are what runtime.Callers gives.
	Frames func(numbers []uint64) [][]recording.Frame
	// Getenv is the environment's, for the process's place in its job. Nil: package os's.
	Getenv func(string) string
}

// Source is what a file is made from: a *cistern.Allocator.
type Source interface {
	Options() config.Options
	Driver() cuda.Driver
	DeviceCount() int
	// Record is the state of a device in use with its newest events, at most so many; false where it is not in use.
	Record(dev cuda.Device, most int) (memory.Record, bool)
	StackFrames(stack uint32) []uint64
}

// Write writes the state and the history of every device in use to a file, whole or not at all.
func Write(path string, a Source, n Names) error {
	devices := Devices(a, n)
	if len(devices) == 0 {
		return errors.New("no device is in use: there is nothing to write")
	}
	return WriteFile(path, func(w io.Writer) error {
		return native.Write(w, &recording.File{Path: path, Traces: devices})
	})
}

// Devices is the state of every device in use with what led to it, where its history is on.
func Devices(a Source, n Names) []*recording.Trace {
	d := dumping{a: a, names: n}
	for i := range a.DeviceCount() {
		d.add(cuda.Device(i), math.MaxInt)
	}
	d.name()
	for _, t := range d.traces {
		findStart(t)
	}
	return d.traces
}

// dumping makes traces of devices, in two steps: add copies what the engine has, with its numbers of stacks; name finds
// the names of all that the copies mention.
type dumping struct {
	a      Source
	names  Names
	traces []*recording.Trace
	older  uint64                      // events that were left out
	stacks map[uint32]uint32           // the number in the traces' table by the engine's
	failed []*cistern.OutOfMemoryError // whose stacks and labels are wanted as well
}

// add copies a device, with its newest events, at most so many. It reports whether the device is in use.
func (d *dumping) add(dev cuda.Device, most int) bool {
	r, ok := d.a.Record(dev, most)
	if !ok {
		return false
	}
	t := &recording.Trace{Device: int(dev), Format: "cistern", Final: []recording.Segment{}}
	t.Events = r.Events
	if r.Lost > 0 && len(r.Events) == most {
		d.older = r.Lost
	}
	for _, id := range r.Pools {
		t.Pools = append(t.Pools, recording.PoolID(id))
	}
	for _, st := range r.Streams {
		t.Streams = append(t.Streams, uint64(st.Handle))
	}
	if len(t.Streams) == 0 {
		t.Streams = []uint64{0} // of spare chunks that no stream has used
	}
	for _, s := range r.Segments {
		stream := uint32(max(s.Stream, 0))
		g := recording.Segment{Addr: s.Addr, Size: s.Size, Stream: stream, Pool: s.Number, Large: s.Large, Expandable: s.Chunks != nil}
		for _, b := range s.Blocks {
			x := recording.Block{Addr: b.Addr, Size: b.Size, Requested: b.Requested, Stream: stream, Pool: s.Number, Stack: b.Stack,
				Tag: uint16(b.Tag), Library: b.Library, State: recording.BlockState(b.State)}
			if x.Library == 0 && x.State != recording.Inactive {
				x.Library = d.names.DefaultLibrary
			}
			g.Blocks = append(g.Blocks, x)
		}
		t.Final = append(t.Final, g)
	}
	slices.SortFunc(t.Final, func(a, b recording.Segment) int { return cmp.Compare(a.Addr, b.Addr) })
	for i := range t.Events {
		if e := &t.Events[i]; e.Library == 0 && asked(e.Kind) {
			e.Library = d.names.DefaultLibrary
		}
	}
	t.Identity = d.names.identity()
	d.traces = append(d.traces, t)
	return true
}

// identity is this process's place in its job, nil where it is of none.
func (n *Names) identity() *recording.Identity {
	getenv := n.Getenv
	if getenv == nil {
		getenv = environ.Get
	}
	host, _ := os.Hostname()
	id := identity.Of(getenv, host, os.Getpid())
	if !identity.Known(&id) {
		return nil
	}
	return &id
}

// asked reports whether an event is of a request.
func asked(k event.Kind) bool {
	return k == event.Alloc || k == event.FreeRequested || k == event.FreeCompleted || k == event.OOM
}

// name completes the traces: the tables of stacks, which they share, and of tags and libraries.
func (d *dumping) name() {
	d.stacks = map[uint32]uint32{0: 0}
	var engine []uint32 // the engine's numbers, by the traces'
	for _, t := range d.traces {
		each(t, func(stack *uint32, _ uint16, _ uint8) {
			n, known := d.stacks[*stack]
			if !known {
				engine = append(engine, *stack)
				n = uint32(len(engine))
				d.stacks[*stack] = n
			}
			*stack = n
		})
	}
	for _, f := range d.failed {
		if _, known := d.stacks[f.Stack]; !known {
			engine = append(engine, f.Stack)
			d.stacks[f.Stack] = uint32(len(engine))
		}
	}
	stacks, frames := d.resolve(engine)
	for _, t := range d.traces {
		t.Stacks, t.Frames = stacks, frames
		d.labels(t)
		t.Threads = d.threads(t)
	}
}

// findStart completes a trace by what was there before its first event.
func findStart(t *recording.Trace) {
	// What cannot be here is a file that asks for too much memory.
	if err := initial.Find(t, initial.Options{}); err != nil {
		t.Notes = append(t.Notes, err.Error())
	}
	if len(t.Events) == 0 {
		t.Notes = nil // of what is missing, all is
	}
}

// each calls f for everything in a trace that has a label.
func each(t *recording.Trace, f func(stack *uint32, tag uint16, library uint8)) {
	for i := range t.Events {
		e := &t.Events[i]
		f(&e.Stack, e.Tag, e.Library)
	}
	for i := range t.Final {
		for k := range t.Final[i].Blocks {
			b := &t.Final[i].Blocks[k]
			f(&b.Stack, b.Tag, b.Library)
		}
	}
}

// resolve makes the tables of stacks and frames, the first stack of them the empty one.
func (d *dumping) resolve(engine []uint32) ([]recording.Stack, []recording.Frame) {
	of := map[uint64]int{} // places in numbers
	var numbers []uint64
	for _, s := range engine {
		for _, f := range d.a.StackFrames(s) {
			if _, known := of[f]; !known {
				of[f] = len(numbers)
				numbers = append(numbers, f)
			}
		}
	}
	resolve := d.names.Frames
	if resolve == nil {
		resolve = goFrames
	}
	var named [][]recording.Frame
	if len(numbers) > 0 {
		named = resolve(numbers)
	}
	var frames []recording.Frame
	seen := map[recording.Frame]uint32{}
	stacks := []recording.Stack{nil}
	for _, s := range engine {
		var stack recording.Stack
		for _, f := range d.a.StackFrames(s) {
			for _, frame := range named[of[f]] {
				n, known := seen[frame]
				if !known {
					n = uint32(len(frames))
					seen[frame] = n
					frames = append(frames, frame)
				}
				stack = append(stack, n)
			}
		}
		stacks = append(stacks, stack)
	}
	return stacks, frames
}

// goFrames names frames of a Go program.
func goFrames(numbers []uint64) [][]recording.Frame {
	out := make([][]recording.Frame, len(numbers))
	for i, n := range numbers {
		for frames := runtime.CallersFrames([]uintptr{uintptr(n)}); ; {
			f, more := frames.Next()
			if f.Function == "" {
				f.Function = fmt.Sprintf("%#x", n)
			}
			out[i] = append(out[i], recording.Frame{File: f.File, Func: f.Function, Line: f.Line})
			if !more {
				break
			}
		}
	}
	return out
}

// labels makes the tables of tags and libraries, as far as they are used.
func (d *dumping) labels(t *recording.Trace) {
	tags, libraries := map[int]bool{}, map[int]bool{}
	use := func(_ *uint32, tag uint16, library uint8) {
		if tag != 0 && !tags[int(tag)] {
			tags[int(tag)] = true
		}
		if library != 0 && !libraries[int(library)] {
			libraries[int(library)] = true
		}
	}
	each(t, use)
	for _, f := range d.failed {
		use(nil, uint16(f.Tag), cmp.Or(f.Library, d.names.DefaultLibrary))
	}
	t.Tags = table(tags, "tag", func(n int) string {
		if d.names.Tag == nil {
			return ""
		}
		return d.names.Tag(uint32(n))
	})
	t.Libraries = table(libraries, "library", func(n int) string {
		if d.names.Library == nil {
			return ""
		}
		return d.names.Library(uint8(n))
	})
}

// table is a list of names by number, nil where no number is used.
func table(used map[int]bool, word string, name func(int) string) []string {
	if len(used) == 0 {
		return nil
	}
	most := 0
	for n := range used {
		most = max(most, n)
	}
	out := make([]string, most+1)
	for n := range used {
		out[n] = cmp.Or(text.Clean(name(n)), fmt.Sprintf("%s %d", word, n))
	}
	return out
}

// threads are the names of this process's threads that a trace mentions and that are still there.
func (d *dumping) threads(t *recording.Trace) map[uint32]string {
	seen := map[uint32]bool{}
	for i := range t.Events {
		if n := t.Events[i].Thread; n != 0 && !seen[n] {
			seen[n] = true
		}
	}
	for _, f := range d.failed {
		seen[f.Thread] = true
	}
	var out map[uint32]string
	for n := range seen {
		name, err := nopoll.ReadFile(filepath.Join("/proc/self/task", fmt.Sprint(n), "comm"))
		if err != nil {
			continue
		}
		if out == nil {
			out = map[uint32]string{}
		}
		out[n] = text.Clean(strings.TrimSpace(string(name)))
	}
	return out
}
