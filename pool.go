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

// NewPool creates a private pool of the kind of memory that the device's options say.
func (d Device) NewPool(id PoolID) (Pool, error) { return d.NewPoolWith(id, PoolOptions{}) }

// NewPoolWith creates a private pool of the memory that the options say. Its upstream is opened to the peers of the device.
func (d Device) NewPoolWith(id PoolID, o PoolOptions) (Pool, error) {
	p, err := d.engine.NewPool(id, o)
	return Pool{p}, err
}

// Pool finds a pool by its name.
func (d Device) Pool(id PoolID) (Pool, bool) {
	p, ok := d.engine.Pool(id)
	return Pool{p}, ok
}

// Pools are the names of the pools by number: the numbers of Segment and event.Event.Pool. The number of a pool that is gone is
// given to another as that of a stream is.
func (d Device) Pools() []PoolID { return d.engine.Views.Pools() }

// Route sends the requests of the stream on this device into a pool until Unroute. Routes nest: the last one counts. Frees
// always go to the pool of the block.
func (d Device) Route(st Stream, p Pool) error { return d.engine.Captures.Route(st.engine, p.engine) }

// Unroute ends the last Route that was not ended.
func (d Device) Unroute(st Stream) error { return d.engine.Captures.Unroute(st.engine) }

// ID is the pool's name.
func (p Pool) ID() PoolID { return p.engine.ID() }

// Device is the device of the pool.
func (p Pool) Device() Device { return Device{p.engine.Device()} }

// Alloc hands out memory of the pool; see Device.Alloc.
func (p Pool) Alloc(size uint64, st Stream) (cuda.Ptr, error) {
	return p.engine.Alloc(size, st.engine)
}

// AllocTagged is Alloc with a tag, which Snapshot, Base, the history and TagUsage show.
func (p Pool) AllocTagged(size uint64, st Stream, tag uint32) (cuda.Ptr, error) {
	return p.engine.Device().AllocWith(size, st.engine, engine.AllocOptions{Pool: p.engine, Tag: tag})
}

// LargestFree is the largest request in bytes that the pool meets for the stream without a driver call, or the size of the
// largest free block where requests of any size would take one.
func (p Pool) LargestFree(st Stream) uint64 { return p.engine.LargestFree(st.engine) }

// Stats sums the pool up as it is at one moment.
func (p Pool) Stats() PoolStats { return p.engine.Stats() }

// SetLimit bounds the memory that the pool may reserve, in bytes; 0 is no limit of its own. Memory beyond a new limit is not
// given back by this call; Trim does that.
func (p Pool) SetLimit(bytes uint64) { p.engine.SetLimit(bytes) }

// Trim gives the free memory of the pool back to the driver, unless the pool is pinned. For the default pool this includes
// memory that released pools left.
func (p Pool) Trim() error { return p.engine.Trim() }

// Release ends the pool. The program does not allocate from it again, and launches no more graphs that use its memory. Live
// blocks stay valid and are freed as always. Free memory can move to other pools or, where the pool is made of segments, goes
// back to its upstream. For memory of a captured graph Release waits for the context or, while a stream is being captured, the
// end of that capture does.
func (p Pool) Release() error { return p.engine.Release() }

// Blocks lists the live allocations of the pool in address order, without those that were freed and wait for other streams.
func (p Pool) Blocks() []Block { return p.engine.Blocks() }

// Restore makes these blocks the live allocations of the pool, at the same addresses, as Blocks listed them before: other live
// blocks are freed, and listed blocks that are not live are allocated again. Base, Size and Requested, and Stream where it is
// given, describe a block; Tag, Library and Stack are taken over where it is allocated again. The memory at the addresses must
// still be the pool's, as it is where a capture pinned it. The contents of a block that is allocated again are those of its
// memory. After an error nothing has changed.
func (p Pool) Restore(blocks []Block) error { return p.engine.Restore(blocks) }

// Resource is the pool as a resource, for adaptors and for other pools over it. Its memory is aligned to 512 bytes, and up to
// 2 MiB on request. A free names a stream behind whose work so far the memory is reused (Allocator.FreeOn). Memory that a pool
// gets from another pool of the device is in the statistics of both, and once under the limit.
func (p Pool) Resource() resource.Resource { return p.engine.Resource() }
