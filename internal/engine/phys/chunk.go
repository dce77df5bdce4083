package phys

import "github.com/cistern-gpu/cistern/cuda"

// ChunkID names a chunk of one device; 0 is none.
type ChunkID int32

// Chunk is one physical handle.
type Chunk struct {
	Handle   cuda.Handle
	Size     uint64 // bytes
	Addr     uint64 // where its owner, or the last one, has it mapped; 0 while it is spare
	Serial   uint64 // never reused
	Stamp    uint64 // while spare: the epoch of Stream after which its bytes are free
	Stream   int32  // while spare: the stream that used it last, -1 none
	Owner    int32  // index of the owning stream heap, -1 none
	Mappings int32  // mappings that exist in the driver, stale mappings included
	Released bool   // the driver has the memory back, and it is still counted
	spare    bool
	group    uint8 // while owned: in which it is counted
	next     ChunkID
}

// chunks is the slab of a device's chunks.
type chunks struct {
	slab    []Chunk
	unused  ChunkID // a list by next
	serials uint64
}

func (c *chunks) add(h cuda.Handle, size uint64) ChunkID {
	if len(c.slab) == 0 {
		c.slab = make([]Chunk, 1, 64)
	}
	id := c.unused
	if id != 0 {
		c.unused = c.slab[id].next
	} else {
		id = ChunkID(len(c.slab))
		c.slab = append(c.slab, Chunk{})
	}
	c.slab[id] = Chunk{Handle: h, Size: size, Serial: c.newSerial(), Owner: -1, Stream: -1}
	return id
}

func (c *chunks) newSerial() uint64 {
	c.serials++
	return c.serials
}

func (c *chunks) drop(id ChunkID) {
	c.slab[id] = Chunk{next: c.unused}
	c.unused = id
}
