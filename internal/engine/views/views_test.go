package views_test

import (
	"errors"
	"reflect"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/internal/engine/journal"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/views"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/memory"
)

const mib = 1 << 20

func same(t *testing.T, what string, got, want any) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s: %+v\nwant %+v", what, got, want)
	}
}

// Sums come with the most bytes first, and by number where they are equal.
func TestUsage(t *testing.T) {
	u := views.Usage{}
	same(t, "nothing", u.Tags(), []memory.TagUse(nil))
	for _, b := range []struct {
		number uint32
		size   uint64
		paused uint64
	}{{5, 1024, 0}, {2, 1024, 0}, {9, 512, 0}, {0, 2048, 0}, {9, 1024, 512}} {
		u.Add(b.number, &heap.Block{Size: b.size, Requested: b.size - 10}, b.paused)
	}
	zero, nine := memory.Use{Blocks: 1, Requested: 2038, Allocated: 2048}, memory.Use{Blocks: 2, Requested: 1516, Allocated: 1536, Paused: 512}
	other := memory.Use{Blocks: 1, Requested: 1014, Allocated: 1024}
	same(t, "tags", u.Tags(), []memory.TagUse{{Tag: 0, Use: zero}, {Tag: 9, Use: nine}, {Tag: 2, Use: other}, {Tag: 5, Use: other}})
	same(t, "libraries", u.Libraries(), []memory.LibraryUse{{Library: 0, Use: zero}, {Library: 9, Use: nine}, {Library: 2, Use: other}, {Library: 5, Use: other}})
	same(t, "stacks", u.Stacks(), []memory.StackUse{{Stack: 0, Use: zero}, {Stack: 9, Use: nine}, {Stack: 2, Use: other}, {Stack: 5, Use: other}})
}

// A pool is its stream heaps and those of its spill.
func TestPools(t *testing.T) {
	now := quota.Gauges{quota.Allocs: 3, quota.Requested: 900, quota.Allocated: 1536, quota.Active: 4, quota.ActiveBytes: 2048, quota.Free: 1, quota.FreeBytes: 512}
	own := views.Heap{Now: &now, Free: 512, Paused: 100}
	spilled := own
	spilled.Spilled = true
	var use memory.PoolUse
	var stats memory.PoolStats
	for _, h := range []views.Heap{own, spilled} {
		h.AddTo(&use)
		h.AddToStats(&stats)
	}
	same(t, "use", use, memory.PoolUse{Allocated: 3072, Pending: 1024, Free: 1024, Spilled: 1536, Paused: 200})
	same(t, "stats", stats, memory.PoolStats{Blocks: 6, Requested: 1800, Allocated: 3072, Cached: 1024, Spilled: 1536, Paused: 200})
	list := []memory.PoolUse{{Pool: memory.PoolID{1}, Free: 1}, {Pool: memory.PoolID{2}, Allocated: 1, Pending: 1}, {Pool: memory.PoolID{3}, Allocated: 1}}
	views.SortPools(list)
	same(t, "order", []memory.PoolID{list[0].Pool, list[1].Pool, list[2].Pool}, []memory.PoolID{{2}, {1}, {3}})
}

// A segment is neighbours; a gap, or another range, begins the next one.
func TestSegments(t *testing.T) {
	s := views.Segments{Of: memory.Segment{Stream: 3, Handle: 7, Pool: memory.PoolID{1, 2}, Number: 4, Large: true}}
	s.Add(&heap.Block{Addr: 0, Size: 512, Requested: 500, Tag: journal.Label(9, 8), State: heap.Used}, 6, 100, true)
	s.Add(&heap.Block{Addr: 512, Size: 512, State: heap.Free}, 0, 0, false)
	s.Add(&heap.Block{Addr: 1024, Size: 512, State: heap.Pending}, 0, 0, true) // a neighbour of another range
	s.Add(&heap.Block{Addr: 4096, Size: 1024, State: heap.Free}, 0, 0, false)  // behind what has no memory
	segment := func(addr, size, paused uint64, blocks ...memory.SegmentBlock) memory.Segment {
		g := s.Of
		g.Addr, g.Size, g.Paused, g.Blocks = addr, size, paused, blocks
		return g
	}
	same(t, "segments", s.List, []memory.Segment{
		segment(0, 1024, 100, memory.SegmentBlock{Addr: 0, Size: 512, Requested: 500, Tag: 9, Library: 8, Stack: 6, Paused: 100, State: memory.BlockUsed},
			memory.SegmentBlock{Addr: 512, Size: 512}),
		segment(1024, 512, 0, memory.SegmentBlock{Addr: 1024, Size: 512, State: memory.BlockPending}),
		segment(4096, 1024, 0, memory.SegmentBlock{Addr: 4096, Size: 1024}),
	})
}

func TestSteps(t *testing.T) {
	e := &memory.OutOfMemoryError{Largest: mib, Limit: 8 * mib}
	all := memory.AllStages | memory.StageFit
	for _, c := range []struct {
		f    views.Failure
		x    memory.Stages
		a    views.Attempt
		want string
	}{
		{views.Failure{Allowed: all}, memory.StageFit, views.Attempt{Tries: 1}, "the largest free block is 1.00 MiB"},
		{views.Failure{Allowed: all}, memory.StageFit, views.Attempt{}, ""},
		{views.Failure{Allowed: all}, memory.StageCollect, views.Attempt{}, "nothing that is free waits for the GPU"},
		{views.Failure{Allowed: all}, memory.StageCollect, views.Attempt{Tries: 1, Asked: 1}, "waited for the GPU"},
		{views.Failure{Allowed: all, Segmented: true}, memory.StageRemap, views.Attempt{Tries: 1}, "the pool is made of segments, which do not move"},
		{views.Failure{Allowed: all, Registered: true}, memory.StageRemap, views.Attempt{Tries: 1}, "memory is registered elsewhere, so nothing moves"},
		{views.Failure{Allowed: all}, memory.StageRemap, views.Attempt{Tries: 1, Found: mib}, "1.00 MiB of free chunks could move"},
		{views.Failure{Allowed: all}, memory.StageGrow, views.Attempt{Tries: 1, Stop: views.StopLimit}, "the limit of 8.00 MiB is in the way"},
		{views.Failure{Allowed: all, PoolLimit: mib}, memory.StageGrow, views.Attempt{Tries: 1, Stop: views.StopPoolLimit}, "the pool's limit of 1.00 MiB is in the way"},
		{views.Failure{Allowed: all}, memory.StageGrow, views.Attempt{Stop: views.StopLacks, Err: errors.New("a\nb")},
			"not asked for, as the device has less than that; a; b"},
		{views.Failure{Allowed: all}, memory.StageLend, views.Attempt{Found: mib}, "1.00 MiB of free chunks of other pools were available"},
		{views.Failure{Allowed: all}, memory.StageCallback, views.Attempt{}, "no function is registered"},
		{views.Failure{Allowed: all}, memory.StageCallback, views.Attempt{Tries: 1, Asked: 3, Gave: 2}, "2 of 3 functions gave memory back"},
		{views.Failure{Allowed: all}, memory.StageNode, views.Attempt{Note: "no broker is connected"}, "no broker is connected"},
		{views.Failure{Allowed: all, Resuming: true}, memory.StageNode, views.Attempt{Tries: 1}, "other processes released 5 bytes"},
		{views.Failure{Allowed: all}, memory.StageNode, views.Attempt{Tries: 1, Note: "2 clients\nasked"}, "other processes released 5 bytes; 2 clients; asked"},
		{views.Failure{Allowed: all}, memory.StageSpill, views.Attempt{}, "the pool has none"},
		{views.Failure{Allowed: all, HasSpill: true}, memory.StageSpill, views.Attempt{Err: errors.New("full")}, "full"},
		{views.Failure{Allowed: memory.StageFit}, memory.StageLend, views.Attempt{}, "off by the settings"},
		{views.Failure{Allowed: all, TooLarge: true}, memory.StageGrow, views.Attempt{}, "no device has that much memory"},
		{views.Failure{Allowed: all, Resuming: true}, memory.StageRemap, views.Attempt{}, "not for resuming"},
		{views.Failure{Allowed: all, Resuming: true}, memory.StageFit, views.Attempt{}, "not for resuming"},
		{views.Failure{Allowed: all, Resuming: true}, memory.StageLend, views.Attempt{}, ""},
	} {
		c.f.Error = e
		c.a.Gained, c.a.Took = 5, time.Second
		steps := c.f.Steps(func(x memory.Stages) views.Attempt {
			if x == c.x {
				return c.a
			}
			return views.Attempt{}
		})
		if len(steps) != memory.NumStages {
			t.Fatalf("%d steps", len(steps))
		}
		for _, s := range steps {
			if s.Stage == c.x {
				same(t, s.Stage.String(), s, memory.Step{Stage: c.x, Tries: c.a.Tries, Gained: 5, Took: time.Second, Note: c.want})
			}
		}
	}
}

// Every stage has a counter, and they do not share one.
func TestCountMet(t *testing.T) {
	var k memory.Counters
	for _, x := range memory.StagesInOrder() {
		views.CountMet(&k, x)
	}
	same(t, "counters", k, memory.Counters{ByFit: 1, ByCollect: 1, ByRemap: 1, ByGrow: 1, ByLend: 1, ByCallback: 1, ByNode: 1, BySpill: 1})
}

// Figures that follow from the quota are its own, and reading gauges allocates nothing.
func TestStatsAndGauges(t *testing.T) {
	q := &quota.Device{Limit: 100 * mib, Reserved: 30 * mib, Elsewhere: 2 * mib, Spare: 4 * mib}
	q.Physical[quota.GroupAll].Add(32 * mib)
	q.Physical[quota.GroupLarge].Add(32 * mib)
	a := &quota.Arena{}
	q.AddArena(a)
	a.Classes[quota.Small].SetFree(1, 8*mib)
	a.Classes[quota.Small].Alloc(1000, 1024, 1)
	q.Rebalance(nil, 2)
	s := views.Stats(q)
	if s.Allocations.All.Current != 1 || s.Allocations.Small.Peak != 1 || s.Allocations.Large.Current != 0 || s.Requested.All.Current != 1000 ||
		s.Allocated.Small.Added != 1024 || s.Reserved.All.Current != 32*mib || s.Reserved.Large.Peak != 32*mib || s.Segments.All.Current != 1 || s.SpareBytes != 4*mib {
		t.Errorf("%+v", s)
	}
	now := *a.Classes[quota.Small].Now()
	g := views.Gauges(q, &now)
	if g.Reserved != 32*mib || g.Allocated != 1024 || g.Active != 1024 || g.Cached != 12*mib-1024 || g.Limit != 100*mib || g.PeakReserved != 32*mib || g.PeakAllocated != 1024 {
		t.Errorf("%+v", g)
	}
	if n := testing.AllocsPerRun(10, func() { g = views.Gauges(q, &now) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
