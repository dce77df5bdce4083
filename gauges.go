package cistern

// gauges are one space's statistics. Every request changes them, under the lane's lock alone, and yet the device's peaks
// are exact: a lane may move its gauges freely below its allowances, and the allowances of all lanes add up to no more
// than the peak so far. A request that would exceed one takes the device's lock, is carried out there, and has the sum
// taken and the allowances shared out anew (Device.settle). So no sum can pass the recorded peak unseen, and in steady
// state nothing is shared between threads. There are allowances for each class, since each has peaks of its own, and
// for a lane's classes together.
type gauges struct {
	now [numGauges]int64
	max [numGauges]int64 // allowance of the class: what now may reach without the device's lock
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
func (s *space) roomForAlloc(requested, n uint64) bool {
	return s.room(gAllocs, 1) && s.room(gRequested, int64(requested)) && s.room(gAllocated, int64(n)) &&
		s.room(gActive, 1) && s.room(gActiveBytes, int64(n))
}

// room reports whether gauge i may rise by x without the device's lock.
func (s *space) room(i int, x int64) bool {
	own := s.gauges.now[i] + x
	return own <= s.gauges.max[i] && own+s.classes[1-s.class].now[i] <= s.most[i]
}

// numClasses is 2: room looks at the one other class.
var _ [numClasses - 2]struct{}

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
func (s *space) roomForFree(n uint64, neighbours int) bool {
	return s.room(gFree, 1-int64(neighbours)) && s.room(gFreeBytes, int64(n))
}

// free notes that a block came back and may be reused.
func (g *gauges) free(requested, n uint64, freeBlocks int) {
	g.park(requested, n)
	g.unpark(n, n, freeBlocks)
}

// park notes that a block came back while other streams use it.
func (g *gauges) park(requested, n uint64) {
	g.now[gAllocs]--
	g.now[gRequested] -= int64(requested)
	g.now[gAllocated] -= int64(n)
}

// unpark notes that a parked block may be reused: back of its n bytes are free memory.
func (g *gauges) unpark(n, back uint64, freeBlocks int) {
	g.now[gActive]--
	g.now[gActiveBytes] -= int64(n)
	g.setFree(freeBlocks, int64(back))
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
}

// The groups: all spaces of a device, and those of PyTorch's two pools of sizes.
const (
	groupAll = iota
	groupSmall
	groupLarge
	numGroups
)

// settle is called after a change that was made outside the hot path: if the space exceeds an allowance now, the sums
// are taken, the peaks raised and the allowances shared out anew. The caller holds Device.mu and the lane's lock and
// has held both since before the change, so that no other thread has seen it. also is a space of another lane whose
// lock the caller holds, or nil.
//
// +checklocks:d.mu
func (d *Device) settle(s, also *space) {
	for i := range numGauges {
		if !s.room(i, 0) || len(s.absent) > 0 { // a free may have changed what no lane counts
			d.settleAll(s, also)
			return
		}
	}
}

// settleAll is settle for any change. The caller holds the locks of held and also, either of which may be nil.
//
// +checklocks:d.mu
func (d *Device) settleAll(held, also *space) {
	for _, l := range d.lanes {
		if !held.in(l) && !also.in(l) {
			l.mu.Lock()
		}
	}
	d.settleLocked(held)
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

// +checklocks:d.mu
func (d *Device) settleLocked(favoured *space) {
	for g := range d.groups {
		d.groups[g].now = [numGauges]int64{}
	}
	for _, l := range d.lanes {
		for class := range l.classes {
			for _, g := range [2]int{groupAll, groupOf(class)} {
				for i, v := range l.classes[class].now {
					d.groups[g].now[i] += v
				}
			}
		}
	}
	// Free memory that no space owns: spare chunks.
	for _, g := range [2]int{groupAll, groupLarge} {
		d.groups[g].now[gFreeBytes] += int64(d.spareBytes)
		d.groups[g].now[gFree] += int64(len(d.spares))
	}
	for g := range d.groups {
		x := &d.groups[g]
		for i, v := range x.now {
			x.peak[i] = max(x.peak[i], v)
		}
	}
	for g := range d.held {
		d.held[g].raise()
	}
	d.shareOut(favoured)
}

// shareOut sets the allowances. Of what a sum may still rise before it passes its peak, each lane gets as much as it
// needs to reach its own highest value again, the favoured one first, as far as that goes; what remains is shared
// alike. So a program whose streams each repeat what they did before comes here no more.
//
// +checklocks:d.mu
func (d *Device) shareOut(favoured *space) {
	var left [numGroups][numGauges]int64
	for g := range d.groups {
		for i := range left[g] {
			left[g][i] = d.groups[g].peak[i] - d.groups[g].now[i]
		}
	}
	give := func(l *lane) {
		for i := range numGauges {
			sum := int64(0)
			for class := range l.classes {
				c := &l.classes[class]
				v := c.now[i]
				sum += v
				c.high[i] = max(c.high[i], v)
				x := min(left[groupOf(class)][i], c.high[i]-v)
				c.max[i] = v + x
				left[groupOf(class)][i] -= x
			}
			l.high[i] = max(l.high[i], sum)
			x := min(left[groupAll][i], l.high[i]-sum)
			l.most[i] = sum + x
			left[groupAll][i] -= x
		}
	}
	if favoured != nil {
		give(favoured.lane)
	}
	for _, l := range d.lanes {
		if !favoured.in(l) {
			give(l)
		}
	}
	n := int64(len(d.lanes))
	for _, l := range d.lanes {
		for i := range numGauges {
			for class := range l.classes {
				l.classes[class].max[i] += left[groupOf(class)][i] / n
			}
			l.most[i] += left[groupAll][i] / n
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
	for _, l := range d.lanes {
		l.high = [numGauges]int64{}
		for class := range l.classes {
			l.classes[class].high = [numGauges]int64{}
		}
	}
	for g := range d.held {
		d.held[g].bytes.Peak, d.held[g].handles.Peak = 0, 0 // settleAll raises them
		d.paused[g].Peak = d.paused[g].Current
	}
	for _, p := range d.byNumber {
		if p != nil {
			p.peak = p.holds()
		}
	}
	d.settleAll(nil, nil)
}
