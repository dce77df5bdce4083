package recording

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

// Made reports whether a call was made by the process whose memory this is, as far as processes are distinguished.
func (t *Trace) Made(c *Call) bool { return t.Owner == nil || c.Process == t.Owner.Number }
