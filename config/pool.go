package config

import "github.com/cistern-gpu/cistern/resource"

// PoolKind is the memory that a pool is made of.
type PoolKind uint8

const (
	PoolDefault      PoolKind = iota // as the options of the allocator say: that of its Upstream, else chunks with BackendVMM
	PoolMalloc                       // segments from cuMemAlloc, which cudaIpcGetMemHandle accepts
	PoolSingleHandle                 // segments of one physical handle each
)

// PoolOptions configure a pool. The zero value is the default of the device.
type PoolOptions struct {
	Kind PoolKind
	// Upstream is where the pool's segments come from; Kind must be PoolDefault then. It is called with no lock held and
	// may use the allocator. Its memory counts as reserved and, where Traits().OnDevice, under the device's limit.
	Upstream resource.Resource
	// SegmentPerBlock makes each block a segment of its own, which is reused only by requests that need a segment of that
	// size, as PyTorch's no_split does. With chunks, which have no segments, it means PoolSingleHandle.
	SegmentPerBlock bool
	// Limit bounds the memory that the pool may reserve, in bytes; 0 is no limit of its own. A request beyond it is met
	// from the pool's free memory, even where the device has more.
	Limit uint64
	// Spill is where a request's memory comes from when all other stages have failed (memory.StageSpill); nil is none. It
	// is called as Upstream is. Its memory belongs to the pool and is not under the pool's limit.
	Spill resource.Resource
	// OnOutOfMemory is called, with no lock held, before the device's callbacks. It reports whether it gave memory back.
	// It must not allocate from this pool. Nil is none.
	OnOutOfMemory func(need uint64) bool
	// OnEnd is called, on a goroutine of its own, when the pool was released and reserves nothing from its upstream and
	// its spill any more. The program can close them then.
	OnEnd func()
}
