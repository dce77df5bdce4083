package memory

// Value is one statistic: now, at its highest since the start or ResetPeaks, and everything added and taken away since the
// start or ResetAccumulated.
type Value struct {
	Current, Peak, Added, Removed int64
}

// Grouped is a statistic of all blocks, and of the two size classes: small is what is cut for requests of up to 256 KiB
// (PyTorch draws its line at 1 MiB).
type Grouped struct {
	All, Small, Large Value
}

// Stats are the statistics that PyTorch reports, exact at the moment of the call. Reserved + Paused = ActiveBytes +
// InactiveBytes.
type Stats struct {
	Allocations   Grouped // blocks handed out
	Active        Grouped // blocks handed out, or given back and still used by other streams
	Inactive      Grouped // free blocks and spare chunks (PyTorch: inactive_split)
	Requested     Grouped // bytes asked for
	Allocated     Grouped // bytes handed out, rounded
	ActiveBytes   Grouped
	InactiveBytes Grouped
	Segments      Grouped // chunks and segments held from the driver; spare ones count as large
	Reserved      Grouped // bytes of physical memory held, likewise
	Paused        Grouped // bytes of active blocks whose memory is paused
	SpareBytes    uint64  // bytes of chunks that are mapped nowhere
	StaleMappings int     // old mappings that wait for the GPU; they cost addresses, not memory
	AddressBytes  uint64  // address space reserved
	ImportedBytes uint64  // memory of other processes that is mapped: exports, and named objects, also while they are built. In no other figure
	Counters
}

// Counters count what happened since the start or ResetAccumulated.
type Counters struct {
	Remaps       int64 // chunks moved
	DeviceAllocs int64 // chunks or segments got from the driver
	DeviceFrees  int64
	Retries      int64 // requests met only by taking from other pools, by giving cached memory back, by a callback or by other processes
	OOMs         int64 // requests that failed
	Borrows      int64 // requests met with a free block of another stream's
	StreamSyncs  int64 // waits of a host thread for the GPU

	ByFit, ByCollect, ByRemap, ByGrow, ByLend, ByCallback, ByNode, BySpill int64 // requests on the slow path, by the stage that met them
}

// PoolStats is what one pool holds, in bytes.
type PoolStats struct {
	Reserved, PeakReserved uint64 // physical memory; the peak is since the start or Device.ResetPeaks
	Requested, Allocated   uint64 // of blocks handed out: asked for, and rounded
	Cached                 uint64 // free
	Spilled                uint64 // of Allocated: from the pool's Spill, which the limit does not count
	Paused                 uint64 // of blocks handed out, or waiting for other streams: without physical memory
	Limit                  uint64 // 0 is none of its own
	Blocks                 int64  // handed out
}

// Gauges are the figures of a device that a reader watches: bytes at one moment, and counts since the start, which
// ResetAccumulated does not change.
type Gauges struct {
	Reserved  uint64 // physical memory held
	Allocated uint64 // handed out, rounded
	Active    uint64 // the same, and what was given back and other streams still use
	Cached    uint64 // inactive: Reserved + Paused = Active + Cached
	Paused    uint64 // of Active: without physical memory
	Pinned    uint64 // of Cached: in pools that captured graphs use
	// Recent is at least the most that was active with physical memory in the last 250 ms, 500 ms, 1 s, 2 s and 4 s.
	Recent [5]uint64

	PeakReserved, PeakAllocated, PeakActive, PeakCached, PeakPaused uint64 // since the start or ResetPeaks

	Limit       uint64 // 0: none
	DriverCalls uint64 // made by the engine for the device
	Retries     uint64 // as in Counters
	OOMs        uint64
}
