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

// Options and their parts: package config.
type (
	Backend      = config.Backend
	CrossStream  = config.CrossStream
	IPC          = config.IPC
	Keep         = config.Keep
	Options      = config.Options
	PauseOptions = config.PauseOptions
	PoolKind     = config.PoolKind
	PoolOptions  = config.PoolOptions
	Spill        = config.Spill
	StreamOption = config.StreamOption
)

// Plain data: package memory.
type (
	Block            = memory.Block
	BlockState       = memory.BlockState
	Chunk            = memory.Chunk
	Counters         = memory.Counters
	Gauges           = memory.Gauges
	Grouped          = memory.Grouped
	LibraryUse       = memory.LibraryUse
	Names            = memory.Names
	OutOfMemoryError = memory.OutOfMemoryError
	PauseError       = memory.PauseError
	PauseReport      = memory.PauseReport
	PointerError     = memory.PointerError
	PoolID           = memory.PoolID
	PoolStats        = memory.PoolStats
	PoolUse          = memory.PoolUse
	Record           = memory.Record
	Segment          = memory.Segment
	SegmentBlock     = memory.SegmentBlock
	Shared           = memory.Shared
	SharedChunk      = memory.SharedChunk
	StackTable       = memory.StackTable
	StackUse         = memory.StackUse
	Stages           = memory.Stages
	Stats            = memory.Stats
	Step             = memory.Step
	TagUse           = memory.TagUse
	Use              = memory.Use
	Value            = memory.Value
)

// Values of options and of plain data.
const (
	AllStages        = memory.AllStages
	BackendMalloc    = config.BackendMalloc
	BackendVMM       = config.BackendVMM
	BlockFree        = memory.BlockFree
	BlockPending     = memory.BlockPending
	BlockUsed        = memory.BlockUsed
	CrossStreamReady = config.CrossStreamReady
	CrossStreamWait  = config.CrossStreamWait
	IPCHandles       = config.IPCHandles
	IPCLegacy        = config.IPCLegacy
	KeepDisk         = config.KeepDisk
	KeepHost         = config.KeepHost
	KeepNone         = config.KeepNone
	MaxLibrary       = memory.MaxLibrary
	MaxTag           = memory.MaxTag
	PoolDefault      = config.PoolDefault
	PoolMalloc       = config.PoolMalloc
	PoolSingleHandle = config.PoolSingleHandle
	ReportHistory    = config.ReportHistory
	SpillHostNUMA    = config.SpillHostNUMA
	SpillManaged     = config.SpillManaged
	SpillNone        = config.SpillNone
	SpillPinned      = config.SpillPinned
	StacksBoth       = config.StacksBoth
	StacksNative     = config.StacksNative
	StacksOff        = config.StacksOff
	StacksPython     = config.StacksPython
	StageCallback    = memory.StageCallback
	StageCollect     = memory.StageCollect
	StageFit         = memory.StageFit
	StageGrow        = memory.StageGrow
	StageLend        = memory.StageLend
	StageRemap       = memory.StageRemap
	StageSpill       = memory.StageSpill
	StreamDurable    = config.StreamDurable
)

// Errors that errors.Is finds.
var (
	ErrNotExported    = memory.ErrNotExported
	ErrUnknownPointer = memory.ErrUnknownPointer
)

// ParseOptions reads the text form that CISTERN_CONF has; see [config.Parse].
func ParseOptions(text string) (Options, error) { return config.Parse(text) }

// ParseStages reads stages that are separated by "+"; see [memory.ParseStages].
func ParseStages(text string) (Stages, error) { return memory.ParseStages(text) }
