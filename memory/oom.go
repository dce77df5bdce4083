package memory

import (
	"fmt"
	"strings"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/units"
)

// OutOfMemoryError is a request that every stage of the reclaim stages failed to meet. errors.Is(err, cuda.ErrOutOfMemory)
// holds. All sizes are bytes, as they were when the reclaim stages ended.
type OutOfMemoryError struct {
	Device       cuda.Device
	Pool         PoolID
	Requested    uint64
	Need         uint64 // the same, rounded
	Tag          uint32
	Library      uint8
	Reserved     uint64 // memory held by all pools of the device
	Elsewhere    uint64 // of Reserved: not the device's own, as host memory
	Allocated    uint64 // rounded bytes handed out
	Paused       uint64 // handed out, but without physical memory, which Reserved does not count
	Pending      uint64 // given back, but still used by other streams
	Cached       uint64 // free, spare chunks included
	Pinned       uint64 // of Cached: pinned by captured graphs
	Other        uint64 // of Cached: memory of another kind, the device's where this pool's is not or the other way round
	Largest      uint64 // largest free block of the request's own pool and stream
	Limit        uint64 // the memory limit, 0 none
	PoolLimit    uint64 // the pool's own, if that was in the way; else 0
	PoolReserved uint64 // then: what it holds
	DriverFree   uint64 // free memory as the driver reports it
	// DriverTotal is all memory as the driver reports it; 0 says that it did not report either.
	DriverTotal uint64
	Tried       Stages
	Off         Stages       // stages that the options leave out
	Pools       []PoolUse    // allocations by pool, the most first
	Upstream    string       // what the memory of the request's pool is; "" where it is what the device's options say
	Tags        []TagUse     // likewise; nil if no request was ever tagged
	Libraries   []LibraryUse // likewise; nil if no request ever named a library
	Stacks      []StackUse   // likewise; nil if blocks do not keep stacks (Allocator.KeepStacks)
	Cause       error        // what the upstream said last; nil when the limit was in the way
	Steps       []Step       // of the reclaim stages, one for each stage, in order
	Stack       uint32       // of the request (AllocOptions)
	Thread      uint32
	Stream      cuda.StreamID // that the request named; zero for a resume
	Handle      cuda.Stream   // by which it was made known
	OffDevice   bool          // the request was not for the device's own memory
}

func (e *OutOfMemoryError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "out of memory on device %d: tried to allocate %s", e.Device, units.FormatBytes(e.Requested))
	if e.Upstream != "" {
		fmt.Fprintf(&b, " of %s memory", e.Upstream)
	}
	fmt.Fprintf(&b, "; %s reserved, %s of it allocated", units.FormatBytes(e.Reserved), units.FormatBytes(e.Allocated))
	if e.Paused != 0 {
		fmt.Fprintf(&b, ", %s more paused", units.FormatBytes(e.Paused))
	}
	if e.Limit != 0 {
		fmt.Fprintf(&b, ", limit %s", units.FormatBytes(e.Limit))
	}
	if e.PoolLimit != 0 {
		fmt.Fprintf(&b, ", of it %s in pool {%d, %d}, whose limit is %s", units.FormatBytes(e.PoolReserved), e.Pool[0], e.Pool[1],
			units.FormatBytes(e.PoolLimit))
	}
	if e.DriverTotal != 0 {
		fmt.Fprintf(&b, ", %s free on the device", units.FormatBytes(e.DriverFree))
	}
	if e.Pending != 0 {
		fmt.Fprintf(&b, ", %s waiting for other streams", units.FormatBytes(e.Pending))
	}
	if e.Pinned+e.Other != 0 {
		fmt.Fprintf(&b, ", %s cached in pools that others cannot use", units.FormatBytes(e.Pinned+e.Other))
	}
	fmt.Fprintf(&b, "; tried: %s", e.Tried)
	return b.String()
}

// Unwrap makes errors.Is find both cuda.ErrOutOfMemory and the cause.
func (e *OutOfMemoryError) Unwrap() []error {
	if e.Cause != nil {
		return []error{cuda.ErrOutOfMemory, e.Cause}
	}
	return []error{cuda.ErrOutOfMemory}
}
