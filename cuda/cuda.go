// Package cuda is the GPU driver as Cistern sees it: one Go interface, Driver, over the calls that the
// engine uses, with typed handles and errors that carry CUDA's own names.
//
// Two implementations exist. cuda/nvidia binds libcuda.so.1 at run time; cuda/sim is a GPU that exists in memory.
// Neither holds policy: a Driver calls, checks and converts, and nothing else. A call enters this interface
// with its first user.
//
// # What every implementation promises
//
//   - It leaves the calling thread's current CUDA context as it found it.
//   - Every call is made in relaxed capture mode, and the thread's own mode is restored afterwards, so that no call
//     invalidates a stream capture that some thread has under way. Calls that are forbidden even then (synchronising
//     or querying a capturing stream) are the caller's to avoid; StreamCapture tells.
//   - Every call may be made from any goroutine, concurrently.
//   - A call that fails has no effect, and its error is an *Error that names the call and CUDA's code.
package cuda

import "time"

// Device is the ordinal of a GPU in this process, as CUDA numbers them (CUDA_VISIBLE_DEVICES applied).
type Device int

// Ptr is a device address (CUdeviceptr). Zero is the null pointer.
type Ptr uint64

// Handle is a physical allocation made by MemCreate (CUmemGenericAllocationHandle), a "chunk" in Cistern's words.
type Handle uint64

// Event is a CUevent, created without timing.
type Event uintptr

// Stream is a CUstream as the caller passed it. It is a handle, and handles are recycled: use StreamID to know a
// stream again.
type Stream uintptr

// The three streams that have no handle of their own (cuda.h: CU_STREAM_LEGACY, CU_STREAM_PER_THREAD).
const (
	StreamNull      Stream = 0 // the legacy default stream, unless the caller was compiled for per-thread streams
	StreamLegacy    Stream = 1
	StreamPerThread Stream = 2 // another stream in every thread
)

// StreamID identifies a stream for the life of the process: ids are never reused within a context
// (cuStreamGetCtx, cuStreamGetId).
type StreamID struct {
	Context uint64
	ID      uint64
}

// CaptureStatus is what cuStreamGetCaptureInfo reports.
type CaptureStatus int

const (
	CaptureNone        CaptureStatus = 0
	CaptureActive      CaptureStatus = 1
	CaptureInvalidated CaptureStatus = 2
)

// GraphNode is a CUgraphNode: a piece of work in a graph. A node of a graph that is being captured is known while that
// capture is under way.
type GraphNode uintptr

// HandleType is a set of ways in which a chunk can be exported to another process (CUmemAllocationHandleType).
// It is fixed when the chunk is created.
type HandleType uint32

const (
	HandleNone   HandleType = 0
	HandlePosix  HandleType = 1 // a POSIX file descriptor
	HandleFabric HandleType = 8 // a fabric handle, for multi-node NVLink
)

// IpcHandle names memory from MemAlloc in other processes (CUipcMemHandle).
type IpcHandle [64]byte

// Location says where physical memory lives.
type Location uint8

const (
	LocationDevice   Location = iota // the GPU's own memory
	LocationHostNUMA                 // host memory of one NUMA node (extended GPU memory)
)

// PoolPtr names memory of an exported pool in other processes (CUmemPoolPtrExportData).
type PoolPtr [64]byte

// EventHandle names an event from EventCreateShared in other processes (CUipcEventHandle).
type EventHandle [64]byte

// MemProp describes a chunk to MemCreate. Two chunks with equal MemProp are interchangeable.
type MemProp struct {
	Device   Device
	Location Location
	NUMANode int // for LocationHostNUMA
	Handles  HandleType
	RDMA     bool // gpuDirectRDMACapable; only where DeviceInfo.RDMA
}

// DeviceInfo is what is known of a device without creating a context on it.
type DeviceInfo struct {
	Name        string
	UUID        [16]byte
	TotalBytes  uint64     // cuDeviceTotalMem
	Granularity uint64     // bytes; the minimum granularity of MemCreate and MemMap, 2 MiB on every GPU so far
	VMM         bool       // virtual memory management is supported
	Handles     HandleType // handle types that a real MemCreate succeeded with or the attributes promise; see Driver.ProbeHandles
	RDMA        bool       // GPUDirect RDMA with virtual memory management
	Multiproc   int        // streaming multiprocessors
	Managed     bool       // managed memory that host and device may use at the same time
	Pools       bool       // stream-ordered memory pools
	PoolHandles HandleType // handle types that a memory pool can be made with
	HostNUMA    int        // the NUMA node of the host nearest to the device, -1 where the driver names none
	HostVMM     bool       // MemCreate with LocationHostNUMA is supported
	LazyHost    bool       // HostAlloc finds no pages: mapping and touching memory first, and HostRegister, would be no faster
}

// MemPool is a pool of stream-ordered memory (CUmemoryPool).
type MemPool uintptr

// MemPoolProps describe a pool to MemPoolCreate. Its memory is the device's.
type MemPoolProps struct {
	Device  Device
	Handles HandleType // in what way it can be exported; one type, or none
	MaxSize uint64     // bytes it may hold at most; 0 is the driver's own bound
}

// MemPoolAttr is an attribute of a memory pool (CUmemPool_attribute).
type MemPoolAttr int

const (
	MemPoolReuseFollowEventDependencies MemPoolAttr = 1 // 0 or 1
	MemPoolReuseAllowOpportunistic      MemPoolAttr = 2 // 0 or 1
	MemPoolReuseAllowInternal           MemPoolAttr = 3 // 0 or 1
	MemPoolReleaseThreshold             MemPoolAttr = 4 // bytes that are kept when streams or events are synchronised
	MemPoolReservedCurrent              MemPoolAttr = 5 // bytes; read only
	MemPoolReservedHigh                 MemPoolAttr = 6 // bytes; setting it to 0 resets it
	MemPoolUsedCurrent                  MemPoolAttr = 7 // bytes; read only
	MemPoolUsedHigh                     MemPoolAttr = 8 // bytes; setting it to 0 resets it
)

// Driver is the part of the CUDA driver that Cistern uses. The comment of each method names the driver call behind
// it; errors carry that name.
type Driver interface {
	// Name is "nvidia" or "sim".
	Name() string
	// Version is the driver's CUDA version as cuDriverGetVersion gives it: 13000 for 13.0.
	Version() int
	// Now is the host's clock, from any point on: real or, where the device is simulated, that of the simulation.
	Now() time.Duration
	// DeviceCount is the number of visible devices (cuDeviceGetCount).
	DeviceCount() (int, error)
	// DeviceInfo describes a device; no context is created (cuDeviceGet, cuDeviceGetAttribute, cuDeviceTotalMem).
	DeviceInfo(d Device) (DeviceInfo, error)
	// ProbeHandles finds, by really creating and releasing a chunk of the minimum granularity, which of FABRIC and
	// POSIX handles the device grants, most capable first: FABRIC|POSIX, POSIX, none.
	ProbeHandles(d Device) (HandleType, error)
	// ContextActive reports whether the device's primary context exists (cuDevicePrimaryCtxGetState). Asking
	// creates nothing.
	ContextActive(d Device) (bool, error)
	// RetainContext makes the primary context exist until the process ends (cuDevicePrimaryCtxRetain). The first
	// call for a device can take a second and hundreds of megabytes; it is made when memory is first wanted there.
	RetainContext(d Device) error
	// CanAccessPeer reports whether d can use the memory of peer directly (cuDeviceCanAccessPeer). EnablePeerAccess lets
	// work of d's primary context use what MemAlloc gives out on peer, before or after (cuCtxEnablePeerAccess); mapped
	// memory is MemSetAccess's business. Both contexts must exist. A second time it fails with
	// ErrPeerAccessAlreadyEnabled.
	CanAccessPeer(d, peer Device) (bool, error)
	EnablePeerAccess(d, peer Device) error
	// MemInfo is the device's free and total memory in bytes (cuMemGetInfo). Without a primary context it fails
	// with ErrInvalidContext rather than create one.
	MemInfo(d Device) (free, total uint64, err error)

	// MemAlloc and MemFree are cuMemAlloc and cuMemFree on the device's primary context. MemFree waits, implicitly,
	// for all work of the context; nothing may rely on that.
	MemAlloc(d Device, size uint64) (Ptr, error)
	MemFree(d Device, p Ptr) error

	// AddressReserve reserves a range of addresses, size and align in bytes, multiples of the granularity; hint 0
	// leaves the place to the driver (cuMemAddressReserve). AddressFree gives a whole reservation back.
	AddressReserve(size, align uint64, hint Ptr) (Ptr, error)
	AddressFree(p Ptr, size uint64) error
	// MemCreate makes physical memory of size bytes, a multiple of the granularity (cuMemCreate). MemRelease drops
	// the caller's reference: the memory goes with its last mapping.
	MemCreate(size uint64, prop MemProp) (Handle, error)
	MemRelease(h Handle) error
	// MemMap maps the whole of a chunk (offset 0) at p; a chunk may be mapped at several addresses at once. The
	// range is unusable until MemSetAccess. MemUnmap undoes whole mappings: [p, p+size) must be made of them. It
	// does not wait for the GPU: the caller must know that queued work no longer uses the range.
	MemMap(p Ptr, size uint64, h Handle) error
	MemUnmap(p Ptr, size uint64) error
	// MemSetAccess gives every device in devs read-write access to [p, p+size), which must be mapped throughout.
	MemSetAccess(p Ptr, size uint64, devs []Device) error
	// MemSetReadOnly gives every device in devs access that only reads to [p, p+size), in place of the access that it has
	// (cuMemSetAccess, CU_MEM_ACCESS_FLAGS_PROT_READ). A write by work of such a device breaks its context.
	MemSetReadOnly(p Ptr, size uint64, devs []Device) error

	// MemExport makes a file descriptor of a chunk that was created with HandlePosix (cuMemExportToShareableHandle).
	// It keeps the memory while it is open; it is the caller's, and closed on exec.
	MemExport(h Handle) (fd int, err error)
	// MemImport is a chunk of this process's own for a descriptor that another process, or this one, exported
	// (cuMemImportFromShareableHandle). It is mapped and released like one from MemCreate, and takes no memory of its
	// own. The descriptor stays the caller's and is needed no longer. dev is the device that the memory lies on, or
	// that it is wanted for where that one is not visible here.
	MemImport(dev Device, fd int) (Handle, error)
	// IpcExport is a handle for memory from MemAlloc that starts at p (cuIpcGetMemHandle). IpcOpen maps it in another
	// process for the device (cuIpcOpenMemHandle, peer access enabled where it takes that) and gives its first
	// address; opened twice it is the same address, to be closed twice. The exporting process cannot open it.
	IpcExport(d Device, p Ptr) (IpcHandle, error)
	IpcOpen(d Device, h IpcHandle) (Ptr, error)
	IpcClose(d Device, p Ptr) error

	// StreamID identifies a stream (cuStreamGetCtx, cuStreamGetId). StreamNull and StreamLegacy are those of d's
	// primary context; StreamPerThread is the calling thread's. It is legal on a stream that is being captured, but may
	// give it another id until the capture ends: CUDA has no way to ask that leaves the capture alone.
	StreamID(d Device, s Stream) (StreamID, error)
	// StreamCapture reports whether the stream is being captured, and into which capture
	// (cuStreamGetCaptureInfo). Legal on any stream; on the legacy stream, while a stream that blocks with it is being
	// captured, it fails with ErrStreamCaptureImplicit, which harms nothing but says that recording, waiting or
	// synchronising there would invalidate that capture.
	StreamCapture(d Device, s Stream) (CaptureStatus, uint64, error)
	// StreamCaptureNodes names the capture that s is in, as StreamCapture does, and the nodes that whatever is captured on s
	// next comes after (cuStreamGetCaptureInfo with dependencies); 0 and none where no capture is active. Like
	// GraphNodeDependencies it fails with ErrLossyQuery where one piece of work may begin before the other is over, as after a
	// programmatic launch.
	StreamCaptureNodes(d Device, s Stream) (capture uint64, after []GraphNode, err error)
	// GraphNodeDependencies are the nodes that a node comes after, of which others may be left out that come before these
	// (cuGraphNodeGetDependencies).
	GraphNodeDependencies(d Device, n GraphNode) ([]GraphNode, error)
	// StreamWaitEvent makes later work of s wait for the event (cuStreamWaitEvent).
	StreamWaitEvent(d Device, s Stream, e Event) error
	// StreamSynchronize waits until all work of s is done (cuStreamSynchronize).
	StreamSynchronize(d Device, s Stream) error
	// ContextSynchronize waits until all work of the device's primary context is done (cuCtxSynchronize). While any
	// stream of the context is being captured it fails with ErrStreamCaptureUnsupported and invalidates that capture,
	// in relaxed mode too (measured on an H200, driver 580): the caller must know.
	ContextSynchronize(d Device) error

	// EventCreate makes an event without timing (cuEventCreate, CU_EVENT_DISABLE_TIMING).
	EventCreate(d Device) (Event, error)
	// EventCreateShared makes an event that other processes may open, without timing (cuEventCreate,
	// CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING). EventExport names it (cuIpcGetEventHandle) and EventOpen opens it in
	// another process (cuIpcOpenEventHandle), which may record it, wait for it and query it, and which destroys its own.
	// The process that made it destroys it last. A wait is for the record that was last when the wait was queued: whoever
	// waits must know, by other means, that the record was made.
	EventCreateShared(d Device) (Event, error)
	EventExport(d Device, e Event) (EventHandle, error)
	EventOpen(d Device, h EventHandle) (Event, error)
	EventDestroy(d Device, e Event) error
	// EventRecord marks the work queued on s so far (cuEventRecord). Recording on a destroyed stream is undefined.
	EventRecord(d Device, e Event, s Stream) error
	// EventQuery reports whether the recorded work is done (cuEventQuery); "not ready" is false, not an error.
	EventQuery(d Device, e Event) (bool, error)
	// EventSynchronize waits for the recorded work (cuEventSynchronize).
	EventSynchronize(d Device, e Event) error

	// StreamCreate makes a stream (cuStreamCreate); one that is not blocking does not order itself with the legacy
	// stream. StreamBlocking tells which it is (cuStreamGetFlags); the legacy and the per-thread stream are blocking. A
	// stream that is being captured is not asked, for fear of the capture: ErrStreamCaptureUnsupported, without harm.
	StreamCreate(d Device, blocking bool) (Stream, error)
	StreamDestroy(d Device, s Stream) error
	StreamBlocking(d Device, s Stream) (bool, error)

	// MemcpyAsync copies between any two addresses that CUDA knows, host memory included (cuMemcpyAsync). Host memory
	// that is not page-locked makes it slow, and it may then wait. On a stream that is being captured it becomes a node of
	// the graph, like prefetching, which is the caller's to avoid.
	MemcpyAsync(d Device, dst, src Ptr, size uint64, s Stream) error

	// HostAlloc is page-locked host memory that the host and work of every device use at one address (cuMemHostAlloc,
	// portable and device-mapped). HostRegister page-locks memory that the process has already, in whole pages
	// (cuMemHostRegister, portable), which is several times faster where many threads have touched it before. A copy
	// must not cross from one registration into another.
	HostAlloc(d Device, size uint64) (Ptr, error)
	HostFree(d Device, p Ptr) error
	HostRegister(d Device, p Ptr, size uint64) error
	HostUnregister(d Device, p Ptr) error

	// ManagedAlloc is memory that host and devices use at one address and that migrates between them
	// (cuMemAllocManaged, global). MemFree frees it. MemPrefetch has it moved to the device, or with LocationHostNUMA to
	// the host, in the stream's order (cuMemPrefetchAsync_v2).
	ManagedAlloc(d Device, size uint64) (Ptr, error)
	MemPrefetch(d Device, p Ptr, size uint64, to Location, s Stream) error

	// MemSetHostAccess lets the host read and write mapped memory that lies on its NUMA node (cuMemSetAccess).
	MemSetHostAccess(p Ptr, size uint64, node int) error

	// Stream-ordered memory. MemPoolCreate makes a pool and MemPoolDefault finds the device's own (cuMemPoolCreate,
	// cuDeviceGetDefaultMemPool). MemPoolTrim gives memory back until keep bytes are held. MemPoolSetAccess opens the
	// pool's memory, all of it, to the devices. MemAllocAsync gets memory from a pool in the stream's order, MemFreeAsync
	// gives it back in the stream's order (cuMemAllocFromPoolAsync, cuMemFreeAsync); on a stream that is being captured
	// they become nodes of the graph, which is the caller's to avoid.
	MemPoolCreate(props MemPoolProps) (MemPool, error)
	MemPoolDestroy(d Device, pool MemPool) error
	MemPoolDefault(d Device) (MemPool, error)
	MemPoolGet(d Device, pool MemPool, attr MemPoolAttr) (uint64, error)
	MemPoolSet(d Device, pool MemPool, attr MemPoolAttr, value uint64) error
	MemPoolTrim(d Device, pool MemPool, keep uint64) error
	MemPoolSetAccess(d Device, pool MemPool, devs []Device) error
	MemAllocAsync(d Device, size uint64, pool MemPool, s Stream) (Ptr, error)
	MemFreeAsync(d Device, p Ptr, s Stream) error

	// Pools for other processes. MemPoolExport makes a file descriptor of a pool that was created with HandlePosix
	// (cuMemPoolExportToShareableHandle); it is the caller's, and closed on exec. MemPoolImport is a pool of this process's
	// for it (cuMemPoolImportFromShareableHandle): nothing can be allocated from it, and its memory is accessible to the
	// device that it lies on, whatever the exporter opened it to, and to those of MemPoolSetAccess. MemPoolDestroy drops it.
	// The descriptor stays the caller's and is needed no longer. d is any device with a context.
	MemPoolExport(d Device, pool MemPool) (fd int, err error)
	MemPoolImport(d Device, fd int) (MemPool, error)
	// MemPoolExportPtr names memory from MemAllocAsync that starts at p, and MemPoolImportPtr maps it in a process that has
	// imported the pool (cuMemPoolExportPointer, cuMemPoolImportPointer). Importing takes no memory. There it is used only after the
	// allocation is complete, and freed by MemFreeAsync or MemFree before the exporter frees it: the exporter's free comes
	// after the importer's by events, or the importer's is complete.
	MemPoolExportPtr(d Device, p Ptr) (PoolPtr, error)
	MemPoolImportPtr(d Device, pool MemPool, h PoolPtr) (Ptr, error)
}
