package memory

// PoolUse is what one pool holds.
type PoolUse struct {
	Pool      PoolID
	Upstream  string // what its memory is; "" where it is what the device's options say
	Allocated uint64 // rounded bytes handed out
	Pending   uint64 // bytes given back, still used by other streams
	Free      uint64 // bytes cached
	Spilled   uint64 // of Allocated: from the pool's spill
	Paused    uint64 // of Allocated and Pending: without physical memory
	Pinned    bool   // captured graphs use it: what is free stays
	// Elsewhere: its memory is not the device's own. What it spilled may be elsewhere all the same.
	Elsewhere bool
}

// Bytes is what the pool has: handed out, given back and free.
func (p PoolUse) Bytes() uint64 { return p.Allocated + p.Pending + p.Free }

// Use is what some live blocks add up to.
type Use struct {
	Blocks    int64
	Requested uint64 // bytes asked for
	Allocated uint64 // rounded
	Paused    uint64 // of Allocated: without physical memory
}

// TagUse is what the live blocks of one tag add up to.
type TagUse struct {
	Tag uint32
	Use
}

// LibraryUse is what the live blocks of one library add up to.
type LibraryUse struct {
	Library uint8
	Use
}

// StackUse is what the live blocks of one stack add up to.
type StackUse struct {
	Stack uint32 // 0: of blocks whose stack is not known
	Use
}

// StackTable is what the table of stacks holds.
type StackTable struct {
	Stacks int
	Bytes  uint64 // of frames
	// Lost counts how often a stack had no number because the table was full: it holds up to 2^18 stacks of together
	// 64 MiB.
	Lost uint64
}
