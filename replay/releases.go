package replay

import (
	"fmt"
	"sync"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/leaves"
	"github.com/cistern-gpu/cistern/recording"
)

// Release is a point at which a program gave cached memory back beside any shortage: torch.cuda.empty_cache, or the
// end of a private pool. The calls themselves are not in a trace.
type Release struct {
	Event int    // index of the event before which it happened
	Count int    // recorded segment events that it made, from Event on
	Pool  uint32 // index into Plan.Pools of the pool that ended; 0 means the cache was emptied
}

// limits remembers the releases of the limits that were replayed last, since a search replays each many times.
type limits struct {
	mu    sync.Mutex // protects what follows
	known [mostLimits]limited
	next  int // in known, to be replaced
}

// mostLimits is how many limits are remembered.
const mostLimits = 4

// limited is a plan with its releases under a limit; nil: none.
type limited struct {
	capacity uint64
	plan     *Plan
}

// withReleases is the plan with the releases that its record shows, under a limit of capacity bytes (0 is unknown).
func (p *Plan) withReleases(capacity uint64) *Plan {
	if !p.Trace.FromStart || p.segmentsFreed == 0 {
		return p
	}
	if capacity < p.Recorded.PeakReserved {
		capacity = 0 // of which nothing follows
	}
	l := p.limits
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, k := range l.known {
		if k.plan != nil && k.capacity == capacity {
			q := *k.plan
			q.work, q.searched = p.work, p.searched
			return &q
		}
	}
	q, err := p.inferReleases(capacity)
	if err == nil {
		l.known[l.next] = limited{capacity, q}
		l.next = (l.next + 1) % mostLimits
	}
	return q
}

// inferReleases finds the releases of withReleases. After an error, which the run meets too, they are not all.
//
// Segments that went back to the driver did so for a shortage, if a new segment follows at once and would not have
// fitted under the limit; else the program asked for it. It emptied the cache, if no segment that was wholly free
// stayed, or if large ones went before small ones, PyTorch's order then; what stayed though wholly free belonged to a
// private pool. Else a private pool ended, and what was allocated in the segments was its.
func (p *Plan) inferReleases(capacity uint64) (*Plan, error) {
	t := p.Trace
	if movesHandles(t) {
		return p, nil
	}
	conf, _ := TorchConfOf(t.Settings)
	limit := p.Recorded.PeakReserved
	gcAt := uint64(0)
	if capacity >= limit {
		limit = capacity
		gcAt = uint64(conf.GCThreshold * float64(capacity))
	}
	q := *p
	q.Pools = append([]recording.PoolID(nil), p.Pools...)
	q.Notes = append([]string(nil), p.Notes...)
	h := heldSegments{segOf: make([]int32, p.Blocks)}
	var reserved uint64
	for i := 0; i < len(t.Events); i++ {
		e := &t.Events[i]
		switch e.Kind {
		case event.SegmentAlloc, event.SegmentMap:
			reserved += e.Size
			h.add(e)
		case event.Alloc:
			if b := p.Block[i]; b >= 0 {
				if s := h.alloc(b, e); s != nil && s.hidden != 0 {
					q.pools[b] = s.hidden
				}
			}
		case event.FreeCompleted:
			if b := p.Block[i]; b >= 0 {
				h.free(b)
			}
		case event.SegmentFree, event.SegmentUnmap:
			end := i
			before := reserved
			for ; end < len(t.Events) && (t.Events[end].Kind == event.SegmentFree || t.Events[end].Kind == event.SegmentUnmap); end++ {
				reserved -= min(reserved, t.Events[end].Size)
			}
			if !shortage(t.Events[end:], &conf, before, limit, gcAt) {
				if err := p.take(int64(h.segs.Len()) / 8); err != nil {
					return &q, err
				}
				q.addRelease(&h, i, end)
			}
			for j := i; j < end; j++ {
				h.remove(&t.Events[j])
			}
			i = end - 1
		}
	}
	return &q, nil
}

// shortage reports whether segments were freed for the request that rest begins with.
func shortage(rest []event.Event, conf *TorchConf, reserved, limit, gcAt uint64) bool {
	if len(rest) == 0 {
		return false
	}
	switch rest[0].Kind {
	case event.OOM:
		return true
	case event.SegmentAlloc, event.SegmentMap:
	default:
		return false
	}
	if conf.GCThreshold > 0 && reserved > gcAt {
		return true // garbage was collected; without a capacity the threshold is not known
	}
	size := rest[0].Size
	for i := range rest {
		k := rest[i].Kind
		if k == event.Alloc {
			size = max(size, conf.SegmentSize(conf.BlockSize(rest[i].Size)))
		}
		if k == event.Alloc || k == event.SegmentFree || k == event.SegmentUnmap {
			break
		}
	}
	return reserved+size > limit
}

// addRelease records a release that made the segment events from first to end.
func (p *Plan) addRelease(h *heldSegments, first, end int) {
	events := p.Trace.Events[first:end]
	r := Release{Event: first, Count: end - first}
	pool, mixed := events[0].Pool, false
	gone := map[uint64]bool{}
	for i := range events {
		mixed = mixed || events[i].Pool != pool || events[i].Kind == event.SegmentUnmap
		gone[events[i].Addr] = true
	}
	switch kept := h.keptWhole(gone); {
	case pool != 0 && !mixed:
		r.Pool = pool
		p.noteRelease(fmt.Sprintf("event %d: private pool %v ended", first, p.Pools[pool]))
	case mixed || len(kept) == 0:
		p.noteRelease(fmt.Sprintf("event %d: the program emptied the cache (%d segment events without a shortage)", first, r.Count))
	case largeFirst(events):
		pool, blocks := p.hide(kept)
		p.noteRelease(fmt.Sprintf("event %d: the program emptied the cache (%d segment events without a shortage); "+
			"%d segments stayed though wholly free: taken for a private pool that the file does not name (%v), with the %d allocations in them",
			first, r.Count, len(kept), pool, blocks))
	default:
		var segs []*heldSegment
		for i := range events {
			segs = append(segs, h.at(events[i].Addr))
		}
		var blocks int
		r.Pool, blocks = p.hide(segs)
		p.noteRelease(fmt.Sprintf("event %d: %d segments were given back while others lay wholly free: "+
			"taken for the end of a private pool that the file does not name, with the %d allocations in them", first, r.Count, blocks))
	}
	p.Releases = append(p.Releases, r)
}

// mostReleaseNotes is how many releases are noted one by one.
const mostReleaseNotes = 100

func (p *Plan) noteRelease(note string) {
	switch n := len(p.Releases); {
	case n < mostReleaseNotes:
		p.Notes = append(p.Notes, note)
	case n == mostReleaseNotes:
		p.Notes = append(p.Notes, "further releases of memory without a shortage are not listed")
	}
}

// hide puts what was allocated in segments into an inferred pool: the one that some of them are known to belong to, or
// a new one. It returns the pool and the number of allocations.
func (p *Plan) hide(segs []*heldSegment) (pool uint32, blocks int) {
	for _, s := range segs {
		if s.hidden != 0 {
			pool = s.hidden
		}
	}
	if pool == 0 {
		pool = uint32(len(p.Pools))
		p.Pools = append(p.Pools, recording.PoolID{})
	}
	if p.pools == nil {
		p.pools = map[int32]uint32{}
	}
	for _, s := range segs {
		s.hidden = pool
		blocks += len(s.blocks)
		for _, b := range s.blocks {
			p.pools[b] = pool
		}
	}
	_ = p.take(int64(blocks)) // the next release sees that nothing is left
	return pool, blocks
}

// largeFirst reports whether large segments were freed before small ones, as PyTorch does when it empties the cache;
// of a pool that ends it frees the small ones first. False where there is only one kind.
func largeFirst(events []event.Event) bool {
	return events[0].Size != smallSegment && events[len(events)-1].Size == smallSegment
}

// heldSegment is a segment that the recorded allocator held.
type heldSegment struct {
	id         int32 // 1 + index into heldSegments.all
	addr, size uint64
	pool       uint32
	hidden     uint32 // an inferred pool, 0 is none
	live       int
	blocks     []int32 // every block that was allocated in it
}

// heldSegments follows the recorded segments and what lies in them.
type heldSegments struct {
	segs  leaves.List[*heldSegment] // in address order
	segOf []int32                   // by block, 1 + index into all; 0 is none
	all   []*heldSegment
}

// below is the segment with the largest address not above addr, and its place; nil if none.
func (h *heldSegments) below(addr uint64) (*heldSegment, leaves.Pos) {
	p, ok := h.segs.Before(h.segs.Search(func(s **heldSegment) bool { return (*s).addr > addr }))
	if !ok {
		return nil, p
	}
	return *h.segs.At(p), p
}

func (h *heldSegments) at(addr uint64) *heldSegment {
	if s, _ := h.below(addr); s != nil && addr < s.addr+s.size {
		return s
	}
	return &heldSegment{}
}

func (h *heldSegments) add(e *event.Event) {
	s := &heldSegment{addr: e.Addr, size: e.Size, pool: e.Pool}
	h.segs.Insert(h.segs.Search(func(o **heldSegment) bool { return (*o).addr > e.Addr }), s)
	h.all = append(h.all, s)
	s.id = int32(len(h.all))
}

func (h *heldSegments) remove(e *event.Event) {
	if s, p := h.below(e.Addr); s != nil && s.addr == e.Addr {
		h.segs.Delete(p)
	}
}

// alloc puts block b into the segment that it lies in, and returns that; nil where there is none.
func (h *heldSegments) alloc(b int32, e *event.Event) *heldSegment {
	s, _ := h.below(e.Addr)
	if s == nil {
		return nil
	}
	s.live++
	s.blocks = append(s.blocks, b)
	if e.Pool != 0 {
		s.pool = e.Pool
	}
	h.segOf[b] = s.id
	return s
}

func (h *heldSegments) free(b int32) {
	if id := h.segOf[b]; id > 0 {
		h.all[id-1].live--
	}
}

// keptWhole are the segments of the default pool that are wholly free and not gone.
func (h *heldSegments) keptWhole(gone map[uint64]bool) []*heldSegment {
	var out []*heldSegment
	for p := range h.segs.All() {
		if s := *p; s.pool == 0 && s.live == 0 && !gone[s.addr] {
			out = append(out, s)
		}
	}
	return out
}

// movesHandles reports whether a physical handle was mapped at several addresses in turn, as Cistern does and PyTorch
// does not: then a mapping that went away says nothing of what the program asked for.
func movesHandles(t *recording.Trace) bool {
	at := map[uint64]uint64{}
	for i := range t.Events {
		e := &t.Events[i]
		if e.Kind != event.SegmentMap || e.Handle == 0 {
			continue
		}
		if old, ok := at[e.Handle]; ok && old != e.Addr {
			return true
		}
		at[e.Handle] = e.Addr
	}
	return false
}
