package native

import (
	"fmt"
	"slices"

	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/input"
	"github.com/cistern-gpu/cistern/recording/internal/tables"
)

// readDriver is a driver trace as far as it was read.
type readDriver struct {
	d     recording.Driver
	table int
}

const (
	callSize    = 112 // bytes of a Call in memory
	processSize = 64

	untracedSize = 80 // and what a list has to spare
	gpuSize      = 64
)

// driverBlock takes in one of the blocks that only driver traces have.
func (r *reader) driverBlock(typ byte, c *tables.Cursor) error {
	if typ == blockDriver {
		return r.driverHead(c)
	}
	if r.driver == nil {
		return fmt.Errorf("before the block that begins a driver trace")
	}
	d := &r.driver.d
	switch typ {
	case blockProcesses:
		if n := c.U(); n != uint64(len(d.Processes)) && !c.Bad {
			return fmt.Errorf("processes from number %d; expected number %d", n, len(d.Processes))
		}
		for range c.Count(4) {
			var err error
			if d.Processes, err = input.Grow(r.b, d.Processes, processSize); err != nil {
				return err
			}
			p := recording.Process{PID: c.Ref(), Parent: c.Ref(), StartNS: c.U(), Program: c.Text()}
			if err := r.b.Take(int64(len(p.Program))); err != nil {
				return err
			}
			d.Processes = append(d.Processes, p)
		}
	case blockEnds:
		for range c.Count(2) {
			process, ns := c.Ref(), c.U()
			if c.Bad {
				return errPayload
			}
			if int(process) >= len(d.Processes) {
				return fmt.Errorf("the end of process number %d; there are %d", process, len(d.Processes))
			}
			d.Processes[process].EndNS = ns
		}
	case blockGPUs:
		return r.gpus(d, c)
	case blockUntraced:
		for range c.Count(3) {
			u := recording.Untraced{PID: c.Ref(), Program: c.Text(), Why: c.Text()}
			if err := r.b.Take(int64(len(u.Program)+len(u.Why)) + untracedSize); err != nil {
				return err
			}
			d.Untraced = append(d.Untraced, u)
		}
	case blockCalls:
		return r.calls(d, c)
	case blockDriverEnd:
		d.End = recording.DriverEnd{Dropped: c.U(), Lost: c.U(), Status: int(c.I()), Finished: c.U()}
		for range c.Count(1) {
			s := c.Text()
			if err := r.b.Take(int64(len(s)) + 32); err != nil {
				return err
			}
			d.End.Unknown = append(d.End.Unknown, s)
		}
		if len(c.B) > 0 { // older files end here
			d.End.Spent = c.U()
		}
		d.Ended = true
	}
	return nil
}

func (r *reader) driverHead(c *tables.Cursor) error {
	if r.driver != nil {
		return fmt.Errorf("a second driver trace in a file")
	}
	if v := c.U(); v != driverVersion && !c.Bad {
		return fmt.Errorf("version %d of driver traces; expected %d", v, driverVersion)
	}
	table := c.U()
	if table != uint64(len(r.tables)) {
		return fmt.Errorf("table %d; expected %d", table, len(r.tables))
	}
	r.tables = append(r.tables, &readTable{})
	r.driver = &readDriver{table: int(table), d: recording.Driver{WallNS: c.I()}}
	for range c.Count(1) {
		r.driver.d.Program = append(r.driver.d.Program, c.Text())
	}
	return r.b.Take(int64(len(r.raw)) * 20)
}

func (r *reader) calls(d *recording.Driver, c *tables.Cursor) error {
	if n := c.U(); n != uint64(len(d.Calls)) && !c.Bad {
		return fmt.Errorf("calls from number %d; expected number %d", n, len(d.Calls))
	}
	stacks := len(r.tables[r.driver.table].stacks)
	var last recording.Call
	for range c.Count(14) {
		q := recording.Call{Kind: recording.CallKind(c.U8()), TimeNS: last.TimeNS + uint64(c.I()), TookNS: c.U(), Addr: last.Addr + uint64(c.I()), Size: c.U(),
			Stream: c.U(), Handle: last.Handle + uint64(c.I()), Pool: last.Pool + uint64(c.I()), Extra: c.U(), Process: c.Ref(),
			Thread: c.Ref(), Stack: c.Ref()}
		result, device := c.I(), c.I()
		q.Result, q.Device = int32(result), int16(device)
		if c.Bad {
			return errPayload
		}
		if q.Kind == recording.CallNone || q.Kind >= recording.NumCallKinds || int(q.Process) >= len(d.Processes) || int(q.Stack) >= stacks ||
			int64(q.Result) != result || int64(q.Device) != device || q.Device < -1 || q.Device >= recording.MaxDevices {
			return fmt.Errorf("call %d is of an unknown kind or refers to what is not there", len(d.Calls))
		}
		var err error
		if d.Calls, err = input.Grow(r.b, d.Calls, callSize); err != nil {
			return err
		}
		d.Calls = append(d.Calls, q)
		last = q
	}
	return nil
}

// finish gives a driver trace its tables.
func (r *readDriver) finish(tables []*readTable) *recording.Driver {
	if r == nil {
		return nil
	}
	tab := tables[r.table]
	r.d.Stacks, r.d.Frames = tab.stacks, tab.frames
	if len(r.d.Stacks) == 0 {
		r.d.Stacks = []recording.Stack{nil}
	}
	return &r.d
}

// setOwners says whose the traces of a driver trace are, where there are several of a device. Events tell their threads, and
// calls which process a thread was of.
func setOwners(traces []*recording.Trace, d *recording.Driver) {
	of := map[int]int{} // traces of a device
	for _, t := range traces {
		of[t.Device]++
	}
	var threads map[uint32]uint32
	for _, t := range traces {
		if of[t.Device] < 2 || t.Source != recording.FormatDriver {
			continue
		}
		if threads == nil {
			threads = map[uint32]uint32{}
			for i := range d.Calls {
				threads[d.Calls[i].Thread] = d.Calls[i].Process
			}
		}
		for i := range t.Events {
			if n, ok := threads[t.Events[i].Thread]; ok && int(n) < len(d.Processes) {
				t.Owner = &recording.Owner{Number: n, PID: d.Processes[n].PID, Program: d.Processes[n].Program}
				break
			}
		}
	}
}

// gpus takes in devices of a driver trace.
func (r *reader) gpus(d *recording.Driver, c *tables.Cursor) error {
	for range c.Count(19) {
		number := c.U()
		g := recording.GPU{Number: int16(number & 0x7fff)}
		for i := range g.UUID {
			g.UUID[i] = c.U8()
		}
		g.Name, g.Total = c.Text(), c.U()
		if c.Bad {
			return errPayload
		}
		if number >= recording.MaxDevices || slices.ContainsFunc(d.GPUs, func(o recording.GPU) bool { return o.Number == g.Number }) {
			return fmt.Errorf("GPU number %d; expected another one below %d", number, recording.MaxDevices)
		}
		if err := r.b.Take(int64(len(g.Name)) + gpuSize); err != nil {
			return err
		}
		d.GPUs = append(d.GPUs, g)
	}
	return nil
}
