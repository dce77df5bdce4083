package replay

import (
	"fmt"
	"sort"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

// Plan is a trace prepared for replay: allocations numbered densely, frees paired with them. Read-only once made, but for
// the count of what all its runs do, and what it remembers for runs with the same limit.
type Plan struct {
	Trace *recording.Trace
	// Block is, for each event, the number of the block that it allocates or frees, or that an oom attempts; -1 where
	// it has none. The blocks of Trace.Initial are numbers 0 to len(Initial)-1.
	Block []int32
	// Blocks is the number of block numbers.
	Blocks int
	// Pools are the private pools: those of the trace, then those that were inferred. Pools[0] is the default pool.
	Pools []recording.PoolID
	// Releases are the times at which the program emptied a cache or ended a pool, inferred from the record for each
	// run, since they depend on its capacity.
	Releases []Release
	// PeakLive is the highest number of requested bytes between alloc and free_completed.
	PeakLive uint64
	// Recorded is what the recorded allocator did.
	Recorded Recorded
	// Notes say what was assumed.
	Notes []string

	size    []uint64         // of each block, requested bytes
	pools   map[int32]uint32 // pools that were inferred, by block
	streams []uint32         // indices into Trace.Streams in the order of their handles, as PyTorch orders streams
	startUS int64

	work     *Work // of all runs, those of copies included
	searched bool  // Options.Search

	delayed []int64 // by block, when it was free in the record if later than given back; nil: no block was

	limits *limits // what runs with each limit have in common

	segmentsFreed int // recorded segment_free and segment_unmap events
}

// Recorded is what the recorded allocator did. Its JSON is part of the command's contract.
type Recorded struct {
	PeakReserved  uint64         `json:"peak_reserved_bytes"`
	SegmentEvents int            `json:"segment_events"`
	OOMs          int            `json:"ooms"`
	Settings      map[string]any `json:"settings"` // empty where the file does not say
}

// NewPlan prepares a trace.
func NewPlan(t *recording.Trace) *Plan {
	p := &Plan{Trace: t, Block: make([]int32, len(t.Events)), Pools: append([]recording.PoolID(nil), t.Pools...),
		work: NewWork(t.StoredBytes), limits: &limits{}}
	if len(p.Pools) == 0 {
		p.Pools = []recording.PoolID{{}}
	}
	if len(t.Events) > 0 {
		p.startUS = t.Events[0].TimeUS
	}
	p.pair()
	p.orderStreams()
	p.record()
	return p
}

// pair numbers the blocks.
func (p *Plan) pair() {
	t := p.Trace
	live := newAddrTable(1024)
	p.size = make([]uint64, 0, len(t.Initial)+len(t.Events)/3)
	var bytes uint64
	for i, b := range t.Initial {
		size := b.Requested
		if size == 0 {
			size = b.Size
		}
		live.put(b.Addr, int32(i))
		p.size = append(p.size, size)
		bytes += size
	}
	p.PeakLive = bytes
	var unknown, twice int
	given := map[int32]int64{} // when a block was given back that is not free yet
	for i := range t.Events {
		e := &t.Events[i]
		b := int32(-1)
		switch e.Kind {
		case event.Alloc:
			if e.Size == 0 || e.Addr == 0 {
				break // a request of nothing, which gets nothing
			}
			b = int32(len(p.size))
			p.size = append(p.size, e.Size)
			if old, ok := live.put(e.Addr, b); ok {
				// The block before was never freed as far as the file says.
				twice++
				bytes -= p.size[old]
			}
			bytes += e.Size
			p.PeakLive = max(p.PeakLive, bytes)
		case event.FreeRequested:
			if n, ok := live.get(e.Addr); ok {
				b = n
				given[n] = e.TimeUS
			}
		case event.FreeCompleted:
			if n, ok := live.take(e.Addr); ok {
				b = n
				bytes -= p.size[n]
				if us, ok := given[n]; ok {
					delete(given, n)
					if e.TimeUS > us {
						p.delay(n, i)
					}
				}
			} else {
				unknown++
			}
		case event.OOM:
			if e.Size > 0 {
				b = int32(len(p.size))
				p.size = append(p.size, e.Size)
			}
		}
		p.Block[i] = b
	}
	p.Blocks = len(p.size)
	if unknown > 0 {
		p.Notes = append(p.Notes, fmt.Sprintf("%d frees of blocks that the file does not allocate were left out", unknown))
	}
	if twice > 0 {
		p.Notes = append(p.Notes, fmt.Sprintf("%d blocks were allocated over one that the file never frees: they stay live in the replay", twice))
	}
}

func (p *Plan) orderStreams() {
	p.streams = make([]uint32, max(1, len(p.Trace.Streams)))
	for i := range p.streams {
		p.streams[i] = uint32(i)
	}
	if s := p.Trace.Streams; len(s) > 0 {
		sort.SliceStable(p.streams, func(i, j int) bool { return s[p.streams[i]] < s[p.streams[j]] })
	}
}

// record sums up what the recorded allocator did.
func (p *Plan) record() {
	r := &p.Recorded
	r.PeakReserved = p.Trace.RecordedPeakReserved()
	for i := range p.Trace.Events {
		switch e := &p.Trace.Events[i]; e.Kind {
		case event.SegmentAlloc, event.SegmentMap:
			r.SegmentEvents++
		case event.SegmentFree, event.SegmentUnmap:
			r.SegmentEvents++
			p.segmentsFreed++
		case event.OOM:
			r.OOMs++
		}
	}
	r.Settings = map[string]any{}
	if s := p.Trace.Settings; s.Known {
		c, _ := TorchConfOf(s)
		r.Settings["conf"] = s.Conf
		r.Settings["effective"] = c.String()
	}
}

// Micros is the time of an event in microseconds since the first, never below 0.
func (p *Plan) Micros(i int) int64 { return recording.SinceUS(p.startUS, p.Trace.Events[i].TimeUS) }

// timeOf is the recorder's time of event i, of the first event for the initial blocks (-1).
func (p *Plan) timeOf(i int) int64 {
	if i < 0 {
		return p.startUS
	}
	return p.Trace.Events[i].TimeUS
}

// DurationUS is the time between the first event and the last, in microseconds.
func (p *Plan) DurationUS() int64 {
	if len(p.Trace.Events) == 0 {
		return 0
	}
	return p.Micros(len(p.Trace.Events) - 1)
}

// delay notes that other streams used a block until event i.
func (p *Plan) delay(b int32, i int) {
	if n := len(p.size) - len(p.delayed); n > 0 {
		p.delayed = append(p.delayed, make([]int64, n)...)
	}
	p.delayed[b] = p.Micros(i)
}

// completedUS is when a block was free in the record, if that was later than it was given back; else 0.
func (p *Plan) completedUS(b int) int64 {
	if b < len(p.delayed) {
		return p.delayed[b]
	}
	return 0
}

// With is the plan for another trace of the same blocks: one that ends earlier, or asks for another size.
func (p *Plan) With(t *recording.Trace) *Plan {
	q := *p
	q.Trace, q.limits = t, &limits{}
	return &q
}

// Size is the bytes that block b was requested with.
func (p *Plan) Size(b int) uint64 { return p.size[b] }

// poolOf is the pool of block b: the recorded one unless another was inferred.
func (p *Plan) poolOf(b int, recorded uint32) uint32 {
	if p.pools != nil {
		if n, ok := p.pools[int32(b)]; ok {
			return n
		}
	}
	return recorded
}

// streamUses is, by stream, how often a block of it is allocated or freed. One that is never freed keeps its stream.
func (p *Plan) streamUses() []int {
	uses := make([]int, p.numStreams())
	for i := range p.Trace.Initial {
		uses[p.Trace.Initial[i].Stream] += 2
	}
	for i := range p.Trace.Events {
		if e := &p.Trace.Events[i]; p.Block[i] >= 0 && (e.Kind == event.Alloc || e.Kind == event.OOM) {
			uses[e.Stream] += 2
		}
	}
	return uses
}

// numStreams is the number of streams, at least 1.
func (p *Plan) numStreams() int { return len(p.streams) }

// addrTable maps addresses to block numbers: open addressing with linear probing and backward-shift deletion, since
// it is touched three times for every allocation of a trace and a Go map would take half of the time of a replay.
// Address 0 is the empty slot and is never put.
type addrTable struct {
	slots []addrSlot // a power of two of them
	shift uint
	n     int
}

type addrSlot struct {
	addr  uint64
	block int32
}

func newAddrTable(size int) *addrTable {
	t := &addrTable{shift: 64}
	for n := 1; n < size; n <<= 1 {
		t.shift--
	}
	t.slots = make([]addrSlot, 1<<(64-t.shift))
	return t
}

// home is the slot of an address by Fibonacci hashing.
func (t *addrTable) home(addr uint64) int { return int(addr * 0x9E3779B97F4A7C15 >> t.shift) }

func (t *addrTable) find(addr uint64) int {
	mask := len(t.slots) - 1
	i := t.home(addr)
	for t.slots[i].addr != 0 && t.slots[i].addr != addr {
		i = (i + 1) & mask
	}
	return i
}

func (t *addrTable) get(addr uint64) (int32, bool) {
	s := &t.slots[t.find(addr)]
	return s.block, addr != 0 && s.addr == addr
}

// put sets the block at addr and returns the one that was there.
func (t *addrTable) put(addr uint64, block int32) (old int32, ok bool) {
	if addr == 0 {
		return 0, false
	}
	i := t.find(addr)
	if t.slots[i].addr == addr {
		old, t.slots[i].block = t.slots[i].block, block
		return old, true
	}
	t.slots[i] = addrSlot{addr, block}
	if t.n++; t.n*2 > len(t.slots) {
		t.grow()
	}
	return 0, false
}

func (t *addrTable) grow() {
	old := t.slots
	t.slots = make([]addrSlot, 2*len(old))
	t.shift--
	for _, s := range old {
		if s.addr != 0 {
			t.slots[t.find(s.addr)] = s
		}
	}
}

// take removes addr.
func (t *addrTable) take(addr uint64) (int32, bool) {
	i := t.find(addr)
	if addr == 0 || t.slots[i].addr != addr {
		return 0, false
	}
	block := t.slots[i].block
	mask := len(t.slots) - 1
	for j := (i + 1) & mask; t.slots[j].addr != 0; j = (j + 1) & mask {
		// An entry moves into the hole unless its home lies cyclically after the hole.
		if h := t.home(t.slots[j].addr); (j-h)&mask >= (j-i)&mask {
			t.slots[i] = t.slots[j]
			i = j
		}
	}
	t.slots[i] = addrSlot{}
	t.n--
	return block, true
}
