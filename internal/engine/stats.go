package engine

import (
	"github.com/cistern-gpu/cistern/internal/engine/arena"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/views"
	"github.com/cistern-gpu/cistern/memory"
)

// Stats returns the device's statistics.
func (v *Views) Stats() memory.Stats {
	v.gpu.mu.Lock()
	defer v.gpu.mu.Unlock()
	v.pools.lockArenas(nil, nil)
	if v.frees.late.Any() { // found in the magazines just now
		v.pools.unlockArenas(nil, nil)
		v.frees.freeLate(nil)
		v.pools.lockArenas(nil, nil)
	}
	v.phys.quota.Rebalance(nil, len(v.phys.mem.Spares()))
	s := views.Stats(&v.phys.quota)
	v.pools.unlockArenas(nil, nil)
	s.StaleMappings, s.AddressBytes, s.Counters = v.phys.mem.Stale.Len(), v.phys.mem.Ranges.Bytes(), v.phys.counts
	s.ImportedBytes = v.imports.bytes
	s.StreamSyncs = v.gpu.timeline.Waits()
	return s
}

// ResetPeaks makes the present values the peaks.
func (v *Views) ResetPeaks() {
	v.gpu.mu.Lock()
	defer v.gpu.mu.Unlock()
	v.phys.quota.ResetPeaks()
	for _, p := range v.pools.byNumber {
		if p != nil {
			p.peak = p.holds()
		}
	}
	v.phys.rebalanceAll(nil, nil)
}

// ResetAccumulated makes Added and Removed of every statistic and the Counters start from 0 again. Present values and peaks
// stay. A size class from which a chunk moves to another afterwards can show less than 0 added for Segments and Reserved: the
// two classes always add up to all.
func (v *Views) ResetAccumulated() {
	v.gpu.mu.Lock()
	defer v.gpu.mu.Unlock()
	v.pools.lockArenas(nil, nil)
	v.phys.quota.Rebalance(nil, len(v.phys.mem.Spares()))
	v.phys.quota.ResetAccumulated()
	v.pools.unlockArenas(nil, nil)
	v.phys.glance.before.Retries += v.phys.counts.Retries
	v.phys.glance.before.OOMs += v.phys.counts.OOMs
	v.phys.counts = memory.Counters{}
	v.gpu.timeline.ResetWaits()
}

// got notes memory that came from the driver or an upstream, gaveBack memory that went there. counted is memory under
// the device's limit.
//
// +checklocks:ph.gpu.mu
func (ph *physical) got(bytes uint64, counted bool) {
	ph.quota.Got(bytes, counted)
	ph.counts.DeviceAllocs++
}

// +checklocks:ph.gpu.mu
func (ph *physical) gaveBack(bytes uint64, counted bool) {
	ph.quota.GaveBack(bytes, counted)
	ph.counts.DeviceFrees++
}

// rebalance is called after a change that was made outside the hot path: if the stream heap exceeds an allowance now, the sums
// are taken, the peaks raised and the allowances shared out anew. The caller holds Device.mu and the arena's lock and
// has held both since before the change, so that no other thread has seen it. also is a stream heap of another arena whose
// lock the caller holds, or nil.
//
// +checklocks:ph.gpu.mu
func (ph *physical) rebalance(s, also *streamHeap) {
	if !s.arena.Quota.Within(s.class) || len(s.paused) > 0 { // a free may have changed what no arena counts
		ph.rebalanceAll(s, also)
	}
}

// rebalanceAll is rebalance for any change. The caller holds the locks of held and also, either of which may be nil.
//
// +checklocks:ph.gpu.mu
func (ph *physical) rebalanceAll(held, also *streamHeap) {
	ph.pools.lockArenas(held, also)
	var favoured *quota.Arena
	if held != nil {
		favoured = &held.arena.Quota
	}
	ph.quota.Rebalance(favoured, len(ph.mem.Spares()))
	ph.pools.unlockArenas(held, also)
}

// lockArenas locks the arenas of the device, but those of two stream heaps that the caller has locked; either may be nil.
//
// +checklocks:pt.gpu.mu
func (pt *poolTable) lockArenas(held, also *streamHeap) {
	for _, l := range pt.arenas {
		if !held.in(l) && !also.in(l) {
			l.Lock()
		}
	}
}

// +checklocks:pt.gpu.mu
func (pt *poolTable) unlockArenas(held, also *streamHeap) {
	for _, l := range pt.arenas {
		if !held.in(l) && !also.in(l) {
			l.Unlock()
		}
	}
}

// in reports whether a stream heap, which may be nil, belongs to the arena.
func (s *streamHeap) in(l *arena.Arena) bool { return s != nil && s.arena == l }

// lockBeside locks the arena of o unless it is the arena of held, whose lock the caller has; held may be nil.
func (o *streamHeap) lockBeside(held *streamHeap) {
	if !held.in(o.arena) {
		o.arena.Lock()
	}
}

func (o *streamHeap) unlockBeside(held *streamHeap) {
	if !held.in(o.arena) {
		o.arena.Unlock()
	}
}
