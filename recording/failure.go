package recording

import (
	"github.com/cistern-gpu/cistern/event"
)

// Requests that failed, as the process that made them saw it: what no event has, and what is not known later.

// Failure is what a process wrote down of a request that failed, beside the events that led to it: what only it could
// know at that moment. It is kept as JSON. Sizes are bytes.
type Failure struct {
	Event   int      `json:"event"`         // the event.OOM in Trace.Events; -1 where the history was off
	Cut     bool     `json:"cut,omitempty"` // there was an event, in what was cut off from the file that this was read from
	TimeUS  int64    `json:"time_us"`
	PID     int      `json:"pid"`
	Program []string `json:"program"` // command line
	Version string   `json:"version"` // of Cistern
	Conf    string   `json:"conf"`    // the settings in force, in CISTERN_CONF's syntax
	// Lines are the message of the exception, line by line.
	Lines []string `json:"lines"`

	Requested uint64 `json:"requested_bytes"`
	Need      uint64 `json:"need_bytes"` // rounded
	Pool      PoolID `json:"pool"`
	Upstream  string `json:"upstream"` // "" is the device's own memory
	Stream    uint64 `json:"stream"`
	Tag       uint16 `json:"tag"`     // index into Trace.Tags
	Library   uint8  `json:"library"` // index into Trace.Libraries
	Thread    uint32 `json:"thread"`
	Stack     uint32 `json:"stack"` // index into Trace.Stacks

	Device      string `json:"device_name"`
	UUID        string `json:"device_uuid"`
	DeviceTotal uint64 `json:"device_total_bytes"` // 0: the driver did not say
	DeviceFree  uint64 `json:"device_free_bytes"`

	Reserved  uint64 `json:"reserved_bytes"`
	Allocated uint64 `json:"allocated_bytes"`
	Pending   uint64 `json:"pending_bytes"`
	Cached    uint64 `json:"cached_bytes"`
	Pinned    uint64 `json:"pinned_bytes"`
	Paused    uint64 `json:"paused_bytes"`
	Largest   uint64 `json:"largest_free_bytes"` // for the request's pool and stream
	Limit     uint64 `json:"limit_bytes"`        // 0: none
	PoolLimit uint64 `json:"pool_limit_bytes"`
	PoolHolds uint64 `json:"pool_holds_bytes"`
	// PoolsElsewhere are pools whose memory is not the device's own; Elsewhere is what they hold of Reserved, and UsedElsewhere
	// of Allocated and Pending.
	PoolsElsewhere []PoolID `json:"pools_elsewhere,omitempty"`
	Elsewhere      uint64   `json:"elsewhere_bytes,omitempty"`
	UsedElsewhere  uint64   `json:"used_elsewhere_bytes,omitempty"`

	Steps  []FailureStep `json:"steps"`  // the reclaim stages, in order
	Limits []Limit       `json:"limits"` // in force, whatever sets them
	// Others are the processes on the device, this one among them, as NVML tells them; OthersUnknown says why there are none.
	Others        []Neighbour `json:"processes"`
	OthersUnknown string      `json:"processes_unknown,omitempty"`
}

// FailureStep is a reclaim stage that was tried, or skipped.
type FailureStep struct {
	Stage  string `json:"rung"`
	Tries  int    `json:"tries"`
	Gained uint64 `json:"gained_bytes"` // memory that it got, freed or moved
	TookUS int64  `json:"took_us"`
	Note   string `json:"note,omitempty"` // "off by the settings", what the driver said, …
}

// Limit is a bound on memory that was in force.
type Limit struct {
	Kind  string `json:"kind"` // "device", "cistern", "pool", "mps", "mig", "container" (host memory), "rlimit"
	Bytes uint64 `json:"bytes"`
	From  string `json:"from"` // where it is set: a variable, a file, a setting
}

// Neighbour is a process on the device.
type Neighbour struct {
	PID   int    `json:"pid"`
	Name  string `json:"name"`  // "" unknown
	Bytes uint64 `json:"bytes"` // 0 where the driver does not tell
	Self  bool   `json:"self,omitempty"`
}

// FailedAt is the event of the failure that a file is about: the last that the process wrote down, as it wrote the file for
// that one while other threads may have gone on to fail; where no event is of it, the last event, as what was written is
// of that moment. Where the process wrote nothing, it is what the run died of, as far as is known: the last
// failure that was not made good, else the last. ok is false where no request failed.
func (t *Trace) FailedAt() (at int, ok bool) {
	if n := len(t.Failures); n > 0 {
		if f := t.Failures[n-1]; t.tells(f) {
			return f.Event, true
		}
		return len(t.Events) - 1, true
	}
	good := false
	for i := range t.Events {
		if t.Events[i].Kind == event.OOM {
			if _, met := t.MetLater(i); !met || !good {
				at, ok, good = i, true, good || !met
			}
		}
	}
	return at, ok
}

// tells reports whether one of the events is of this failure.
func (t *Trace) tells(f *Failure) bool {
	return f.Event >= 0 && f.Event < len(t.Events) && t.Events[f.Event].Kind == event.OOM
}

// MetLater finds the event at which what failed at event i was met after all: PyTorch, for one, gives cached memory back
// and asks again.
func (t *Trace) MetLater(i int) (at int, ok bool) {
	failed := &t.Events[i]
	for k := i + 1; k < len(t.Events); k++ {
		switch e := &t.Events[k]; {
		case e.Kind == event.Alloc && e.Stream == failed.Stream:
			return k, e.Size == failed.Size // else it went on with something else
		case e.Kind == event.OOM:
			return 0, false
		}
	}
	return 0, false
}
