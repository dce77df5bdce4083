package cistern

// gauges are one space's statistics. Every request changes them, under the space's lock alone, and yet the device's
// peaks are exact: a space may move its gauges freely below its allowances, and the allowances of all spaces add up
// to no more than the peak so far. A request that would exceed one takes the device's lock, is carried out there, and
// has the sum taken and the allowances shared out anew (Device.settle). So no sum can pass the recorded peak
// unseen, and in steady state nothing is shared between threads.
type gauges struct {
	now [numGauges]int64
	max [numGauges]int64 // allowance: what now may reach without the device's lock
	// high is the highest value that now had when allowances were shared out. Guarded by Device.mu.
	high [numGauges]int64
	sum  [numGauges]int64 // everything ever added
}

// The gauges. Bytes are rounded unless the name says otherwise; "active" includes blocks that wait for other streams.
const (
	gAllocs      = iota // blocks handed out
	gRequested          // bytes asked for, of blocks handed out
	gAllocated          // bytes handed out
	gActive             // blocks, active
	gActiveBytes        // bytes, active
	gFree               // free blocks
	gFreeBytes          // bytes, free
	numGauges
)

// roomForAlloc reports whether handing out n bytes stays within the allowances.
func (g *gauges) roomForAlloc(requested, n uint64) bool {
	return g.now[gAllocs] < g.max[gAllocs] &&
		g.now[gRequested]+int64(requested) <= g.max[gRequested] &&
		g.now[gAllocated]+int64(n) <= g.max[gAllocated] &&
		g.now[gActive] < g.max[gActive] &&
		g.now[gActiveBytes]+int64(n) <= g.max[gActiveBytes]
}

// alloc notes that n bytes were handed out, after which freeBlocks blocks are free.
func (g *gauges) alloc(requested, n uint64, freeBlocks int) {
	r, b := int64(requested), int64(n)
	g.now[gAllocs]++
	g.now[gRequested] += r
	g.now[gAllocated] += b
	g.now[gActive]++
	g.now[gActiveBytes] += b
	g.now[gFree] = int64(freeBlocks)
	g.now[gFreeBytes] -= b
	g.sum[gAllocs]++
	g.sum[gRequested] += r
	g.sum[gAllocated] += b
	g.sum[gActive]++
	g.sum[gActiveBytes] += b
}

// roomForFree reports whether taking n bytes back, in a block with so many free neighbours, stays within the
// allowances.
func (g *gauges) roomForFree(n uint64, neighbours int) bool {
	return g.now[gFree]+1-int64(neighbours) <= g.max[gFree] && g.now[gFreeBytes]+int64(n) <= g.max[gFreeBytes]
}

// free notes that a block came back and may be reused.
func (g *gauges) free(requested, n uint64, freeBlocks int) {
	g.park(requested, n)
	g.unpark(n, freeBlocks)
}

// park notes that a block came back while other streams use it.
func (g *gauges) park(requested, n uint64) {
	g.now[gAllocs]--
	g.now[gRequested] -= int64(requested)
	g.now[gAllocated] -= int64(n)
}

// unpark notes that a parked block may be reused.
func (g *gauges) unpark(n uint64, freeBlocks int) {
	g.now[gActive]--
	g.now[gActiveBytes] -= int64(n)
	g.setFree(freeBlocks, int64(n))
}

// setFree notes the number of free blocks and a change of the free bytes.
func (g *gauges) setFree(freeBlocks int, change int64) {
	if more := int64(freeBlocks) - g.now[gFree]; more > 0 {
		g.sum[gFree] += more
	}
	g.now[gFree] = int64(freeBlocks)
	g.now[gFreeBytes] += change
	if change > 0 {
		g.sum[gFreeBytes] += change
	}
}

// group is the sum of the gauges of a set of spaces with its peaks. Guarded by Device.mu.
type group struct {
	now, peak [numGauges]int64
	spaces    int64
}

// The groups: all spaces of a device, and those of PyTorch's two pools of sizes.
const (
	groupAll = iota
	groupSmall
	groupLarge
	numGroups
)

// settle is called after a change that was made outside the hot path: if the space exceeds an allowance now, the sums
// are taken, the peaks raised and the allowances shared out anew, half of what is left to this space. The caller
// holds Device.mu and the space's lock and has held both since before the change, so that no other thread has seen it.
// also is another space whose lock the caller holds, or nil.
func (d *Device) settle(s, also *space) {
	for i, v := range s.gauges.now {
		if v > s.gauges.max[i] {
			d.settleAll(s, also)
			return
		}
	}
}

// settleAll is settle for any change. The caller holds the locks of held and also, either of which may be nil.
func (d *Device) settleAll(held, also *space) {
	for _, s := range d.spaces {
		if s != nil && s != held && s != also {
			s.mu.Lock()
		}
	}
	d.settleLocked(held)
	for _, s := range d.spaces {
		if s != nil && s != held && s != also {
			s.mu.Unlock()
		}
	}
}

func (d *Device) settleLocked(favoured *space) {
	for g := range d.groups {
		d.groups[g].now, d.groups[g].spaces = [numGauges]int64{}, 0
	}
	for _, s := range d.spaces {
		if s == nil {
			continue
		}
		for _, g := range [2]int{groupAll, groupOf(s.class)} {
			x := &d.groups[g]
			x.spaces++
			for i, v := range s.gauges.now {
				x.now[i] += v
			}
		}
	}
	// Free memory that no space owns: spare chunks.
	d.groups[groupAll].now[gFreeBytes] += int64(d.spareBytes)
	d.groups[groupAll].now[gFree] += int64(len(d.spares))
	d.groups[groupLarge].now[gFreeBytes] += int64(d.spareBytes)
	d.groups[groupLarge].now[gFree] += int64(len(d.spares))
	for g := range d.groups {
		x := &d.groups[g]
		for i, v := range x.now {
			x.peak[i] = max(x.peak[i], v)
		}
	}
	d.shareOut(favoured)
}

// shareOut sets the allowances. Of what the sum may still rise before it passes the peak, each space gets as much as
// it needs to reach its own highest value again, the favoured one first, as far as that goes; what remains is shared
// alike. So a program whose streams each repeat what they did before comes here no more.
func (d *Device) shareOut(favoured *space) {
	var left [numGroups][numGauges]int64
	for g := range d.groups {
		for i := range left[g] {
			left[g][i] = d.groups[g].peak[i] - d.groups[g].now[i]
		}
	}
	give := func(s *space, bonus bool) {
		class := groupOf(s.class)
		for i, v := range s.gauges.now {
			x := min(left[groupAll][i], left[class][i])
			if bonus {
				x = min(left[groupAll][i]/d.groups[groupAll].spaces, left[class][i]/d.groups[class].spaces)
				s.gauges.max[i] += x
				continue
			}
			s.gauges.high[i] = max(s.gauges.high[i], v)
			x = min(x, s.gauges.high[i]-v)
			s.gauges.max[i] = v + x
			left[groupAll][i] -= x
			left[class][i] -= x
		}
	}
	if favoured != nil {
		give(favoured, false)
	}
	for _, s := range d.spaces {
		if s != nil && s != favoured {
			give(s, false)
		}
	}
	for _, s := range d.spaces {
		if s != nil {
			give(s, true)
		}
	}
}

// resetPeaks makes the present the peak.
func (d *Device) resetPeaks() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for g := range d.groups {
		d.groups[g].peak = [numGauges]int64{}
	}
	for _, s := range d.spaces {
		if s != nil {
			s.gauges.high = [numGauges]int64{}
		}
	}
	d.peakReserved = d.reservedBytes
	d.peakSegments = d.segments
	d.settleAll(nil, nil)
}
