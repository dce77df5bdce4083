package quota

import "github.com/cistern-gpu/cistern/internal/magazine"

// The gauges. Bytes are rounded unless the name says otherwise; "active" includes blocks that wait for other streams.
const (
	Allocs      = iota // blocks handed out
	Requested          // bytes asked for, of blocks handed out
	Allocated          // bytes handed out
	Active             // blocks, active
	ActiveBytes        // bytes, active
	Free               // free blocks
	FreeBytes          // bytes, free
	NumGauges
)

// Gauges are one value for each gauge.
type Gauges [NumGauges]int64

func (g *Gauges) add(o *Gauges) {
	for i, v := range o {
		g[i] += v
	}
}

// The size classes.
const (
	Small = iota
	Large
	NumClasses
)

// Class is what the blocks of one size class of an arena amount to. The arena's lock guards it.
type Class struct {
	now Gauges
	max Gauges // what now may reach without the device's lock
	// high is the highest value that now had when allowances were shared out. The device's lock guards it.
	high   Gauges
	sum    Gauges // everything ever added
	recent int64  // the most active bytes since TakeRecent
}

// Now are the gauges.
func (c *Class) Now() *Gauges { return &c.now }

// Ever is everything that was ever added to the gauges.
func (c *Class) Ever() *Gauges { return &c.sum }

// Alloc notes that n bytes were handed out, after which freeBlocks blocks are free.
func (c *Class) Alloc(requested, n uint64, freeBlocks int) {
	r, b := int64(requested), int64(n)
	c.now[Allocs]++
	c.now[Requested] += r
	c.now[Allocated] += b
	c.now[Active]++
	c.now[ActiveBytes] += b
	c.now[Free] = int64(freeBlocks)
	c.now[FreeBytes] -= b
	c.sum[Allocs]++
	c.sum[Requested] += r
	c.sum[Allocated] += b
	c.sum[Active]++
	c.sum[ActiveBytes] += b
	c.recent = max(c.recent, c.now[ActiveBytes])
}

// Free notes that a block came back and may be reused.
func (c *Class) Free(requested, n uint64, freeBlocks int) {
	c.Park(requested, n)
	c.Unpark(n, n, freeBlocks)
}

// Park notes that a block came back while other streams use it.
func (c *Class) Park(requested, n uint64) {
	c.now[Allocs]--
	c.now[Requested] -= int64(requested)
	c.now[Allocated] -= int64(n)
}

// Unpark notes that a parked block may be reused: back of its n bytes are free memory.
func (c *Class) Unpark(n, back uint64, freeBlocks int) {
	c.now[Active]--
	c.now[ActiveBytes] -= int64(n)
	c.SetFree(freeBlocks, int64(back))
}

// SetFree notes the number of free blocks and a change of the free bytes.
func (c *Class) SetFree(freeBlocks int, change int64) {
	if more := int64(freeBlocks) - c.now[Free]; more > 0 {
		c.sum[Free] += more
	}
	c.now[Free] = int64(freeBlocks)
	c.now[FreeBytes] += change
	if change > 0 {
		c.sum[FreeBytes] += change
	}
}

// Exchange notes what C code did: net is what it took back less what it handed out again, and handed what it handed out. A
// block that it keeps counts as a free block of its own.
func (c *Class) Exchange(net, handed magazine.Amount) {
	c.now[Allocs] -= net.Blocks
	c.now[Requested] -= net.Requested
	c.now[Allocated] -= net.Bytes
	c.now[Active] -= net.Blocks
	c.now[ActiveBytes] -= net.Bytes
	c.now[Free] += net.Blocks
	c.now[FreeBytes] += net.Bytes
	c.sum[Allocs] += handed.Blocks
	c.sum[Requested] += handed.Requested
	c.sum[Allocated] += handed.Bytes
	c.sum[Active] += handed.Blocks
	c.sum[ActiveBytes] += handed.Bytes
	c.sum[Free] += handed.Blocks + net.Blocks
	c.sum[FreeBytes] += handed.Bytes + net.Bytes
	c.recent = max(c.recent, c.now[ActiveBytes])
}

// Merge notes that a block which C code kept is an ordinary free block now, by which the number of free blocks changed so
// much: it counted as one of its own.
func (c *Class) Merge(change int) { c.now[Free] += int64(change - 1) }

// TakeOut notes that a block which C code took back is in use after all.
func (c *Class) TakeOut(requested, n uint64) {
	r, b := int64(requested), int64(n)
	c.now[Allocs]++
	c.now[Requested] += r
	c.now[Allocated] += b
	c.now[Active]++
	c.now[ActiveBytes] += b
	c.now[Free]--
	c.now[FreeBytes] -= b
	c.sum[Free]--
	c.sum[FreeBytes] -= b
	c.recent = max(c.recent, c.now[ActiveBytes])
}

// Arena is what the blocks of one arena amount to, and what it may change without the device's lock. The arena's lock guards
// it.
type Arena struct {
	Classes [NumClasses]Class
	Gone    bool // the device's lock guards it
	// most is the allowance of the classes together: what the sum of their gauges may reach without the device's lock.
	most Gauges
	// high is the highest sum when allowances were shared out. The device's lock guards it.
	high Gauges
}

// Spared notes that free memory of a class, in so many chunks, became spare. The sums count it still, so what may rise in its
// place does not.
func (a *Arena) Spared(class int, chunks int, bytes uint64) {
	for _, most := range [2]*Gauges{&a.Classes[class].max, &a.most} {
		most[Free] -= int64(chunks)
		most[FreeBytes] -= int64(bytes)
	}
}

// TakeRecent is the most bytes that were active since it was called last, the classes' peaks added up: they need not have been at
// the same moment.
func (a *Arena) TakeRecent() (bytes int64) {
	for i := range a.Classes {
		c := &a.Classes[i]
		bytes += c.recent
		c.recent = c.now[ActiveBytes]
	}
	return bytes
}

// RoomForAlloc reports whether handing out n bytes stays within the allowances.
func (a *Arena) RoomForAlloc(class int, requested, n uint64) bool {
	c, other := a.pair(class)
	return a.room(c, other, Allocs, 1) && a.room(c, other, Requested, int64(requested)) && a.room(c, other, Allocated, int64(n)) &&
		a.room(c, other, Active, 1) && a.room(c, other, ActiveBytes, int64(n))
}

// RoomForFree reports whether taking n bytes back, in a block with so many free neighbours, stays within the allowances.
func (a *Arena) RoomForFree(class int, n uint64, neighbours int) bool {
	c, other := a.pair(class)
	return a.room(c, other, Free, 1-int64(neighbours)) && a.room(c, other, FreeBytes, int64(n))
}

// Within reports whether no gauge of the class exceeds an allowance.
func (a *Arena) Within(class int) bool {
	c, other := a.pair(class)
	for i := range NumGauges {
		if !a.room(c, other, i, 0) {
			return false
		}
	}
	return true
}

// pair is a class and the other one. NumClasses is 2.
func (a *Arena) pair(class int) (c, other *Class) { return &a.Classes[class&1], &a.Classes[1-class&1] }

var _ [NumClasses - 2]struct{}

// room reports whether gauge i of a class may rise by x.
func (a *Arena) room(c, other *Class, i int, x int64) bool {
	own := c.now[i] + x
	return own <= c.max[i] && own+other.now[i] <= a.most[i]
}

// FreeRoom is what C code may take back without exceeding an allowance: of each class, and of both together.
func (a *Arena) FreeRoom() (room [NumClasses + 1]magazine.Amount) {
	var sum Gauges
	for i := range a.Classes {
		c := &a.Classes[i]
		room[i] = freeRoom(&c.now, &c.max)
		sum[Free] += c.now[Free]
		sum[FreeBytes] += c.now[FreeBytes]
	}
	room[NumClasses] = freeRoom(&sum, &a.most)
	return room
}

func freeRoom(now, max *Gauges) magazine.Amount {
	return magazine.Amount{Blocks: max[Free] - now[Free], Bytes: max[FreeBytes] - now[FreeBytes]}
}

// AllocRoom is what C code may hand out without exceeding an allowance, likewise.
func (a *Arena) AllocRoom() (room [NumClasses + 1]magazine.Amount) {
	var sum Gauges
	for i := range a.Classes {
		c := &a.Classes[i]
		room[i] = allocRoom(&c.now, &c.max)
		for k, v := range c.now {
			sum[k] += v
		}
	}
	room[NumClasses] = allocRoom(&sum, &a.most)
	return room
}

func allocRoom(now, max *Gauges) magazine.Amount {
	return magazine.Amount{
		Blocks:    min(max[Allocs]-now[Allocs], max[Active]-now[Active]),
		Bytes:     min(max[Allocated]-now[Allocated], max[ActiveBytes]-now[ActiveBytes]),
		Requested: max[Requested] - now[Requested],
	}
}
