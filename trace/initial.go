package trace

import (
	"fmt"
	"math"
	"slices"

	"github.com/cistern-gpu/cistern/event"
)

// FindStart fills Initial, InitialSegments and FromStart from Events and Final (which may be nil), for those who make a
// Trace of a history and a state of their own. The pools that events name are taken as they are.
func (t *Trace) FindStart() error {
	return t.walkBack(&budget{limit: math.MaxInt64}, t.Final != nil, true)
}

// walkBack goes from the trace's final state backwards over its events, and so finds what was there before the first:
// Initial, InitialSegments, FromStart. On the way it gives events the pool of the segment they lie in, unless
// ownPools says that the recorder named it. hasFinal is false for formats that do not end with a state; then only the
// blocks that are freed but never allocated are found.
func (t *Trace) walkBack(b *budget, hasFinal, ownPools bool) error {
	var (
		live   addrMap
		blocks []Block
		free   []uint32 // unused indices of blocks
		segs   segset
		err    error
	)
	put := func(blk Block) error {
		if n := len(free); n > 0 {
			live.set(blk.Addr, free[n-1])
			blocks[free[n-1]] = blk
			free = free[:n-1]
			return nil
		}
		if blocks, err = grow(b, blocks, 48+4+48); err != nil { // and its places in free and live
			return err
		}
		live.set(blk.Addr, uint32(len(blocks)))
		blocks = append(blocks, blk)
		return nil
	}
	pools := false // whether the pool of anything but the default is known
	pending := 0
	for i := range t.Final {
		s := &t.Final[i]
		if spare(s) {
			continue // of Cistern's, mapped nowhere: no event led to that
		}
		pools = pools || s.Pool != 0
		for _, blk := range s.Blocks {
			if blk.State == Inactive {
				continue
			}
			if blk.State == PendingFree {
				pending++
			}
			if err := put(blk); err != nil {
				return err
			}
		}
		seg := *s
		seg.Blocks = nil
		segs.insert(seg)
	}
	if err := b.take(int64(segs.n) * 2 * segmentSize); err != nil {
		return err
	}

	var lostAllocs, lostFrees, lostSegs, unknownPool int
	for i := len(t.Events) - 1; i >= 0; i-- {
		e := &t.Events[i]
		switch e.Kind {
		case event.Alloc, event.FreeRequested, event.FreeCompleted:
			if pools && !ownPools {
				if s := segs.at(e.Addr); s != nil {
					e.Pool = s.Pool
				}
			}
			j, ok := live.get(e.Addr)
			switch {
			case e.Kind == event.Alloc && ok:
				live.del(e.Addr)
				free = append(free, j)
			case e.Kind == event.Alloc:
				if hasFinal {
					lostFrees++
				}
			case e.Kind == event.FreeRequested && ok && blocks[j].State == PendingFree:
				blocks[j].State = Active
			default:
				// Live here and not after: a free. Should something be live at the address after, its alloc was lost.
				if ok {
					lostAllocs++
					live.del(e.Addr)
					free = append(free, j)
				}
				blk := Block{Addr: e.Addr, Size: roundBlock(e.Size), Requested: e.Size, Stream: e.Stream, Pool: e.Pool,
					Tag: e.Tag, Library: e.Library, State: PendingFree}
				if e.Kind == event.FreeRequested {
					blk.State = Active
				}
				if err := put(blk); err != nil {
					return err
				}
			}
		case event.SegmentAlloc:
			s := segs.at(e.Addr)
			if s == nil || s.Addr != e.Addr || s.Size != e.Size {
				if hasFinal {
					lostSegs++
				}
				break
			}
			if !ownPools {
				e.Pool = s.Pool
			}
			segs.remove(e.Addr)
		case event.SegmentFree:
			if s := segs.overlapping(e.Addr, e.Size); s != nil || e.Addr+e.Size < e.Addr {
				lostSegs++
				break
			}
			if err := b.take(2 * segmentSize); err != nil {
				return err
			}
			segs.insert(Segment{Addr: e.Addr, Size: e.Size, Stream: e.Stream, Pool: e.Pool, Large: e.Size > smallSegment})
			unknownPool++
		case event.SegmentMap:
			if s := segs.at(e.Addr); s != nil && !ownPools {
				e.Pool = s.Pool
			}
			if segs.cut(e.Addr, e.Size) != e.Size && hasFinal {
				lostSegs++
			}
		case event.SegmentUnmap:
			if s := segs.overlapping(e.Addr, e.Size); s != nil || e.Addr+e.Size < e.Addr {
				lostSegs++
				break
			}
			if err := b.take(2 * segmentSize); err != nil {
				return err
			}
			if l, k := segs.seek(e.Addr); !ownPools {
				// The rest of its range, where there is one next to it, knows the pool.
				if p := segs.before(l, k); p != nil && p.Expandable && p.Addr+p.Size == e.Addr {
					e.Pool = p.Pool
				}
			}
			segs.join(Segment{Addr: e.Addr, Size: e.Size, Stream: e.Stream, Pool: e.Pool, Expandable: true,
				Large: e.Size%largePage == 0})
		}
	}
	t.InitialSegments = segs.all()
	t.Initial = nil
	if live.n > 0 {
		t.Initial = make([]Block, 0, live.n)
		for i, v := range live.vals {
			if v != 0 {
				blk := blocks[v-1]
				if blk.Addr != live.keys[i] {
					panic("trace: a block under the address of another")
				}
				t.Initial = append(t.Initial, blk)
			}
		}
		slices.SortFunc(t.Initial, func(a, b Block) int {
			if a.Addr < b.Addr {
				return -1
			}
			return 1
		})
	}
	t.FromStart = len(t.Initial) == 0 && len(t.InitialSegments) == 0
	t.noteInitial(hasFinal)
	if pending > 0 {
		t.note("%d blocks were freed but still in use by a stream when the file was written", pending)
	}
	if unknownPool > 0 && !ownPools {
		t.note("%d segments were given back before the end: the file does not say to which pool they belonged; "+
			"the default pool is assumed", unknownPool)
	}
	if lostAllocs > 0 || lostFrees > 0 || lostSegs > 0 {
		t.note("events and final state disagree: %d allocs without a free or a block at the end, %d frees of an address "+
			"that was allocated again without an alloc, %d segment events that fit no segment", lostFrees, lostAllocs, lostSegs)
	}
	return nil
}

const (
	segmentSize  = 80       // bytes of a Segment in memory
	smallSegment = 2 << 20  // PyTorch's kSmallBuffer: segments up to this size hold small blocks
	largePage    = 20 << 20 // PyTorch's page of expandable segments for large blocks
	blockAlign   = 512      // PyTorch's kMinBlockSize
)

// roundBlock is the size of the block that PyTorch uses for a request of n bytes by default.
func roundBlock(n uint64) uint64 {
	if r := (n + blockAlign - 1) &^ (blockAlign - 1); r > n {
		return r
	}
	return max(n, blockAlign)
}

func (t *Trace) noteInitial(hasFinal bool) {
	if t.FromStart {
		return
	}
	var live, reserved uint64
	for i := range t.Initial {
		live += t.Initial[i].Requested
	}
	for i := range t.InitialSegments {
		reserved += t.InitialSegments[i].Size
	}
	if len(t.Events) == 0 {
		t.note("no history was kept: the file says what was held, %d blocks (%d bytes) in %d segments (%d bytes)", len(t.Initial), live,
			len(t.InitialSegments), reserved)
		return
	}
	if !hasFinal {
		t.note("recording began mid-run: %d blocks (%d bytes) are freed without an alloc and taken as live at the start",
			len(t.Initial), live)
		return
	}
	t.note("recording began mid-run or its ring overflowed: %d blocks (%d bytes) and %d segments (%d bytes) were held "+
		"before the first event; sizes of those freed later are rounded as by default", len(t.Initial), live,
		len(t.InitialSegments), reserved)
}

func (t *Trace) note(format string, args ...any) {
	t.Notes = append(t.Notes, fmt.Sprintf(format, args...))
}
