// Package cistern is a caching allocator of GPU memory: one engine that hands out device memory to every library of a
// process, reuses what is freed without asking the driver, moves physical memory to where it is wanted by remapping
// it, and explains itself when there is none left.
//
//	drv, err := open.Open("")            // package cuda/open: the GPU, or a simulated one
//	a, err := cistern.New(drv, cistern.Options{})
//	dev, err := a.Device(0)
//	st, err := dev.Stream(0)             // the default stream
//	p, err := dev.Alloc(64<<20, st)      // 64 MiB, usable at once by work queued on the stream
//	err = a.Free(p)                      // reusable on the stream at once, elsewhere when the GPU's order allows
package cistern

import (
	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
)

// The engine's types, and those of packages memory and config.
type (
	AllocOptions     = engine.AllocOptions
	Allocator        = engine.Allocator
	Backend          = config.Backend
	Block            = memory.Block
	BlockState       = memory.BlockState
	Chunk            = memory.Chunk
	Counters         = memory.Counters
	CrossStream      = config.CrossStream
	Device           = engine.Device
	Export           = engine.Export
	FreeOptions      = engine.FreeOptions
	Gauges           = memory.Gauges
	Grouped          = memory.Grouped
	IPC              = config.IPC
	Keep             = config.Keep
	LibraryUse       = memory.LibraryUse
	Names            = memory.Names
	Options          = config.Options
	OutOfMemoryError = memory.OutOfMemoryError
	PauseError       = memory.PauseError
	PauseOptions     = config.PauseOptions
	PauseReport      = memory.PauseReport
	PointerError     = memory.PointerError
	Pool             = engine.Pool
	PoolID           = memory.PoolID
	PoolKind         = config.PoolKind
	PoolOptions      = config.PoolOptions
	PoolStats        = memory.PoolStats
	PoolUse          = memory.PoolUse
	Record           = memory.Record
	Registration     = engine.Registration
	Stages           = memory.Stages
	Segment          = memory.Segment
	SegmentBlock     = memory.SegmentBlock
	Selection        = engine.Selection
	Shared           = memory.Shared
	SharedChunk      = memory.SharedChunk
	Spill            = config.Spill
	StackTable       = memory.StackTable
	StackUse         = memory.StackUse
	Stats            = memory.Stats
	Step             = memory.Step
	Stream           = engine.Stream
	StreamOption     = config.StreamOption
	TagUse           = memory.TagUse
	Use              = memory.Use
	Value            = memory.Value
)

// What the engine's settings and calls can be.
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
	StageCallback    = memory.StageCallback
	StageCollect     = memory.StageCollect
	StageFit         = memory.StageFit
	StageGrow        = memory.StageGrow
	StageLend        = memory.StageLend
	StageRemap       = memory.StageRemap
	StageSpill       = memory.StageSpill
	SpillHostNUMA    = config.SpillHostNUMA
	SpillManaged     = config.SpillManaged
	SpillNone        = config.SpillNone
	SpillPinned      = config.SpillPinned
	StacksBoth       = config.StacksBoth
	StacksNative     = config.StacksNative
	StacksOff        = config.StacksOff
	StacksPython     = config.StacksPython
	StreamDurable    = config.StreamDurable
)

// Errors that errors.Is finds.
var (
	ErrNotExported    = memory.ErrNotExported
	ErrUnknownPointer = memory.ErrUnknownPointer
)

// New makes an allocator over a driver; see engine.New.
func New(drv cuda.Driver, opts Options) (*Allocator, error) { return engine.New(drv, opts) }

// ParseOptions reads the text form that CISTERN_CONF has.
func ParseOptions(text string) (Options, error) { return config.Parse(text) }

// ParseStages reads stages that are separated by commas.
func ParseStages(text string) (Stages, error) { return memory.ParseStages(text) }
