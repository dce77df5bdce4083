package dump

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/deadline"
	"github.com/cistern-gpu/cistern/internal/nopoll"
	"github.com/cistern-gpu/cistern/internal/nvml"
	"github.com/cistern-gpu/cistern/recording"
)

// nvmlTimeout is how long the management library may take to list the processes on the device.
const nvmlTimeout = 2 * time.Second

// failure is what a process can say of a request that failed, but for what it takes others to know (surroundings). The trace
// is the device's.
func failure(a Source, oom *cistern.OutOfMemoryError, lines []string, t *recording.Trace, n *Names) *recording.Failure {
	f := &recording.Failure{Event: -1, TimeUS: time.Now().UnixMicro(), PID: os.Getpid(), Program: program(), Version: cistern.Version,
		Conf: a.Options().String(), Lines: lines, Stream: uint64(oom.Handle), Requested: oom.Requested, Need: oom.Need, Pool: recording.PoolID(oom.Pool),
		Upstream: oom.Upstream, Tag: uint16(oom.Tag), Library: oom.Library, Thread: oom.Thread, Stack: oom.Stack,
		DeviceTotal: oom.DriverTotal, DeviceFree: oom.DriverFree, Reserved: oom.Reserved, Allocated: oom.Allocated,
		Pending: oom.Pending, Cached: oom.Cached, Pinned: oom.Pinned, Paused: oom.Paused, Largest: oom.Largest, Limit: oom.Limit,
		PoolLimit: oom.PoolLimit, PoolHolds: oom.PoolReserved, Steps: []recording.FailureStep{}}
	if f.Library == 0 {
		f.Library = n.DefaultLibrary
	}
	if info, err := a.Driver().DeviceInfo(oom.Device); err == nil {
		f.Device, f.UUID = info.Name, uuidText(info.UUID)
	}
	f.Elsewhere = oom.Elsewhere
	for _, p := range oom.Pools {
		if p.Elsewhere {
			f.PoolsElsewhere = append(f.PoolsElsewhere, recording.PoolID(p.Pool))
			f.UsedElsewhere += p.Allocated + p.Pending
		}
	}
	for _, s := range oom.Steps {
		f.Steps = append(f.Steps, recording.FailureStep{Stage: s.Stage.String(), Tries: s.Tries, Gained: s.Gained,
			TookUS: s.Took.Microseconds(), Note: s.Note})
	}
	for i := len(t.Events) - 1; i >= 0 && f.Event < 0; i-- {
		e := &t.Events[i]
		if e.Kind == event.OOM && e.Size == oom.Need && e.Tag == uint16(oom.Tag) && (e.Stack == oom.Stack || e.Stack == 0) &&
			(e.Thread == oom.Thread || e.Thread == 0) {
			f.Event, f.TimeUS = i, e.TimeUS
			e.Stack, e.Thread = oom.Stack, oom.Thread // which may have been found out after it
		}
	}
	return f
}

// surroundings adds what else was in the way, as far as it can be found out in time.
func surroundings(f *recording.Failure, a Source, oom *cistern.OutOfMemoryError, getenv func(string) string) {
	ctx, cancel := deadline.WithTimeout(nvmlTimeout)
	defer cancel()
	f.Limits = limits(a, oom, f, getenv)
	if f.UUID == "" || simulated(a.Driver()) {
		f.OthersUnknown = "the device is a simulated one"
		return
	}
	var uuid [16]byte
	if info, err := a.Driver().DeviceInfo(oom.Device); err == nil {
		uuid = info.UUID
	}
	list, err := nvml.Neighbours(ctx, uuid)
	if err != nil {
		if context.Cause(ctx) != nil {
			err = fmt.Errorf("NVML did not answer within %v", nvmlTimeout)
		}
		f.OthersUnknown = err.Error()
		return
	}
	f.Others = neighbours(list, f.PID)
}

// neighbours is each process once: one that computes and draws comes twice from NVML, with the same bytes.
func neighbours(list []nvml.Process, self int) []recording.Neighbour {
	out := []recording.Neighbour{}
	at := map[int]int{}
	for _, p := range list {
		i, seen := at[p.PID]
		if !seen {
			i = len(out)
			at[p.PID] = i
			out = append(out, recording.Neighbour{PID: p.PID, Name: p.Name, Self: p.PID == self})
		}
		out[i].Bytes = max(out[i].Bytes, p.Bytes)
	}
	return out
}

// simulated reports whether a driver has no GPU.
func simulated(d cuda.Driver) bool {
	_, ok := d.(interface{ AdoptStreams() })
	return ok
}

// program is the command line of this process.
func program() []string {
	text, err := nopoll.ReadFile("/proc/self/cmdline")
	if err != nil || len(text) == 0 {
		return os.Args
	}
	return strings.Split(string(bytes.TrimSuffix(text, []byte{0})), "\x00")
}

// uuidText is a UUID as NVIDIA writes it, "" for none.
func uuidText(u [16]byte) string {
	if u == [16]byte{} {
		return ""
	}
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}
