// Package config is the options of an allocator, with their text form (the variable CISTERN_CONF), and the options of its
// pools, pauses and streams.
package config

import (
	"fmt"
	"path"
	"strings"
	"time"

	"github.com/cistern-gpu/cistern/memory"
)

// Backend is how memory is got from the driver.
type Backend string

const (
	BackendVMM    Backend = "vmm"    // chunks, mapped where they are wanted
	BackendMalloc Backend = "malloc" // whole segments from cuMemAlloc, for libraries that need cudaIpcGetMemHandle
)

// IPC is how memory can be shared with other processes.
type IPC string

const (
	IPCHandles IPC = "handles" // by the handles of its chunks
	IPCLegacy  IPC = "legacy"  // by cudaIpcGetMemHandle, which needs memory from cuMemAlloc: backend malloc
)

// CrossStream says when free memory of one stream may serve another.
type CrossStream string

const (
	CrossStreamWait  CrossStream = "wait"  // the taking stream waits, on the GPU, for the event of the last free
	CrossStreamReady CrossStream = "ready" // only what the host knows to be done
)

// Spill is where the default pool gets memory when nothing else can meet a request (PoolOptions.Spill).
type Spill string

const (
	SpillNone     Spill = ""          // nowhere: the request fails
	SpillManaged  Spill = "managed"   // memory that migrates between host and device
	SpillPinned   Spill = "pinned"    // page-locked host memory
	SpillHostNUMA Spill = "host_numa" // host memory of the device's NUMA node, mapped for it
)

// Switch turns a part of the C library on or off.
type Switch string

const (
	SwitchOn  Switch = "on"
	SwitchOff Switch = "off"
)

// Options configure an allocator. The zero value is the default of every option.
type Options struct {
	Driver      string        // what package cuda/open opens: "", "nvidia", "sim", "sim:80GiB"; not used by the engine
	Backend     Backend       // default vmm; malloc with IPCLegacy
	Limit       uint64        // bytes of physical memory per device, 0 is no limit
	ChunkMax    uint64        // largest chunk in bytes, a multiple of 2 MiB; default 32 MiB
	CrossStream CrossStream   // default wait
	Stages      memory.Stages // stages that are tried; default all
	// CacheLimit is how many bytes of free memory a device keeps, 0 is no limit. What lies above that and was not needed for
	// CacheDecay is released to the driver, without a wait for the GPU: when memory is freed or requested, and by
	// Device.ReleaseUnused. Memory of pinned pools and of users' resources does not count.
	CacheLimit uint64
	// CacheDecay is for how long memory above CacheLimit must not have been needed; default 10 s. A negative value is no time:
	// what lies above the limit is released at once.
	CacheDecay time.Duration
	// History is how many events of each device are kept from the start, 0 is off. Parse makes it ReportHistory where
	// there is a report and the text says nothing of a history.
	History int
	IPC     IPC // default handles
	// SingleHandle makes every segment one physical handle, as registration with a network needs it, in place of
	// chunks that move.
	SingleHandle bool
	Spill        Spill // default none
	// Upstream is where the memory of pools comes from that name no other, the default pool among them: the name of an upstream
	// (package resource/open), "" for the driver. It excludes BackendMalloc and SingleHandle.
	Upstream string
	// CaptureReuse has a capture reuse memory that it used on several streams once it has joined them, at the price of
	// reading the graph's order at requests; off, that memory is reused after the capture. It is PyTorch's
	// graph_capture_record_stream_reuse.
	CaptureReuse bool
	// Magazine says whether the C library keeps recently freed blocks of small requests in magazines, from which it meets
	// requests without a call of the engine; default on.
	Magazine Switch
	// Stacks says of which frames the stacks of requests are made: "off" (the default), "python", "native" or "all".
	// Blocks keep them then. The C library takes both kinds, Go programs have native frames only
	// (Allocator.CatchStacks).
	Stacks string
	// StackSample has only some requests caught: those of at least so many bytes always, smaller ones with a probability of
	// their size to that. 0 is all.
	StackSample uint64
	// Report is the folder in which the C library writes a file for each out-of-memory, "" is none. ReportChild has it start
	// cistern report on the files that stay.
	Report      string
	ReportChild bool
	// Node says whether the C library connects to the node's broker: NodeAuto (the default) where one listens at a usual place,
	// NodeOff never, else the path of its socket.
	Node string
	// NodeWait is how long a request may wait in all for memory that other processes stop using;
	// default 3 s, negative for none.
	NodeWait time.Duration
	// NodeHeadroom is how much of a device the driver keeps free for what libraries load, such as kernels, as long as other
	// processes have memory that they do not use; 0 is the default, NoHeadroom none.
	NodeHeadroom uint64
	// NodeLabel is what the process calls itself, for rules of the broker's policy.
	NodeLabel string
	// Top says whether the C library publishes its figures in a status segment for cistern top; default on.
	Top Switch
}

// What Options.Node can be beside a path.
const (
	NodeAuto = "auto"
	NodeOff  = "off"
)

// DefaultNodeWait is Options.NodeWait by default.
const DefaultNodeWait = 3 * time.Second

// NoHeadroom is Options.NodeHeadroom for none.
const NoHeadroom = ^uint64(0)

// Headroom is Options.NodeHeadroom on a device with so many bytes: by default 128 MiB, and at most 1/256 of the device. A kernel of
// CUDA's libraries takes 2 to 20 MiB when it is first called.
func (o *Options) Headroom(total uint64) uint64 {
	switch o.NodeHeadroom {
	case 0:
		return min(128<<20, total/256)
	case NoHeadroom:
		return 0
	}
	return o.NodeHeadroom
}

// ReportHistory is how many events are kept where files are to be written of requests that fail, where no option says how many: what
// would have met such a request is found out by replaying them. It is some 300,000 blocks that came and went, and at most 56 MB
// of the host's memory for a device.
const ReportHistory = 1_000_000

// DefaultCacheDecay is long enough for a training step: what each step needs is not released within it. maxCacheDecay is the
// longest time.
const (
	DefaultCacheDecay = 10 * time.Second
	maxCacheDecay     = 24 * time.Hour
)

// What Options.Stacks can be.
const (
	StacksOff    = "off"
	StacksNative = "native"
	StacksPython = "python"
	StacksAll    = "all"
)

// WithDefaults fills in the defaults.
func (o Options) WithDefaults() Options {
	if o.IPC == "" {
		o.IPC = IPCHandles
	}
	if o.Backend == "" {
		o.Backend = BackendVMM
		if o.IPC == IPCLegacy {
			o.Backend = BackendMalloc
		}
	}
	if o.ChunkMax == 0 {
		o.ChunkMax = 32 << 20
	}
	if o.CrossStream == "" {
		o.CrossStream = CrossStreamWait
	}
	if o.Stages == 0 {
		o.Stages = memory.AllStages
	}
	if o.CacheDecay == 0 {
		o.CacheDecay = DefaultCacheDecay
	}
	if o.Magazine == "" {
		o.Magazine = SwitchOn
	}
	if o.Stacks == "" {
		o.Stacks = StacksOff
	}
	if o.Node == "" {
		o.Node = NodeAuto
	}
	if o.NodeWait == 0 {
		o.NodeWait = DefaultNodeWait
	}
	if o.Top == "" {
		o.Top = SwitchOn
	}
	return o
}

// Validate says what is wrong with the options, nil when nothing is.
func (o Options) Validate() error {
	if o.Backend != BackendVMM && o.Backend != BackendMalloc {
		return fmt.Errorf("backend %q: choose vmm or malloc", o.Backend)
	}
	if o.IPC != IPCHandles && o.IPC != IPCLegacy {
		return fmt.Errorf("ipc %q: choose handles or legacy", o.IPC)
	}
	if o.IPC == IPCLegacy && (o.Backend != BackendMalloc || o.SingleHandle) {
		return fmt.Errorf("ipc legacy: needs memory from cuMemAlloc: backend malloc, without single_handle")
	}
	if o.Upstream != "" && (o.Backend != BackendVMM || o.SingleHandle) {
		return fmt.Errorf("upstream %q: excludes backend malloc, ipc legacy and single_handle, which say where memory comes from too", o.Upstream)
	}
	if strings.Contains(o.Upstream, ";") || o.Upstream != strings.TrimSpace(o.Upstream) {
		return fmt.Errorf("upstream %q: expected the name of an upstream without a semicolon, and without space at its ends", o.Upstream)
	}
	if o.SingleHandle && o.Backend != BackendVMM {
		return fmt.Errorf("single_handle true: needs backend vmm")
	}
	if o.CrossStream != CrossStreamWait && o.CrossStream != CrossStreamReady {
		return fmt.Errorf("cross_stream %q: choose wait or ready", o.CrossStream)
	}
	if o.CacheDecay > maxCacheDecay {
		return fmt.Errorf("cache_decay %v: must be at most %v", o.CacheDecay, maxCacheDecay)
	}
	if o.CacheLimit == 0 && o.CacheDecay != 0 && o.CacheDecay != DefaultCacheDecay {
		return fmt.Errorf("cache_decay: needs cache_limit")
	}
	const g = 2 << 20
	if o.ChunkMax < g || o.ChunkMax%g != 0 || o.ChunkMax > 1<<40 {
		return fmt.Errorf("chunk %d: must be a multiple of 2 MiB", o.ChunkMax)
	}
	if o.Stages&^(memory.AllStages|memory.StageFit) != 0 {
		return fmt.Errorf("stages %#x: unknown stages", uint16(o.Stages))
	}
	switch o.Spill {
	case SpillNone, SpillManaged, SpillPinned, SpillHostNUMA:
	default:
		return fmt.Errorf("spill %q: choose managed, pinned or host_numa", o.Spill)
	}
	if o.History < 0 || o.History > 1<<30 {
		return fmt.Errorf("history %d: must be a number of events up to %d", o.History, 1<<30)
	}
	if o.Magazine != SwitchOn && o.Magazine != SwitchOff {
		return fmt.Errorf("magazine %q: choose on or off", o.Magazine)
	}
	if o.Top != SwitchOn && o.Top != SwitchOff {
		return fmt.Errorf("top %q: choose on or off", o.Top)
	}
	if err := o.validateNode(); err != nil {
		return err
	}
	switch o.Stacks {
	case StacksOff, StacksNative, StacksPython, StacksAll:
	default:
		return fmt.Errorf("stacks %q: choose off, python, native or all", o.Stacks)
	}
	if o.StackSample != 0 && o.Stacks == StacksOff {
		return fmt.Errorf("stack_sample %d: needs stacks python, native or all", o.StackSample)
	}
	if strings.Contains(o.Report, ",") || o.Report != strings.TrimSpace(o.Report) {
		return fmt.Errorf("report %q: expected a folder whose name has no comma, and no space at its ends", o.Report)
	}
	if o.ReportChild && o.Report == "" {
		return fmt.Errorf("report_child true: needs report, the folder for the files")
	}
	return nil
}

// mostNodeLabel is the most bytes of Options.NodeLabel.
const mostNodeLabel = 64

func (o Options) validateNode() error {
	if o.Node != NodeAuto && o.Node != NodeOff && !path.IsAbs(o.Node) {
		return fmt.Errorf("node %q: choose auto, off or the absolute path of the broker's socket", o.Node)
	}
	if o.NodeWait < -1 || o.NodeWait > time.Minute {
		return fmt.Errorf("node_wait %v: expected a time of up to 1m", o.NodeWait)
	}
	if len(o.NodeLabel) > mostNodeLabel {
		return fmt.Errorf("node_label %q: expected at most %d bytes", o.NodeLabel, mostNodeLabel)
	}
	return nil
}
