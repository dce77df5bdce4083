// Package export writes recorded runs for the tools that people have. It reads a recording.File, whatever it came from, and
// streams the output; what it holds besides the trace follows what was live at once and the number of stacks.
//
//   - pprof.go: a profile for `go tool pprof`, of one moment (moment.go).
//   - perfetto.go: a timeline for ui.perfetto.dev; threads.go puts what the program's threads did on it.
//   - tables.go: events and allocations as rows, whose columns are described once for every format and for the
//     command's help; csv.go and parquet.go write them.
//   - calls.go: the driver's calls, where a file has them.
//
// What is live is what analyze says is live (walk.go): the outputs and `cistern inspect` agree to the byte.
package export

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/cistern-gpu/cistern/recording"
)

// PyTorchDoc, PprofDoc and PerfettoDoc say what those formats contain and in which units, for the command's help and the
// documentation.
const (
	PyTorchDoc = `The snapshot has one segment for each recorded segment. Where the recording has none, as a driver trace and an
RMM log, each allocation is a segment, since the viewer draws nothing outside of segments.
Tag, library and thread are lines of user_metadata.`
	PprofDoc = `inuse_space and inuse_objects are the requested bytes and the blocks that are live at the moment (--at).
alloc_space and alloc_objects are all allocations until then.
Stacks are the recorded frames. Labels are pool, stream and size; device and process where there are several; tag,
library and thread where they were recorded; state=pending_free for freed blocks that a stream still uses.
Flame graphs by label need no stacks: go tool pprof -tagroot library,tag,size -http : FILE.`
	PerfettoDoc = `Each device has counters in bytes: live (requested bytes), active (the same, each block rounded up to 512) and
reserved (memory of the allocator); live also by stream, pool, tag and library.
Instants are segments allocated and freed, failed requests and marks, with size, address, stream, pool and stack.
Where threads were recorded, their allocations and frees are instants on the program's threads, and the driver calls of
a driver trace are slices there.
Times are since 1970 where the recording has the date. Events of the same microsecond are a nanosecond apart.`
)

// poolName is a private pool by PyTorch's two numbers, and a word for the default one.
func poolName(id recording.PoolID) string {
	if id == (recording.PoolID{}) {
		return "default"
	}
	return fmt.Sprintf("%d,%d", id[0], id[1])
}

// streamName is a stream's small id as a number, a handle as people see it in a debugger.
func streamName(id uint64) string {
	if id < 1<<16 {
		return strconv.FormatUint(id, 10)
	}
	return fmt.Sprintf("%#x", id)
}

// poolOf and streamOf answer for the indices of an event; what a hostile file says is out of range is the default.
func poolOf(t *recording.Trace, i uint32) recording.PoolID {
	if int(i) < len(t.Pools) {
		return t.Pools[i]
	}
	return recording.PoolID{}
}

func streamOf(t *recording.Trace, i uint32) uint64 {
	if int(i) < len(t.Streams) {
		return t.Streams[i]
	}
	return 0
}

// stackText is a stack on one line, innermost frame first.
func stackText(t *recording.Trace, stack uint32) string {
	var b strings.Builder
	for i, f := range t.FramesOf(stack) {
		if i > 0 {
			b.WriteString("; ")
		}
		b.WriteString(f.String())
	}
	return b.String()
}

// callerText is the innermost frame whose line is known: under Python, the line of the program that asked, whatever libraries
// stand between it and the driver. Where none has a line, the frame that says most.
func callerText(t *recording.Trace, stack uint32) string {
	frames := t.FramesOf(stack)
	for _, f := range frames {
		if f.HasFile() && f.Line > 0 {
			return f.String()
		}
	}
	if len(frames) > 0 {
		return frames[max(0, recording.Telling(frames))].String()
	}
	return ""
}
