package cistern

import (
	"slices"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/internal/vm"
)

// BlockState is the state of a block in a snapshot.
type BlockState uint8

const (
	BlockFree    BlockState = iota // inactive
	BlockUsed                      // handed out
	BlockPending                   // given back, still used by other streams
)

// Segment is a contiguous range of mapped memory of one (pool, stream, size class).
type Segment struct {
	Addr   uint64  // 0 for a spare chunk, which is mapped nowhere
	Size   uint64  // bytes; of physical memory but for Paused
	Stream int     // index into Record.Streams, as in event.Event.Stream, -1 for new spare chunks
	Owner  *Stream // that stream, nil for new spare chunks
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

// Snapshot lists all physical memory of the device and what is in it, and the blocks whose memory is paused: the sizes of
// the segments add up to the reserved and the paused bytes, those of the used and pending blocks to the active bytes.
func (d *Device) Snapshot() []Segment {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.snapshot()
}

// Record is History and Snapshot of one moment, with what their numbers mean.
type Record struct {
	Events  []event.Event // the newest, oldest first
	Lost    uint64        // older ones, which the ring no longer holds or which were left out
	Held    []Segment
	Streams []*Stream // as Device.Streams
	Pools   []PoolID  // as Device.Pools
}

// Record is what is held, and the newest events that led to it, at most n of them.
func (d *Device) Record(n int) Record {
	d.mu.Lock()
	defer d.mu.Unlock()
	events, lost := d.hist.newest(n)
	return Record{events, lost, d.snapshot(), slices.Clone(d.streams), slices.Clone(d.poolNames)}
}

// snapshot is Snapshot. The caller holds Device.mu and nothing else.
//
// +checklocks:d.mu
func (d *Device) snapshot() []Segment {
	out := d.segmentsOf(func(*space) bool { return true })
	for _, id := range d.spares {
		k := d.chunks.At(id)
		g := Segment{Size: k.Size, Stream: int(k.Stream), Large: true, Chunks: []Chunk{{k.Handle, k.Size}}, Blocks: []SegmentBlock{{Size: k.Size}}}
		if k.Stream >= 0 {
			g.Owner = d.streams[k.Stream]
		}
		out = append(out, g)
	}
	return out
}

// SnapshotPool lists the physical memory that is mapped for one pool. Spare chunks belong to none.
func (d *Device) SnapshotPool(id PoolID) []Segment {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.segmentsOf(func(s *space) bool { return s.pool.id == id })
}

// segmentsOf lists the segments of the spaces that are wanted.
//
// +checklocks:d.mu
func (d *Device) segmentsOf(wanted func(*space) bool) (out []Segment) {
	for _, s := range d.spaces {
		if s != nil && wanted(s) {
			s.mu.Lock()
			out = append(out, s.segments()...)
			s.mu.Unlock()
		}
	}
	return out
}

// segments is what there is of a space. The caller holds Device.mu and the space's lock.
//
// +checklocks:s.dev.mu
func (s *space) segments() []Segment {
	var out []Segment
	end := uint64(0)
	s.heap.Each(func(id heap.ID, b *heap.Block) bool {
		if b.State == heap.Hole || b.State == heap.Zombie && !s.inTransit(b.Addr) {
			return true
		}
		if len(out) == 0 || b.Addr != end || s.heap.Prev(id) == 0 {
			out = append(out, Segment{Addr: b.Addr, Stream: int(s.stream.index.Load()), Owner: s.stream, Pool: s.pool.id, Number: s.pool.number,
				Large: quota.GroupOf(s.class) == quota.GroupLarge})
		}
		g := &out[len(out)-1]
		g.Size += b.Size
		end = b.Addr + b.Size
		x := SegmentBlock{Addr: b.Addr, Size: b.Size, Requested: b.Requested, Tag: tagOf(b.Tag), Library: libraryOf(b.Tag), Stack: s.heap.Stack(id), Paused: s.missing(b)}
		g.Paused += x.Paused
		switch b.State {
		case heap.Used:
			x.State = BlockUsed
		case heap.Pending:
			x.State = BlockPending
		}
		g.Blocks = append(g.Blocks, x)
		return true
	})
	if s.area == nil {
		return out
	}
	for i := range out {
		g := &out[i]
		s.area.Whole(&s.dev.chunks, g.Addr, g.Size, func(_ vm.ChunkID, k *vm.Chunk) bool {
			g.Chunks = append(g.Chunks, Chunk{k.Handle, k.Size})
			return true
		})
	}
	return out
}

// Usage is the bytes handed out, rounded, and the bytes of physical memory held: the two figures of Stats that cost
// least.
func (d *Device) Usage() (allocated, reserved uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range d.spaces {
		if s != nil {
			s.mu.Lock()
			allocated += uint64(s.gauges.Now()[quota.Allocated])
			s.mu.Unlock()
		}
	}
	return allocated, d.quota.Total()
}

// Streams are the streams that the device knows, by index: what Segment.Stream and event.Event.Stream refer to. The index
// of a stream that may have been destroyed is given to another in time, but not while the history names it, nor what
// TakeHistory returned last.
func (d *Device) Streams() []*Stream {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.streams)
}

// Pools are the names of the pools by number: what event.Event.Pool refers to. The number of a pool that is gone is given to
// another as that of a stream is.
func (d *Device) Pools() []PoolID {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.poolNames)
}
