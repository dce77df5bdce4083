// Package vm keeps the physical side of the engine: chunks (physical handles), which addresses of which owner they
// are mapped at, and old mappings that must wait for the GPU before they go. It decides nothing about blocks.
//
// A chunk is mapped at one address at a time as far as its owner is concerned. When it moves, it is mapped at its new
// address first and the old mapping becomes a zombie: the driver allows both at once, and stream order makes the new
// one usable immediately. The zombie is unmapped once the host knows that the work queued before the move is done.
//
// Nothing here locks; the engine's device lock guards Memory, an owner's lock its Area.
package vm

import "github.com/cistern-gpu/cistern/cuda"

// ChunkID names a chunk of one device; 0 is none.
type ChunkID int32

// Chunk is one physical handle.
type Chunk struct {
	Handle   cuda.Handle
	Size     uint64 // bytes
	Addr     uint64 // where its owner sees it; 0 while it is spare
	Serial   uint64 // never reused
	Stamp    uint64 // while spare: the epoch of Stream after which its bytes are free
	Stream   int32  // while spare: the stream that used it last, -1 none
	Owner    int32  // index of the owning space, -1 while it is spare
	Mappings int32  // mappings that exist in the driver, zombies included
	Upstream int32  // which upstream it came from; chunks of one upstream are interchangeable
	Released bool   // the driver has the memory back, and it is still counted
	next     ChunkID
}

// Chunks is the slab of a device's chunks.
type Chunks struct {
	slab    []Chunk
	spare   ChunkID
	serials uint64
}

// At is the record of a chunk; the pointer is valid until the next Add.
func (c *Chunks) At(id ChunkID) *Chunk { return &c.slab[id] }

// Add makes a record.
func (c *Chunks) Add(h cuda.Handle, size uint64, upstream int32) ChunkID {
	if len(c.slab) == 0 {
		c.slab = make([]Chunk, 1, 64)
	}
	id := c.spare
	if id != 0 {
		c.spare = c.slab[id].next
	} else {
		id = ChunkID(len(c.slab))
		c.slab = append(c.slab, Chunk{})
	}
	c.slab[id] = Chunk{Handle: h, Size: size, Serial: c.NewSerial(), Owner: -1, Stream: -1, Upstream: upstream}
	return id
}

// NewSerial numbers a piece of memory, whatever it is made of.
func (c *Chunks) NewSerial() uint64 {
	c.serials++
	return c.serials
}

// Drop forgets a chunk.
func (c *Chunks) Drop(id ChunkID) {
	c.slab[id] = Chunk{next: c.spare}
	c.spare = id
}

// Area says which chunk is mapped at which address of one owner.
type Area struct {
	granularity uint64
	ranges      []addresses
}

// addresses is one reserved range. slots has an entry for each granule up to the highest address used so far: the
// chunk that is mapped there, whichever part of it.
type addresses struct {
	base, size uint64
	slots      []ChunkID
}

// NewArea returns an area without addresses; granularity in bytes.
func NewArea(granularity uint64) *Area { return &Area{granularity: granularity} }

// AddRange adds reserved addresses.
func (a *Area) AddRange(base, size uint64) {
	a.ranges = append(a.ranges, addresses{base: base, size: size})
}

// DropRange forgets a range.
func (a *Area) DropRange(base uint64) {
	for i := range a.ranges {
		if a.ranges[i].base == base {
			a.ranges = append(a.ranges[:i], a.ranges[i+1:]...)
			return
		}
	}
}

// Reserved is the sum of the ranges in bytes of address space.
func (a *Area) Reserved() uint64 {
	var n uint64
	for i := range a.ranges {
		n += a.ranges[i].size
	}
	return n
}

func (a *Area) rangeOf(addr uint64) *addresses {
	for i := range a.ranges {
		if r := &a.ranges[i]; addr-r.base < r.size {
			return r
		}
	}
	return nil
}

// At is the chunk mapped at addr, 0 when none is.
func (a *Area) At(addr uint64) ChunkID {
	r := a.rangeOf(addr)
	if r == nil {
		return 0
	}
	if i := (addr - r.base) / a.granularity; i < uint64(len(r.slots)) {
		return r.slots[i]
	}
	return 0
}

// Set notes that the chunk (0: nothing) is mapped at [addr, addr+size).
func (a *Area) Set(addr, size uint64, id ChunkID) {
	r := a.rangeOf(addr)
	i := (addr - r.base) / a.granularity
	n := size / a.granularity
	for uint64(len(r.slots)) < i+n {
		r.slots = append(r.slots, 0)
	}
	for k := range r.slots[i : i+n] {
		r.slots[i+uint64(k)] = id
	}
}

// Whole calls f for every chunk that lies wholly within [addr, addr+size), which must be mapped throughout, in address
// order, until it returns false.
func (a *Area) Whole(chunks *Chunks, addr, size uint64, f func(ChunkID, *Chunk) bool) {
	end := addr + size
	p := (addr + a.granularity - 1) / a.granularity * a.granularity
	for p < end {
		id := a.At(p)
		if id == 0 {
			p += a.granularity
			continue
		}
		c := chunks.At(id)
		if c.Addr+c.Size > end {
			return
		}
		if c.Addr >= addr && !f(id, c) {
			return
		}
		p = c.Addr + c.Size
	}
}

// Zombie is an old mapping of a chunk. It may be unmapped once the host knows that Epoch of Stream is over.
type Zombie struct {
	Addr  uint64
	Chunk ChunkID
	Block int32 // the owner's block for these addresses
	Owner int32 // index of the owning space
	// Stream and Epoch say whose work must be done, as the engine counts them.
	Stream int32
	Epoch  uint64
	Told   Telling
	// Recorded says that the history has told that nothing is mapped here any more, or never told that anything was.
	Recorded bool
}

// Telling is how far somebody who wants to know of an old mapping before it is unmapped was told.
type Telling uint8

const (
	Untold    Telling = iota
	BeingTold         // it must not be unmapped yet
	Told              // or nobody ever knew of it
)

// Zombies is a queue of old mappings in the order in which they were made.
type Zombies struct {
	list []Zombie
	head int
}

// Push adds a zombie.
func (z *Zombies) Push(x Zombie) {
	if z.head > 0 && len(z.list) == cap(z.list) {
		n := copy(z.list, z.list[z.head:])
		z.list = z.list[:n]
		z.head = 0
	}
	z.list = append(z.list, x)
}

// Len is the number of zombies.
func (z *Zombies) Len() int { return len(z.list) - z.head }

// Filter calls f for every zombie, oldest first, and drops those for which it returns true.
func (z *Zombies) Filter(f func(*Zombie) bool) {
	keep := z.list[:0]
	for i := z.head; i < len(z.list); i++ {
		if !f(&z.list[i]) {
			keep = append(keep, z.list[i])
		}
	}
	z.list = keep
	z.head = 0
}
