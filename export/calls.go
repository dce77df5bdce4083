package export

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/cistern-gpu/cistern/recording"
)

// The calls of a driver trace: as slices on the threads that made them, and as a table.

var callColumns = []Column{
	{"call", Int, false, "number of the call, in the order in which they ended"},
	{"pid", Int, false, "number of the process"},
	{"thread", Int, false, "the kernel's number of the thread"},
	{"time_ns", Int, false, "nanoseconds since 1970, when it began"},
	{"took_ns", Int, false, "nanoseconds"},
	{"function", Text, false, "CUDA's name, without version"},
	{"may_wait", Truth, false, "whether the function may wait for the GPU"},
	{"result", Int, false, "CUresult; 0 is success"},
	{"device", Int, true, "number of the GPU; null where there was none"},
	{"address", Uint, true, "device or host address; null where there is none"},
	{"bytes", Uint, false, "size; 0 where the function has none"},
	{"stream", Uint, false, "handle of the stream"},
	{"handle", Uint, true, "of physical memory or an array; of a context for calls that end one"},
	{"memory_pool", Uint, true, "handle of the driver's memory pool"},
	{"stack_id", Int, true, "number of the stack in this file; null where none was recorded"},
	{"caller", Text, true, "innermost frame with a known line: function file:line; if none has, the most specific one"},
	{"stack", Text, true, "all frames, innermost first, joined by '; '"},
}

// stacksOf are the stacks of a driver trace, as those of a device's.
func stacksOf(d *recording.Driver) *recording.Trace {
	return &recording.Trace{Stacks: d.Stacks, Frames: d.Frames}
}

// wallNS is when a call began, in nanoseconds since 1970.
func wallNS(d *recording.Driver, c *recording.Call) int64 { return max(0, d.WallNS+int64(c.TimeNS)) }

// processOf is the process of a call.
func processOf(d *recording.Driver, i uint32) recording.Process {
	if int(i) < len(d.Processes) {
		return d.Processes[i]
	}
	return recording.Process{}
}

// whose says of which process the memory of trace i is, where the file has several of its device.
func whose(f *recording.File, i int) string {
	if o := f.Traces[i].Owner; o != nil {
		return " of " + ownerName(o)
	}
	return ""
}

func ownerName(o *recording.Owner) string {
	return fmt.Sprintf("%s %d", cmp.Or(programName(o.Program), "process"), o.PID)
}

// programName is the last part of a program's path; empty where the path is not known.
func programName(path string) string {
	if path == "" {
		return ""
	}
	return filepath.Base(path)
}

func fillCalls(r rows, f *recording.File, speak func(*words)) error {
	d := f.Driver
	if d == nil {
		return errors.New("the file has no driver calls; those that cistern trace writes have")
	}
	w := wordsOf(stacksOf(d))
	var functions [recording.NumCallKinds + 1]uint32
	for k := range functions {
		functions[k] = w.id(recording.CallKind(k).String())
	}
	speak(w)
	for i := range d.Calls {
		c := &d.Calls[i]
		r.int(int64(i))
		r.int(int64(processOf(d, c.Process).PID))
		r.int(int64(c.Thread))
		r.int(wallNS(d, c))
		r.int(int64(c.TookNS))
		r.text(functions[min(c.Kind, recording.NumCallKinds)])
		r.truth(c.Kind.MayWait())
		r.int(int64(c.Result))
		knownInt(r, int64(c.Device), c.Device >= 0)
		known(r, c.Addr, c.Addr != 0)
		r.uint(c.Size)
		r.uint(c.Stream)
		known(r, c.Handle, c.Handle != 0)
		known(r, c.Pool, c.Pool != 0)
		w.source(r, c.Stack)
		if err := r.end(); err != nil {
			return err
		}
	}
	return nil
}

// Field numbers of what only calls need.
const (
	typeBegin = 1
	typeEnd   = 2
)

// calls writes the calls of a driver trace: a process and its threads for each that made some.
func (p *perfetto) calls(f *recording.File, sequence uint64) {
	d, names := f.Driver, threadNames(f)
	out := perfettoDevice{perfetto: p, t: stacksOf(d), sequence: sequence}
	processes := map[uint32]uint64{}
	threads := map[[2]uint32]uint64{}
	for i := range d.Calls {
		c := &d.Calls[i]
		process := processOf(d, c.Process)
		thread, ok := threads[[2]uint32{c.Process, c.Thread}]
		if !ok {
			if processes[c.Process] == 0 {
				var command []string
				if process.PID == processOf(d, 0).PID {
					command = d.Program
				}
				processes[c.Process] = out.processTrack(uint64(process.PID), programName(process.Program), command)
			}
			thread = out.threadTrack(processes[c.Process], uint64(process.PID), c.Thread, names[c.Thread])
			threads[[2]uint32{c.Process, c.Thread}] = thread
		}
		out.call(i, c, thread, wallNS(d, c))
	}
}

// call writes one call as a slice.
func (d *perfettoDevice) call(i int, c *recording.Call, thread uint64, ns int64) {
	d.body = number(d.body[:0], eventType, typeBegin)
	d.body = number(d.body, eventTrack, thread)
	name := c.Kind.String()
	if c.Failed() {
		name += fmt.Sprintf(": error %d", c.Result)
	}
	d.body = text(d.body, eventName, name)
	d.annotateNumber("call", annotationUint, uint64(i))
	for _, a := range []struct {
		name string
		kind protowire.Number
		v    uint64
	}{
		{"bytes", annotationUint, c.Size}, {"address", annotationPointer, c.Addr}, {"stream", annotationPointer, c.Stream},
		{"handle", annotationPointer, c.Handle}, {"memory_pool", annotationPointer, c.Pool},
	} {
		if a.v != 0 {
			d.annotateNumber(a.name, a.kind, a.v)
		}
	}
	if c.Device >= 0 {
		d.annotateNumber("device", annotationUint, uint64(c.Device))
	}
	if c.Kind.MayWait() {
		d.annotateText("may wait for the GPU", "yes")
	}
	d.frames(c.Stack)
	d.event(uint64(ns))
	d.body = number(d.body[:0], eventType, typeEnd)
	d.body = number(d.body, eventTrack, thread)
	d.event(uint64(ns) + c.TookNS)
}
