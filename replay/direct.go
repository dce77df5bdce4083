package replay

import (
	"fmt"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
)

func init() {
	Register("direct", func(env *Env) (Policy, string, error) {
		if env.Spec.HasConf && env.Spec.Conf != "" {
			return nil, "", fmt.Errorf("direct: %q: the policy has no settings", env.Spec.Conf)
		}
		return &direct{meter: newMeter(env.GPULag), env: env, arena: newArena(env.Plan.Blocks, 1)}, "", nil
	})
}

// direct models a program without a caching allocator: cuMemAlloc and cuMemFree for every request. The driver packs
// requests below 1 MiB into blocks of 2 MiB, as it was seen to do; others get whole pages of 2 MiB. Every free waits
// for the device, as cuMemFree does.
//
// A block is freed when the record says that no stream uses it any more. In truth cuMemFree would have waited for
// that, so that memory would be back earlier and the host later.
type direct struct {
	meter
	env   *Env
	arena arena
}

// packed is the size in bytes below which the driver packs requests.
const packed = 1 * mib

// Alloc is Policy.Alloc.
func (d *direct) Alloc(b int, size uint64, stream, pool uint32) (uint64, error) {
	i := int32(-1)
	size = roundUp(size, minBlock)
	if size >= packed {
		size = roundUp(size, roundLarge)
	} else {
		i = d.arena.take(0, size)
	}
	d.count(callMemAlloc, d.costs.MemAlloc(size))
	if i < 0 {
		held := roundUp(size, roundLarge)
		if d.env.Capacity > 0 && d.reserved+held > d.env.Capacity {
			d.ooms++
			return 0, fmt.Errorf("cuMemAlloc of %d bytes with %d reserved, capacity %d: %w", size, d.reserved, d.env.Capacity, cuda.ErrOutOfMemory)
		}
		i = d.arena.segment(held)
		d.grow(held)
		d.env.emitSegment(event.SegmentAlloc, d.arena.blocks[i].addr, held, stream, pool)
		d.arena.cut(i, size, 0)
	}
	d.arena.of[b] = i
	d.allocated += size
	return d.arena.blocks[i].addr, nil
}

// FreeRequested is Policy.FreeRequested.
func (d *direct) FreeRequested(int) {}

// Free is Policy.Free.
func (d *direct) Free(b int) error {
	i, err := d.arena.used(b)
	if err != nil {
		return err
	}
	size := d.arena.blocks[i].size
	d.allocated -= size
	d.count(callMemFree, d.costs.MemFree(size))
	d.deviceSyncs++
	d.waitForGPU()
	i = d.arena.give(i, 0)
	if d.arena.whole(i) {
		blk := d.arena.blocks[i]
		d.shrink(blk.size)
		d.env.emitSegment(event.SegmentFree, blk.addr, blk.size, 0, 0)
		d.arena.drop(i)
	}
	return nil
}
