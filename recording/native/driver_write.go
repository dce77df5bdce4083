package native

import (
	"fmt"

	"github.com/cistern-gpu/cistern/recording"
)

// driverVersion is the version of the blocks that a driver trace has beside those of every Cistern file.
const driverVersion = 1

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
	blockGPUs     = 139
)

// writtenDriver is how much of a driver trace is in the file.
type writtenDriver struct {
	table, processes, gpus, untraced, calls int
}

// BeginDriver writes that this is a driver trace, and of which program. It comes before every Begin.
func (w *Writer) BeginDriver(d *recording.Driver) error {
	if len(d.Stacks) == 0 {
		return fmt.Errorf("a driver trace without a table of stacks; expected at least the empty one")
	}
	w.driver.table = len(w.tables)
	w.b = w.b[:0]
	w.u(driverVersion)
	w.u(uint64(w.driver.table))
	w.i(d.WallNS)
	w.u(uint64(len(d.Program)))
	for _, s := range d.Program {
		w.s(s[:min(len(s), blockFill/max(1, len(d.Program)))])
	}
	w.tables = append(w.tables, writtenTable{key: &d.Stacks[0], strings: map[string]uint32{}})
	w.block(blockDriver)
	return w.err
}

// SyncDriver writes what a driver trace has gained: processes, those that ended, stacks, and all of d.Calls, which are
// the calls since the last time.
func (w *Writer) SyncDriver(d *recording.Driver, ended []uint32) error {
	w.tables[w.driver.table].key = &d.Stacks[0]
	w.processes(d.Processes)
	w.ends(d.Processes, ended)
	w.gpus(d.GPUs)
	w.untraced(d.Untraced)
	w.syncTable(w.driver.table, d.Frames, d.Stacks)
	w.calls(d.Calls)
	return w.err
}

// EndDriver writes what is known at the end of a driver trace.
func (w *Writer) EndDriver(e *recording.DriverEnd) error {
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
	return w.err
}

// writeDriver writes the whole of what was read, before its traces.
func (w *Writer) writeDriver(d *recording.Driver) error {
	if err := w.BeginDriver(d); err != nil {
		return err
	}
	var ended []uint32
	for i := range d.Processes {
		if d.Processes[i].EndNS != 0 {
			ended = append(ended, uint32(i))
		}
	}
	if err := w.SyncDriver(d, ended); err != nil || !d.Ended {
		return err
	}
	return w.EndDriver(&d.End)
}

// processes writes those that a driver trace has gained.
func (w *Writer) processes(p []recording.Process) {
	from, first := w.driver.processes, 0
	w.list(blockProcesses, len(p)-from, func() { w.u(uint64(from + first)) }, func(i int, begins bool) {
		if begins {
			first = i
		}
		q := &p[from+i]
		w.u(uint64(q.PID))
		w.u(uint64(q.Parent))
		w.u(q.StartNS)
		w.s(q.Program[:min(len(q.Program), blockFill)])
	})
	w.driver.processes = len(p)
}

// ends writes which processes have ended.
func (w *Writer) ends(p []recording.Process, ended []uint32) {
	w.list(blockEnds, len(ended), func() {}, func(i int, _ bool) {
		w.u(uint64(ended[i]))
		w.u(p[ended[i]].EndNS)
	})
}

// gpus writes those that a driver trace has gained.
func (w *Writer) gpus(all []recording.GPU) {
	list := all[w.driver.gpus:]
	w.list(blockGPUs, len(list), func() {}, func(i int, _ bool) {
		w.u(uint64(list[i].Number))
		for _, b := range list[i].UUID {
			w.u8(b)
		}
		w.s(list[i].Name[:min(len(list[i].Name), 256)])
		w.u(list[i].Total)
	})
	w.driver.gpus = len(all)
}

// untraced writes the processes that were not seen and that a driver trace has gained.
func (w *Writer) untraced(all []recording.Untraced) {
	list := all[w.driver.untraced:]
	w.list(blockUntraced, len(list), func() {}, func(i int, _ bool) {
		w.u(uint64(list[i].PID))
		w.s(list[i].Program[:min(len(list[i].Program), 4096)])
		w.s(list[i].Why[:min(len(list[i].Why), 4096)])
	})
	w.driver.untraced = len(all)
}

// calls writes calls as rows; each number that tends to be near the one before it is a difference.
func (w *Writer) calls(c []recording.Call) {
	var last recording.Call
	from, first := w.driver.calls, 0
	w.list(blockCalls, len(c), func() { w.u(uint64(from + first)) }, func(i int, begins bool) {
		if begins {
			last, first = recording.Call{}, i
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
	w.driver.calls += len(c)
}
