package trace

import "fmt"

// readDriver is a driver trace as far as it was read.
type readDriver struct {
	d     Driver
	table int
}

const (
	callSize    = 112 // bytes of a Call in memory
	processSize = 64

	untracedSize = 80 // and what a list has to spare
)

// driverBlock takes in one of the blocks that only driver traces have.
func (r *cisternReader) driverBlock(typ byte, c *cursor) error {
	if typ == blockDriver {
		return r.driverHead(c)
	}
	if r.driver == nil {
		return fmt.Errorf("before the block that begins a driver trace")
	}
	d := &r.driver.d
	switch typ {
	case blockProcesses:
		if n := c.u(); n != uint64(len(d.Processes)) && !c.bad {
			return fmt.Errorf("processes from number %d; expected number %d", n, len(d.Processes))
		}
		for range c.count(4) {
			var err error
			if d.Processes, err = grow(r.b, d.Processes, processSize); err != nil {
				return err
			}
			p := Process{PID: c.ref(), Parent: c.ref(), StartNS: c.u(), Program: c.text()}
			if err := r.b.take(int64(len(p.Program))); err != nil {
				return err
			}
			d.Processes = append(d.Processes, p)
		}
	case blockEnds:
		for range c.count(2) {
			process, ns := c.ref(), c.u()
			if c.bad {
				return errPayload
			}
			if int(process) >= len(d.Processes) {
				return fmt.Errorf("the end of process number %d; there are %d", process, len(d.Processes))
			}
			d.Processes[process].EndNS = ns
		}
	case blockUntraced:
		for range c.count(3) {
			u := Untraced{PID: c.ref(), Program: c.text(), Why: c.text()}
			if err := r.b.take(int64(len(u.Program)+len(u.Why)) + untracedSize); err != nil {
				return err
			}
			d.Untraced = append(d.Untraced, u)
		}
	case blockCalls:
		return r.calls(d, c)
	case blockDriverEnd:
		d.End = DriverEnd{Dropped: c.u(), Lost: c.u(), Status: int(c.i()), Finished: c.u()}
		for range c.count(1) {
			s := c.text()
			if err := r.b.take(int64(len(s)) + 32); err != nil {
				return err
			}
			d.End.Unknown = append(d.End.Unknown, s)
		}
		if len(c.b) > 0 { // older files end here
			d.End.Spent = c.u()
		}
		d.Ended = true
	}
	return nil
}

func (r *cisternReader) driverHead(c *cursor) error {
	if r.driver != nil {
		return fmt.Errorf("a second driver trace in a file")
	}
	if v := c.u(); v != DriverVersion && !c.bad {
		return fmt.Errorf("version %d of driver traces; expected %d", v, DriverVersion)
	}
	table := c.u()
	if table != uint64(len(r.tables)) {
		return fmt.Errorf("table %d; expected %d", table, len(r.tables))
	}
	r.tables = append(r.tables, &readTable{})
	r.driver = &readDriver{table: int(table), d: Driver{WallNS: c.i()}}
	for range c.count(1) {
		r.driver.d.Program = append(r.driver.d.Program, c.text())
	}
	return r.b.take(int64(len(r.raw)) * 20)
}

func (r *cisternReader) calls(d *Driver, c *cursor) error {
	if n := c.u(); n != uint64(len(d.Calls)) && !c.bad {
		return fmt.Errorf("calls from number %d; expected number %d", n, len(d.Calls))
	}
	stacks := len(r.tables[r.driver.table].stacks)
	var last Call
	for range c.count(14) {
		q := Call{Kind: CallKind(c.u8()), TimeNS: last.TimeNS + uint64(c.i()), TookNS: c.u(), Addr: last.Addr + uint64(c.i()), Size: c.u(),
			Stream: c.u(), Handle: last.Handle + uint64(c.i()), Pool: last.Pool + uint64(c.i()), Extra: c.u(), Process: c.ref(),
			Thread: c.ref(), Stack: c.ref()}
		result, device := c.i(), c.i()
		q.Result, q.Device = int32(result), int16(device)
		if c.bad {
			return errPayload
		}
		if q.Kind == CallNone || q.Kind >= NumCallKinds || int(q.Process) >= len(d.Processes) || int(q.Stack) >= stacks ||
			int64(q.Result) != result || int64(q.Device) != device || q.Device < -1 || q.Device >= maxDevices {
			return fmt.Errorf("call %d is of an unknown kind or refers to what is not there", len(d.Calls))
		}
		var err error
		if d.Calls, err = grow(r.b, d.Calls, callSize); err != nil {
			return err
		}
		d.Calls = append(d.Calls, q)
		last = q
	}
	return nil
}

// finish gives a driver trace its tables.
func (r *readDriver) finish(tables []*readTable) *Driver {
	if r == nil {
		return nil
	}
	tab := tables[r.table]
	r.d.Stacks, r.d.Frames = tab.stacks, tab.frames
	if len(r.d.Stacks) == 0 {
		r.d.Stacks = []Stack{nil}
	}
	return &r.d
}
