package engine

import (
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/memory"
)

// Where memory is mapped for a request that no free block fits.

// place is where new memory goes: at the start of an unmapped range, behind the free block left of it if there is one, or at its
// end, before the free block to its right.
type place struct {
	unmapped heap.ID
	need     uint64  // bytes to map there
	room     uint64  // bytes that could be mapped there
	atEnd    bool    // map at the end of the unmapped range
	joins    heap.ID // the free block that the new memory extends, 0 none
}

// place finds where the request's memory is to be mapped, with so much room beyond what is needed, within the pool's own
// limit; no place where there is none. It locks other arenas.
//
// +checklocks:m.c.d.gpu.mu
func (m *chunkRequest) place(spare uint64) (place, error) {
	c, d, s := m.c, m.c.d, m.h.s
	find := func() (place, bool) { return s.placeFor(c.n, d.state.phys.upstream.Granularity(), spare) }
	at, ok := find()
	if !ok {
		if err := m.h.reserve(c.n); err != nil {
			if isOutOfMemory(err) {
				c.steps.log.oom, c.steps.log.of(memory.StageGrow).err = err, err // the first that needs addresses
				return place{}, nil
			}
			return place{}, err
		}
		if at, ok = find(); !ok {
			return place{}, nil
		}
	}
	for !s.pool.mayHold(at.need) {
		if !m.spare(at.need) {
			c.steps.scope.limit = s.pool
			c.steps.log.try(memory.StageGrow).stop = stopPoolLimit
			return place{}, nil
		}
		if at, ok = find(); !ok {
			return place{}, nil
		}
	}
	if s.pool.limit != 0 {
		at.room = min(at.room, s.pool.limit-s.pool.reserved)
	}
	return at, nil
}

// placeFor chooses where a request of n bytes is to be met: where the least must be mapped, and of such places the
// smallest unmapped range that has spare bytes of room beyond.
func (s *streamHeap) placeFor(n, granularity, spare uint64) (place, bool) {
	var best place
	up := func(x uint64) uint64 { return (x + granularity - 1) / granularity * granularity }
	better := func(p place) {
		if p.room >= p.need+spare && (best.unmapped == 0 || p.need < best.need || p.need == best.need && p.room < best.room) {
			best = p
		}
	}
	s.blocks.UnmappedBins.Each(granularity, func(id heap.ID, b *heap.Block) bool {
		p := place{unmapped: id, need: up(n), room: b.Size}
		better(p)
		if l := s.blocks.Prev(id); l != 0 && s.blocks.At(l).State == heap.Free {
			p.need, p.joins = up(n-min(n, s.blocks.At(l).Size)), l
			better(p)
		}
		if r := s.blocks.Next(id); r != 0 && s.blocks.At(r).State == heap.Free {
			p.need, p.joins, p.atEnd = up(n-min(n, s.blocks.At(r).Size)), r, true
			better(p)
		}
		return true
	})
	return best, best.unmapped != 0
}
