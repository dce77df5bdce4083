package trace

import (
	"encoding/binary"
	"fmt"
	"io"
	"path"

	"github.com/cistern-gpu/cistern/event"
)

// DriverVersion is the version of the blocks that a driver trace has beside those of every Cistern file.
const DriverVersion = 1

// Blocks of driver traces, which readers of events pass over.
const (
	blockDriver = 128 + iota
	blockProcesses
	blockCalls
	blockDriverEnd
)

const (
	blockUntraced = 135
	blockEnds     = 136
)

// FormatDriver is the Source of the traces in a driver trace.
const FormatDriver = "driver-trace"

// DriverWriter writes a driver trace as a program runs: what was given to it before Flush can be read from then on,
// whatever becomes of the file after. It belongs to one goroutine.
type DriverWriter struct {
	w        *Writer
	d        Driver // what goes into every file; Calls are those since the last flush
	written  struct{ processes, calls, untraced int }
	ended    []uint32 // processes, since the last flush
	stackIDs map[string]uint32
	frameIDs map[Frame]uint32
	tracker  *Tracker
	devices  map[deviceKey]*deviceTrace
	order    []*deviceTrace
	left     int // pairs of process and device for which there is no trace
	notes    []string
	names    nativeNames // that Frames has made
}

type deviceKey struct {
	process uint32
	device  int16
}

type deviceTrace struct {
	t       *Trace
	n       int // its number in the file; -1 before it has any
	streams interned
	pending []event.Event
}

// NewDriverWriter begins a file for a program.
func NewDriverWriter(w io.Writer, wallNS int64, program []string) (*DriverWriter, error) {
	cw, err := NewWriter(w)
	if err != nil {
		return nil, err
	}
	d := &DriverWriter{w: cw, d: Driver{WallNS: wallNS, Program: program, Stacks: []Stack{nil}}, stackIDs: map[string]uint32{"": 0},
		frameIDs: map[Frame]uint32{}, tracker: NewTracker(), devices: map[deviceKey]*deviceTrace{}}
	cw.driver(&d.d)
	return d, cw.Flush()
}

// driver writes the block that says that this is a driver trace. Its table is the next one.
func (w *Writer) driver(d *Driver) {
	w.b = w.b[:0]
	w.u(DriverVersion)
	w.u(uint64(len(w.tables)))
	w.i(d.WallNS)
	w.u(uint64(len(d.Program)))
	for _, s := range d.Program {
		w.s(s[:min(len(s), blockFill/max(1, len(d.Program)))])
	}
	w.tables = append(w.tables, writtenTable{key: &d.Stacks[0], strings: map[string]uint32{}})
	w.block(blockDriver)
}

// Process adds a process and returns its number.
func (d *DriverWriter) Process(p Process) uint32 {
	d.d.Processes = append(d.d.Processes, p)
	return uint32(len(d.d.Processes) - 1)
}

// ProcessEnded says when a process was seen to have ended.
func (d *DriverWriter) ProcessEnded(process uint32, ns uint64) {
	d.d.Processes[process].EndNS = ns
	d.ended = append(d.ended, process)
}

// Untraced adds a process that was not seen.
func (d *DriverWriter) Untraced(u Untraced) {
	if len(d.d.Untraced) < MostUntraced {
		d.d.Untraced = append(d.d.Untraced, u)
	}
}

// Stack is the number of a stack, innermost frame first.
func (d *DriverWriter) Stack(frames []Frame) uint32 {
	ids := make(Stack, len(frames))
	key := make([]byte, 0, 4*len(frames))
	for i, f := range frames {
		id, ok := d.frameIDs[f]
		if !ok {
			id = uint32(len(d.d.Frames))
			d.d.Frames = append(d.d.Frames, f)
			d.frameIDs[f] = id
		}
		ids[i] = id
		key = binary.LittleEndian.AppendUint32(key, id)
	}
	id, ok := d.stackIDs[string(key)]
	if !ok {
		id = uint32(len(d.d.Stacks))
		d.d.Stacks = append(d.d.Stacks, ids)
		d.stackIDs[string(key)] = id
	}
	return id
}

// Frames are those of a stack, as who reads the file has them.
func (d *DriverWriter) Frames(stack uint32) []Frame {
	frames := d.d.StackFrames(stack)
	for i := range frames {
		_ = d.names.demangle(&frames[i], nil) // which has no bound
	}
	return frames
}

// Call adds the next call.
func (d *DriverWriter) Call(c *Call) {
	d.d.Calls = append(d.d.Calls, *c)
	us := int64((c.TimeNS + c.TookNS) / 1000)
	if c.Result == resultOutOfMemory && c.Kind.gets() && c.Device >= 0 {
		d.event(c.Process, c.Device, c.Stream, event.Event{Kind: event.OOM, Addr: c.Extra, Size: c.Size, TimeUS: us, Stack: c.Stack, Thread: c.Thread})
	}
	d.tracker.Call(c, func(h *Holding) {
		if h.Memory.OnDevice() && h.Device >= 0 && h.Size > 0 { // sparse arrays have nothing of their own
			d.event(h.Process, h.Device, h.Stream, event.Event{Kind: event.Alloc, Addr: h.At, Size: h.Size, TimeUS: us, Stack: h.Call.Stack, Thread: h.Thread})
		}
	}, func(h *Holding) {
		if h.Memory.OnDevice() && h.Device >= 0 && h.Size > 0 { // sparse arrays have nothing of their own
			for _, k := range []event.Kind{event.FreeRequested, event.FreeCompleted} {
				d.event(h.Process, h.Device, h.Stream, event.Event{Kind: k, Addr: h.At, Size: h.Size, TimeUS: us, Stack: c.Stack, Thread: c.Thread})
			}
		}
	})
}

const resultOutOfMemory = 2 // CUDA_ERROR_OUT_OF_MEMORY

// gets reports whether the function gets memory on a device.
func (k CallKind) gets() bool {
	switch k {
	case MemAlloc, MemAllocPitch, MemAllocAsync, MemAllocFromPoolAsync, MemCreate, ArrayCreate, Array3DCreate, MipmappedArrayCreate:
		return true
	}
	return false
}

// event adds an event to the trace of a process's device.
func (d *DriverWriter) event(process uint32, device int16, stream uint64, e event.Event) {
	k := deviceKey{process, device}
	dt := d.devices[k]
	if dt == nil {
		dt = &deviceTrace{n: -1}
		d.devices[k] = dt
		if len(d.order) < maxDevices && device < maxDevices {
			p := &d.d.Processes[process]
			dt.t = &Trace{Device: int(device), Source: FormatDriver, Pools: []PoolID{{}}, FromStart: true, Settings: Settings{MaxSplitSize: -1}}
			dt.t.note("process %d, %s: allocations of the driver, as requests; physical memory and arrays stand at addresses from 2^60, "+
				"as they have none of their own", p.PID, path.Base(p.Program))
			d.order = append(d.order, dt)
		} else {
			d.left++
		}
	}
	if dt.t == nil {
		return
	}
	e.Stream = dt.streams.id(stream)
	dt.pending = append(dt.pending, e)
}

// Note adds to what is said of every trace in the file, when it is closed.
func (d *DriverWriter) Note(text string) { d.notes = append(d.notes, text) }

// Flush writes everything so far. What comes after a failure is not kept.
func (d *DriverWriter) Flush() error {
	err := d.flush()
	if err != nil {
		d.d.Calls = d.d.Calls[:0]
		for _, dt := range d.order {
			dt.pending = dt.pending[:0]
		}
	}
	return err
}

func (d *DriverWriter) flush() error {
	w := d.w
	table := &w.tables[0]
	table.key = &d.d.Stacks[0]
	w.processes(d.d.Processes, d.written.processes)
	d.written.processes = len(d.d.Processes)
	w.ends(d.d.Processes, d.ended)
	d.ended = d.ended[:0]
	w.untraced(d.d.Untraced[d.written.untraced:])
	d.written.untraced = len(d.d.Untraced)
	// A table belongs to a trace in package trace; that of the calls is written like one.
	w.syncTable(0, d.d.Frames, d.d.Stacks)
	w.calls(d.d.Calls, d.written.calls)
	d.written.calls += len(d.d.Calls)
	d.d.Calls = d.d.Calls[:0]
	for _, dt := range d.order {
		t := dt.t
		t.Streams, t.Stacks, t.Frames = dt.streams.vals, d.d.Stacks, d.d.Frames
		if dt.n < 0 {
			n, err := w.Begin(t)
			if err != nil {
				return err
			}
			dt.n = n
		}
		if len(dt.pending) == 0 {
			continue
		}
		if err := w.Sync(dt.n, t); err != nil {
			return err
		}
		if err := w.Events(dt.n, dt.pending); err != nil {
			return err
		}
		dt.pending = dt.pending[:0]
	}
	return w.Flush()
}

// Close writes what is known at the end, and the index.
func (d *DriverWriter) Close(end DriverEnd) error {
	if err := d.Flush(); err != nil {
		return err
	}
	for _, dt := range d.order {
		for _, n := range d.notes {
			dt.t.note("%s", n)
		}
		if d.left > 0 {
			dt.t.note("%d further pairs of process and device have calls but no events here", d.left)
		}
		if end.Dropped > 0 || end.Lost > 0 {
			dt.t.note("%d calls were dropped and %d not finished: what they got or freed is not known", end.Dropped, end.Lost)
		}
		if err := d.w.End(dt.n, dt.t); err != nil {
			return err
		}
	}
	d.w.driverEnd(&end)
	return d.w.Close()
}

func (w *Writer) processes(p []Process, from int) {
	first := from
	w.list(blockProcesses, len(p)-from, func() { w.u(uint64(first)) }, func(i int, begins bool) {
		if begins {
			first = from + i
		}
		q := &p[from+i]
		w.u(uint64(q.PID))
		w.u(uint64(q.Parent))
		w.u(q.StartNS)
		w.s(q.Program[:min(len(q.Program), blockFill)])
	})
}

// ends writes which processes have ended.
func (w *Writer) ends(p []Process, ended []uint32) {
	w.list(blockEnds, len(ended), func() {}, func(i int, _ bool) {
		w.u(uint64(ended[i]))
		w.u(p[ended[i]].EndNS)
	})
}

func (w *Writer) untraced(list []Untraced) {
	w.list(blockUntraced, len(list), func() {}, func(i int, _ bool) {
		w.u(uint64(list[i].PID))
		w.s(list[i].Program[:min(len(list[i].Program), 4096)])
		w.s(list[i].Why[:min(len(list[i].Why), 4096)])
	})
}

// calls writes calls as rows; each number that tends to be near the one before it is a difference.
func (w *Writer) calls(c []Call, from int) {
	var last Call
	first := 0
	w.list(blockCalls, len(c), func() { w.u(uint64(from + first)) }, func(i int, begins bool) {
		if begins {
			last, first = Call{}, i
		}
		q := &c[i]
		w.u8(byte(q.Kind))
		w.i(int64(q.TimeNS - last.TimeNS))
		w.u(q.TookNS)
		w.i(int64(q.Addr - last.Addr))
		w.u(q.Size)
		w.u(q.Stream)
		w.i(int64(q.Handle - last.Handle))
		w.i(int64(q.Pool - last.Pool))
		w.u(q.Extra)
		w.u(uint64(q.Process))
		w.u(uint64(q.Thread))
		w.u(uint64(q.Stack))
		w.i(int64(q.Result))
		w.i(int64(q.Device))
		last = *q
	})
}

func (w *Writer) driverEnd(e *DriverEnd) {
	w.b = w.b[:0]
	w.u(e.Dropped)
	w.u(e.Lost)
	w.i(int64(e.Status))
	w.u(e.Finished)
	n := min(len(e.Unknown), 256)
	w.u(uint64(n))
	for _, s := range e.Unknown[:n] {
		w.s(s[:min(len(s), 1024)])
	}
	w.u(e.Spent)
	w.block(blockDriverEnd)
}

// writeDriver writes the whole of what was read, before its traces.
func (w *Writer) writeDriver(d *Driver) error {
	if len(d.Stacks) == 0 {
		return fmt.Errorf("a driver trace without a table of stacks; expected at least the empty one")
	}
	table := len(w.tables)
	w.driver(d)
	w.processes(d.Processes, 0)
	var ended []uint32
	for i := range d.Processes {
		if d.Processes[i].EndNS != 0 {
			ended = append(ended, uint32(i))
		}
	}
	w.ends(d.Processes, ended)
	w.untraced(d.Untraced)
	w.syncTable(table, d.Frames, d.Stacks)
	w.calls(d.Calls, 0)
	if d.Ended {
		w.driverEnd(&d.End)
	}
	return w.err
}
