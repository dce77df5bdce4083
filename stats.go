package cistern

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
	d.settleAll(nil, nil)
	sums := d.sums()
	value := func(g, i int) Value {
		x := &d.groups[g]
		since := d.since[g][i]
		return Value{x.now[i], x.peak[i], sums[g][i] - since.added, sums[g][i] - x.now[i] - since.removed}
	}
	grouped := func(i int) Grouped {
		return Grouped{value(groupAll, i), value(groupSmall, i), value(groupLarge, i)}
	}
	s := Stats{
		Allocations:    grouped(gAllocs),
		Active:         grouped(gActive),
		Inactive:       grouped(gFree),
		Requested:      grouped(gRequested),
		Allocated:      grouped(gAllocated),
		ActiveBytes:    grouped(gActiveBytes),
		InactiveBytes:  grouped(gFreeBytes),
		Segments:       Grouped{d.held[groupAll].handles, d.held[groupSmall].handles, d.held[groupLarge].handles},
		Reserved:       Grouped{d.held[groupAll].bytes, d.held[groupSmall].bytes, d.held[groupLarge].bytes},
		Paused:         Grouped{d.paused[groupAll], d.paused[groupSmall], d.paused[groupLarge]},
		SpareBytes:     d.spareBytes,
		ZombieMappings: d.zombies.Len(),
		Counters:       d.counts,
	}
	s.StreamSyncs = d.timeline.Waits()
	for _, r := range d.areas {
		s.AddressBytes += r.size
	}
	return s
}

// sums is what was ever added to each statistic.
//
// +checklocks:d.mu
func (d *Device) sums() [numGroups][numGauges]int64 {
	sums := d.retired
	for _, s := range d.spaces {
		if s == nil {
			continue
		}
		s.mu.Lock()
		for _, g := range [2]int{groupAll, groupOf(s.class)} {
			for i, v := range s.gauges.sum {
				sums[g][i] += v
			}
		}
		s.mu.Unlock()
	}
	return sums
}

// ResetPeaks makes the present values the peaks.
func (d *Device) ResetPeaks() { d.resetPeaks() }

// total is what was added to and taken from a statistic when ResetAccumulated was last called.
type total struct{ added, removed int64 }

// ResetAccumulated makes Added and Removed of every statistic and the Counters start from 0 again. What is now and the
// peaks stay. A size class from which a chunk moves to another afterwards can show less than 0 added for Segments and
// Reserved: the two classes always add up to all.
func (d *Device) ResetAccumulated() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.settleAll(nil, nil)
	for g, list := range d.sums() {
		for i, v := range list {
			d.since[g][i] = total{v, v - d.groups[g].now[i]}
		}
	}
	for g := range d.held {
		for _, v := range [2]*Value{&d.held[g].bytes, &d.held[g].handles} {
			v.Added, v.Removed = 0, 0
		}
		d.paused[g].Added, d.paused[g].Removed = 0, 0
	}
	d.glance.before.Retries += d.counts.Retries
	d.glance.before.OOMs += d.counts.OOMs
	d.counts = Counters{}
	d.timeline.ResetWaits()
}
