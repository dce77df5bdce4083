package cistern

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/cistern-gpu/cistern/internal/units"
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

// Options configure an allocator. The zero value is the default of every option.
type Options struct {
	Driver      string      // what package cuda/open opens: "", "nvidia", "sim", "sim:80GiB"; not used by New
	Backend     Backend     // default vmm; malloc with IPCLegacy
	Limit       uint64      // bytes of physical memory per device, 0 is no limit
	ChunkMax    uint64      // largest chunk in bytes, a multiple of 2 MiB; default 32 MiB
	CrossStream CrossStream // default wait
	Ladder      Rungs       // rungs that are tried; default all
	// History is how many events of each device are kept from the start, 0 is off. ParseOptions makes it ReportHistory where
	// there is a report and the text says nothing of a history.
	History int
	IPC     IPC // default handles
	// SingleHandle makes every segment one physical handle, as registration with a network needs it, in place of
	// chunks that move.
	SingleHandle bool
	Spill        Spill // default none
	// CaptureReuse has a capture reuse memory that it used on several streams once it has joined them, at the price of
	// reading the graph's order at requests; off, that memory is reused after the capture. It is PyTorch's
	// graph_capture_record_stream_reuse.
	CaptureReuse bool
	// NoFront has the C library call the engine for every request and every free.
	NoFront bool
	// Stacks says of which frames the stacks of requests are made: "off" (the default), "native", "python",
	// "native+python". Blocks keep them then. The C library catches both kinds; for Go programs native is the engine's own
	// business (Allocator.CatchStacks), and there are no others.
	Stacks string
	// StackSample has only some requests caught: those of at least so many bytes always, smaller ones with a probability of
	// their size to that. 0 is all.
	StackSample uint64
	// Report is the folder in which the C library writes a file for each out-of-memory, "" is none. ReportChild has it start
	// cistern report on the files that stay.
	Report      string
	ReportChild bool
	// NoTop has the C library keep no page for cistern top.
	NoTop bool
}

// ReportHistory is how many events are kept where files are to be written of requests that fail, and nobody says how many: what
// would have met such a request is found out by replaying them. It is some 300,000 blocks that came and went, and at most 56 MB
// of the host's memory for a device.
const ReportHistory = 1_000_000

// What Options.Stacks can be.
const (
	StacksOff    = "off"
	StacksNative = "native"
	StacksPython = "python"
	StacksBoth   = "native+python"
)

func (o Options) withDefaults() Options {
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
	if o.Ladder == 0 {
		o.Ladder = AllRungs
	}
	if o.Stacks == "" {
		o.Stacks = StacksOff
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
		return fmt.Errorf("ipc legacy: needs memory from cuMemAlloc, which backend vmm and single_handle are not")
	}
	if o.SingleHandle && o.Backend != BackendVMM {
		return fmt.Errorf("single_handle true: needs backend vmm")
	}
	if o.CrossStream != CrossStreamWait && o.CrossStream != CrossStreamReady {
		return fmt.Errorf("cross_stream %q: choose wait or ready", o.CrossStream)
	}
	const g = 2 << 20
	if o.ChunkMax < g || o.ChunkMax%g != 0 || o.ChunkMax > 1<<40 {
		return fmt.Errorf("chunk %d: must be a multiple of 2 MiB", o.ChunkMax)
	}
	if o.Ladder&^(AllRungs|RungFit) != 0 {
		return fmt.Errorf("ladder %#x: unknown rungs", uint16(o.Ladder))
	}
	switch o.Spill {
	case SpillNone, SpillManaged, SpillPinned, SpillHostNUMA:
	default:
		return fmt.Errorf("spill %q: choose managed, pinned or host_numa", o.Spill)
	}
	if o.History < 0 || o.History > 1<<30 {
		return fmt.Errorf("history %d: must be a number of events up to %d", o.History, 1<<30)
	}
	switch o.Stacks {
	case StacksOff, StacksNative, StacksPython, StacksBoth:
	default:
		return fmt.Errorf("stacks %q: choose off, native, python or native+python", o.Stacks)
	}
	if o.StackSample != 0 && o.Stacks == StacksOff {
		return fmt.Errorf("stack_sample %d: needs stacks native, python or native+python", o.StackSample)
	}
	if strings.Contains(o.Report, ",") || o.Report != strings.TrimSpace(o.Report) {
		return fmt.Errorf("report %q: a folder whose name has no commas, and no spaces at its ends", o.Report)
	}
	if o.ReportChild && o.Report == "" {
		return fmt.Errorf("report_child true: needs report, the folder for the files")
	}
	return nil
}

// optionKeys are the keys of the text form, in the order in which String writes them.
var optionKeys = []string{"driver", "backend", "limit", "chunk", "cross_stream", "ladder", "history", "ipc",
	"single_handle", "capture_reuse", "front", "spill", "stacks", "stack_sample", "report", "report_child", "top"}

// ParseOptions reads the text form that CISTERN_CONF has: "key:value,key:value". An empty text is the defaults.
//
//	driver:sim:80GiB        which driver (package cuda/open)
//	backend:vmm|malloc
//	limit:70GiB             physical memory per device; 0 is no limit
//	chunk:32MiB             largest chunk
//	cross_stream:wait|ready
//	ladder:collect+remap+grow+lend+callback+spill    rungs to try ("all")
//	history:100000          events kept; with report 1000000 where it is not given
//	ipc:handles|legacy      legacy: memory that cudaIpcGetMemHandle accepts (backend:malloc)
//	single_handle:true      each segment is one physical handle
//	capture_reuse:true      a capture reuses memory of several streams that it has joined
//	front:on|off            off: the C library calls the engine for every request and every free
//	spill:managed|pinned|host_numa    where the default pool gets memory from when nothing else is left
//	stacks:off|native|python|native+python    where requests come from is caught, and blocks keep it
//	stack_sample:1MiB       of smaller requests only some, in proportion to their size; 0 is all
//	report:FOLDER           the C library writes a file there for each out-of-memory
//	report_child:true       and starts cistern report on those that stay
//	top:on|off              off: the C library keeps no page for cistern top
func ParseOptions(text string) (Options, error) {
	var o Options
	var history bool // it is given
	if strings.TrimSpace(text) == "" {
		return o.withDefaults(), nil
	}
	for _, item := range strings.Split(text, ",") {
		key, value, ok := strings.Cut(strings.TrimSpace(item), ":")
		if !ok {
			return o, fmt.Errorf("setting %q: expected key:value; the keys are %s", item, strings.Join(optionKeys, ", "))
		}
		var err error
		switch key {
		case "driver":
			o.Driver = value
		case "backend":
			o.Backend = Backend(value)
		case "limit":
			o.Limit, err = units.ParseBytes(value)
		case "chunk":
			if o.ChunkMax, err = units.ParseBytes(value); err == nil && o.ChunkMax == 0 {
				err = fmt.Errorf("must be a multiple of 2 MiB")
			}
		case "cross_stream":
			o.CrossStream = CrossStream(value)
		case "ladder":
			o.Ladder, err = ParseRungs(value)
		case "history":
			history = true
			o.History, err = strconv.Atoi(value)
		case "ipc":
			o.IPC = IPC(value)
		case "single_handle":
			if o.SingleHandle = value == "true"; value != "true" && value != "false" {
				err = fmt.Errorf("choose true or false")
			}
		case "capture_reuse":
			if o.CaptureReuse = value == "true"; value != "true" && value != "false" {
				err = fmt.Errorf("choose true or false")
			}
		case "front":
			if o.NoFront = value == "off"; value != "on" && value != "off" {
				err = fmt.Errorf("choose on or off")
			}
		case "spill":
			if o.Spill = Spill(value); value == "" {
				err = fmt.Errorf("choose managed, pinned or host_numa")
			}
		case "stacks":
			if o.Stacks = value; value == "" {
				err = fmt.Errorf("choose off, native, python or native+python")
			}
		case "stack_sample":
			o.StackSample, err = units.ParseBytes(value)
		case "report":
			if o.Report = value; value == "" {
				err = fmt.Errorf("expected a folder")
			}
		case "report_child":
			if o.ReportChild = value == "true"; value != "true" && value != "false" {
				err = fmt.Errorf("choose true or false")
			}
		case "top":
			if o.NoTop = value == "off"; value != "on" && value != "off" {
				err = fmt.Errorf("choose on or off")
			}
		default:
			return o, fmt.Errorf("unknown setting %q: the keys are %s", key, strings.Join(optionKeys, ", "))
		}
		if err != nil {
			return o, fmt.Errorf("setting %s:%s: %w", key, value, err)
		}
	}
	if o.Report != "" && !history {
		o.History = ReportHistory
	}
	o = o.withDefaults()
	return o, o.Validate()
}

// ParseRungs reads rungs by name, joined by "+"; "all" is all of them.
func ParseRungs(text string) (Rungs, error) {
	if text == "all" {
		return AllRungs, nil
	}
	r := RungFit
next:
	for _, w := range strings.Split(text, "+") {
		for i, n := range rungNames {
			if n == w {
				r |= 1 << i
				continue next
			}
		}
		return 0, fmt.Errorf("rung %q: choose among %s, or all", w, strings.Join(rungNames, ", "))
	}
	return r, nil
}

// String is the text form of the options that differ from the defaults.
func (o Options) String() string {
	o = o.withDefaults()
	d := Options{}.withDefaults()
	var items []string
	add := func(changed bool, key string, value any) {
		if changed {
			items = append(items, fmt.Sprintf("%s:%v", key, value))
		}
	}
	add(o.Driver != "", "driver", o.Driver)
	add(o.Backend != d.Backend, "backend", o.Backend)
	add(o.Limit != 0, "limit", o.Limit)
	add(o.ChunkMax != d.ChunkMax, "chunk", o.ChunkMax)
	add(o.CrossStream != d.CrossStream, "cross_stream", o.CrossStream)
	add(o.Ladder|RungFit != d.Ladder|RungFit, "ladder", o.Ladder)
	implied := 0
	if o.Report != "" {
		implied = ReportHistory
	}
	add(o.History != implied, "history", o.History)
	add(o.IPC != d.IPC, "ipc", o.IPC)
	add(o.SingleHandle, "single_handle", o.SingleHandle)
	add(o.CaptureReuse, "capture_reuse", "true")
	add(o.NoFront, "front", "off")
	add(o.Spill != SpillNone, "spill", o.Spill)
	add(o.Stacks != d.Stacks, "stacks", o.Stacks)
	add(o.StackSample != 0, "stack_sample", o.StackSample)
	add(o.Report != "", "report", o.Report)
	add(o.ReportChild, "report_child", o.ReportChild)
	add(o.NoTop, "top", "off")
	return strings.Join(items, ",")
}
