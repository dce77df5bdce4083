package engine

import (
	"github.com/cistern-gpu/cistern/internal/engine/arena"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/views"
	"github.com/cistern-gpu/cistern/memory"
)

// Stats returns the device's statistics.
func (d *Device) Stats() memory.Stats {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lockArenas(nil, nil)
	if d.late.Any() { // found in the magazines just now
		d.unlockArenas(nil, nil)
		d.freeLate(nil)
		d.lockArenas(nil, nil)
	}
	d.quota.Rebalance(nil, len(d.mem.Spares()))
	s := views.Stats(&d.quota)
	d.unlockArenas(nil, nil)
	s.StaleMappings, s.AddressBytes, s.Counters = d.mem.Stale.Len(), d.mem.Ranges.Bytes(), d.counts
	s.StreamSyncs = d.timeline.Waits()
	return s
}

// ResetPeaks makes the present values the peaks.
func (d *Device) ResetPeaks() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.quota.ResetPeaks()
	for _, p := range d.byNumber {
		if p != nil {
			p.peak = p.holds()
		}
	}
	d.rebalanceAll(nil, nil)
}

// ResetAccumulated makes Added and Removed of every statistic and the Counters start from 0 again. What is now and the
// peaks stay. A size class from which a chunk moves to another afterwards can show less than 0 added for Segments and
// Reserved: the two classes always add up to all.
func (d *Device) ResetAccumulated() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lockArenas(nil, nil)
	d.quota.Rebalance(nil, len(d.mem.Spares()))
	d.quota.ResetAccumulated()
	d.unlockArenas(nil, nil)
	d.glance.before.Retries += d.counts.Retries
	d.glance.before.OOMs += d.counts.OOMs
	d.counts = memory.Counters{}
	d.timeline.ResetWaits()
}

// got notes memory that came from the driver or an upstream, gaveBack memory that went there. counted is memory under
// the device's limit.
//
// +checklocks:d.mu
func (d *Device) got(bytes uint64, counted bool) {
	d.quota.Got(bytes, counted)
	d.counts.DeviceAllocs++
}

// +checklocks:d.mu
func (d *Device) gaveBack(bytes uint64, counted bool) {
	d.quota.GaveBack(bytes, counted)
	d.counts.DeviceFrees++
}

// rebalance is called after a change that was made outside the hot path: if the stream heap exceeds an allowance now, the sums
// are taken, the peaks raised and the allowances shared out anew. The caller holds Device.mu and the arena's lock and
// has held both since before the change, so that no other thread has seen it. also is a stream heap of another arena whose
// lock the caller holds, or nil.
//
// +checklocks:d.mu
func (d *Device) rebalance(s, also *streamHeap) {
	if !s.arena.Quota.Within(s.class) || len(s.paused) > 0 { // a free may have changed what no arena counts
		d.rebalanceAll(s, also)
	}
}

// rebalanceAll is rebalance for any change. The caller holds the locks of held and also, either of which may be nil.
//
// +checklocks:d.mu
func (d *Device) rebalanceAll(held, also *streamHeap) {
	d.lockArenas(held, also)
	var favoured *quota.Arena
	if held != nil {
		favoured = &held.arena.Quota
	}
	d.quota.Rebalance(favoured, len(d.mem.Spares()))
	d.unlockArenas(held, also)
}

// lockArenas locks the arenas of the device, but those of two stream heaps that the caller has locked; either may be nil.
//
// +checklocks:d.mu
func (d *Device) lockArenas(held, also *streamHeap) {
	for _, l := range d.arenas {
		if !held.in(l) && !also.in(l) {
			l.Lock()
		}
	}
}

// +checklocks:d.mu
func (d *Device) unlockArenas(held, also *streamHeap) {
	for _, l := range d.arenas {
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
