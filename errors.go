package cistern

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/units"
)

// ErrUnknownPointer is what errors.Is finds in the error of an operation on an address that is not a live allocation
// of this allocator: never handed out, or freed already.
var ErrUnknownPointer = errors.New("not a live allocation of this allocator")

// PointerError is an operation on an address that is no live allocation.
type PointerError struct {
	Op     string
	Ptr    cuda.Ptr
	Detail string // "freed twice", …
}

func (e *PointerError) Error() string {
	if e.Detail != "" {
		return fmt.Sprintf("%s %#x: %s: %s", e.Op, uint64(e.Ptr), ErrUnknownPointer, e.Detail)
	}
	return fmt.Sprintf("%s %#x: %s", e.Op, uint64(e.Ptr), ErrUnknownPointer)
}

func (e *PointerError) Unwrap() error { return ErrUnknownPointer }

// OutOfMemoryError is a request that every rung of the ladder failed to meet. errors.Is(err, cuda.ErrOutOfMemory)
// holds. All sizes are bytes, as they were when the ladder ended.
type OutOfMemoryError struct {
	Device    cuda.Device
	Pool      PoolID
	Requested uint64
	Need      uint64 // the same, rounded
	Tag       uint32
	Library   uint8
	Reserved  uint64 // memory held by all pools of the device
	Elsewhere uint64 // of Reserved: not the device's own, as host memory
	Allocated uint64 // rounded bytes handed out
	Paused    uint64 // handed out, but without physical memory, which Reserved does not count
	Pending   uint64 // given back, but still used by other streams
	Cached    uint64 // free, spare chunks included
	Pinned    uint64 // of Cached: pinned by captured graphs
	Other     uint64 // of Cached: memory of another kind, the device's where this pool's is not or the other way round
	Largest   uint64 // largest free block of the request's own pool and stream
	Limit     uint64 // the memory limit, 0 none
	PoolLimit uint64 // the pool's own, if that was in the way; else 0
	PoolHolds uint64 // then: what it holds
	DriverHas uint64 // free memory as the driver reports it
	// DriverTotal is all memory as the driver reports it; 0 says that it did not report either.
	DriverTotal uint64
	Tried       Rungs
	Off         Rungs        // rungs that the options leave out
	Pools       []PoolUse    // who held what, the most first
	Upstream    string       // what the memory of the request's pool is; "" where it is what the device's options say
	Tags        []TagUse     // likewise; nil if no request was ever tagged
	Libraries   []LibraryUse // likewise; nil if no request ever named a library
	Stacks      []StackUse   // likewise; nil if blocks do not keep stacks (Allocator.KeepStacks)
	Cause       error        // what the upstream said last; nil when the limit was in the way
	Steps       []Step       // of the ladder, one for each rung, in order
	Stack       uint32       // of the request (AllocOptions)
	Thread      uint32
	Stream      cuda.StreamID // that the request named; zero for a resume
	Handle      cuda.Stream   // by which it was made known
	host        bool          // the request was not for the device's own memory
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
		fmt.Fprintf(&b, ", of it %s in pool {%d, %d}, whose limit is %s", units.FormatBytes(e.PoolHolds), e.Pool[0], e.Pool[1],
			units.FormatBytes(e.PoolLimit))
	}
	if e.DriverTotal != 0 {
		fmt.Fprintf(&b, ", %s free on the device", units.FormatBytes(e.DriverHas))
	}
	if e.Pending != 0 {
		fmt.Fprintf(&b, ", %s waiting for other streams", units.FormatBytes(e.Pending))
	}
	if e.Pinned+e.Other != 0 {
		fmt.Fprintf(&b, ", %s cached in pools that cannot lend", units.FormatBytes(e.Pinned+e.Other))
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

// Rungs is a set of steps of the out-of-memory ladder.
type Rungs uint16

// The rungs, in the order in which they are tried.
const (
	RungFit      Rungs = 1 << iota // a free block of the space
	RungCollect                    // frees whose other streams are done, or can be waited for on the GPU
	RungRemap                      // free chunks of the same pool, moved here
	RungGrow                       // new memory upstream
	RungLend                       // free chunks and cached segments of other pools; free blocks of other streams
	RungCallback                   // callbacks: the pool's own, then those of other libraries
	RungSpill                      // the pool's spill: memory of another kind
	rungEnd
)

// AllRungs is every rung that can be turned off; fit cannot.
const AllRungs = RungCollect | RungRemap | RungGrow | RungLend | RungCallback | RungSpill

var rungNames = []string{"fit", "collect", "remap", "grow", "lend", "callback", "spill"}

// String is the names of the rungs in order, joined by "+".
func (r Rungs) String() string {
	var names []string
	for i, n := range rungNames {
		if r&(1<<i) != 0 {
			names = append(names, n)
		}
	}
	return strings.Join(names, "+")
}

// codeOf is the CUDA code within an error.
func codeOf(err error) (cuda.Code, bool) {
	var c cuda.Code
	ok := errors.As(err, &c)
	return c, ok
}
