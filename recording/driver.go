package recording

// A driver trace is what `cistern trace` saw of a program: every call of the driver that allocates or frees. In Cistern's
// format it stands beside the events: blocks that readers of events alone pass over. The events are the allocations of
// device memory as requests, one Trace for each process and device, so that everything that reads traces reads these.

// Driver is the calls of a traced program.
type Driver struct {
	// WallNS is what to add to a call's time for the time of day, in ns since 1970.
	WallNS    int64
	Program   []string // and its arguments
	Processes []Process
	GPUs      []GPU // those that are known, each number once
	Untraced  []Untraced
	Calls     []Call
	Stacks    []Stack // Stacks[0] is the empty stack; Call.Stack indexes it
	Frames    []Frame
	End       DriverEnd
	Ended     bool // End is known: the trace was not cut off
}

// Process is one that loaded the driver.
type Process struct {
	PID, Parent uint32
	StartNS     uint64 // when it was first seen
	EndNS       uint64 // when it was seen to have ended, and with it what it held; 0 where that is not known
	Program     string // the file
}

// GPU is a device of a driver trace. The processes of a program may number the devices differently (CUDA_VISIBLE_DEVICES): in the
// trace a number means the same device for all.
type GPU struct {
	Number int16 // Call.Device
	UUID   [16]byte
	Name   string
	Total  uint64 // bytes of its memory
}

// Untraced is a process that the program started, or one of those that it started, and that used the driver without being
// seen: none of its calls is here.
type Untraced struct {
	PID     uint32 `json:"pid"`
	Program string `json:"program"` // the file, or its name alone
	Why     string `json:"why"`     // the end of a sentence
}

// MostUntraced is how many of them a file names.
const MostUntraced = 1000

// Call is one call of the driver.
type Call struct {
	TimeNS, TookNS uint64 // on the machine's monotonic clock
	Addr, Size     uint64
	Stream         uint64 // handle
	Handle         uint64 // of physical memory or an array; a context's
	Pool           uint64 // handle
	// Extra is, for allocations from pools and trims, what the pool held from the driver after it; for launches of graphs,
	// what the device's graphs then held; of memory that the device did not have, what was free; of what a context got,
	// that context; of cuMemCreate, the kind of location; of cuDevicePrimaryCtx calls, whether the context is gone; of a
	// piece of cuMemMapArrayAsync, 1 where it is mapped, 0 where it is unmapped.
	Extra   uint64
	Process uint32 // index into Driver.Processes
	Thread  uint32 // the kernel's number
	Stack   uint32
	Result  int32 // CUresult
	Device  int16 // the trace's number; -1 where there was none
	Kind    CallKind
}

// StackFrames are the frames of a stack, innermost first.
func (d *Driver) StackFrames(stack uint32) []Frame {
	out := make([]Frame, 0, len(d.Stacks[stack]))
	for _, f := range d.Stacks[stack] {
		out = append(out, d.Frames[f])
	}
	return out
}

// Failed reports whether the call returned an error.
func (c *Call) Failed() bool { return c.Result != 0 }

// DriverEnd is what is known at the end only.
type DriverEnd struct {
	Dropped  uint64   `json:"dropped"`     // calls that the recorder had no room for
	Lost     uint64   `json:"lost"`        // calls whose record was not finished: their process was killed then
	Unknown  []string `json:"unknown"`     // ways to functions that could not be followed
	Status   int      `json:"status"`      // exit status of the program, or 128 and the signal that ended it
	Finished uint64   `json:"finished_ns"` // when it had ended
	Spent    uint64   `json:"spent_ns"`    // for how long recording kept the program's threads, of all together; 0 where it is not known
}

// VirtualBase is above all addresses: physical memory and arrays stand from there on in the order in which they were got.
const VirtualBase = 1 << 60

// CallKind is a function of the driver.
type CallKind uint8

// The functions, numbered as in audit/audit.h.
const (
	CallNone CallKind = iota
	MemAlloc
	MemAllocPitch
	MemAllocManaged
	MemAllocHost
	MemHostAlloc
	MemHostRegister
	MemHostUnregister
	MemFree
	MemFreeHost
	MemAllocAsync
	MemAllocFromPoolAsync
	MemFreeAsync
	MemPoolCreate
	MemPoolDestroy
	MemPoolTrimTo
	MemPoolImportPointer
	MemAddressReserve
	MemAddressFree
	MemCreate
	MemRelease
	MemMap
	MemUnmap
	MemSetAccess
	MemRetainAllocationHandle
	MemExportToShareableHandle
	MemImportFromShareableHandle
	IpcGetMemHandle
	IpcOpenMemHandle
	IpcCloseMemHandle
	ArrayCreate
	Array3DCreate
	ArrayDestroy
	MipmappedArrayCreate
	MipmappedArrayDestroy
	ImportExternalMemory
	DestroyExternalMemory
	DevicePrimaryCtxReset
	DevicePrimaryCtxRelease
	CtxDestroy
	GraphAddMemAllocNode // also an allocation on a stream that is being captured
	GraphLaunch
	GraphUpload
	DeviceGraphMemTrim
	MemMapArrayAsync // one for each piece of its list: Pool is the array, Addr says where in it
	NumCallKinds
)

var callNames = [NumCallKinds]string{"none", "cuMemAlloc", "cuMemAllocPitch", "cuMemAllocManaged", "cuMemAllocHost",
	"cuMemHostAlloc", "cuMemHostRegister", "cuMemHostUnregister", "cuMemFree", "cuMemFreeHost", "cuMemAllocAsync",
	"cuMemAllocFromPoolAsync", "cuMemFreeAsync", "cuMemPoolCreate", "cuMemPoolDestroy", "cuMemPoolTrimTo",
	"cuMemPoolImportPointer", "cuMemAddressReserve", "cuMemAddressFree", "cuMemCreate", "cuMemRelease", "cuMemMap",
	"cuMemUnmap", "cuMemSetAccess", "cuMemRetainAllocationHandle", "cuMemExportToShareableHandle",
	"cuMemImportFromShareableHandle", "cuIpcGetMemHandle", "cuIpcOpenMemHandle", "cuIpcCloseMemHandle", "cuArrayCreate",
	"cuArray3DCreate", "cuArrayDestroy", "cuMipmappedArrayCreate", "cuMipmappedArrayDestroy", "cuImportExternalMemory",
	"cuDestroyExternalMemory", "cuDevicePrimaryCtxReset", "cuDevicePrimaryCtxRelease", "cuCtxDestroy",
	"cuGraphAddMemAllocNode", "cuGraphLaunch", "cuGraphUpload", "cuDeviceGraphMemTrim", "cuMemMapArrayAsync"}

// String is the function's name in CUDA, without version.
func (k CallKind) String() string {
	if k < NumCallKinds {
		return callNames[k]
	}
	return "invalid"
}

// MayWait reports whether the function may wait for the GPU before it returns.
func (k CallKind) MayWait() bool {
	switch k {
	case MemFree, MemFreeHost, MemHostUnregister, MemPoolDestroy, MemPoolTrimTo, MemUnmap, IpcCloseMemHandle, ArrayDestroy,
		MipmappedArrayDestroy, DestroyExternalMemory, DevicePrimaryCtxReset, DevicePrimaryCtxRelease, CtxDestroy, DeviceGraphMemTrim:
		return true
	}
	return false
}
