package engine

import "github.com/cistern-gpu/cistern/internal/engine/quota"

// The policy of sizes: what is cut from which chunks, and when memory is moved rather than got anew. The constants
// were chosen by replaying recorded training and serving runs: each doubling of the chunk size halves the driver time
// of a move (it costs by the handle, 28 us on an H200) and adds to what is lost in partly used chunks, which matters
// the more, the less memory is held altogether.

// A size class (quota.Small, quota.Large) has chunks of its own until they are wholly free, so that small long-lived blocks do
// not pin chunks that large blocks are cut from.

// smallMax is the largest small request in bytes.
const smallMax = 256 << 10

// classOf is the size class of a rounded request.
func (d *Device) classOf(n uint64) int {
	if n <= smallMax {
		return quota.Small
	}
	return quota.Large
}

const (
	// While a device holds less than fineBelow bytes, chunks are of the least size (of twice that for requests of
	// largeRequest bytes, unless there is a limit to keep; a request of that many that is for more than is held, as a
	// program's first, counts as if its memory were held); under a limit, and when more than half of the device is held,
	// they are of half the largest size; else of a part of what is held, from half the largest size to the largest: what is
	// lost in partly used chunks grows with their size, and matters by its share.
	fineBelow    = 3 << 30
	coarsePart   = 600
	largeRequest = 192 << 20
	// budgetPart, restPart: nor is a chunk larger than 1/budgetPart of what the device can hold, nor than 1/restPart of what
	// is left of that: where memory is little, or nearly all is held, a request fails for what lies in partly used chunks.
	// A run that stays far from its limit gets the chunks that it would get without one.
	budgetPart = 1024
	restPart   = 256
	// slack: as long as the memory held stays within 1 + 1/slack of the most that was ever active, new memory is got
	// rather than old memory moved, because it is cheaper (no unmapping) and leaves large free blocks whole.
	slack = 100
	// littlePart: nor is anything moved while no more than that part of the device is held (280 MiB of an H200).
	littlePart = 512
)

// chunkSize is the size of the next chunk when missing bytes are to be had for a request.
//
// +checklocks:d.mu
func (d *Device) chunkSize(class int, request, missing uint64) uint64 {
	g := d.upstream.Granularity()
	size := d.opts.ChunkMax
	held := d.quota.Reserved
	if before := held - min(held, request-min(request, missing)); request >= max(largeRequest, before) && d.quota.Limit == 0 {
		held = max(fineBelow, before+request)
	}
	switch {
	case d.throttle.on && class != quota.Small: // few and large: they are to make moving rare
	case class == quota.Small || held < fineBelow:
		size = g
		if request >= largeRequest && d.quota.Limit == 0 {
			size = min(2*g, d.opts.ChunkMax)
		}
	case d.quota.Limit != 0 || held > d.info.TotalBytes/2:
		size = max(g, size/2/g*g)
	default:
		size = max(g, min(size, max(size/2, held/coarsePart))/g*g)
	}
	return min(missing, size, d.mostChunk())
}

// mostChunk is the largest that a chunk may be for what the device can hold, and for what is left of that.
//
// +checklocks:d.mu
func (d *Device) mostChunk() uint64 {
	g, budget := d.upstream.Granularity(), d.budget()
	most := min(budget/budgetPart, (budget-min(budget, d.quota.Reserved))/restPart)
	return max(g, most/g*g)
}

// budget is what the device can hold, as far as is known: its limit, or all of its memory.
//
// +checklocks:d.mu
func (d *Device) budget() uint64 {
	if d.quota.Limit != 0 {
		return min(d.quota.Limit, d.info.TotalBytes)
	}
	return d.info.TotalBytes
}

// minRest is what a large block must leave of a free block, if it leaves anything, while chunks are fine: two chunks, of
// which one at least is whole and can move. That makes moving rare and cuts large free blocks up, which is no bargain when
// three quarters of what can be held are.
//
// +checklocks:d.mu
func (d *Device) minRest(class int) uint64 {
	if class == quota.Small || d.quota.Reserved >= min(fineBelow, d.budget()/4*3) {
		return 0
	}
	return 2 * d.upstream.Granularity()
}

// growFirst reports whether need bytes of new memory stay within the slack, and within the limit.
//
// +checklocks:d.mu
func (d *Device) growFirst(need uint64) bool {
	if !d.quota.MayHold(need) {
		return false
	}
	if d.quota.Reserved+need <= d.info.TotalBytes/littlePart {
		return true
	}
	most, held := uint64(d.quota.Peak(quota.ActiveBytes)), d.quota.Total()
	if d.throttle.on {
		return held+need <= most+most/throttleSlack
	}
	return held+need <= most+most/slack
}

// overshoot is by how much the last chunk that is moved may exceed what is missing: without limit for large blocks,
// whose next neighbours use the rest, but a small block does not break up a large chunk unless memory is short.
//
// +checklocks:d.mu
func (d *Device) overshoot(class int, pressure bool) uint64 {
	if class == quota.Small && !pressure {
		return d.upstream.Granularity()
	}
	return 1 << 62
}
