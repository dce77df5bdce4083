package memory

import (
	"fmt"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
)

// PoolID names a pool of a device: PyTorch's MempoolId_t. {0, 0} is the default pool.
type PoolID [2]uint64

// words are a pool's name in a sentence.
func (id PoolID) words() string {
	if id == (PoolID{}) {
		return "the default pool"
	}
	return fmt.Sprintf("pool {%d, %d}", id[0], id[1])
}

// Stream names a stream.
type Stream struct {
	ID     cuda.StreamID
	Handle cuda.Stream // by which it was made known
}

// Block describes the allocation that an address lies in.
type Block struct {
	Base      cuda.Ptr
	Size      uint64 // bytes, rounded
	Requested uint64 // bytes asked for
	Device    cuda.Device
	Pool      PoolID
	Stream    cuda.StreamID
	Handle    cuda.Stream // by which the stream was made known
	Tag       uint32      // as given to AllocTagged, 0 none
	Library   uint8       // as given to AllocWith, 0 none
	Stack     uint32      // likewise, while stacks are kept (KeepStacks)
}

// BlockState is the state of a block in a snapshot.
type BlockState uint8

const (
	BlockFree    BlockState = iota // inactive
	BlockUsed                      // handed out
	BlockPending                   // given back, still used by other streams
)

// Segment is a contiguous range of mapped memory of one (pool, stream, size class).
type Segment struct {
	Addr   uint64      // 0 for a spare chunk, which is mapped nowhere
	Size   uint64      // bytes; of physical memory but for Paused
	Stream int         // index into Record.Streams, as in event.Event.Stream, -1 for new spare chunks
	Handle cuda.Stream // by which that stream was made known
	Pool   PoolID
	Number uint32 // the pool's number, as in event.Event.Pool
	Large  bool
	Chunks []Chunk // in address order; nil where the pool is made of segments
	Blocks []SegmentBlock
	Paused uint64 // bytes of Size without physical memory
}

// Chunk is a physical handle within a segment.
type Chunk struct {
	Handle cuda.Handle
	Size   uint64
}

// SegmentBlock is a piece of a segment.
type SegmentBlock struct {
	Addr      uint64
	Size      uint64
	Requested uint64
	Tag       uint32 // as given to AllocTagged, 0 none
	Library   uint8  // as given to AllocWith, 0 none
	Stack     uint32 // likewise, while stacks are kept (KeepStacks)
	Paused    uint64 // bytes of Size without physical memory
	State     BlockState
}

// Record is History and Snapshot of one moment, with what their numbers mean.
type Record struct {
	Events   []event.Event // the newest, oldest first
	Lost     uint64        // older ones, which the ring no longer holds or which were left out
	Segments []Segment
	Streams  []Stream // as Device.Streams
	Pools    []PoolID // as Device.Pools
}
