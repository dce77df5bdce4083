package replay

import (
	"fmt"
	"slices"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

// The constants of c10/cuda/CUDACachingAllocator.cpp (torch 2.11), in bytes.
const (
	minBlock      = 512          // kMinBlockSize: sizes are rounded to multiples of it
	smallSize     = 1 * mib      // kSmallSize: the largest request of the small pools
	smallSegment  = 2 * mib      // kSmallBuffer: segments and pages of the small pools
	minLargeAlloc = 10 * mib     // kMinLargeAlloc: requests from here on get segments of their own size
	roundLarge    = 2 * mib      // kRoundLarge: to which those are rounded
	rangeDevice   = 150109880320 // device memory that an expandable segment's address range is made for, at least
)

func init() {
	Register("torch", func(env *Env) (Policy, string, error) {
		conf, err := torchConf(env)
		if err != nil {
			return nil, "", err
		}
		t := newTorch(env, conf)
		return t, conf.String(), nil
	})
}

// torchConf is the settings of a torch policy: its own, or the trace's.
func torchConf(env *Env) (TorchConf, error) {
	if env.Spec.HasConf {
		c, err := ParseTorchConf(env.Spec.Conf)
		if err == nil && c.Fraction < 1 && env.Capacity == 0 {
			err = fmt.Errorf("torch settings: per_process_memory_fraction: %v: a fraction needs a capacity", c.Fraction)
		}
		return c, err
	}
	c, note := TorchConfOf(env.Plan.Trace.Settings)
	if note != "" {
		env.Note(note)
	}
	if c.Fraction < 1 {
		env.Note(fmt.Sprintf("per_process_memory_fraction:%v was set, of a device whose size the file does not say: the capacity is the limit", c.Fraction))
	}
	return c, nil
}

// torch models DeviceCachingAllocator: the native caching allocator of PyTorch, with native segments or expandable
// ones. It takes the decisions that PyTorch takes, in the same order; the driver's answers are modelled, and so are
// the addresses of segments, except where the record gives them (Env.verify).
//
// The limit on reserved bytes is PyTorch's process limit (set_per_process_memory_fraction): it refuses a new segment
// that would exceed it. The driver itself never fails here.
type torch struct {
	meter
	env   *Env
	conf  TorchConf
	limit uint64 // bytes, 0 is none
	gcAt  uint64 // reserved bytes above which old blocks are freed; 0 is never

	blocks []torchBlock
	unused []int32 // free slots in blocks
	of     []int32 // block number → index in blocks
	pools  []torchPool
	ranges []torchRange
	ended  []bool // by index into Plan.Pools: private pools that have ended

	waiting []bool // by block number: given back, and other streams may still use it
	pending int    // of those
	events  int    // most of them at a time: CUDA events are pooled
	last    int    // the block given back by the call before, -1 if that was another call
	// late are blocks whose streams had finished by the request that comes next. PyTorch finds that out when a request
	// begins, or when it waits for all streams since the request met a shortage; only the record tells which, so that
	// they are kept here where there is one. (With garbage collection it does not tell: then the former is assumed.)
	late     []int32
	nextAddr uint64 // where the next segment lies
	placed   uint64 // segments that the draw has placed

	handle  uint64            // number of the last physical handle
	handles map[uint64]uint64 // by address, where there is a listener
}

// torchBlock is a piece of a segment, used, cached or (expandable) unmapped.
type torchBlock struct {
	addr, size uint64
	prev, next int32 // neighbours in the segment, -1 is none
	pool       int32
	rng        int32 // expandable segment, -1 is none
	stream     uint32
	used       bool // handed out, or given back and still in use by a stream
	mapped     bool // backed by memory; always, outside expandable segments
	gcBase     int64
}

// torchPool is a BlockPool: the cached blocks of the small or large requests of one pool.
type torchPool struct {
	small    bool
	private  uint32    // index into Plan.Pools, 0 is the default pool
	free     []freeSet // by stream; nil before the pool's first use, as is the next
	unmapped [][]int32 // by stream, in address order
	searches int64     // get_free_blocks_call_count: the clock of garbage collection
}

func newTorch(env *Env, conf TorchConf) *torch {
	p := env.Plan
	t := &torch{meter: newMeter(env.GPULag), env: env, conf: conf, limit: env.Capacity,
		of: make([]int32, p.Blocks), ended: make([]bool, len(p.Pools)), waiting: make([]bool, p.Blocks), last: -1, nextAddr: firstAddr}
	if env.Spec.HasConf && conf.Fraction < 1 && t.limit > 0 {
		t.limit = uint64(conf.Fraction * float64(t.limit))
	}
	if t.limit > 0 && conf.GCThreshold > 0 {
		t.gcAt = uint64(conf.GCThreshold * float64(t.limit))
	}
	for i := range p.Pools {
		for _, small := range []bool{true, false} {
			t.pools = append(t.pools, torchPool{small: small, private: uint32(i)})
		}
	}
	for i := range t.of {
		t.of[i] = -1
	}
	if env.Emit != nil {
		t.handles = map[uint64]uint64{}
	}
	if env.verify != nil {
		t.nextAddr = p.addressesAbove()
	}
	return t
}

// firstAddr is where modelled addresses begin, where CUDA's do on Linux.
const firstAddr = 0x7f00_0000_0000

// poolFor is the pool of a request of size bytes, rounded.
func (t *torch) poolFor(private uint32, size uint64) int32 {
	if size <= smallSize {
		return int32(2 * private)
	}
	return int32(2*private + 1)
}

func (t *torch) newBlock(b torchBlock) int32 {
	if n := len(t.unused); n > 0 {
		i := t.unused[n-1]
		t.unused = t.unused[:n-1]
		t.blocks[i] = b
		return i
	}
	t.blocks = append(t.blocks, b)
	return int32(len(t.blocks) - 1)
}

func (t *torch) dropBlock(i int32) { t.unused = append(t.unused, i) }

// use is a pool that is about to have blocks.
func (t *torch) use(pool int32) *torchPool {
	p := &t.pools[pool]
	if p.free == nil {
		n := t.env.Plan.numStreams()
		t.search(16 * n)
		p.free, p.unmapped = make([]freeSet, n), make([][]int32, n)
	}
	return p
}

// cache puts a block among the free ones of its pool.
func (t *torch) cache(i int32) {
	b := &t.blocks[i]
	p := t.use(b.pool)
	b.gcBase = p.searches
	p.free[b.stream].insert(b.size, b.addr, i)
}

func (t *torch) uncache(i int32) {
	b := &t.blocks[i]
	t.pools[b.pool].free[b.stream].remove(b.size, b.addr, i)
}

// request is AllocParams: what a request looks for.
type request struct {
	size    uint64 // rounded
	segment uint64 // bytes of the segment that it would get
	pool    int32
	stream  uint32
}

// Alloc is DeviceCachingAllocator::malloc.
func (t *torch) Alloc(b int, size uint64, stream, pool uint32) (uint64, error) {
	t.last = -1
	if t.pending > 0 {
		t.count(callEventQuery, t.costs.EventQuery) // process_events: the oldest is not done yet
	}
	if len(t.late) > 0 && (t.pending > 0 || t.gcAt > 0 || !t.env.verify.shortageAhead()) {
		t.flushLate()
	}
	r := request{size: t.conf.BlockSize(size), stream: stream}
	r.pool = t.poolFor(pool, r.size)
	r.segment = t.conf.SegmentSize(r.size)
	found := t.fit(r)
	if found < 0 {
		found = t.obtain(r)
	}
	if found >= 0 {
		t.blocks[found].used = true // what is free late does not merge with it
	}
	t.flushLate()
	if found < 0 {
		t.count(callMemGetInfo, t.costs.MemGetInfo)
		t.ooms++
		return 0, fmt.Errorf("request of %d bytes with %d reserved, limit %d: %w", r.size, t.reserved, t.limit, cuda.ErrOutOfMemory)
	}
	if t.shouldSplit(found, r.size) {
		t.split(found, r)
	}
	blk := &t.blocks[found]
	t.of[b] = found
	t.allocated += blk.size
	return blk.addr, nil
}

// obtain is the chain of malloc for a request that no cached block meets.
func (t *torch) obtain(r request) int32 {
	if t.gcAt > 0 {
		t.collectGarbage()
	}
	if i := t.newSegment(r); i >= 0 {
		return i
	}
	if t.releaseOversize(r) {
		if i := t.newSegment(r); i >= 0 {
			return i
		}
	}
	t.releaseCached()
	t.retries++
	return t.newSegment(r)
}

// fit is get_free_block: the best fit among the cached blocks of the stream, taken out of the cache, or -1.
func (t *torch) fit(r request) int32 {
	p := t.use(r.pool)
	if t.gcAt > 0 {
		p.searches++
	}
	s := &p.free[r.stream]
	at := s.seek(r.size, 0, 0)
	if s.end(at) {
		return -1
	}
	if t.blocks[s.at(at).block].rng >= 0 {
		// A block at the edge of mapped memory counts with what it can grow to, so that the ones in the middle of a
		// segment are used up first.
		for next := s.next(at); !s.end(next); next = s.next(at) {
			t.search(1)
			if t.growable(s.at(next).block) >= t.growable(s.at(at).block) {
				break
			}
			at = next
		}
	}
	size := s.at(at).size
	if r.size < t.conf.MaxSplit && size >= t.conf.MaxSplit {
		return -1
	}
	if r.size >= t.conf.MaxSplit && size >= r.size+t.conf.MaxNonSplitRound {
		return -1
	}
	i := s.at(at).block
	s.removeAt(at)
	return i
}

func (t *torch) shouldSplit(i int32, size uint64) bool {
	rest := t.blocks[i].size - size
	if t.pools[t.blocks[i].pool].small || t.conf.Expandable {
		return rest >= minBlock
	}
	return size < t.conf.MaxSplit && rest > smallSize
}

// split cuts block i down to the request and caches the rest.
func (t *torch) split(i int32, r request) {
	b := t.blocks[i]
	rest := t.newBlock(torchBlock{addr: b.addr + r.size, size: b.size - r.size, prev: i, next: b.next, pool: b.pool,
		rng: b.rng, stream: b.stream, mapped: true})
	if b.next >= 0 {
		t.blocks[b.next].prev = rest
	}
	t.blocks[i].next, t.blocks[i].size = rest, r.size
	t.cache(rest)
}

// FreeRequested is DeviceCachingAllocator::free. Whether other streams used the block shows in Free: then it comes
// later.
func (t *torch) FreeRequested(b int) {
	t.flushLate()
	t.last = b
	if !t.waiting[b] {
		t.waiting[b] = true
		t.pending++
	}
}

// Free is free_block: from now on the block is cached.
func (t *torch) Free(b int) error {
	i := t.of[b]
	if i < 0 {
		return fmt.Errorf("block %d is free already", b)
	}
	t.of[b] = -1
	delayed := t.waiting[b] && t.last != b
	t.last = -1
	if t.waiting[b] {
		if delayed {
			// insert_events and process_events; how many streams there were is not in a trace, one is counted.
			if t.pending > t.events {
				t.events = t.pending
				t.count(callEventCreate, t.costs.EventCreate)
			}
			t.count(callEventRecord, t.costs.EventRecord)
			t.count(callEventQuery, t.costs.EventQuery)
		}
		t.waiting[b] = false
		t.pending--
	}
	t.allocated -= t.blocks[i].size
	if delayed && t.env.verify != nil {
		t.late = append(t.late, i)
		return nil
	}
	t.flushLate()
	t.freeBlock(i)
	return nil
}

// freeBlock merges a block that was handed out with its free neighbours and caches it.
func (t *torch) freeBlock(i int32) {
	t.blocks[i].used = false
	t.merge(i, t.blocks[i].prev)
	t.merge(i, t.blocks[i].next)
	t.cache(i)
}

// flushLate frees the blocks of late.
func (t *torch) flushLate() {
	for _, i := range t.late {
		t.freeBlock(i)
	}
	t.late = t.late[:0]
}

// merge is try_merge_blocks: neighbour src becomes part of dst if it is free and in the same state.
func (t *torch) merge(dst, src int32) {
	if src < 0 {
		return
	}
	d, s := &t.blocks[dst], &t.blocks[src]
	if s.used || s.mapped != d.mapped {
		return
	}
	if s.mapped {
		t.uncache(src)
	} else {
		t.removeUnmapped(src)
	}
	if d.prev == src {
		d.addr, d.prev = s.addr, s.prev
		if d.prev >= 0 {
			t.blocks[d.prev].next = dst
		}
	} else {
		d.next = s.next
		if d.next >= 0 {
			t.blocks[d.next].prev = dst
		}
	}
	d.size += s.size
	t.dropBlock(src)
}

// newSegment is alloc_block: a block of a new segment, or of newly mapped pages, not cached; -1 is out of memory.
func (t *torch) newSegment(r request) int32 {
	if t.limit > 0 && t.reserved+r.segment > t.limit {
		return -1
	}
	if t.conf.Expandable {
		return t.expand(r)
	}
	addr := t.place(r.segment, event.SegmentAlloc)
	t.memAlloc(r.segment)
	i := t.newBlock(torchBlock{addr: addr, size: r.segment, prev: -1, next: -1, pool: r.pool, rng: -1,
		stream: r.stream, mapped: true})
	t.emit(event.SegmentAlloc, addr, r.segment, i)
	return i
}

// place is the address of a new segment: the recorded one where the run is held against the record, else the next.
func (t *torch) place(size uint64, kind event.Kind) uint64 {
	if v := t.env.verify; v != nil {
		if addr, ok := v.address(kind); ok {
			return addr
		}
	}
	if t.env.draw != nil && t.placed < 1<<orderBits {
		t.placed++
		return firstAddr + (t.env.draw.slot(t.placed-1)+1)*maxRequest // further apart than any segment is large
	}
	addr := t.nextAddr
	t.nextAddr += (size + smallSegment - 1) / smallSegment * smallSegment
	return addr
}

// emit tells of a segment event, of maps and unmaps once for each page, since each is a handle of its own.
func (t *torch) emit(kind event.Kind, addr, size uint64, i int32) {
	b := &t.blocks[i]
	e := event.Event{Kind: kind, Addr: addr, Size: size, Stream: b.stream, Pool: t.pools[b.pool].private}
	if t.env.verify != nil {
		t.env.verify.emitted(e)
	}
	if t.env.Emit == nil {
		return
	}
	if kind != event.SegmentMap && kind != event.SegmentUnmap {
		t.env.Emit(e)
		return
	}
	for e.Size = t.ranges[b.rng].page; e.Addr < addr+size; e.Addr += e.Size {
		t.search(4)
		if kind == event.SegmentMap {
			t.handle++
			t.handles[e.Addr] = t.handle
		}
		e.Handle = t.handles[e.Addr]
		t.env.Emit(e)
	}
}

// Segments is Snapshotter.Segments: for expandable segments, one for each contiguous mapped range, as PyTorch reports
// them.
func (t *torch) Segments() []recording.Segment {
	dead := map[int32]bool{}
	for _, i := range t.unused {
		dead[i] = true
	}
	var out []recording.Segment
	for i := range t.blocks {
		b := &t.blocks[i]
		if dead[int32(i)] || !b.mapped || b.prev >= 0 && t.blocks[b.prev].mapped {
			continue
		}
		s := recording.Segment{Addr: b.addr, Stream: b.stream, Pool: t.pools[b.pool].private, Large: !t.pools[b.pool].small,
			Expandable: b.rng >= 0}
		for j := int32(i); j >= 0 && t.blocks[j].mapped; j = t.blocks[j].next {
			c := &t.blocks[j]
			blk := recording.Block{Addr: c.addr, Size: c.size, Stream: c.stream, Pool: s.Pool}
			if c.used {
				blk.State = recording.Active
			}
			s.Size += c.size
			s.Blocks = append(s.Blocks, blk)
		}
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b recording.Segment) int {
		if a.Addr < b.Addr {
			return -1
		}
		return 1
	})
	return out
}
