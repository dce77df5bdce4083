// Package driver records the calls that a program makes of the driver: a Writer writes them as the program runs, and
// beside them the allocations of device memory as the events of one trace for each process and device. A Tracker follows
// which memory the calls leave allocated. Package native reads the files.
package driver

import (
	"encoding/binary"
	"io"
	"path"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/tables"
	"github.com/cistern-gpu/cistern/recording/native"
)

// Writer writes a driver trace as a program runs: what was given to it before Flush can be read from then on,
// whatever becomes of the file after. It belongs to one goroutine.
type Writer struct {
	w        *native.Writer
	d        recording.Driver // what goes into every file; Calls are those since the last flush
	ended    []uint32         // processes, since the last flush
	stackIDs map[string]uint32
	frameIDs map[recording.Frame]uint32
	tracker  *Tracker
	devices  map[deviceKey]*deviceTrace
	order    []*deviceTrace
	left     int // pairs of process and device for which there is no trace
	notes    []string
	names    tables.NativeNames // that Frames has made
}

type deviceKey struct {
	process uint32
	device  int16
}

type deviceTrace struct {
	t       *recording.Trace
	n       int // its number in the file; -1 before it has any
	streams tables.Interned
	pending []event.Event
}

// NewWriter begins a file for a program.
func NewWriter(w io.Writer, wallNS int64, program []string) (*Writer, error) {
	cw, err := native.NewWriter(w)
	if err != nil {
		return nil, err
	}
	d := &Writer{w: cw, d: recording.Driver{WallNS: wallNS, Program: program, Stacks: []recording.Stack{nil}}, stackIDs: map[string]uint32{"": 0},
		frameIDs: map[recording.Frame]uint32{}, tracker: NewTracker(), devices: map[deviceKey]*deviceTrace{}}
	if err := cw.BeginDriver(&d.d); err != nil {
		return nil, err
	}
	return d, cw.Flush()
}

// Process adds a process and returns its number.
func (d *Writer) Process(p recording.Process) uint32 {
	d.d.Processes = append(d.d.Processes, p)
	return uint32(len(d.d.Processes) - 1)
}

// GPU adds a device, whose number is new.
func (d *Writer) GPU(g recording.GPU) { d.d.GPUs = append(d.d.GPUs, g) }

// ProcessEnded says when a process was seen to have ended.
func (d *Writer) ProcessEnded(process uint32, ns uint64) {
	d.d.Processes[process].EndNS = ns
	d.ended = append(d.ended, process)
}

// Untraced adds a process that was not seen.
func (d *Writer) Untraced(u recording.Untraced) {
	if len(d.d.Untraced) < recording.MostUntraced {
		d.d.Untraced = append(d.d.Untraced, u)
	}
}

// Stack is the number of a stack, innermost frame first.
func (d *Writer) Stack(frames []recording.Frame) uint32 {
	ids := make(recording.Stack, len(frames))
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

// Frames are those of a stack, as readers of the file get them.
func (d *Writer) Frames(stack uint32) []recording.Frame {
	frames := d.d.StackFrames(stack)
	for i := range frames {
		_ = d.names.Demangle(&frames[i], nil) // which has no bound
	}
	return frames
}

// Call adds the next call.
func (d *Writer) Call(c *recording.Call) {
	d.d.Calls = append(d.d.Calls, *c)
	us := int64((c.TimeNS + c.TookNS) / 1000)
	if c.Result == resultOutOfMemory && gets(c.Kind) && c.Device >= 0 {
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

// gets reports whether function k gets memory on a device.
func gets(k recording.CallKind) bool {
	switch k {
	case recording.MemAlloc, recording.MemAllocPitch, recording.MemAllocAsync, recording.MemAllocFromPoolAsync, recording.MemCreate, recording.ArrayCreate, recording.Array3DCreate, recording.MipmappedArrayCreate:
		return true
	}
	return false
}

// event adds an event to the trace of a process's device.
func (d *Writer) event(process uint32, device int16, stream uint64, e event.Event) {
	k := deviceKey{process, device}
	dt := d.devices[k]
	if dt == nil {
		dt = &deviceTrace{n: -1}
		d.devices[k] = dt
		if len(d.order) < recording.MaxDevices && device < recording.MaxDevices {
			p := &d.d.Processes[process]
			dt.t = &recording.Trace{Device: int(device), Source: recording.FormatDriver, Pools: []recording.PoolID{{}}, FromStart: true, Settings: recording.Settings{MaxSplitSize: -1}}
			dt.t.Note("process %d, %s: allocations of the driver, as requests; physical memory and arrays stand at addresses from 2^60, "+
				"as they have none of their own", p.PID, path.Base(p.Program))
			d.order = append(d.order, dt)
		} else {
			d.left++
		}
	}
	if dt.t == nil {
		return
	}
	e.Stream = dt.streams.ID(stream)
	dt.pending = append(dt.pending, e)
}

// Note adds to the notes of every trace in the file, when it is closed.
func (d *Writer) Note(text string) { d.notes = append(d.notes, text) }

// Flush writes everything so far. What comes after a failure is not kept.
func (d *Writer) Flush() error {
	err := d.flush()
	if err != nil {
		d.d.Calls = d.d.Calls[:0]
		for _, dt := range d.order {
			dt.pending = dt.pending[:0]
		}
	}
	return err
}

func (d *Writer) flush() error {
	w := d.w
	if err := w.SyncDriver(&d.d, d.ended); err != nil {
		return err
	}
	d.ended, d.d.Calls = d.ended[:0], d.d.Calls[:0]
	for _, dt := range d.order {
		t := dt.t
		t.Streams, t.Stacks, t.Frames = dt.streams.Vals, d.d.Stacks, d.d.Frames
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
func (d *Writer) Close(end recording.DriverEnd) error {
	if err := d.Flush(); err != nil {
		return err
	}
	for _, dt := range d.order {
		for _, n := range d.notes {
			dt.t.Note("%s", n)
		}
		if d.left > 0 {
			dt.t.Note("%d further pairs of process and device have calls but no events here", d.left)
		}
		if end.Dropped > 0 || end.Lost > 0 {
			dt.t.Note("%d calls were dropped and %d not finished: what they got or freed is not known", end.Dropped, end.Lost)
		}
		if err := d.w.End(dt.n, dt.t); err != nil {
			return err
		}
	}
	if err := d.w.EndDriver(&end); err != nil {
		return err
	}
	return d.w.Close()
}
