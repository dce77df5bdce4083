package analyze

import (
	"cmp"
	"path"
	"slices"

	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/driver"
)

// driver adds what a driver trace says of a call that failed: its caller, and what the traced processes held on the
// device then.
func (x *FailureReport) driver(t *recording.Trace, d *recording.Driver) {
	e := &t.Events[x.Event]
	held := map[uint32]uint64{} // on the device, by process
	tracker := driver.NewTracker()
	count := func(h *driver.Holding, sign uint64) {
		if int(h.Device) == t.Device && h.Memory.OnDevice() {
			held[h.Process] += sign * h.Size
		}
	}
	var failed *recording.Call
	for i := range d.Calls {
		c := &d.Calls[i]
		if int(c.Device) == t.Device && c.Failed() && c.Size == e.Size && int64((c.TimeNS+c.TookNS)/1000) == e.TimeUS {
			failed = c
			break
		}
		tracker.Call(c, func(h *driver.Holding) { count(h, 1) }, func(h *driver.Holding) { count(h, ^uint64(0)) })
	}
	x.Program = d.Program
	if failed == nil || int(failed.Process) >= len(d.Processes) {
		return
	}
	p, at := d.Processes[failed.Process], failed.TimeNS+failed.TookNS
	x.PID, x.Message = int(p.PID), []string{failed.Kind.String() + ": CUDA_ERROR_OUT_OF_MEMORY"}
	x.Thread = t.ThreadName(failed.Thread)
	for process, bytes := range held {
		if bytes == 0 || int(process) >= len(d.Processes) {
			continue
		}
		if q := d.Processes[process]; q.EndNS == 0 || q.EndNS > at {
			x.Processes = append(x.Processes, recording.Neighbour{PID: int(q.PID), Name: path.Base(q.Program), Bytes: bytes, Self: process == failed.Process})
		}
	}
	slices.SortFunc(x.Processes, func(a, b recording.Neighbour) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.PID, b.PID))
	})
	x.ProcessesUnknown = "only processes that were traced are known, by what they asked the driver for"
	for _, line := range UntracedLines(d.Untraced) {
		x.ProcessesUnknown += "; " + line
	}
}
