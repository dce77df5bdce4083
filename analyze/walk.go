package analyze

import (
	"slices"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/leaves"
	"github.com/cistern-gpu/cistern/recording"
)

// grain is PyTorch's rounding of a block: an event carries the requested size, its block covers at least this many.
const grain = 512

func roundUp(n uint64) uint64 {
	if n == 0 {
		return grain
	}
	return (n + grain - 1) / grain * grain
}

// held is one block that has not been returned for reuse.
type held struct {
	addr    uint64
	size    uint64 // bytes requested
	since   int    // event that handed it out, -1 for one that was live before the first
	stream  uint32
	pool    uint32
	stack   uint32
	thread  uint32 // that asked; 0 where the file does not say
	tag     uint16
	library uint8
	pending bool // given back, still used by some stream
}

// extent is a range of reserved addresses.
type extent struct {
	addr, size uint64
	stream     uint32
	pool       uint32
	expandable bool
}

func (e extent) end() uint64 { return e.addr + e.size }

// state is what a trace says about a moment: the blocks live then and the address ranges reserved.
type state struct {
	live      map[uint64]held
	liveBytes uint64
	allocated uint64 // rounded to grain
	segments  leaves.List[extent]
	reserved  uint64         // a handle that is mapped more than once counts once
	mapped    map[uint64]int // mappings by handle, where the file tells handles
	hasSegs   bool           // the trace says anything about segments

	gone, came []extent // what the last event that was applied changed in segments
}

// startState is the state before a trace's first event.
func startState(t *recording.Trace) *state {
	s := &state{live: make(map[uint64]held, 1024), mapped: map[uint64]int{}}
	for _, b := range t.Initial {
		if b.State == recording.Inactive {
			continue
		}
		h := held{addr: b.Addr, size: b.Requested, since: -1, stream: b.Stream, pool: b.Pool, stack: b.Stack,
			tag: b.Tag, library: b.Library, pending: b.State == recording.PendingFree}
		if h.size == 0 {
			h.size = b.Size
		}
		s.add(h)
	}
	for _, g := range t.InitialSegments {
		s.reserved += s.reserve(extent{g.Addr, g.Size, g.Stream, g.Pool, g.Expandable})
	}
	return s
}

func (s *state) add(h held) {
	s.drop(h.addr) // an event lost by the recorder may have left a block here
	s.live[h.addr] = h
	s.liveBytes += h.size
	s.allocated += roundUp(h.size)
}

func (s *state) drop(addr uint64) {
	if h, ok := s.live[addr]; ok {
		s.liveBytes -= h.size
		s.allocated -= roundUp(h.size)
		delete(s.live, addr)
	}
}

// apply moves the state past event i.
func (s *state) apply(i int, e *event.Event) {
	s.gone, s.came = s.gone[:0], s.came[:0]
	switch e.Kind {
	case event.Alloc:
		s.add(held{addr: e.Addr, size: e.Size, since: i, stream: e.Stream, pool: e.Pool, stack: e.Stack, thread: e.Thread, tag: e.Tag,
			library: e.Library})
	case event.FreeRequested:
		if h, ok := s.live[e.Addr]; ok {
			h.pending = true
			s.live[e.Addr] = h
		}
	case event.FreeCompleted:
		s.drop(e.Addr)
	case event.SegmentAlloc, event.SegmentMap:
		n := s.reserve(extent{e.Addr, e.Size, e.Stream, e.Pool, e.Kind == event.SegmentMap})
		if e.Handle != 0 {
			if s.mapped[e.Handle]++; s.mapped[e.Handle] > 1 {
				return
			}
		}
		s.reserved += n
	case event.SegmentFree, event.SegmentUnmap:
		n := s.release(e.Addr, e.Size)
		if e.Handle != 0 {
			if s.mapped[e.Handle]--; s.mapped[e.Handle] > 0 {
				return
			}
			delete(s.mapped, e.Handle)
		}
		s.reserved -= min(s.reserved, n)
	}
}

// reserve adds a range and returns its size. Mapped ranges that touch become one: PyTorch maps an expandable segment
// page by page.
func (s *state) reserve(x extent) uint64 {
	if x.size == 0 {
		return 0
	}
	s.hasSegs = true
	p := s.segments.Search(func(g *extent) bool { return g.addr >= x.addr })
	next := s.segments.At(p)
	if b, ok := s.segments.Before(p); ok && joins(*s.segments.At(b), x) {
		g := s.segments.At(b)
		s.gone = append(s.gone, *g)
		g.size += x.size
		both := next != nil && joins(*g, *next)
		if both {
			s.gone = append(s.gone, *next)
			g.size += next.size
		}
		s.came = append(s.came, *g)
		if both {
			s.segments.Delete(p)
		}
		return x.size
	}
	if next != nil && joins(x, *next) {
		s.gone = append(s.gone, *next)
		next.addr = x.addr
		next.size += x.size
		s.came = append(s.came, *next)
		return x.size
	}
	s.came = append(s.came, x)
	s.segments.Insert(p, x)
	return x.size
}

func joins(a, b extent) bool {
	return a.expandable && b.expandable && a.end() == b.addr && a.stream == b.stream && a.pool == b.pool
}

// release takes a range out, cutting the segments that it overlaps, and returns how many bytes of it there were. Bytes
// that were never seen reserved count for nothing: the trace began after them.
func (s *state) release(addr, size uint64) uint64 {
	released := uint64(0)
	end := addr + size
	came := len(s.came)
	p := s.segments.Search(func(g *extent) bool { return g.end() > addr })
	for next := s.segments.At(p); next != nil && next.addr < end; next = s.segments.At(p) {
		g := *next
		released += min(g.end(), end) - max(g.addr, addr)
		s.gone = append(s.gone, g)
		if g.addr < addr {
			left := g
			left.size = addr - g.addr
			s.came = append(s.came, left)
		}
		if g.end() > end {
			right := g
			right.addr, right.size = end, g.end()-end
			s.came = append(s.came, right)
		}
		p = s.segments.Delete(p)
	}
	for _, x := range s.came[came:] {
		s.segments.Insert(s.segments.Search(func(g *extent) bool { return g.addr >= x.addr }), x)
	}
	return released
}

// walk calls visit with the state after each of the events named, in rising order. Event -1 is the state before the
// first. The state is lent until visit returns.
func walk(t *recording.Trace, events []int, visit func(i int, s *state)) {
	s := startState(t)
	next := 0
	for next < len(events) && events[next] < 0 {
		visit(events[next], s)
		next++
	}
	for i := range t.Events {
		if next == len(events) {
			return
		}
		s.apply(i, &t.Events[i])
		for next < len(events) && events[next] == i {
			visit(i, s)
			next++
		}
	}
}

// sorted is the live blocks in address order.
func (s *state) sorted() []held {
	blocks := make([]held, 0, len(s.live))
	for _, h := range s.live {
		blocks = append(blocks, h)
	}
	slices.SortFunc(blocks, func(a, b held) int {
		switch {
		case a.addr < b.addr:
			return -1
		case a.addr > b.addr:
			return 1
		}
		return 0
	})
	return blocks
}
