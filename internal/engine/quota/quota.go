// Package quota is the arithmetic of a device's memory: what is reserved, handed out and free, with exact peaks, and what may
// still be got.
//
// # Allowances
//
// Every request changes the gauges of an arena under that arena's lock alone, and yet the device's peaks are exact: an arena
// may move its gauges freely below its allowances, and the allowances of all arenas add up to no more than the peak so far. A
// request that would exceed one is carried out with the device's lock, which has the sums taken and the allowances shared out
// anew (Device.Rebalance). So no sum can pass the recorded peak unseen, and in steady state nothing is shared between threads.
// There are allowances for each size class, since each has peaks of its own, and for an arena's classes together.
//
// # Locks
//
// It has none. The device's lock guards a Device, and the lock of an arena its Arena.
package quota

import "slices"

// The groups of arenas that have statistics of their own: all, and each size class, as PyTorch's two pools of sizes.
const (
	GroupAll = iota
	GroupSmall
	GroupLarge
	NumGroups
)

// GroupOf is the group of a size class.
func GroupOf(class int) int {
	if class == Small {
		return GroupSmall
	}
	return GroupLarge
}

// groupsOf are the groups that a size class counts in.
func groupsOf(class int) [2]int { return [2]int{GroupAll, GroupOf(class)} }

// Device is what a device has.
type Device struct {
	Limit     uint64 // of Reserved, 0 none; SetLimit sets it
	Reserved  uint64 // physical memory that is under the limit
	Elsewhere uint64 // memory that is not: of pools whose upstream is host memory or another pool
	InFlight  uint64 // bytes under the limit that are being asked of users' upstreams, with no lock held
	Spare     uint64 // of Reserved: in no arena
	Returned  uint64 // bytes ever given back to where they came from
	Physical  [NumGroups]Physical
	Paused    [NumGroups]Value // bytes of blocks whose memory is paused
	Watch     Watch

	arenas  []*Arena
	sums    [NumGroups]group
	retired [NumGroups]Gauges // what was added in stream heaps that are gone, and to the spare chunks
	since   [NumGroups]struct{ added, removed Gauges }
	limits  [numLimits]uint64
	recent  int64 // the most active bytes of each class that was retired since TakeRecent
}

// The limits of Reserved, of which the lowest is in force: the program's own, and that of the node's broker.
const (
	LimitOwn = iota
	LimitNode
	numLimits
)

// NewDevice is a device without memory that has a limit of its own, 0 for none.
func NewDevice(limit uint64) (d Device) {
	d.SetLimit(LimitOwn, limit)
	return d
}

// SetLimit sets one of the limits, 0 for none.
func (d *Device) SetLimit(which int, bytes uint64) {
	d.limits[which] = bytes
	d.Limit = 0
	for _, l := range d.limits {
		if l != 0 && (d.Limit == 0 || l < d.Limit) {
			d.Limit = l
		}
	}
}

// group is the sum of the gauges of a set of arenas, with its peaks.
type group struct {
	now, peak Gauges
}

// Watch has operations come to the device's lock that the allowances alone would not: those that make more memory free, or more
// memory active within a span of time, than was noted. The zero value watches nothing.
type Watch struct {
	Free   int64 // the free bytes of all arenas beyond which a free comes; 0: none does
	Step   int64 // by how much active memory may exceed Active before a request comes; 0: none does
	Active int64 // the most active bytes since the span began that were noted; Rebalance raises it
	Soon   bool  // a request comes as well once active memory has risen by Step
}

// MostActive is what active memory has not exceeded since the span began.
func (w *Watch) MostActive() int64 { return w.Active + w.Step }

// limit bounds what a sum may still rise.
func (w *Watch) limit(now, left *Gauges) {
	if w.Free > 0 {
		left[FreeBytes] = min(left[FreeBytes], max(0, w.Free-now[FreeBytes]))
	}
	if w.Step > 0 {
		left[ActiveBytes] = min(left[ActiveBytes], w.MostActive()-now[ActiveBytes])
		if w.Soon {
			left[ActiveBytes] = min(left[ActiveBytes], w.Step)
		}
	}
}

// AddArena counts an arena from now on.
func (d *Device) AddArena(a *Arena) { d.arenas = append(d.arenas, a) }

// RemoveGone no longer counts the arenas that are gone, which are empty.
func (d *Device) RemoveGone() {
	d.arenas = slices.DeleteFunc(d.arenas, func(a *Arena) bool { return a.Gone })
}

// Total is all physical memory.
func (d *Device) Total() uint64 { return d.Reserved + d.Elsewhere }

// MayHold reports whether the limit allows need bytes more.
func (d *Device) MayHold(need uint64) bool {
	return d.Limit == 0 || d.Reserved+d.InFlight+need <= d.Limit
}

// Got notes memory that came from the driver or an upstream, GaveBack memory that went there. counted is memory under the
// limit.
func (d *Device) Got(bytes uint64, counted bool) {
	if counted {
		d.Reserved += bytes
	} else {
		d.Elsewhere += bytes
	}
	d.Physical[GroupAll].Add(bytes)
	d.Physical[GroupAll].raise()
}

// GaveBack is the opposite of Got.
func (d *Device) GaveBack(bytes uint64, counted bool) {
	if counted {
		d.Reserved -= bytes
	} else {
		d.Elsewhere -= bytes
	}
	d.Physical[GroupAll].Remove(bytes)
	d.Returned += bytes
}

// AddSpare notes a chunk that no arena has any more.
func (d *Device) AddSpare(bytes uint64) {
	d.Spare += bytes
	d.Physical[GroupLarge].Join(bytes)
	for _, g := range groupsOf(Large) {
		d.retired[g][Free]++
		d.retired[g][FreeBytes] += int64(bytes)
	}
}

// TakeSpare notes that a spare chunk goes to an arena.
func (d *Device) TakeSpare(bytes uint64) {
	d.Spare -= bytes
	d.Physical[GroupLarge].Leave(bytes)
}

// AddPaused notes that blocks of a class lost so many bytes of memory, or got them back.
func (d *Device) AddPaused(class int, bytes int64) {
	for _, g := range groupsOf(class) {
		v := &d.Paused[g]
		v.Current += bytes
		v.raise()
		if bytes > 0 {
			v.Added += bytes
		} else {
			v.Removed -= bytes
		}
	}
}

// Retire empties a class whose stream heap is gone: what was ever added there stays counted.
func (d *Device) Retire(class int, c *Class) {
	for _, g := range groupsOf(class) {
		for i, v := range c.sum {
			d.retired[g][i] += v
		}
	}
	d.recent += c.recent
	*c = Class{}
}

// TakeRecent is Arena.TakeRecent of stream heaps that are gone since.
func (d *Device) TakeRecent() (bytes int64) {
	bytes, d.recent = d.recent, 0
	return bytes
}

// Retired is what was ever added to a gauge in stream heaps that are gone.
func (d *Device) Retired(gauge int) int64 { return d.retired[GroupAll][gauge] }

// Peak is the peak of a gauge of all arenas.
func (d *Device) Peak(gauge int) int64 { return d.sums[GroupAll].peak[gauge] }

// WatchReached reports whether more memory is free than a free may make so without the device's lock, as of the last Rebalance.
func (d *Device) WatchReached() bool {
	return d.Watch.Free > 0 && d.sums[GroupAll].now[FreeBytes] >= d.Watch.Free
}

// Now is a gauge of all arenas, as of the last Rebalance.
func (d *Device) Now(gauge int) int64 { return d.sums[GroupAll].now[gauge] }

// Rebalance takes the sums, raises the peaks and shares the allowances out anew. spares is the number of spare chunks, and
// favoured the arena that gets allowances first, or nil. The locks of all arenas are held.
func (d *Device) Rebalance(favoured *Arena, spares int) {
	var sums [NumClasses]Gauges
	for _, a := range d.arenas {
		for class := range a.Classes {
			sums[class].add(&a.Classes[class].now)
		}
	}
	for g := range d.sums {
		d.sums[g].now = Gauges{}
	}
	for class := range sums {
		for _, g := range groupsOf(class) {
			d.sums[g].now.add(&sums[class])
		}
	}
	// Free memory that no arena has: spare chunks.
	for _, g := range groupsOf(Large) {
		d.sums[g].now[FreeBytes] += int64(d.Spare)
		d.sums[g].now[Free] += int64(spares)
	}
	for g := range d.sums {
		x := &d.sums[g]
		for i, v := range x.now {
			x.peak[i] = max(x.peak[i], v)
		}
	}
	for g := range d.Physical {
		d.Physical[g].raise()
	}
	d.Watch.Active = max(d.Watch.Active, d.sums[GroupAll].now[ActiveBytes])
	d.shareOut(favoured)
}

// shareOut sets the allowances. Of what a sum may still rise before it passes its peak, each arena gets as much as it needs
// to reach its own highest value again, the favoured one first, as far as that goes; what remains is shared alike. So a program
// whose streams each repeat what they did before comes here no more.
func (d *Device) shareOut(favoured *Arena) {
	var left [NumGroups]Gauges
	for g := range d.sums {
		for i := range left[g] {
			left[g][i] = d.sums[g].peak[i] - d.sums[g].now[i]
		}
	}
	d.Watch.limit(&d.sums[GroupAll].now, &left[GroupAll])
	if favoured != nil {
		favoured.give(&left)
	}
	for _, a := range d.arenas {
		if a != favoured {
			a.give(&left)
		}
	}
	any := false
	for g := range left {
		for i := range left[g] {
			left[g][i] /= max(int64(len(d.arenas)), 1)
			any = any || left[g][i] != 0
		}
	}
	if !any {
		return
	}
	for _, a := range d.arenas {
		for class := range a.Classes {
			a.Classes[class].max.add(&left[GroupOf(class)])
		}
		a.most.add(&left[GroupAll])
	}
}

// give lets an arena reach its own highest value again, of what is left.
func (a *Arena) give(left *[NumGroups]Gauges) {
	var sum Gauges
	for class := range a.Classes {
		c := &a.Classes[class]
		sum.add(&c.now)
		allow(&c.now, &c.high, &c.max, &left[GroupOf(class)])
	}
	allow(&sum, &a.high, &a.most, &left[GroupAll])
}

// allow sets the allowances most of gauges that are at now, and takes what it gives from left.
func allow(now, high, most, left *Gauges) {
	for i, v := range now {
		h := max(high[i], v)
		x := min(left[i], h-v)
		high[i] = h
		most[i] = v + x
		left[i] -= x
	}
}

// ResetPeaks forgets the peaks, which the next Rebalance makes the present.
func (d *Device) ResetPeaks() {
	for g := range d.sums {
		d.sums[g].peak = Gauges{}
		d.Physical[g].Bytes.Peak, d.Physical[g].Handles.Peak = 0, 0
		d.Paused[g].Peak = d.Paused[g].Current
	}
	for _, a := range d.arenas {
		a.high = Gauges{}
		for class := range a.Classes {
			a.Classes[class].high = Gauges{}
		}
	}
}

// Statistics are the values of every gauge of every group, as of the last Rebalance. The locks of all arenas are held.
func (d *Device) Statistics() (all [NumGroups][NumGauges]Value) {
	sums := d.everAdded()
	for g := range all {
		x, since := &d.sums[g], &d.since[g]
		for i := range all[g] {
			all[g][i] = Value{x.now[i], x.peak[i], sums[g][i] - since.added[i], sums[g][i] - x.now[i] - since.removed[i]}
		}
	}
	return all
}

// ResetAccumulated has Added and Removed of every statistic start from 0 again. The locks of all arenas are held, and
// Rebalance was called.
func (d *Device) ResetAccumulated() {
	for g, sum := range d.everAdded() {
		for i, v := range sum {
			d.since[g].added[i], d.since[g].removed[i] = v, v-d.sums[g].now[i]
		}
		for _, v := range [3]*Value{&d.Physical[g].Bytes, &d.Physical[g].Handles, &d.Paused[g]} {
			v.Added, v.Removed = 0, 0
		}
	}
}

// everAdded is what was ever added to each gauge.
func (d *Device) everAdded() [NumGroups]Gauges {
	sums := d.retired
	for _, a := range d.arenas {
		for class := range a.Classes {
			for _, g := range groupsOf(class) {
				for i, v := range a.Classes[class].sum {
					sums[g][i] += v
				}
			}
		}
	}
	return sums
}
