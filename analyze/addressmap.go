package analyze

import (
	"sort"

	"github.com/cistern-gpu/cistern/recording"
)

// AddressMap is where everything lay at one moment.
type AddressMap struct {
	Event    int // state after this event; -1 is before the first
	Segments []MapSegment
	// FreeBytes are the reserved bytes that no live block covers, FreePieces the ranges they come in, LargestFree the
	// largest of these. A block's bytes behind its rounded size (PyTorch does not split off less than 1 MiB of a large
	// block) count as free here: the file does not tell them apart.
	FreeBytes   uint64
	FreePieces  int
	LargestFree uint64
}

// MapSegment is a range of addresses with the live blocks in it, in address order.
type MapSegment struct {
	Addr, Size uint64
	Stream     uint32 // index into Trace.Streams
	Pool       uint32 // index into Trace.Pools
	Expandable bool
	// Inferred is set where the file says nothing of the segment (RMM's log has none, a snapshot begun mid-run may
	// miss some): then the range is merely what the blocks there span.
	Inferred bool
	Blocks   []MapBlock
}

// MapBlock is a live block.
type MapBlock struct {
	Addr    uint64
	Size    uint64 // bytes, rounded to 512
	Request uint64 // bytes asked for
	Stream  uint32
	Stack   uint32
	Since   int  // event that handed it out, -1 before the first
	Pending bool // given back, still used by some stream
}

// inferredGap is the distance beyond which blocks outside every known segment are shown as two ranges: the
// granularity of physical memory.
const inferredGap = 2 << 20

// MapAt is the address map after the given event.
func MapAt(t *recording.Trace, event int) AddressMap {
	var m AddressMap
	walk(t, []int{event}, func(_ int, s *state) { m = s.addressMap(event) })
	return m
}

func (s *state) addressMap(event int) AddressMap {
	m := AddressMap{Event: event, Segments: make([]MapSegment, 0, s.segments.Len())}
	for g := range s.segments.All() {
		m.Segments = append(m.Segments, MapSegment{Addr: g.addr, Size: g.size, Stream: g.stream, Pool: g.pool,
			Expandable: g.expandable})
	}
	known := m.Segments
	var loose []MapSegment
	for _, h := range s.sorted() {
		b := MapBlock{Addr: h.addr, Size: roundUp(h.size), Request: h.size, Stream: h.stream, Stack: h.stack,
			Since: h.since, Pending: h.pending}
		i := sort.Search(len(known), func(i int) bool { return known[i].Addr+known[i].Size > b.Addr })
		if i < len(known) && known[i].Addr <= b.Addr {
			known[i].Blocks = append(known[i].Blocks, b)
			continue
		}
		if n := len(loose); n > 0 && b.Addr-(loose[n-1].Addr+loose[n-1].Size) < inferredGap {
			loose[n-1].Size = max(loose[n-1].Size, b.Addr+b.Size-loose[n-1].Addr)
			loose[n-1].Blocks = append(loose[n-1].Blocks, b)
			continue
		}
		loose = append(loose, MapSegment{Addr: b.Addr, Size: b.Size, Stream: h.stream, Pool: h.pool, Inferred: true,
			Blocks: []MapBlock{b}})
	}
	if len(loose) > 0 {
		m.Segments = append(m.Segments, loose...)
		sort.Slice(m.Segments, func(i, j int) bool { return m.Segments[i].Addr < m.Segments[j].Addr })
	}
	m.measureFree()
	return m
}

// measureFree counts the gaps of the segments that the file knows.
func (m *AddressMap) measureFree() {
	gap := func(n uint64) {
		if n > 0 {
			m.FreeBytes += n
			m.FreePieces++
			m.LargestFree = max(m.LargestFree, n)
		}
	}
	for _, g := range m.Segments {
		if g.Inferred {
			continue
		}
		at, end := g.Addr, g.Addr+g.Size
		for _, b := range g.Blocks {
			if b.Addr > at {
				gap(b.Addr - at)
			}
			at = max(at, b.Addr+b.Size)
		}
		if end > at {
			gap(end - at)
		}
	}
}
