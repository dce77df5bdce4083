package engine

import "github.com/cistern-gpu/cistern/memory"

// The memory that one pool has reserved, and may reserve.

// Stats sums the pool up as it is at one moment.
func (p *Pool) Stats() memory.PoolStats {
	d := p.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, l := range d.state.pools.arenas {
		l.Lock()
		defer l.Unlock()
	}
	st := memory.PoolStats{Reserved: p.holds(), PeakReserved: p.peak, Limit: p.limit}
	for _, s := range d.state.pools.heaps {
		if s != nil && s.pool.owner() == p {
			s.view().AddToStats(&st)
		}
	}
	return st
}

// SetLimit bounds the memory that the pool may reserve, in bytes; 0 is no limit of its own. Memory beyond a new limit stays
// reserved until Trim.
func (p *Pool) SetLimit(bytes uint64) {
	d := p.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	p.limit = bytes
}

// mayHold reports whether the pool's own limit allows need bytes more.
//
// +checklocks:p.dev.gpu.mu
func (p *Pool) mayHold(need uint64) bool {
	return p.limit == 0 || need <= p.limit && p.reserved+p.inFlight <= p.limit-need
}

// holds is the memory that the pool has reserved, its spill's included.
//
// +checklocks:p.dev.gpu.mu
func (p *Pool) holds() uint64 {
	if p.spill != nil {
		return p.reserved + p.spill.reserved
	}
	return p.reserved
}

// gain notes physical memory that came to a stream heap, lose memory that left it. The caller holds Device.mu and the arena's
// lock.
//
// +checklocks:s.dev.gpu.mu
func (s *streamHeap) gain(bytes uint64) {
	s.held += bytes
	s.pool.reserved += bytes
	p := s.pool.owner()
	p.peak = max(p.peak, p.holds())
}

// +checklocks:s.dev.gpu.mu
func (s *streamHeap) lose(bytes uint64) {
	s.held -= bytes
	s.pool.reserved -= bytes
}

// spare makes free chunks of the request's pool spare until the pool's limit allows need bytes more, or there are none
// that can be taken. It reports whether any went. The caller holds Device.mu and the arena's lock.
//
// +checklocks:m.c.d.gpu.mu
func (m *chunkRequest) spare(need uint64) bool {
	c, d, p := m.c, m.c.d, m.h.s.pool
	if p.pinned || d.state.observers.onUnmap != nil || c.steps.allowed&memory.StageRemap == 0 || need > p.limit {
		return false
	}
	c.steps.log.tried |= memory.StageRemap
	excess, got := p.reserved+p.inFlight+need-p.limit, uint64(0)
	for h := range d.state.pools.chunkHeaps() {
		if o := h.s; o.pool == p && o != c.s && got < excess {
			o.lockBeside(c.s)
			got += h.detach(excess - got)
			o.unlockBeside(c.s)
		}
	}
	if got == 0 { // last, as the request may use what is free there where it is
		got = m.h.detach(excess)
	}
	return got > 0
}
