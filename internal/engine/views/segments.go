package views

import (
	"github.com/cistern-gpu/cistern/internal/engine/journal"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/memory"
)

// Segments are made of the blocks of a stream heap, in the order in which heap.Heap.Each gives them.
type Segments struct {
	Of   memory.Segment // what all of them have: stream and pool
	List []memory.Segment
	end  uint64
}

// Add adds a block, which begins a segment where the one before is not its neighbour or another range begins.
func (s *Segments) Add(b *heap.Block, stack uint32, paused uint64, begins bool) {
	if len(s.List) == 0 || b.Addr != s.end || begins {
		s.List = append(s.List, s.Of)
		s.List[len(s.List)-1].Addr = b.Addr
	}
	g := &s.List[len(s.List)-1]
	g.Size += b.Size
	g.Paused += paused
	s.end = b.Addr + b.Size
	x := memory.SegmentBlock{Addr: b.Addr, Size: b.Size, Requested: b.Requested, Tag: journal.TagOf(b.Tag), Library: journal.LibraryOf(b.Tag),
		Stack: stack, Paused: paused}
	switch b.State {
	case heap.Used:
		x.State = memory.BlockUsed
	case heap.Pending:
		x.State = memory.BlockPending
	}
	g.Blocks = append(g.Blocks, x)
}
