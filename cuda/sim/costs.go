package sim

import (
	_ "embed"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
)

// h200CSV is what driver calls cost on one NVIDIA H200 with driver 580: medians in microseconds, the virtual memory
// columns for one handle of that size.
//
//go:embed h200_driver_costs.csv
var h200CSV string

// Costs is what driver calls take of the host's time, apart from waiting. Fields are calls whose cost does not depend
// on size; curves are read through the methods. A Costs is read-only once shared.
type Costs struct {
	EventRecord, EventQuery, EventSynchronize, EventCreate, EventDestroy time.Duration
	StreamWaitEvent, StreamSynchronize, CtxSynchronize                   time.Duration
	StreamGetID, StreamGetCaptureInfo, MemGetInfo, Attribute             time.Duration
	ManagedAlloc, MemExport, ImportRelease                               time.Duration

	// MapAfresh is what cuMemMap costs beyond the table, whose figure is of mapping at the same addresses again and
	// again. UnmapShared is what cuMemUnmap costs more while its chunk is mapped elsewhere as well, as it is when
	// memory has moved.
	MapAfresh, UnmapShared time.Duration

	curves [numCurves]curve
}

const (
	curveMalloc = iota
	curveFree
	curveMallocAsync
	curveFreeAsync
	curveCreate
	curveMap
	curveAccess // one handle, one call
	curveUnmap
	curveRelease
	curveReserve
	curveAddressFree
	curveAccessMany // per handle, where one call covers several
	curveHostAlloc
	curveImport
	numCurves
)

// curveColumns are the columns of the table, in the order of the curves.
var curveColumns = [...]string{
	"cudaMalloc_us", "cudaFree_us", "cudaMallocAsync_us", "cudaFreeAsync_us", "cuMemCreate_us", "cuMemMap_us",
	"cuMemSetAccess_us", "cuMemUnmap_us", "cuMemRelease_us", "cuMemAddressReserve_us", "cuMemAddressFree_us",
}

// point is one measurement.
type point struct {
	size uint64  // bytes
	ns   float64 // cost
}

// curve is a cost over size: straight lines between the measured points (a fixed part and a part per byte, as the
// driver's work is), level below the first, and on along the last line above.
type curve []point

func (c curve) at(size uint64) time.Duration {
	if size <= c[0].size {
		return time.Duration(math.Round(c[0].ns))
	}
	i := 1
	for i < len(c)-1 && size > c[i].size {
		i++
	}
	a, b := c[i-1], c[i]
	ns := a.ns + (b.ns-a.ns)*(float64(size)-float64(a.size))/(float64(b.size)-float64(a.size))
	return time.Duration(math.Round(ns))
}

const mib = 1 << 20

var defaultCosts = sync.OnceValue(func() *Costs {
	c, err := parseCosts(h200CSV)
	if err != nil {
		panic(err) // the table is part of the program
	}
	// Measured on the same machine: record 0.145 us, query 0.106 us, wait 0.137 us, memory info 3.0 us.
	c.EventRecord, c.EventQuery, c.StreamWaitEvent = 145, 106, 137
	c.MemGetInfo = 3000
	// Medians on another H200 with driver 580, the clock's own 31 ns taken off: synchronisation with nothing to wait
	// for; cuStreamGetCtx and cuStreamGetId together.
	c.EventCreate, c.EventDestroy = 95, 55
	c.EventSynchronize, c.StreamSynchronize, c.CtxSynchronize = 130, 160, 250
	c.StreamGetID, c.StreamGetCaptureInfo, c.Attribute = 16, 13, 20
	c.ManagedAlloc = 70 * 1000
	// Medians of lab probe on a third one, at the addresses an allocator would use: cuMemMap 3.7 us where the table
	// has 0.4, cuMemUnmap 14.3 us where it has 11.3.
	c.MapAfresh, c.UnmapShared = 3300, 3000
	// Medians on an H200 with driver 580.159.04: an export took 33 to 37 us at 2, 32 and 256 MiB, also beside 19,900 open
	// descriptors; an import 23 us at 2 MiB and 32 us at 32 and 256 MiB; the release of an import 8 to 15 us. The first and the
	// last are the middle of their range here.
	c.MemExport, c.ImportRelease = 35*1000, 12*1000
	c.curves[curveImport] = curve{{2 * mib, 23e3}, {32 * mib, 32e3}, {256 * mib, 32e3}}
	c.curves[curveHostAlloc] = curve{{2 * mib, 1.06e6}, {64 * mib, 22e6}, {256 * mib, 88e6}, {2048 * mib, 916e6}}
	// One cuMemSetAccess over 1 GiB made of handles of one size took 10791, 1130, 315, 121 and 56 us.
	c.curves[curveAccessMany] = curve{
		{2 * mib, 10791e3 / 512}, {16 * mib, 1130e3 / 64}, {64 * mib, 315e3 / 16}, {256 * mib, 121e3 / 4}, {1024 * mib, 56e3},
	}
	return c
})

// DefaultCosts is the H200's, shared: do not modify it.
func DefaultCosts() *Costs { return defaultCosts() }

// parseCosts reads the table: a header, then a size in bytes and a cost in microseconds for each column.
func parseCosts(text string) (*Costs, error) {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	header := strings.Split(lines[0], ",")
	c := &Costs{}
	for i, name := range curveColumns {
		col := slices.Index(header, name)
		if col < 0 {
			return nil, fmt.Errorf("driver cost table: no column %s", name)
		}
		for n, line := range lines[1:] {
			f := strings.Split(strings.TrimSpace(line), ",")
			if len(f) != len(header) {
				return nil, fmt.Errorf("driver cost table: line %d: expected %d columns, got %d", n+2, len(header), len(f))
			}
			size, err := strconv.ParseUint(f[0], 10, 64)
			if err != nil {
				return nil, fmt.Errorf("driver cost table: line %d: %w", n+2, err)
			}
			us, err := strconv.ParseFloat(f[col], 64)
			if err != nil {
				return nil, fmt.Errorf("driver cost table: line %d: %w", n+2, err)
			}
			c.curves[i] = append(c.curves[i], point{size, us * 1000})
		}
	}
	return c, nil
}

// MemAlloc is cuMemAlloc (measured through cudaMalloc) of size bytes.
func (c *Costs) MemAlloc(size uint64) time.Duration { return c.curves[curveMalloc].at(size) }

// MemFree is cuMemFree of an allocation of size bytes, waiting excluded.
func (c *Costs) MemFree(size uint64) time.Duration { return c.curves[curveFree].at(size) }

// MemCreateFails is cuMemCreate of more than the device's free bytes. The driver takes what there is before it gives
// up: on an H200 43 us with nothing free, 46 us with 512 MiB, 1830 us with 139 GiB.
func (c *Costs) MemCreateFails(free uint64) time.Duration {
	return 43*time.Microsecond + time.Duration(float64(free)/(1<<30)*12860)
}

// MemAllocFails is cuMemAlloc of more than the device's free bytes: 85 us with nothing free, 3620 us with 139 GiB.
func (c *Costs) MemAllocFails(free uint64) time.Duration {
	return 85*time.Microsecond + time.Duration(float64(free)/(1<<30)*25430)
}

// MallocAsync is cudaMallocAsync from a pool that has the memory.
func (c *Costs) MallocAsync(size uint64) time.Duration { return c.curves[curveMallocAsync].at(size) }

// FreeAsync is cudaFreeAsync into a pool that keeps the memory.
func (c *Costs) FreeAsync(size uint64) time.Duration { return c.curves[curveFreeAsync].at(size) }

// MemCreate is cuMemCreate of one handle of size bytes.
func (c *Costs) MemCreate(size uint64) time.Duration { return c.curves[curveCreate].at(size) }

// MemMap is cuMemMap of one handle of size bytes.
func (c *Costs) MemMap(size uint64) time.Duration { return c.curves[curveMap].at(size) }

// MemSetAccess is one cuMemSetAccess over handles handles of size bytes each. What it leaves out: on an H200 the first
// mapping in an otherwise empty stretch of addresses takes 13 us more here, and the last one to go 7 us more in
// MemUnmap (a page table made and dropped, presumably); one call over eight handles took what eight calls took.
func (c *Costs) MemSetAccess(size uint64, handles int) time.Duration {
	if handles == 1 {
		return c.curves[curveAccess].at(size)
	}
	return time.Duration(handles) * c.curves[curveAccessMany].at(size)
}

// MemUnmap is cuMemUnmap of one handle of size bytes; a call over several costs their sum.
func (c *Costs) MemUnmap(size uint64) time.Duration { return c.curves[curveUnmap].at(size) }

// MemRelease is cuMemRelease of one handle of size bytes.
func (c *Costs) MemRelease(size uint64) time.Duration { return c.curves[curveRelease].at(size) }

// MemImport is cuMemImportFromShareableHandle of a chunk of size bytes.
func (c *Costs) MemImport(size uint64) time.Duration { return c.curves[curveImport].at(size) }

// MemAddressReserve is cuMemAddressReserve of size bytes.
func (c *Costs) MemAddressReserve(size uint64) time.Duration { return c.curves[curveReserve].at(size) }

// MemAddressFree is cuMemAddressFree of size bytes.
func (c *Costs) MemAddressFree(size uint64) time.Duration { return c.curves[curveAddressFree].at(size) }

// What follows was measured on one H200 with driver 580. What was measured at one size only is taken to grow with it.

func perGiB(ms float64, size uint64) time.Duration {
	return time.Duration(ms * float64(size) / (1 << 30) * float64(time.Millisecond))
}

// HostAlloc is cuMemHostAlloc of size bytes.
func (c *Costs) HostAlloc(size uint64) time.Duration { return c.curves[curveHostAlloc].at(size) }

// HostFree is cuMemFreeHost: 2 GiB took 191 ms.
func (c *Costs) HostFree(size uint64) time.Duration { return perGiB(191.0/2, size) }

// HostRegister is cuMemHostRegister of memory in huge pages that was touched before: 2 GiB took 38 ms.
func (c *Costs) HostRegister(size uint64) time.Duration { return perGiB(38.0/2, size) }

// HostUnregister is cuMemHostUnregister: 2 GiB took 32 ms.
func (c *Costs) HostUnregister(size uint64) time.Duration { return perGiB(32.0/2, size) }

// ManagedFree is cuMemFree of managed memory.
func (c *Costs) ManagedFree(size uint64) time.Duration { return perGiB(12.6, size) }

// Prefetch is the GPU's time for cuMemPrefetchAsync; fresh memory is only made.
func (c *Costs) Prefetch(size uint64, to cuda.Location, fresh bool) time.Duration {
	switch {
	case to == cuda.LocationHostNUMA:
		return perGiB(94, size)
	case fresh:
		return perGiB(4.8, size)
	}
	return perGiB(21, size)
}

// HostNUMACreate is cuMemCreate on the host's NUMA node, HostNUMAAccess cuMemSetAccess of that memory for a device, and
// HostNUMARelease what unmapping and releasing it took together.
func (c *Costs) HostNUMACreate(size uint64) time.Duration  { return perGiB(211, size) }
func (c *Costs) HostNUMAAccess(size uint64) time.Duration  { return perGiB(9.5, size) }
func (c *Costs) HostNUMARelease(size uint64) time.Duration { return perGiB(44, size) }

// PoolGrow is what a stream-ordered pool pays for size bytes that it does not have, and PoolShrink for giving them back:
// not measured, but taken to be what a chunk of that size costs, which is what it is made of.
func (c *Costs) PoolGrow(size uint64) time.Duration {
	return c.MemAddressReserve(size) + c.MemCreate(size) + c.MemMap(size) + c.MapAfresh + c.MemSetAccess(size, 1)
}

func (c *Costs) PoolShrink(size uint64) time.Duration {
	return c.MemUnmap(size) + c.MemRelease(size) + c.MemAddressFree(size)
}

// Bytes a second of copies. Within a device and between two it is the makers' figure, not a measurement: half of the
// memory's 4.8 TB/s, and NVLink's 450 GB/s.
const (
	rateToHost       = 55.3e9
	rateToDevice     = 55.4e9
	ratePageableFrom = 17e9 // to pageable host memory
	ratePageableTo   = 9e9  // from pageable host memory
	rateWithin       = 2400e9
	ratePeer         = 450e9
)

// copies is the GPU's time for a copy.
func (c *Costs) copies(from, to side) time.Duration {
	rate := rateToHost
	switch {
	case from.kind == copyDevice && to.kind == copyDevice && from.device == to.device:
		rate = rateWithin
	case from.kind == copyDevice && to.kind == copyDevice:
		rate = ratePeer
	case from.kind == copyPageable:
		rate = ratePageableTo
	case to.kind == copyPageable:
		rate = ratePageableFrom
	case to.kind == copyDevice:
		rate = rateToDevice
	}
	return time.Duration(float64(to.size) / rate * float64(time.Second))
}
