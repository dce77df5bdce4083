package engine

import (
	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/memory"
)

// Plain data that users read (package memory).
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
	StackTable       = memory.StackTable
	StackUse         = memory.StackUse
	Stages           = memory.Stages
	Stats            = memory.Stats
	Step             = memory.Step
	TagUse           = memory.TagUse
	Use              = memory.Use
	Value            = memory.Value
)

const (
	AllStages     = memory.AllStages
	BlockFree     = memory.BlockFree
	BlockPending  = memory.BlockPending
	BlockUsed     = memory.BlockUsed
	StageCallback = memory.StageCallback
	StageCollect  = memory.StageCollect
	StageFit      = memory.StageFit
	StageGrow     = memory.StageGrow
	StageLend     = memory.StageLend
	StageRemap    = memory.StageRemap
	StageSpill    = memory.StageSpill
	numStages     = memory.NumStages
)

// The options (package config).
type (
	Backend     = config.Backend
	CrossStream = config.CrossStream
	IPC         = config.IPC
	Options     = config.Options
	Spill       = config.Spill
)

const (
	BackendMalloc    = config.BackendMalloc
	BackendVMM       = config.BackendVMM
	CrossStreamReady = config.CrossStreamReady
	CrossStreamWait  = config.CrossStreamWait
	IPCHandles       = config.IPCHandles
	IPCLegacy        = config.IPCLegacy
	ReportHistory    = config.ReportHistory
	SpillHostNUMA    = config.SpillHostNUMA
	SpillManaged     = config.SpillManaged
	SpillNone        = config.SpillNone
	SpillPinned      = config.SpillPinned
	StacksBoth       = config.StacksBoth
	StacksNative     = config.StacksNative
	StacksOff        = config.StacksOff
	StacksPython     = config.StacksPython
)

// ParseOptions is config.Parse.
func ParseOptions(text string) (Options, error) { return config.Parse(text) }

// ErrUnknownPointer is memory.ErrUnknownPointer.
var ErrUnknownPointer = memory.ErrUnknownPointer

// ParseStages is memory.ParseStages.
func ParseStages(text string) (Stages, error) { return memory.ParseStages(text) }
