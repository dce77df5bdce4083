package engine

import (
	"github.com/cistern-gpu/cistern/internal/engine/views"
	"github.com/cistern-gpu/cistern/memory"
)

// PoolUsage lists the memory of each pool of the device, the most bytes first. Spare chunks belong to none.
func (v *Views) PoolUsage() []memory.PoolUse {
	v.gpu.mu.Lock()
	defer v.gpu.mu.Unlock()
	return v.usage.byPool(nil)
}

// byPool is PoolUsage. The caller holds Device.mu and held's lock.
//
// +checklocks:us.gpu.mu
func (us *usage) byPool(held *streamHeap) []memory.PoolUse {
	var out []memory.PoolUse
	at := map[*Pool]int{}
	for _, s := range us.pools.heaps {
		if s == nil {
			continue
		}
		p := s.pool.owner()
		i, ok := at[p]
		if !ok {
			i = len(out)
			at[p] = i
			out = append(out, memory.PoolUse{Pool: p.id, Upstream: p.backing.upstreamName(), Pinned: p.pinned, Elsewhere: !p.backing.onDevice()})
		}
		s.lockBeside(held)
		s.view().AddTo(&out[i])
		s.unlockBeside(held)
	}
	views.SortPools(out)
	return out
}

// view is what a stream heap adds to its pool. The caller holds Device.mu and the arena's lock.
//
// +checklocks:s.dev.gpu.mu
func (s *streamHeap) view() views.Heap {
	return views.Heap{Now: s.gauges.Now(), Free: s.blocks.FreeBytes, Paused: uint64(s.pausedBytes), Spilled: s.pool != s.pool.owner()}
}
