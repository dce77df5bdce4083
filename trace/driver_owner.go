package trace

import (
	"fmt"
	"path"
)

// Whose memory a trace is of, where a driver trace has several of one device: one for each process.

// Owner is a process of a driver trace.
type Owner struct {
	Number  uint32 `json:"-"` // index into Driver.Processes
	PID     uint32 `json:"pid"`
	Program string `json:"program"` // the file
}

// Where says of which device a trace is, and of which process, where the file has several of it.
func (t *Trace) Where() string { return WhereOf(t.Device, t.Owner) }

// WhereOf is Trace.Where of something that was made of a trace.
func WhereOf(device int, o *Owner) string {
	if o == nil {
		return fmt.Sprintf("device %d", device)
	}
	return fmt.Sprintf("device %d, process %d (%s)", device, o.PID, path.Base(o.Program))
}

// Made reports whether a call was made by the process whose memory this is, as far as processes are told apart.
func (t *Trace) Made(c *Call) bool { return t.Owner == nil || c.Process == t.Owner.Number }

// setOwners says whose the traces of a driver trace are, where there are several of a device. Events tell their threads, and
// calls which process a thread was of.
func setOwners(traces []*Trace, d *Driver) {
	of := map[int]int{} // traces of a device
	for _, t := range traces {
		of[t.Device]++
	}
	var threads map[uint32]uint32
	for _, t := range traces {
		if of[t.Device] < 2 || t.Source != FormatDriver {
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
				t.Owner = &Owner{n, d.Processes[n].PID, d.Processes[n].Program}
				break
			}
		}
	}
}
