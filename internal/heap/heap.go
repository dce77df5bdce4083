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

// Heap holds the blocks of one owner. The zero value is not ready; use New.
type Heap struct {
	slab         slab
	FreeBins     Bins
	UnmappedBins Bins
	table        table // of Used and Pending blocks
	Fit          Fit
	Stacks       Stacks // of Used and Pending blocks

	ranges     []ID   // first block of each range
	FreeBytes  uint64 // sum over Free blocks
	UsedBytes  uint64 // sum over Used and Pending blocks
	FreeBlocks int
	UsedBlocks int
}

// New returns an empty heap.
func New() *Heap {
	h := &Heap{slab: slab{blocks: make([]Block, 1, 64)}}
	h.FreeBins.slab, h.UnmappedBins.slab = &h.slab, &h.slab
	h.table.init()
	return h
}

// At is the record of a block. The pointer is valid until the next call that adds blocks.
func (h *Heap) At(id ID) *Block { return &h.slab.blocks[id] }

// Prev and Next are the neighbours by address within the range, 0 at its ends.
func (h *Heap) Prev(id ID) ID { return h.slab.blocks[id].prev }
func (h *Heap) Next(id ID) ID { return h.slab.blocks[id].next }

// Ranges is the first block of every range, in the order in which they were added.
func (h *Heap) Ranges() []ID { return h.ranges }

// Lookup finds the used or pending block that starts at addr, and its place in the table, which FreeAt takes and which
// holds until the next change of the heap.
func (h *Heap) Lookup(addr uint64) (id ID, place uint64, ok bool) {
	return h.table.find(addr, h.slab.blocks)
}

// AddRange adds addresses without memory: one unmapped range. Ranges never merge with each other.
func (h *Heap) AddRange(addr, size uint64) ID {
	id := h.slab.add()
	b := &h.slab.blocks[id]
	b.Addr, b.Size, b.State = addr, size, Unmapped
	h.UnmappedBins.push(h.slab.blocks, id)
	h.ranges = append(h.ranges, id)
	return id
}

// DropRange forgets a range that is one single unmapped range again, and reports whether it was.
func (h *Heap) DropRange(first ID) bool {
	b := &h.slab.blocks[first]
	if b.State != Unmapped || b.prev != 0 || b.next != 0 {
		return false
	}
	for i, id := range h.ranges {
		if id == first {
			h.ranges = append(h.ranges[:i], h.ranges[i+1:]...)
			h.UnmappedBins.remove(h.slab.blocks, first)
			h.slab.recycle(first)
			return true
		}
	}
	return false
}

// Take hands out n bytes, a multiple of Align, from the smallest free block that the bins offer, lowest address first
// among equals within reach of the scan, and splits off the rest. It returns 0 when no free block fits.
func (h *Heap) Take(n, requested uint64) ID {
	id := h.FreeBins.fit(h.slab.blocks, n)
	if id == 0 {
		return 0
	}
	if rest := h.slab.blocks[id].Size - n; rest < h.Fit.MinRest {
		if id = h.Fit.avoid(&h.FreeBins, h.slab.blocks, id, n, rest); id == 0 {
			return 0
		}
	}
	h.TakeBlock(id, n, requested)
	return id
}

// TakeBlock hands out the first n bytes of a given free block.
func (h *Heap) TakeBlock(id ID, n, requested uint64) {
	h.FreeBins.remove(h.slab.blocks, id)
	h.FreeBytes -= n
	h.UsedBytes += n
	h.UsedBlocks++
	if b := &h.slab.blocks[id]; b.Size == n {
		h.FreeBlocks--
	} else {
		rest := h.slab.split(id, n)
		h.FreeBins.push(h.slab.blocks, rest)
	}
	b := &h.slab.blocks[id]
	b.State = Used
	b.Requested = requested
	h.table.put(b.Addr, id)
}

// TakeAt hands out [addr, addr+n) of a given free block, which must hold all of it, and returns it.
func (h *Heap) TakeAt(id ID, addr, n, requested uint64) ID {
	before := h.slab.blocks[id]
	id = h.FreeBins.carve(id, addr, n)
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
	b := &h.slab.blocks[id]
	b.State, b.Requested = Used, requested
	h.table.put(addr, id)
	return id
}

// Park marks a used block as given back while other streams use it.
func (h *Heap) Park(id ID) { h.slab.blocks[id].State = Pending }

// Free takes back a used or pending block, merges it with its free neighbours and returns the merged block. stamp
// marks the time of the free.
func (h *Heap) Free(id ID, stamp uint64) ID {
	_, place, _ := h.table.find(h.slab.blocks[id].Addr, h.slab.blocks)
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
	b := &h.slab.blocks[id]
	h.UsedBytes -= b.Size
	h.UsedBlocks--
	h.FreeBytes += b.Size
	b.State = Free
	b.Stamp = max(b.Stamp, stamp)
	b.Requested, b.Uses, b.Tag = 0, 0, 0
	h.Stacks.forget(id)
	h.FreeBlocks++
}

// FreeHeld is Free for a block that is to be out of reach until Regain.
func (h *Heap) FreeHeld(id ID, stamp uint64) {
	_, place, _ := h.table.find(h.slab.blocks[id].Addr, h.slab.blocks)
	h.freed(id, place, stamp)
	h.slab.blocks[id].State = Held
}

// Hold puts a free block out of reach until Regain: it is neither handed out nor moved nor merged. It counts as free.
func (h *Heap) Hold(id ID) {
	h.FreeBins.remove(h.slab.blocks, id)
	h.slab.blocks[id].State = Held
}

// Regain makes a block that was held free for use, merged with its free neighbours, and returns the merged block.
func (h *Heap) Regain(id ID) ID {
	h.slab.blocks[id].State = Free
	return h.merge(id)
}

// FreeNeighbours is how many of a block's neighbours are free and would merge with it: 0, 1 or 2.
func (h *Heap) FreeNeighbours(id ID) int {
	b, n := &h.slab.blocks[id], 0
	if b.prev != 0 && h.slab.blocks[b.prev].State == Free {
		n++
	}
	if b.next != 0 && h.slab.blocks[b.next].State == Free {
		n++
	}
	return n
}

// merge puts a free block that is in no bin into its bin, merged with its free neighbours, and returns the merged block.
func (h *Heap) merge(id ID) ID {
	id, joined := h.FreeBins.merge(id)
	h.FreeBlocks -= joined
	return id
}

// Map turns [addr, addr+size) of the unmapped range into free memory with the given stamp and returns the free block that holds
// it, merged with its neighbours.
func (h *Heap) Map(unmapped ID, addr, size, stamp uint64) ID {
	id := h.UnmappedBins.carve(unmapped, addr, size)
	b := &h.slab.blocks[id]
	b.State, b.Stamp = Free, stamp
	h.FreeBytes += size
	h.FreeBlocks++
	return h.merge(id)
}

// Unmap turns [addr, addr+size) of the free block, or of one that is held, into a stale mapping and returns it. What is left of
// the block on either side stays what it was.
func (h *Heap) Unmap(id ID, addr, size uint64) ID {
	before := h.slab.blocks[id]
	if before.State == Held {
		if addr > before.Addr {
			id = h.slab.split(id, addr-before.Addr)
		}
		if h.slab.blocks[id].Size > size {
			h.slab.split(id, size)
		}
	} else {
		id = h.FreeBins.carve(id, addr, size)
	}
	h.FreeBlocks--
	if addr > before.Addr {
		h.FreeBlocks++
	}
	if addr+size < before.Addr+before.Size {
		h.FreeBlocks++
	}
	h.slab.blocks[id].State = Stale
	h.FreeBytes -= size
	return id
}

// Reap turns a stale mapping into an unmapped range, merges it with neighbouring unmapped ranges and returns the result.
func (h *Heap) Reap(id ID) ID {
	b := &h.slab.blocks[id]
	b.State, b.Stamp = Unmapped, 0
	id, _ = h.UnmappedBins.merge(id)
	return id
}

// ReapPart turns [addr, addr+size), which consists of stale mappings and parts of them, into an unmapped range, merges it with neighbouring
// unmapped ranges and returns the result. id is the stale mapping that addr lies in.
func (h *Heap) ReapPart(id ID, addr, size uint64) ID {
	if left := addr - h.slab.blocks[id].Addr; left > 0 {
		id = h.slab.split(id, left)
	}
	for h.slab.blocks[id].Size < size {
		h.slab.absorb(id, h.slab.blocks[id].next)
	}
	if h.slab.blocks[id].Size > size {
		h.slab.split(id, size)
	}
	return h.Reap(id)
}

// Each calls f for every block of every range in address order.
func (h *Heap) Each(f func(ID, *Block) bool) {
	for _, id := range h.ranges {
		for ; id != 0; id = h.slab.blocks[id].next {
			if !f(id, &h.slab.blocks[id]) {
				return
			}
		}
	}
}
