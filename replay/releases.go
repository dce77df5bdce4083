package replay

import (
	"fmt"
	"sort"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/trace"
)

// Release is a point at which a program gave cached memory back beside any shortage: torch.cuda.empty_cache, or the
// end of a private pool. The calls themselves are not in a trace.
type Release struct {
	Event int    // index of the event before which it happened
	Count int    // recorded segment events that it made, from Event on
	Pool  uint32 // index into Plan.Pools of the pool that ended; 0 means the cache was emptied
}

// withReleases is the plan with the releases that its record shows, under a limit of capacity bytes (0 is unknown).
//
// Segments that went back to the driver did so for a shortage, if a new segment follows at once and would not have
// fitted under the limit; else the program asked for it. It emptied the cache, if no segment that was wholly free
// stayed; else the segments belonged to a pool that ended, and so did what was allocated in them.
func (p *Plan) withReleases(capacity uint64) *Plan {
	t := p.Trace
	if !t.FromStart || p.segmentsFreed == 0 {
		return p
	}
	conf, _ := TorchConfOf(t.Settings)
	limit := p.Recorded.PeakReserved
	gcAt := uint64(0)
	if capacity >= limit {
		limit = capacity
		gcAt = uint64(conf.GCThreshold * float64(capacity))
	}
	q := *p
	q.Pools = append([]trace.PoolID(nil), p.Pools...)
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
				h.alloc(b, e)
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
				q.addRelease(&h, i, end)
			}
			for j := i; j < end; j++ {
				h.remove(&t.Events[j])
			}
			i = end - 1
		}
	}
	return &q
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
		if rest[i].Kind == event.Alloc {
			size = max(size, conf.segmentSize(conf.round(rest[i].Size)))
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
	switch {
	case pool != 0 && !mixed:
		r.Pool = pool
		p.Notes = append(p.Notes, fmt.Sprintf("event %d: private pool %v ended", first, p.Pools[pool]))
	case mixed || h.allGone(gone):
		p.Notes = append(p.Notes, fmt.Sprintf("event %d: the program emptied the cache (%d segment events without a shortage)", first, r.Count))
	default:
		r.Pool = uint32(len(p.Pools))
		p.Pools = append(p.Pools, trace.PoolID{})
		if p.pools == nil {
			p.pools = map[int32]uint32{}
		}
		n := 0
		for addr := range gone {
			for _, b := range h.at(addr).blocks {
				p.pools[b] = r.Pool
				n++
			}
		}
		p.Notes = append(p.Notes, fmt.Sprintf("event %d: %d segments were given back while others lay wholly free: "+
			"taken for the end of a private pool that the file does not name, with the %d allocations in them", first, r.Count, n))
	}
	p.Releases = append(p.Releases, r)
}

// heldSegment is a segment that the recorded allocator held.
type heldSegment struct {
	addr, size uint64
	pool       uint32
	live       int
	blocks     []int32 // every block that was allocated in it
}

// heldSegments follows the recorded segments and what lies in them.
type heldSegments struct {
	segs  []*heldSegment // in address order
	segOf []int32        // by block, 1 + index into all; 0 is none
	all   []*heldSegment
	ids   map[*heldSegment]int32
}

// index is the place of the segment with the largest address not above addr, -1 if none.
func (h *heldSegments) index(addr uint64) int {
	return sort.Search(len(h.segs), func(i int) bool { return h.segs[i].addr > addr }) - 1
}

func (h *heldSegments) at(addr uint64) *heldSegment {
	if i := h.index(addr); i >= 0 && addr < h.segs[i].addr+h.segs[i].size {
		return h.segs[i]
	}
	return &heldSegment{}
}

func (h *heldSegments) add(e *event.Event) {
	s := &heldSegment{addr: e.Addr, size: e.Size, pool: e.Pool}
	i := h.index(e.Addr) + 1
	h.segs = append(h.segs, nil)
	copy(h.segs[i+1:], h.segs[i:])
	h.segs[i] = s
	if h.ids == nil {
		h.ids = map[*heldSegment]int32{}
	}
	h.all = append(h.all, s)
	h.ids[s] = int32(len(h.all))
}

func (h *heldSegments) remove(e *event.Event) {
	if i := h.index(e.Addr); i >= 0 && h.segs[i].addr == e.Addr {
		h.segs = append(h.segs[:i], h.segs[i+1:]...)
	}
}

func (h *heldSegments) alloc(b int32, e *event.Event) {
	if i := h.index(e.Addr); i >= 0 {
		s := h.segs[i]
		s.live++
		s.blocks = append(s.blocks, b)
		if e.Pool != 0 {
			s.pool = e.Pool
		}
		h.segOf[b] = h.ids[s]
	}
}

func (h *heldSegments) free(b int32) {
	if id := h.segOf[b]; id > 0 {
		h.all[id-1].live--
	}
}

// allGone reports whether every segment of the default pool that is wholly free is in gone.
func (h *heldSegments) allGone(gone map[uint64]bool) bool {
	for _, s := range h.segs {
		if s.pool == 0 && s.live == 0 && !gone[s.addr] {
			return false
		}
	}
	return true
}
