// Package cistern is a caching allocator of GPU memory for every library of a process. It reuses freed memory without a
// driver call, moves free physical memory to where it is needed by mapping it again, and explains a request that fails.
//
//	drv, err := open.Open("")            // package cuda/open: the GPU, or a simulated one
//	a, err := cistern.New(drv, cistern.Options{})
//	dev, err := a.Device(0)
//	st, err := dev.Stream(0)             // the default stream
//	p, err := dev.Alloc(64<<20, st)      // 64 MiB that work queued on the stream from now on may use
//	err = a.Free(p)                      // reusable on the stream at once, elsewhere when the GPU's order allows it
//
// An [Allocator] has one [Device] for each GPU, a device has pools ([Pool]), and requests name a [Stream]. All methods may be called
// from any goroutine. Options, statistics, snapshots and errors are plain data of packages config and memory, under the same
// names here. Package resource has other sources of memory for pools, package dump writes files of failed requests.
//
// # Handles
//
// Device, Pool, Stream, Export and Registration are handles: small values to be copied, compared with == and used as keys of
// maps. Copies mean the same device or pool. The zero value means none; only options take it.
//
// # Two orders
//
// Freed memory is reused in stream order: on its own stream at once, on another stream behind an event that this stream waits
// for on the GPU. So a program may free memory while work that uses it is still queued on the stream of the request. Work on
// other streams is made known by [Allocator.RecordStream] before the free, or by [Allocator.FreeOn].
//
// # Cost
//
// A request that cached memory meets, and its free, make no driver call and allocate no Go memory. An event is recorded where
// memory was used on several streams.
package cistern

import (
	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/memory"
)

// Options, described in package config. The zero value of each has the defaults.
type (
	// Options configure an allocator.
	Options = config.Options
	// PoolOptions configure a pool: its upstream, its limit in bytes, what happens when it is out of memory.
	PoolOptions = config.PoolOptions
	// PauseOptions say what a pause does with the contents of memory.
	PauseOptions = config.PauseOptions

	// Backend says how memory comes from the driver: as chunks or as segments.
	Backend = config.Backend
	// CrossStream says when free memory of one stream serves another.
	CrossStream = config.CrossStream
	// IPC says how memory is shared with other processes.
	IPC = config.IPC
	// Keep says where a pause keeps the contents of memory.
	Keep = config.Keep
	// PoolKind is the kind of memory of a pool.
	PoolKind = config.PoolKind
	// Spill is the memory that the default pool uses when the device has none left.
	Spill = config.Spill
	// StreamOption qualifies a stream in Device.Stream.
	StreamOption = config.StreamOption
	// Switch turns a part of the C library on or off.
	Switch = config.Switch
)

// Statistics, snapshots, usage and errors as plain data, described in package memory. Sizes are bytes.
type (
	// Stats are the statistics of a device.
	Stats = memory.Stats
	// Grouped is a statistic of all blocks and of the two size classes.
	Grouped = memory.Grouped
	// Value is one statistic: its current value, its peak, and what was added and removed.
	Value = memory.Value
	// Counters count events such as moved chunks and failed requests.
	Counters = memory.Counters
	// Gauges are the figures of a device that a live display shows.
	Gauges = memory.Gauges
	// PoolStats are the statistics of a pool.
	PoolStats = memory.PoolStats

	// Segment is a range of mapped memory in a snapshot.
	Segment = memory.Segment
	// SegmentBlock is a block of a segment.
	SegmentBlock = memory.SegmentBlock
	// Chunk is a physical handle of a segment.
	Chunk = memory.Chunk
	// BlockState is the state of a block in a snapshot.
	BlockState = memory.BlockState
	// Block is a live allocation.
	Block = memory.Block
	// Record is the state of a device with its newest events.
	Record = memory.Record

	// Use is the sum of some live blocks: their number and bytes.
	Use = memory.Use
	// PoolUse is the usage of a pool.
	PoolUse = memory.PoolUse
	// TagUse is the usage of a tag.
	TagUse = memory.TagUse
	// LibraryUse is the usage of a library.
	LibraryUse = memory.LibraryUse
	// StackUse is the usage of a stack.
	StackUse = memory.StackUse
	// StackTable is the size of the table of stacks.
	StackTable = memory.StackTable

	// OutOfMemoryError is the error of a request that no reclaim stage met.
	OutOfMemoryError = memory.OutOfMemoryError
	// Step is what one reclaim stage did for such a request.
	Step = memory.Step
	// Stages is a set of reclaim stages.
	Stages = memory.Stages
	// Names are functions that name tags, libraries and stacks in the findings of an OutOfMemoryError.
	Names = memory.Names
	// PauseError is the error of a pause of memory that cannot be paused.
	PauseError = memory.PauseError
	// PauseReport is what Device.Pause or Device.Resume did.
	PauseReport = memory.PauseReport
	// PointerError is the error of an operation on an address that is not a live allocation.
	PointerError = memory.PointerError

	// PoolID names a pool of a device by two numbers, as PyTorch's MempoolId_t.
	PoolID = memory.PoolID
	// Shared is what another process needs to open an Export, besides descriptors.
	Shared = memory.Shared
	// SharedChunk is a chunk of an Export.
	SharedChunk = memory.SharedChunk
)

// The values of Backend, IPC, CrossStream, Spill and Switch.
const (
	BackendVMM       = config.BackendVMM       // chunks, mapped where they are needed
	BackendMalloc    = config.BackendMalloc    // segments from cuMemAlloc
	IPCHandles       = config.IPCHandles       // by the handles of chunks
	IPCLegacy        = config.IPCLegacy        // by cudaIpcGetMemHandle; needs BackendMalloc
	CrossStreamWait  = config.CrossStreamWait  // after a wait of the other stream, on the GPU
	CrossStreamReady = config.CrossStreamReady // when the host knows that the GPU is done
	SpillNone        = config.SpillNone        // the request fails
	SpillManaged     = config.SpillManaged     // managed memory
	SpillPinned      = config.SpillPinned      // page-locked host memory
	SpillHostNUMA    = config.SpillHostNUMA    // host memory of the device's NUMA node
	SwitchOn         = config.SwitchOn
	SwitchOff        = config.SwitchOff
)

// The values of Options.Node beside the path of a socket.
const (
	NodeAuto = config.NodeAuto // where a broker listens at a usual place
	NodeOff  = config.NodeOff
)

// The values of Options.Stacks.
const (
	StacksOff    = config.StacksOff
	StacksNative = config.StacksNative // frames of native code, and of Go
	StacksPython = config.StacksPython
	StacksAll    = config.StacksAll
)

// ReportHistory is the number of events that are kept when Options.Report is set by text without a history.
const ReportHistory = config.ReportHistory

// The values of Keep, PoolKind and StreamOption.
const (
	KeepHost         = config.KeepHost         // in page-locked host memory
	KeepDisk         = config.KeepDisk         // in a file
	KeepNone         = config.KeepNone         // dropped: undefined after resume
	PoolDefault      = config.PoolDefault      // as the options of the allocator say
	PoolMalloc       = config.PoolMalloc       // segments from cuMemAlloc
	PoolSingleHandle = config.PoolSingleHandle // segments of one physical handle each
	StreamDurable    = config.StreamDurable    // the stream is not destroyed while the allocator is in use
)

// The values of BlockState.
const (
	BlockFree    = memory.BlockFree    // free
	BlockUsed    = memory.BlockUsed    // allocated
	BlockPending = memory.BlockPending // freed, but other streams still use it
)

// The reclaim stages of a request, in the order in which they are tried. AllStages has all but StageFit, which is always on.
const (
	StageFit      = memory.StageFit      // a free block of the same pool and stream
	StageCollect  = memory.StageCollect  // blocks that other streams no longer use
	StageRemap    = memory.StageRemap    // free chunks of the same pool, mapped here
	StageGrow     = memory.StageGrow     // new memory from the driver or the upstream
	StageLend     = memory.StageLend     // free memory of other pools and streams
	StageCallback = memory.StageCallback // functions of OnOutOfMemory
	StageNode     = memory.StageNode     // other processes on the device, through the node's broker
	StageSpill    = memory.StageSpill    // the spill of the pool
	AllStages     = memory.AllStages
)

// The largest tag and the largest number of a library; 0 is none.
const (
	MaxTag     = memory.MaxTag
	MaxLibrary = memory.MaxLibrary
)

// Errors that errors.Is finds.
var (
	// ErrUnknownPointer is in the error of an operation on an address that is not a live allocation.
	ErrUnknownPointer = memory.ErrUnknownPointer
	// ErrNotExported is in the error of an operation on an export that has ended or never was.
	ErrNotExported = memory.ErrNotExported
)

// ParseOptions reads options from text as in CISTERN_CONF, "key:value,key:value"; see [config.Parse] for the keys.
func ParseOptions(text string) (Options, error) { return config.Parse(text) }

// ParseStages reads stages that are separated by "+"; see [memory.ParseStages].
func ParseStages(text string) (Stages, error) { return memory.ParseStages(text) }
