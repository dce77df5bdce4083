package engine

import (
	"fmt"
	"iter"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/views"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

// backing is what the memory of a pool is made of. There are two kinds: mappedChunks (mappedchunks.go) and wholeSegments
// (wholesegments.go). All else of the engine works on blocks and does not know the kind. The methods are called with
// Device.mu, unless they say otherwise.
type backing interface {
	// newHeap makes what a new stream heap has of it.
	newHeap(s *streamHeap) heapBacking
	// traits say what the memory is. They need no lock.
	traits() resource.Traits
	// onDevice reports whether it is the device's own memory. It needs no lock.
	onDevice() bool
	// upstreamName is "" where the memory is what the device's options say.
	upstreamName() string
	// memInfo is the free and total memory of where it comes from. No lock is held.
	memInfo() (free, total uint64, err error)
	// unit is what sizes of blocks are multiples of. It needs no lock.
	unit() uint64
	// alignSlack is what a request's alignment may take beyond its bytes. It needs no lock.
	alignSlack(align uint64) uint64
	// sizes is how much memory a request of n bytes gets where no free block fits, and the least that would do.
	sizes(n uint64) (usual, least uint64)
	// over reports whether the memory is blocks of another pool.
	over(o *Pool) bool
	// openToPeers opens the memory to all peers that the device has. Device.mu is let go meanwhile.
	openToPeers() error
	// ended gives back what a pool has free that was just released. Device.mu is let go meanwhile.
	ended() error
	// closeOwn has what the engine made to use the upstream closed. The pool holds nothing any more.
	closeOwn()
	// giveBackOwn gives back free memory of the pool, whose own limit is in the way of a reclaimer.
	giveBackOwn(r *reclaimer) (gave bool, err error)
	// explain notes for the error of a request what the kind keeps from it.
	explain(f *views.Failure)
}

// heapBacking is what one stream heap has of such memory: a chunkHeap or a segmentHeap. The methods are called with Device.mu.
type heapBacking interface {
	// supply takes a request through the stages behind fit that need no lock to be let go, except that a user's resource is
	// called without any. It returns a block, or an error that is not out of memory, or neither. The caller holds the arena's lock.
	supply(c *request) (heap.ID, error)
	// wantsChunks reports whether free chunks are to be given back for a request here; limited says that only those of its pool,
	// whose own limit is in the way, are of use.
	wantsChunks(limited bool) bool
	// freeChunks gives back free chunks for a request here, of one pool or (nil) of all, need bytes or more. Device.mu is let go
	// meanwhile.
	freeChunks(only *Pool, need uint64) (bool, error)
	// freeAddresses gives back addresses for a request here, and reports whether any went.
	freeAddresses() bool
	// usable are the stream heaps whose free memory a request here may get.
	usable() iter.Seq[*streamHeap]
	// detach makes memory that is wholly free spare, all or until that is need bytes, and returns the bytes. The caller holds the
	// arena's lock, here and below.
	detach(need uint64) uint64
	// dropRanges gives reservations that hold nothing but addresses back to the driver.
	dropRanges() error
	// succeed gives all there is to a stream heap that takes the place of this one.
	succeed(n *streamHeap) heapBacking
	// recordInherited records that free memory was another stream heap's until now.
	recordInherited(from *streamHeap, addr, size uint64)
	// mapped lists the memory that is opened to peers range by range.
	mapped() []run
	// segmentAt is the segment of a live allocation, whose claim is the range given. It needs no lock.
	segmentAt(p cuda.Ptr, base, size uint64) (cuda.Ptr, uint64, error)
	// export notes what a block lies on.
	export(e *Export, addr, size uint64) error
	// addChunks lists the chunks of segments in a snapshot.
	addChunks(list []memory.Segment)
	// choosePaused finds the memory that a pause is to take, and notes why some cannot be.
	choosePaused(p *pause, no *refusal)
}

// pausedBacking is the memory of a paused range: pausedChunks or pausedSegment. The methods are called with Device.mu; those
// that call a user's resource let it go meanwhile: unmap, restore, dropAgain, get, putBack, undo.
type pausedBacking interface {
	// runs is the memory, piece by piece as it is made.
	runs(a *pausedRange) []run
	// granules is how many parts can be resumed by themselves.
	granules(a *pausedRange) uint64
	// unmapEmpty makes an unmapped range of the granules in which the stale mapping [lo, lo+n) lies and no block does any more.
	unmapEmpty(a *pausedRange, z heap.ID, lo, n uint64)
	// cutUp replaces a paused range that has no memory by parts, of granules of the same kind each, and returns them with their
	// kinds. Granules that no block lies in become unmapped ranges, except in pools of captured graphs.
	cutUp(a *pausedRange, v *survey) (parts []*pausedRange, kinds []granuleKind)

	// final reports whether the contents are lost as soon as the memory is unmapped.
	final() bool
	// unmap has the memory go, release gives back at once what unmapping left. A failed release is tried again by gone.
	unmap(a *pausedRange) error
	release()
	// restore gets back what went, and reports whether the contents are to be copied there.
	restore(a *pausedRange) (renewed bool, err error)
	// dropAgain undoes restore.
	dropAgain(a *pausedRange)
	// gone counts and records memory that went.
	gone(a *pausedRange)

	// counted reports whether the memory is under the device's limit.
	counted() bool
	// turn is when a resume gets the memory, below getTurns.
	turn() int
	// get gets memory, which got counts and records. putBack undoes get.
	get(a *pausedRange) error
	got(a *pausedRange)
	putBack(a *pausedRange)
	// mapAgain maps what get got, pretend notes it as mapped on a broken device.
	mapAgain(a *pausedRange) error
	pretend()
	// undo undoes get, got and mapAgain as far as locks are let go for it, takenBack does the rest.
	undo(a *pausedRange)
	takenBack(a *pausedRange)
}

// getTurns: users' resources, the engine's own, chunks.
const getTurns = 3

// heapsOf are the stream heaps of one kind.
func heapsOf[B heapBacking](heaps []*streamHeap) iter.Seq[B] {
	return func(yield func(B) bool) {
		for _, s := range heaps {
			if s != nil {
				if b, ok := s.backing.(B); ok && !yield(b) {
					return
				}
			}
		}
	}
}

// +checklocks:pt.gpu.mu
func (pt *poolTable) chunkHeaps() iter.Seq[*chunkHeap] { return heapsOf[*chunkHeap](pt.heaps) }

// +checklocks:pt.gpu.mu
func (pt *poolTable) segmentHeaps() iter.Seq[*segmentHeap] { return heapsOf[*segmentHeap](pt.heaps) }

// backingFor makes the memory of a pool as the options say. The caller holds Device.mu, or is the first to have the device.
//
// +checklocks:p.dev.gpu.mu
func backingFor(p *Pool, o config.PoolOptions, u upstream) (backing, error) {
	d := p.dev
	if u.from == nil && o.Kind == config.PoolDefault {
		u = d.state.upstreams.common
	}
	switch {
	case u.from != nil && o.Kind != config.PoolDefault:
		return nil, fmt.Errorf("pool {%d, %d}: an upstream excludes another kind of memory", p.id[0], p.id[1])
	case u.from != nil:
		return newUserSegments(p, o.SegmentPerBlock, u), nil
	case o.Kind == config.PoolMalloc || o.Kind == config.PoolDefault && d.opts.Backend == config.BackendMalloc:
		return newPlainSegments(p, o.SegmentPerBlock), nil
	case o.Kind == config.PoolSingleHandle || o.Kind == config.PoolDefault && (d.opts.SingleHandle || o.SegmentPerBlock):
		return newSingleSegments(p, o.SegmentPerBlock)
	case o.Kind != config.PoolDefault:
		return nil, fmt.Errorf("pool {%d, %d}: unknown kind %d", p.id[0], p.id[1], o.Kind)
	}
	return &mappedChunks{p}, nil
}

// hasChunks reports whether the device makes chunks: with backend:malloc, single_handle and an upstream it does not.
func (ph *physical) hasChunks() bool { return ph.upstream != nil }

// userSegments are the users' resources that pools of the device use, by the number of the pool.
//
// +checklocks:pt.gpu.mu
func (pt *poolTable) userSegments() (list []*wholeSegments) {
	for _, p := range pt.byNumber {
		if p == nil || p.released && p.refs == 0 {
			continue
		}
		if w, ok := p.backing.(*wholeSegments); ok && w.user {
			list = append(list, w)
		}
	}
	return list
}
