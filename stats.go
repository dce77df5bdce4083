package cistern

import "github.com/cistern-gpu/cistern/internal/engine/quota"

// Value is one statistic: now, at its highest since the start or ResetPeaks, and everything added and taken away since the
// start or ResetAccumulated.
type Value struct {
	Current, Peak, Added, Removed int64
}

// Grouped is a statistic of all blocks, and of the two size classes: small is what is cut for requests of up to 256 KiB
// (PyTorch draws its line at 1 MiB).
type Grouped struct {
	All, Small, Large Value
}

// Stats are the statistics that PyTorch reports, exact at the moment of the call. Reserved + Paused = ActiveBytes +
// InactiveBytes.
type Stats struct {
	Allocations    Grouped // blocks handed out
	Active         Grouped // blocks handed out, or given back and still used by other streams
	Inactive       Grouped // free blocks and spare chunks (PyTorch: inactive_split)
	Requested      Grouped // bytes asked for
	Allocated      Grouped // bytes handed out, rounded
	ActiveBytes    Grouped
	InactiveBytes  Grouped
	Segments       Grouped // chunks and segments held from the driver; spare ones count as large
	Reserved       Grouped // bytes of physical memory held, likewise
	Paused         Grouped // bytes of active blocks whose memory is paused
	SpareBytes     uint64  // bytes of chunks that are mapped nowhere
	ZombieMappings int     // old mappings that wait for the GPU; they cost addresses, not memory
	AddressBytes   uint64  // address space reserved
	Counters
}

// Counters count what happened since the start or ResetAccumulated.
type Counters struct {
	Remaps       int64 // chunks moved
	DeviceAllocs int64 // chunks or segments got from the driver
	DeviceFrees  int64
	Retries      int64 // requests met only by taking from other pools, by giving cached memory back, or by a callback
	OOMs         int64 // requests that failed
	Borrows      int64 // requests met with a free block of another stream's
	StreamSyncs  int64 // waits of a host thread for the GPU

	ByFit, ByCollect, ByRemap, ByGrow, ByLend, ByCallback, BySpill int64 // requests on the slow path, by the rung that met them
}

func (c *Counters) count(r Rungs) {
	switch r {
	case RungFit:
		c.ByFit++
	case RungCollect:
		c.ByCollect++
	case RungRemap:
		c.ByRemap++
	case RungGrow:
		c.ByGrow++
	case RungLend:
		c.ByLend++
	case RungCallback:
		c.ByCallback++
	case RungSpill:
		c.BySpill++
	}
}

// Stats returns the device's statistics.
func (d *Device) Stats() Stats {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lockLanes(nil, nil)
	d.quota.Rebalance(nil, len(d.spares))
	all := d.quota.Statistics()
	d.unlockLanes(nil, nil)
	grouped := func(of func(group int) quota.Value) Grouped {
		return Grouped{Value(of(quota.GroupAll)), Value(of(quota.GroupSmall)), Value(of(quota.GroupLarge))}
	}
	gauge := func(i int) Grouped { return grouped(func(g int) quota.Value { return all[g][i] }) }
	physical := &d.quota.Physical
	s := Stats{
		Allocations:    gauge(quota.Allocs),
		Active:         gauge(quota.Active),
		Inactive:       gauge(quota.Free),
		Requested:      gauge(quota.Requested),
		Allocated:      gauge(quota.Allocated),
		ActiveBytes:    gauge(quota.ActiveBytes),
		InactiveBytes:  gauge(quota.FreeBytes),
		Segments:       grouped(func(g int) quota.Value { return physical[g].Handles }),
		Reserved:       grouped(func(g int) quota.Value { return physical[g].Bytes }),
		Paused:         grouped(func(g int) quota.Value { return d.quota.Paused[g] }),
		SpareBytes:     d.quota.Spare,
		ZombieMappings: d.zombies.Len(),
		Counters:       d.counts,
	}
	s.StreamSyncs = d.timeline.Waits()
	for _, r := range d.areas {
		s.AddressBytes += r.size
	}
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
	d.lockLanes(nil, nil)
	d.quota.Rebalance(nil, len(d.spares))
	d.quota.ResetAccumulated()
	d.unlockLanes(nil, nil)
	d.glance.before.Retries += d.counts.Retries
	d.glance.before.OOMs += d.counts.OOMs
	d.counts = Counters{}
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

// rebalance is called after a change that was made outside the hot path: if the space exceeds an allowance now, the sums
// are taken, the peaks raised and the allowances shared out anew. The caller holds Device.mu and the lane's lock and
// has held both since before the change, so that no other thread has seen it. also is a space of another lane whose
// lock the caller holds, or nil.
//
// +checklocks:d.mu
func (d *Device) rebalance(s, also *space) {
	if !s.quota.Within(s.class) || len(s.absent) > 0 { // a free may have changed what no lane counts
		d.rebalanceAll(s, also)
	}
}

// rebalanceAll is rebalance for any change. The caller holds the locks of held and also, either of which may be nil.
//
// +checklocks:d.mu
func (d *Device) rebalanceAll(held, also *space) {
	d.lockLanes(held, also)
	var favoured *quota.Arena
	if held != nil {
		favoured = &held.quota
	}
	d.quota.Rebalance(favoured, len(d.spares))
	d.unlockLanes(held, also)
}

// lockLanes locks the lanes of the device, but those of two spaces that the caller has locked; either may be nil.
//
// +checklocks:d.mu
func (d *Device) lockLanes(held, also *space) {
	for _, l := range d.lanes {
		if !held.in(l) && !also.in(l) {
			l.mu.Lock()
		}
	}
}

// +checklocks:d.mu
func (d *Device) unlockLanes(held, also *space) {
	for _, l := range d.lanes {
		if !held.in(l) && !also.in(l) {
			l.mu.Unlock()
		}
	}
}

// in reports whether a space, which may be nil, belongs to the lane.
func (s *space) in(l *lane) bool { return s != nil && s.lane == l }

// lockBeside locks the lane of o unless it is the lane of held, whose lock the caller has; held may be nil.
func (o *space) lockBeside(held *space) {
	if !held.in(o.lane) {
		o.mu.Lock()
	}
}

func (o *space) unlockBeside(held *space) {
	if !held.in(o.lane) {
		o.mu.Unlock()
	}
}
