package views

import (
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/memory"
)

// Stats are the statistics that follow from a device's quota, as of the last Rebalance. The locks of the device and of all
// arenas are held.
func Stats(q *quota.Device) memory.Stats {
	all := q.Statistics()
	grouped := func(of func(group int) quota.Value) memory.Grouped {
		return memory.Grouped{All: memory.Value(of(quota.GroupAll)), Small: memory.Value(of(quota.GroupSmall)), Large: memory.Value(of(quota.GroupLarge))}
	}
	gauge := func(i int) memory.Grouped { return grouped(func(g int) quota.Value { return all[g][i] }) }
	return memory.Stats{
		Allocations:   gauge(quota.Allocs),
		Active:        gauge(quota.Active),
		Inactive:      gauge(quota.Free),
		Requested:     gauge(quota.Requested),
		Allocated:     gauge(quota.Allocated),
		ActiveBytes:   gauge(quota.ActiveBytes),
		InactiveBytes: gauge(quota.FreeBytes),
		Segments:      grouped(func(g int) quota.Value { return q.Physical[g].Handles }),
		Reserved:      grouped(func(g int) quota.Value { return q.Physical[g].Bytes }),
		Paused:        grouped(func(g int) quota.Value { return q.Paused[g] }),
		SpareBytes:    q.Spare,
	}
}

// Gauges are the gauges that follow from a device's quota and the sum of its arenas now. It allocates nothing.
func Gauges(q *quota.Device, now *quota.Gauges) memory.Gauges {
	cached := uint64(now[quota.FreeBytes]) + q.Spare
	reserved, paused := &q.Physical[quota.GroupAll].Bytes, &q.Paused[quota.GroupAll]
	return memory.Gauges{
		Reserved: q.Total(), PeakReserved: uint64(reserved.Peak),
		Allocated: uint64(now[quota.Allocated]), PeakAllocated: uint64(q.Peak(quota.Allocated)),
		Active: uint64(now[quota.ActiveBytes]), PeakActive: uint64(q.Peak(quota.ActiveBytes)),
		Cached: cached, PeakCached: max(cached, uint64(q.Peak(quota.FreeBytes))),
		Paused: uint64(paused.Current), PeakPaused: uint64(paused.Peak),
		Limit: q.Limit,
	}
}

// CountMet counts a request by the stage that met it.
func CountMet(c *memory.Counters, by memory.Stages) {
	switch by {
	case memory.StageFit:
		c.ByFit++
	case memory.StageCollect:
		c.ByCollect++
	case memory.StageRemap:
		c.ByRemap++
	case memory.StageGrow:
		c.ByGrow++
	case memory.StageLend:
		c.ByLend++
	case memory.StageCallback:
		c.ByCallback++
	case memory.StageNode:
		c.ByNode++
	case memory.StageSpill:
		c.BySpill++
	}
}
