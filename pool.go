package cistern

import (
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/resource"
)

// Pool is a set of blocks apart from the others of its device. Its allocations share no chunk with another pool. Chunks that
// are wholly free move between pools, unless the pool is pinned.
type Pool struct{ engine *engine.Pool }

// DefaultPool is pool {0, 0}.
func (d Device) DefaultPool() Pool { return Pool{d.engine.DefaultPool()} }

// NewPool creates a private pool with the default options of the device. It is an error if the pool exists.
func (d Device) NewPool(id PoolID) (Pool, error) { return d.NewPoolWith(id, PoolOptions{}) }

// NewPoolWith is NewPool with options. The memory of its upstream is made accessible to the peers of the device.
func (d Device) NewPoolWith(id PoolID, o PoolOptions) (Pool, error) {
	p, err := d.engine.NewPool(id, o)
	return Pool{p}, err
}

// Pool returns a pool by its name, and false if there is none.
func (d Device) Pool(id PoolID) (Pool, bool) {
	p, ok := d.engine.Pool(id)
	return Pool{p}, ok
}

// Pools returns the names of the pools by number: the numbers of Segment and event.Event.Pool. The number of a pool that has
// ended is reused, as that of a stream is.
func (d Device) Pools() []PoolID { return d.engine.Views.Pools() }

// Route has requests of the stream on this device that name no pool met from p until Unroute. Routes nest: the last one
// counts. Frees always go to the pool of the block.
func (d Device) Route(st Stream, p Pool) error { return d.engine.Captures.Route(st.engine, p.engine) }

// Unroute ends the innermost Route of the stream.
func (d Device) Unroute(st Stream) error { return d.engine.Captures.Unroute(st.engine) }

// ID is the pool's name.
func (p Pool) ID() PoolID { return p.engine.ID() }

// Device is the device of the pool.
func (p Pool) Device() Device { return Device{p.engine.Device()} }

// Alloc allocates size bytes from the pool; see Device.Alloc.
func (p Pool) Alloc(size uint64, st Stream) (cuda.Ptr, error) {
	return p.engine.Alloc(size, st.engine)
}

// AllocTagged is Alloc with a tag, which Snapshot, Base, the history and TagUsage show.
func (p Pool) AllocTagged(size uint64, st Stream, tag uint32) (cuda.Ptr, error) {
	return p.engine.Device().AllocWith(size, st.engine, engine.AllocOptions{Pool: p.engine, Tag: tag})
}

// LargestFree returns the size in bytes of the largest request that the pool meets for the stream without a driver call, or
// that of the largest free block if every request needs one.
func (p Pool) LargestFree(st Stream) uint64 { return p.engine.LargestFree(st.engine) }

// Stats returns the statistics of the pool, all of one moment.
func (p Pool) Stats() PoolStats { return p.engine.Stats() }

// SetLimit bounds the memory that the pool may reserve, in bytes; 0 is no limit of its own. The call does not return memory
// beyond a new limit to the upstream; Trim does.
func (p Pool) SetLimit(bytes uint64) { p.engine.SetLimit(bytes) }

// Trim returns the free memory of the pool to the driver, unless the pool is pinned. For the default pool this includes the
// free memory of released pools.
func (p Pool) Trim() error { return p.engine.Trim() }

// Release ends the pool. The program must not allocate from it again, nor launch graphs that use its memory. Live blocks
// stay valid and are freed as always. Free memory can move to other pools; that of a pool of segments is returned to its
// upstream. For memory of a captured graph, Release waits until the context is idle; while a stream is being captured, the
// end of the capture does so.
func (p Pool) Release() error { return p.engine.Release() }

// Blocks lists the live allocations of the pool in address order, without blocks that were freed but that other streams
// still use.
func (p Pool) Blocks() []Block { return p.engine.Blocks() }

// Restore makes these blocks the live allocations of the pool, at the same addresses, as Blocks listed them before: other
// live blocks are freed, and listed blocks that are not live are allocated again. Base, Size and Requested describe a block,
// and Stream if it is not zero; a block that is allocated again gets its Tag, Library and Stack. The memory at the addresses
// must still be the pool's, as it is where a capture pinned it. The contents of a block that is allocated again are those of
// its memory. After an error nothing has changed.
func (p Pool) Restore(blocks []Block) error { return p.engine.Restore(blocks) }

// Resource is the pool as a resource, for adaptors and for other pools over it. Its memory is aligned to 512 bytes, and up
// to 2 MiB on request. A free is in the order of its stream (Allocator.FreeOn). Memory that a pool gets from another pool of
// the device is in the statistics of both and counts once for the limit.
func (p Pool) Resource() resource.Resource { return p.engine.Resource() }
