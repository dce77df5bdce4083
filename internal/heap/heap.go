// Package heap keeps the blocks of one owner: which addresses are in use, which are free, which have no memory. It does address
// arithmetic only. It makes no driver call, takes no lock and has no policy but "the smallest block that fits". Its caller
// holds the owner's lock and decides what a stamp means.
//
// # States of a block
//
//	                 Map                Take
//	┌─► Unmapped ───────────► Free ───────────► Used
//	│                        ▲  │ ▲              │
//	│ Reap                   │  │ └──────────────┤ Free
//	│                        │  │ Unmap          ▼ Park
//	└────── Stale ◄──────────┼──┘             Pending (freed, but other streams still use it)
//	                         └─────────────────┘ Free
//
// A free block that a capture must not be given is Held: in no bin, and merged with nothing, until it is free again.
//
// Every address of every range that the heap was given belongs to exactly one block. The blocks of a range form a list in
// address order, so that neighbours are found in constant time. Free blocks are in bins by size; unmapped ranges have bins of
// their own; used and pending blocks are found by address in an open-addressed table.
//
// # Bins
//
// Two-level segregated fit (Masmano, Ripoll, Crespo, Real: "TLSF: A New Dynamic Memory Allocator for Real-Time
// Systems", 2004): a bin for each power of two, cut into 32. Sizes are multiples of 512 bytes, so every size below
// 16 KiB has a bin to itself and a bin above is at most 1/32 (3.1 %) wide. TLSF proper never looks into the bin that
// a request itself falls in. Here that bin is scanned first, up to scanLimit blocks, because programs ask for the
// same sizes again and again, and the smallest block that fits is taken from the bin that is used.
//
// Blocks are records of 64 bytes in one slab. They have no pointers and refer to each other by index, so the garbage collector
// has nothing to follow. Nothing is allocated once the slab and the table have their size.
package heap

import (
	"math/bits"
	"unsafe"
)

// Align is the alignment and the unit of every block in bytes (PyTorch's kMinBlockSize; CUDA promises 256).
const Align = 512

// ID names a block of one heap; 0 is none. An ID is valid until its block is merged away.
type ID int32

// State is where a block is in its life.
type State uint8

const (
	unused   State = iota
	Free           // mapped, in a bin
	Used           // handed out
	Pending        // given back, but other streams still use it
	Unmapped       // addresses without memory
	Held           // free, but out of reach: in no bin, and merged with nothing
	Stale          // an old mapping that queued work may still use: not to be reused, not yet unmapped
)

// Uses says why a free of a block needs more than its stream's order: flags, and the number of the owner's list of other
// streams that use it, 0 for none. So the hot path compares one word with 0.
type Uses int32

const (
	Exported Uses = 1 << 30 // other processes may open the block
	Paused   Uses = 1 << 29 // the block lacks physical memory
	flags         = Exported | Paused
)

// List is the number of the list.
func (u Uses) List() int32 { return int32(u &^ flags) }

// WithList is the same with another list.
func (u Uses) WithList(list int32) Uses { return u&flags | Uses(list) }

// Block is one record of the slab: 64 bytes, one cache line.
type Block struct {
	Addr      uint64
	Size      uint64 // bytes, a multiple of Align
	Requested uint64 // bytes asked for; Used and Pending only
	Stamp     uint64 // the owner's mark of the last free, the largest of all merged frees
	prev      ID     // neighbours by address within the range, whatever their state
	next      ID
	binPrev   ID
	binNext   ID
	Capture   uint32 // the owner's: the capture that a used block was handed out to, 0 none
	Tag       uint32 // the owner's: what a used block was asked for as, 0 none
	Uses      Uses   // why a free of the block is more than that of its stream, 0 for no reason
	bin       uint16
	State     State
	Mark      uint8 // the owner's, of a used block
}

var _ [64 - unsafe.Sizeof(Block{})]byte // a record fits a cache line

// Heap holds the blocks of one owner. The zero value is not ready; use New.
type Heap struct {
	blocks   []Block
	spare    ID // list of unused records, through binNext
	free     bins
	unmapped bins
	table    table

	// MinRest, when not 0, makes Take avoid blocks of which it would leave less than this many bytes, because that
	// little is of no use, unless that is a small part of the request (restPart) or there is no other.
	MinRest uint64
	whole   bool // MinRest is larger than any rest, and nothing is taken instead

	stacks []uint32 // by ID; nil unless KeepStacks is on. Not 0 for Used and Pending blocks only

	ranges     []ID   // first block of each range
	FreeBytes  uint64 // sum over Free blocks
	UsedBytes  uint64 // sum over Used and Pending blocks
	FreeBlocks int
	UsedBlocks int
}

// New returns an empty heap.
func New() *Heap {
	h := &Heap{blocks: make([]Block, 1, 64)}
	h.table.init()
	return h
}

// At is the record of a block. The pointer is valid until the next call that adds blocks.
func (h *Heap) At(id ID) *Block { return &h.blocks[id] }

// Prev and Next are the neighbours by address within the range, 0 at its ends.
func (h *Heap) Prev(id ID) ID { return h.blocks[id].prev }
func (h *Heap) Next(id ID) ID { return h.blocks[id].next }

// Ranges is the first block of every range, in the order in which they were added.
func (h *Heap) Ranges() []ID { return h.ranges }

// Records is the number of records that the slab holds, unused ones included.
func (h *Heap) Records() int { return len(h.blocks) - 1 }

// Lookup finds the used or pending block that starts at addr, and its place in the table, which FreeAt takes and which
// holds until the next change of the heap.
func (h *Heap) Lookup(addr uint64) (id ID, place uint64, ok bool) {
	return h.table.find(addr, h.blocks)
}

// AddRange adds addresses without memory: one unmapped range. Ranges never merge with each other.
func (h *Heap) AddRange(addr, size uint64) ID {
	id := h.record()
	b := &h.blocks[id]
	b.Addr, b.Size, b.State = addr, size, Unmapped
	h.unmapped.push(h.blocks, id)
	h.ranges = append(h.ranges, id)
	return id
}

// DropRange forgets a range that is one single unmapped range again, and reports whether it was.
func (h *Heap) DropRange(first ID) bool {
	b := &h.blocks[first]
	if b.State != Unmapped || b.prev != 0 || b.next != 0 {
		return false
	}
	for i, id := range h.ranges {
		if id == first {
			h.ranges = append(h.ranges[:i], h.ranges[i+1:]...)
			h.unmapped.remove(h.blocks, first)
			h.recycle(first)
			return true
		}
	}
	return false
}

// Take hands out n bytes, a multiple of Align, from the smallest free block that the bins offer, lowest address first
// among equals within reach of the scan, and splits off the rest. It returns 0 when no free block fits.
func (h *Heap) Take(n, requested uint64) ID {
	id := h.free.fit(h.blocks, n)
	if id == 0 {
		return 0
	}
	if rest := h.blocks[id].Size - n; rest < h.MinRest {
		if id = h.avoid(id, n, rest); id == 0 {
			return 0
		}
	}
	h.TakeBlock(id, n, requested)
	return id
}

// avoid is the block that Take takes instead of one that would leave less than MinRest, 0 if it takes none.
func (h *Heap) avoid(id ID, n, rest uint64) ID {
	switch {
	case rest == 0:
	case h.whole:
		return h.free.exact(h.blocks, n)
	case rest > n/restPart:
		if other := h.free.fit(h.blocks, n+h.MinRest); other != 0 {
			return other
		}
	}
	return id
}

// KeepWhole makes Take leave no rest from now on: only a block of the very size will do.
func (h *Heap) KeepWhole() { h.whole, h.MinRest = true, ^uint64(0) }

// Whole reports whether KeepWhole was called.
func (h *Heap) Whole() bool { return h.whole }

// restPart: a rest of up to 1/restPart (2 %) of the request is small.
const restPart = 50

// Fits reports whether Take(n) would find a block, and its size.
func (h *Heap) Fits(n uint64) (uint64, bool) {
	id := h.free.fit(h.blocks, n)
	if id == 0 {
		return 0, false
	}
	return h.blocks[id].Size, true
}

// TakeBlock hands out the first n bytes of a given free block.
func (h *Heap) TakeBlock(id ID, n, requested uint64) {
	h.free.remove(h.blocks, id)
	h.FreeBytes -= n
	h.UsedBytes += n
	h.UsedBlocks++
	if b := &h.blocks[id]; b.Size == n {
		h.FreeBlocks--
	} else {
		rest := h.split(id, n)
		h.free.push(h.blocks, rest)
	}
	b := &h.blocks[id]
	b.State = Used
	b.Requested = requested
	h.table.put(b.Addr, id)
}

// TakeAt hands out [addr, addr+n) of a given free block, which must hold all of it, and returns it.
func (h *Heap) TakeAt(id ID, addr, n, requested uint64) ID {
	before := h.blocks[id]
	id = h.carve(&h.free, id, addr, n)
	h.FreeBlocks--
	if addr > before.Addr {
		h.FreeBlocks++
	}
	if addr+n < before.Addr+before.Size {
		h.FreeBlocks++
	}
	h.FreeBytes -= n
	h.UsedBytes += n
	h.UsedBlocks++
	b := &h.blocks[id]
	b.State, b.Requested = Used, requested
	h.table.put(addr, id)
	return id
}

// Park marks a used block as given back while other streams use it.
func (h *Heap) Park(id ID) { h.blocks[id].State = Pending }

// Free takes back a used or pending block, merges it with its free neighbours and returns the merged block. stamp
// marks the time of the free.
func (h *Heap) Free(id ID, stamp uint64) ID {
	_, place, _ := h.table.find(h.blocks[id].Addr, h.blocks)
	return h.FreeAt(id, place, stamp)
}

// FreeAt is Free for a block whose place in the table Lookup has just found.
func (h *Heap) FreeAt(id ID, place, stamp uint64) ID {
	h.freed(id, place, stamp)
	return h.merge(id)
}

// freed makes a block free that is in no bin yet.
func (h *Heap) freed(id ID, place, stamp uint64) {
	h.table.del(place)
	b := &h.blocks[id]
	h.UsedBytes -= b.Size
	h.UsedBlocks--
	h.FreeBytes += b.Size
	b.State = Free
	b.Stamp = max(b.Stamp, stamp)
	b.Requested, b.Uses, b.Tag = 0, 0, 0
	if h.stacks != nil {
		h.stacks[id] = 0
	}
	h.FreeBlocks++
}

// FreeHeld is Free for a block that is to be out of reach until Regain.
func (h *Heap) FreeHeld(id ID, stamp uint64) {
	_, place, _ := h.table.find(h.blocks[id].Addr, h.blocks)
	h.freed(id, place, stamp)
	h.blocks[id].State = Held
}

// Hold puts a free block out of reach until Regain: it is neither handed out nor moved nor merged. It counts as free.
func (h *Heap) Hold(id ID) {
	h.free.remove(h.blocks, id)
	h.blocks[id].State = Held
}

// Regain makes a block that was held free for use, merged with its free neighbours, and returns the merged block.
func (h *Heap) Regain(id ID) ID {
	h.blocks[id].State = Free
	return h.merge(id)
}

// FreeNeighbours is how many of a block's neighbours are free and would merge with it: 0, 1 or 2.
func (h *Heap) FreeNeighbours(id ID) int {
	b, n := &h.blocks[id], 0
	if b.prev != 0 && h.blocks[b.prev].State == Free {
		n++
	}
	if b.next != 0 && h.blocks[b.next].State == Free {
		n++
	}
	return n
}

// merge joins a block that is in no bin with its free neighbours and puts the result into its bin.
func (h *Heap) merge(id ID) ID {
	b := &h.blocks[id]
	if p := b.prev; p != 0 && h.blocks[p].State == Free {
		h.free.remove(h.blocks, p)
		h.absorb(p, id)
		h.FreeBlocks--
		id, b = p, &h.blocks[p]
	}
	if n := b.next; n != 0 && h.blocks[n].State == Free {
		h.free.remove(h.blocks, n)
		h.absorb(id, n)
		h.FreeBlocks--
	}
	h.free.push(h.blocks, id)
	return id
}

// absorb makes block b part of its left neighbour a, which is in the same state. Neither is in a bin.
func (h *Heap) absorb(a, b ID) {
	x, y := &h.blocks[a], &h.blocks[b]
	x.Size += y.Size
	x.Stamp = max(x.Stamp, y.Stamp)
	x.next = y.next
	if y.next != 0 {
		h.blocks[y.next].prev = a
	}
	h.recycle(b)
}

// split cuts block id after n bytes and returns the second part, of the same state and stamp, in no bin.
func (h *Heap) split(id ID, n uint64) ID {
	rest := h.record()
	b, r := &h.blocks[id], &h.blocks[rest]
	r.Addr, r.Size, r.State, r.Stamp = b.Addr+n, b.Size-n, b.State, b.Stamp
	r.prev, r.next = id, b.next
	if b.next != 0 {
		h.blocks[b.next].prev = rest
	}
	b.next = rest
	b.Size = n
	return rest
}

// Map turns [addr, addr+size) of the unmapped range into free memory with the given stamp and returns the free block that holds
// it, merged with its neighbours.
func (h *Heap) Map(unmapped ID, addr, size, stamp uint64) ID {
	id := h.carve(&h.unmapped, unmapped, addr, size)
	b := &h.blocks[id]
	b.State, b.Stamp = Free, stamp
	h.FreeBytes += size
	h.FreeBlocks++
	return h.merge(id)
}

// Unmap turns [addr, addr+size) of the free block, or of one that is held, into a stale mapping and returns it. What is left of
// the block on either side stays what it was.
func (h *Heap) Unmap(id ID, addr, size uint64) ID {
	before := h.blocks[id]
	if before.State == Held {
		if addr > before.Addr {
			id = h.split(id, addr-before.Addr)
		}
		if h.blocks[id].Size > size {
			h.split(id, size)
		}
	} else {
		id = h.carve(&h.free, id, addr, size)
	}
	h.FreeBlocks--
	if addr > before.Addr {
		h.FreeBlocks++
	}
	if addr+size < before.Addr+before.Size {
		h.FreeBlocks++
	}
	h.blocks[id].State = Stale
	h.FreeBytes -= size
	return id
}

// carve takes a block out of its bin and cuts out [addr, addr+size); what is left of it on either side goes back to
// the bins. The result is in no bin.
func (h *Heap) carve(from *bins, id ID, addr, size uint64) ID {
	from.remove(h.blocks, id)
	if left := addr - h.blocks[id].Addr; left > 0 {
		rest := h.split(id, left)
		from.push(h.blocks, id)
		id = rest
	}
	if h.blocks[id].Size > size {
		rest := h.split(id, size)
		from.push(h.blocks, rest)
	}
	return id
}

// Reap turns a stale mapping into an unmapped range, merges it with neighbouring unmapped ranges and returns the result.
func (h *Heap) Reap(id ID) ID {
	b := &h.blocks[id]
	b.State, b.Stamp = Unmapped, 0
	if p := b.prev; p != 0 && h.blocks[p].State == Unmapped {
		h.unmapped.remove(h.blocks, p)
		h.absorb(p, id)
		id = p
	}
	if n := h.blocks[id].next; n != 0 && h.blocks[n].State == Unmapped {
		h.unmapped.remove(h.blocks, n)
		h.absorb(id, n)
	}
	h.unmapped.push(h.blocks, id)
	return id
}

// ReapPart turns [addr, addr+size), which consists of stale mappings and parts of them, into an unmapped range, merges it with neighbouring
// unmapped ranges and returns the result. id is the stale mapping that addr lies in.
func (h *Heap) ReapPart(id ID, addr, size uint64) ID {
	if left := addr - h.blocks[id].Addr; left > 0 {
		id = h.split(id, left)
	}
	for h.blocks[id].Size < size {
		h.absorb(id, h.blocks[id].next)
	}
	if h.blocks[id].Size > size {
		h.split(id, size)
	}
	return h.Reap(id)
}

// EachFree calls f for every free block of at least n bytes, from large bins to small ones, until it returns false. f
// must not change the heap.
func (h *Heap) EachFree(n uint64, f func(ID, *Block) bool) { h.free.each(h.blocks, n, f) }

// EachHole does the same for unmapped ranges.
func (h *Heap) EachUnmapped(n uint64, f func(ID, *Block) bool) { h.unmapped.each(h.blocks, n, f) }

// Largest is the size of the largest free block in bytes.
func (h *Heap) Largest() uint64 { return h.free.largest(h.blocks) }

// LargestHole is the size of the largest unmapped range in bytes.
func (h *Heap) LargestUnmapped() uint64 { return h.unmapped.largest(h.blocks) }

// Each calls f for every block of every range in address order.
func (h *Heap) Each(f func(ID, *Block) bool) {
	for _, id := range h.ranges {
		for ; id != 0; id = h.blocks[id].next {
			if !f(id, &h.blocks[id]) {
				return
			}
		}
	}
}

func (h *Heap) record() ID {
	if id := h.spare; id != 0 {
		h.spare = h.blocks[id].binNext
		h.blocks[id] = Block{}
		return id
	}
	h.blocks = append(h.blocks, Block{})
	if h.stacks != nil {
		h.stacks = append(h.stacks, 0)
	}
	return ID(len(h.blocks) - 1)
}

func (h *Heap) recycle(id ID) {
	h.blocks[id] = Block{binNext: h.spare}
	h.spare = id
}

// bins are the two levels of lists.
type bins struct {
	first  uint64 // bit i: some list of level i is not empty
	second [levels]uint32
	heads  [levels * subdivisions]ID
}

const (
	subdivisions = 32
	subBits      = 5
	unitBits     = 9                           // log2(Align)
	levels       = 48 - unitBits - subBits + 1 // blocks up to 2^48 bytes
	// scanLimit bounds how many blocks of a bin are looked at. Larger values find tighter fits among blocks that
	// differ by less than 3 %; replays of the recorded traces do not change beyond 16.
	scanLimit = 16
	// Small blocks are many and each look costs a cache miss, while a tight fit among them saves little: of those
	// below quickBelow bytes, the first of the same size or the best of quickLimit is taken.
	quickBelow = 256 << 10
	quickLimit = 4
)

// binOf is the bin of a size: exact below 32 units, then 32 to a power of two.
func binOf(size uint64) uint16 {
	u := size >> unitBits
	if u < subdivisions {
		return uint16(u)
	}
	l := uint(bits.Len64(u)) - 1 - subBits
	i := (l+1)<<subBits | uint(u>>l)&(subdivisions-1)
	if i >= levels*subdivisions {
		i = levels*subdivisions - 1
	}
	return uint16(i)
}

func (b *bins) push(blocks []Block, id ID) {
	x := &blocks[id]
	i := binOf(x.Size)
	x.bin = i
	head := b.heads[i]
	x.binPrev, x.binNext = 0, head
	if head != 0 {
		blocks[head].binPrev = id
	} else {
		b.first |= 1 << (i >> subBits)
		b.second[i>>subBits] |= 1 << (i & (subdivisions - 1))
	}
	b.heads[i] = id
}

func (b *bins) remove(blocks []Block, id ID) {
	x := &blocks[id]
	if x.binNext != 0 {
		blocks[x.binNext].binPrev = x.binPrev
	}
	if x.binPrev != 0 {
		blocks[x.binPrev].binNext = x.binNext
		return
	}
	i := x.bin
	b.heads[i] = x.binNext
	if x.binNext == 0 {
		b.second[i>>subBits] &^= 1 << (i & (subdivisions - 1))
		if b.second[i>>subBits] == 0 {
			b.first &^= 1 << (i >> subBits)
		}
	}
}

// after is the first non-empty bin at or above i, or -1.
func (b *bins) after(i int) int {
	if i >= levels*subdivisions {
		return -1
	}
	l := i >> subBits
	if m := b.second[l] >> (i & (subdivisions - 1)); m != 0 {
		return i + bits.TrailingZeros32(m)
	}
	m := b.first >> (l + 1)
	if l+1 >= 64 || m == 0 {
		return -1
	}
	l += 1 + bits.TrailingZeros64(m)
	return l<<subBits + bits.TrailingZeros32(b.second[l])
}

// fit finds the smallest block of at least n bytes that the scan limit allows, the lowest address among equals.
func (b *bins) fit(blocks []Block, n uint64) ID {
	for i := b.after(int(binOf(n))); i >= 0; i = b.after(i + 1) {
		var best ID
		var bestSize, bestAddr uint64
		limit := scanLimit
		if n < quickBelow {
			limit = quickLimit
		}
		for id := b.heads[i]; id != 0 && limit > 0; id, limit = blocks[id].binNext, limit-1 {
			x := &blocks[id]
			if x.Size < n {
				continue
			}
			if n < quickBelow && x.Size == n {
				return id
			}
			if best == 0 || x.Size < bestSize || x.Size == bestSize && x.Addr < bestAddr {
				best, bestSize, bestAddr = id, x.Size, x.Addr
			}
		}
		if best != 0 {
			return best
		}
	}
	// Every block of a higher bin fits, so what is left are blocks of the request's own bin behind the scan limit.
	for id := b.heads[binOf(n)]; id != 0; id = blocks[id].binNext {
		if blocks[id].Size >= n {
			return id
		}
	}
	return 0
}

// exact finds a block of n bytes.
func (b *bins) exact(blocks []Block, n uint64) ID {
	for id := b.heads[binOf(n)]; id != 0; id = blocks[id].binNext {
		if blocks[id].Size == n {
			return id
		}
	}
	return 0
}

func (b *bins) each(blocks []Block, n uint64, f func(ID, *Block) bool) {
	low := int(binOf(n))
	for i := len(b.heads) - 1; i >= low; i-- {
		if b.second[i>>subBits] == 0 {
			i &^= subdivisions - 1 // an empty level
			continue
		}
		for id := b.heads[i]; id != 0; {
			x := &blocks[id]
			next := x.binNext
			if x.Size >= n && !f(id, x) {
				return
			}
			id = next
		}
	}
}

func (b *bins) largest(blocks []Block) uint64 {
	if b.first == 0 {
		return 0
	}
	l := 63 - bits.LeadingZeros64(b.first)
	i := l<<subBits + 31 - bits.LeadingZeros32(b.second[l])
	var size uint64
	for id := b.heads[i]; id != 0; id = blocks[id].binNext {
		size = max(size, blocks[id].Size)
	}
	return size
}
