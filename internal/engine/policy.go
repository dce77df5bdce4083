package engine

import "github.com/cistern-gpu/cistern/internal/engine/quota"

// The policy of sizes: how large chunks are, and when memory is moved rather than allocated anew. The constants were chosen by
// replaying recorded training and serving runs: each doubling of the chunk size halves the driver time of a move (it costs by
// the handle, 28 us on an H200) and adds to the loss in partly used chunks, which matters the more, the less memory is
// reserved.

// A size class (quota.Small, quota.Large) has chunks of its own until they are wholly free, so that small long-lived blocks do
// not pin chunks that large blocks are cut from.

// smallMax is the largest small request in bytes.
const smallMax = 256 << 10

// classOf is the size class of a rounded request.
func classOf(n uint64) int {
	if n <= smallMax {
		return quota.Small
	}
	return quota.Large
}

const (
	// fineBelow: while the device has reserved less, chunks are of the least size, or of twice that for requests of
	// largeRequest bytes if there is no limit. A request of that size for more than is reserved, such as a program's first,
	// counts as if its memory were reserved. Under a limit, and when more than half of the device is reserved, chunks are of
	// half the largest size. Else they are a part of the reserved memory, from half the largest size to the largest: the loss
	// in partly used chunks grows with their size, and matters by its share.
	fineBelow    = 3 << 30
	coarsePart   = 600
	largeRequest = 192 << 20
	// budgetPart, restPart: a chunk is at most 1/budgetPart of what the device can reserve, and at most 1/restPart of what is
	// left of that. Where little memory is left, a request fails for the memory in partly used chunks. A run that stays far
	// from its limit gets the chunks that it would get without one.
	budgetPart = 1024
	restPart   = 256
	// slack: while reserved memory stays within 1 + 1/slack of the highest active memory, new memory is allocated rather than
	// old memory moved, because it is cheaper (no unmapping) and leaves large free blocks whole.
	slack = 100
	// littlePart: nothing is moved while at most that part of the device is reserved (280 MiB of an H200).
	littlePart = 512
)

// chunkSize is the size of the next chunk for a request that misses so many bytes.
//
// +checklocks:po.gpu.mu
func (po *policy) chunkSize(class int, request, missing uint64) uint64 {
	g := po.phys.upstream.Granularity()
	size := po.gpu.opts.ChunkMax
	held := po.phys.quota.Reserved
	if before := held - min(held, request-min(request, missing)); request >= max(largeRequest, before) && po.phys.quota.Limit == 0 {
		held = max(fineBelow, before+request)
	}
	switch {
	case po.throttle.on && class != quota.Small: // few and large: they are to make moving rare
	case class == quota.Small || held < fineBelow:
		size = g
		if request >= largeRequest && po.phys.quota.Limit == 0 {
			size = min(2*g, po.gpu.opts.ChunkMax)
		}
	case po.phys.quota.Limit != 0 || held > po.gpu.info.TotalBytes/2:
		size = max(g, size/2/g*g)
	default:
		size = max(g, min(size, max(size/2, held/coarsePart))/g*g)
	}
	return min(missing, size, po.mostChunk())
}

// mostChunk is the largest that a chunk may be for the budget, and for what is left of it.
//
// +checklocks:po.gpu.mu
func (po *policy) mostChunk() uint64 {
	g, budget := po.phys.upstream.Granularity(), po.budget()
	most := min(budget/budgetPart, (budget-min(budget, po.phys.quota.Reserved))/restPart)
	return max(g, most/g*g)
}

// budget is the memory that the device can reserve, as far as is known: its limit, or all of its memory.
//
// +checklocks:po.gpu.mu
func (po *policy) budget() uint64 {
	if po.phys.quota.Limit != 0 {
		return min(po.phys.quota.Limit, po.gpu.info.TotalBytes)
	}
	return po.gpu.info.TotalBytes
}

// minRest is what a large block must leave of a free block, if it leaves anything, while chunks are fine: two chunks, of which
// one at least is whole and can move. That makes moving rare and cuts up large free blocks, which does not pay once three
// quarters of the budget are reserved.
//
// +checklocks:po.gpu.mu
func (po *policy) minRest(class int) uint64 {
	if class == quota.Small || po.phys.quota.Reserved >= min(fineBelow, po.budget()/4*3) {
		return 0
	}
	return 2 * po.phys.upstream.Granularity()
}

// growFirst reports whether need bytes of new memory stay within the slack, and within the limit.
//
// +checklocks:po.gpu.mu
func (po *policy) growFirst(need uint64) bool {
	if !po.phys.quota.MayHold(need) {
		return false
	}
	if po.phys.quota.Reserved+need <= po.gpu.info.TotalBytes/littlePart {
		return true
	}
	most, held := uint64(po.phys.quota.Peak(quota.ActiveBytes)), po.phys.quota.Total()
	if po.throttle.on {
		return held+need <= most+most/throttleSlack
	}
	return held+need <= most+most/slack
}

// overshoot is by how much the last chunk that is moved may exceed what is missing: without limit for large blocks,
// whose next neighbours use the rest, but a small block does not break up a large chunk unless memory is short.
//
// +checklocks:po.gpu.mu
func (po *policy) overshoot(class int, pressure bool) uint64 {
	if class == quota.Small && !pressure {
		return po.phys.upstream.Granularity()
	}
	return 1 << 62
}
