package heap

import "unsafe"

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

// slab has the records of all blocks. Those of a range are a list in address order.
type slab struct {
	blocks []Block
	spare  ID // list of unused records, through binNext
}

// add is a record for a new block.
func (s *slab) add() ID {
	if id := s.spare; id != 0 {
		s.spare = s.blocks[id].binNext
		s.blocks[id] = Block{}
		return id
	}
	s.blocks = append(s.blocks, Block{})
	return ID(len(s.blocks) - 1)
}

func (s *slab) recycle(id ID) {
	s.blocks[id] = Block{binNext: s.spare}
	s.spare = id
}

// absorb makes block b part of its left neighbour a, which is in the same state. Neither is in a bin.
func (s *slab) absorb(a, b ID) {
	x, y := &s.blocks[a], &s.blocks[b]
	x.Size += y.Size
	x.Stamp = max(x.Stamp, y.Stamp)
	x.next = y.next
	if y.next != 0 {
		s.blocks[y.next].prev = a
	}
	s.recycle(b)
}

// split cuts block id after n bytes and returns the second part, of the same state and stamp, in no bin.
func (s *slab) split(id ID, n uint64) ID {
	rest := s.add()
	b, r := &s.blocks[id], &s.blocks[rest]
	r.Addr, r.Size, r.State, r.Stamp = b.Addr+n, b.Size-n, b.State, b.Stamp
	r.prev, r.next = id, b.next
	if b.next != 0 {
		s.blocks[b.next].prev = rest
	}
	b.next = rest
	b.Size = n
	return rest
}
