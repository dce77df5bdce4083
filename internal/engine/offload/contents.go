package offload

import (
	"sort"

	"github.com/cistern-gpu/cistern/cuda"
)

// Contents are the contents of blocks in a range of addresses, in address order. The zero value has none.
type Contents struct{ pieces []*piece }

// piece is what one block has of the range, in one place.
type piece struct {
	addr, size uint64
	slab       *slab // of host memory, from at on; or
	file       *File
	at         uint64
	dropped    bool
}

// sub is a part of a piece. The two count once in their place: the piece is no longer used.
func (p *piece) sub(addr, size uint64) *piece {
	return &piece{addr, size, p.slab, p.file, p.at + addr - p.addr, p.dropped}
}

// Add appends contents that have no place yet.
func (c *Contents) Add(addr, size uint64) {
	c.pieces = append(c.pieces, &piece{addr: addr, size: size})
}

// from is the index of the first piece that ends behind addr.
func (c *Contents) from(addr uint64) int {
	return sort.Search(len(c.pieces), func(i int) bool { return c.pieces[i].addr+c.pieces[i].size > addr })
}

// Drop drops the contents of [addr, addr+size), which no piece crosses.
func (c *Contents) Drop(addr, size uint64) {
	for i := c.from(addr); i < len(c.pieces) && c.pieces[i].addr < addr+size; i++ {
		if p := c.pieces[i]; !p.dropped {
			p.dropped = true
			switch {
			case p.slab != nil:
				p.slab.live.Add(-int64(p.size))
			case p.file != nil:
				p.file.drop(p.size)
			}
		}
	}
}

// Part is the contents of [from, to). A range that is cut up hands its contents over to its parts.
func (c *Contents) Part(from, to uint64) (part Contents) {
	for i := c.from(from); i < len(c.pieces) && c.pieces[i].addr < to; i++ {
		p := c.pieces[i]
		if lo, hi := max(p.addr, from), min(p.addr+p.size, to); hi-lo < p.size {
			p = p.sub(lo, hi-lo)
		}
		part.pieces = append(part.pieces, p)
	}
	return part
}

// Bytes is the size of contents that were not dropped.
func Bytes(list []*Contents) (n uint64) {
	for _, c := range list {
		for _, p := range c.pieces {
			if !p.dropped {
				n += p.size
			}
		}
	}
	return n
}

// place gives contents their places and forgets pieces that were dropped.
func place(list []*Contents, put func(placed []*piece, p *piece) []*piece) {
	for _, c := range list {
		var placed []*piece
		for _, p := range c.pieces {
			if !p.dropped {
				placed = put(placed, p)
			}
		}
		c.pieces = placed
	}
}

// Batch is contents that are copied together, as they were when it was made: blocks may be freed while their contents are
// copied. Files stay open until Store.Release.
type Batch struct {
	Bytes      uint64
	host, disk []piece
	done       cuda.Event // recorded behind the copies of Save; 0: none
}

// NewBatch is a batch of contents that have their places.
func NewBatch(list []*Contents) *Batch {
	b := &Batch{}
	for _, c := range list {
		for _, p := range c.pieces {
			switch {
			case p.dropped:
				continue
			case p.file != nil:
				p.file.live.Add(1)
				b.disk = append(b.disk, *p)
			default:
				b.host = append(b.host, *p)
			}
			b.Bytes += p.size
		}
	}
	return b
}

// Release gives back what batches use beside the places of their contents. No copy of them is under way.
func (s *Store) Release(batches ...*Batch) {
	for _, b := range batches {
		if b.done != 0 {
			s.timeline.PutEvent(b.done)
		}
		for i := range b.disk {
			b.disk[i].file.drop(1)
		}
		b.done, b.host, b.disk = 0, nil, nil
	}
}
