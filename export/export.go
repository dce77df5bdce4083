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

// PyTorchDoc, PprofDoc and PerfettoDoc say what is in those formats and in which units, for the command's help.
const (
	PyTorchDoc = `pytorch: tag, library and thread are lines under user_metadata. Of a run that tells of no segments (a driver trace, RMM's
log) each allocation is a segment of its own, as the viewer draws nothing outside of segments.`
	PprofDoc = `pprof: inuse_space (bytes, as requested) and inuse_objects (blocks) are what was live at the moment, from alloc to
free_completed; alloc_space and alloc_objects are all that was allocated until then, what was live before the first
event included. Stacks are the recorded frames. Labels: pool, stream, size, device and process where there are several, tag,
library and thread where they were recorded, and state=pending_free for what was given back but still in use by a stream. Flame
graphs by label need no stacks: go tool pprof -tagroot library,tag,size -http : FILE; -tagfocus tag=NAME is one tag's.`
	PerfettoDoc = `perfetto: for each device counters in bytes (live: as requested, from alloc to free_completed; active: the same with
each block rounded up to 512; reserved: held from the driver; in groups: live by stream and by pool where there are
several, by tag and by library where they were recorded), and instants with size, address, stream, pool and stack for
segments got and given back, for failed requests, and for marks. Where threads were recorded, what they allocated and
gave back are instants on the program's own threads; so are, as slices, the calls of a driver trace. Times are since 1970
where the record says the date; events which it gives the same microsecond are a nanosecond apart, in order.`
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
