// Package recording is the model of recorded runs: a File holds one Trace for each device that has events, and a driver
// trace holds the program's calls of the driver beside them. replay, analyze and report work on these and never ask which
// format they came from. Frames know how they are written for people, and which of a stack says most.
//
// One package reads and writes each format: pytorch (memory snapshots), rmm (CSV logs), native (Cistern's own format),
// driver (what `cistern trace` records, in files of that format). Package open recognises the format of a file by its
// content. Package initial finds the state before the first event.
//
// What is read is not changed any more, and may be shared between goroutines.
package recording

import (
	"fmt"

	"github.com/cistern-gpu/cistern/event"
)

// Trace is what one file says of one device.
type Trace struct {
	Path   string // the file, as it was named
	Format string // "pytorch-snapshot", "rmm-csv", "cistern"
	Device int
	// StoredBytes is the size of the file, compressed as it is; 0 where the trace was not read from one. What may be done
	// with a trace is bounded by it (replay).
	StoredBytes int64
	// Source is the format that a Cistern file was converted from; empty elsewhere.
	Source string

	// Events in recorded order.
	Events []event.Event
	// WallUS is what to add to event.Event.TimeUS for microseconds since 1970: for driver traces, whose clock is the
	// machine's. Elsewhere 0: times are that already, or have no date.
	WallUS int64
	// Streams are the recorded stream handles or ids; event.Event.Stream indexes it.
	Streams []uint64
	// Pools are the private pools seen; Pools[0] is the default pool {0,0}. event.Event.Pool indexes it. A recorder
	// that does not say the pool of an event gives the pool of the segment it lies in, where the file still knows it.
	Pools []PoolID
	// Stacks[0] is the empty stack; event.Event.Stack indexes it.
	Stacks []Stack
	Frames []Frame // Stack frames are indices into it
	// Tags[0] and Libraries[0] are "", for none; event.Event.Tag and Library, Block.Tag and Library index them. Nil where
	// the file tells none.
	Tags      []string
	Libraries []string
	// Threads names threads by event.Event.Thread, where names are known.
	Threads map[uint32]string
	// Failures are what the process said of requests that failed, in order, where it wrote them down.
	Failures []*Failure

	// Initial are the blocks that were live before the first event: the final state minus the events, walked
	// backwards. Empty when recording began with the process. InitialSegments likewise.
	Initial         []Block
	InitialSegments []Segment
	// Owner is whose memory this is, of a driver trace with several processes on the device; nil elsewhere.
	Owner *Owner

	// Final are the segments that the file ends with, blocks included; nil when the format has none.
	Final []Segment

	// FromStart is false when events before the first are known to be missing: recording began mid-run, or the
	// recorder's ring overflowed.
	FromStart bool
	Settings  Settings
	// Environment is what the run was recorded with.
	Environment Environment
	// Identity is the process's place in its job; nil where the file does not say, and where it is of no job.
	Identity *Identity
	// Notes say in words what the file does not tell (hidden pools, a lost start) and what was assumed.
	Notes []string
}

// Note adds a sentence to Notes.
func (t *Trace) Note(format string, args ...any) {
	t.Notes = append(t.Notes, fmt.Sprintf(format, args...))
}

// MaxDevices bounds the numbers of devices, from 0, in files and of traced programs: more than a machine has.
const MaxDevices = 256

// PoolID is PyTorch's MempoolId_t. {0, 0} is the default pool.
type PoolID [2]uint64

// Segment is a contiguous range of addresses held from the driver.
type Segment struct {
	Addr       uint64
	Size       uint64 // bytes
	Stream     uint32 // index into Trace.Streams
	Pool       uint32 // index into Trace.Pools
	Large      bool   // segment_type "large"
	Expandable bool
	Stack      uint32
	Blocks     []Block // in address order, covering the segment
}

// BlockState is the state of a block in a snapshot.
type BlockState uint8

const (
	Inactive    BlockState = iota // free
	Active                        // handed out
	PendingFree                   // given back, still used by some stream
)

// Block is a piece of a segment.
type Block struct {
	Addr      uint64
	Size      uint64 // bytes, rounded
	Requested uint64 // bytes asked for
	Stream    uint32 // index into Trace.Streams
	Pool      uint32
	Stack     uint32
	Tag       uint16 // index into Trace.Tags
	Library   uint8  // index into Trace.Libraries
	State     BlockState
}

// Stack is a list of frames, innermost first, as indices into Trace.Frames.
type Stack []uint32

// Frame is one function on a stack.
type Frame struct {
	File string
	Func string
	Line int
}

// Settings are the allocator settings that the recorder noted.
type Settings struct {
	Known bool // the file says
	// Conf is the recorded PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF), as its user wrote it.
	Conf string
	// Expandable and the rest are PyTorch's settings as it had parsed them.
	Expandable   bool
	MaxSplitSize int64             // bytes, -1 is none
	GCThreshold  float64           // 0 is off
	RoundupPow2  map[uint64]uint64 // MiB threshold → divisions
	Raw          map[string]string // every entry of allocator_settings, in text
}
