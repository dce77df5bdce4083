package analyze

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
)

func alive(from, to int32, i int) bool { return int(from) <= i && (to == Never || i < int(to)) }

// mapOf is the address map that lifetimes give of a moment, its segments as MapAt makes them.
func mapOf(l *Lifetimes, i int) AddressMap {
	s := &state{live: map[uint64]held{}}
	for _, b := range l.Blocks {
		if alive(b.From, b.To, i) {
			s.live[b.Addr] = held{addr: b.Addr, size: b.Size, since: int(b.From), stream: b.Stream, pool: b.Pool,
				stack: b.Stack, pending: b.Freed != Never && int(b.Freed) <= i}
		}
	}
	for _, g := range l.Segments {
		if alive(g.From, g.To, i) {
			p := s.segments.Search(func(x *extent) bool { return x.addr >= g.Addr })
			s.segments.Insert(p, extent{g.Addr, g.Size, g.Stream, g.Pool, g.Expandable})
		}
	}
	return s.addressMap(i)
}

func checkLifetimes(t *testing.T, tr *recording.Trace, moments []int) {
	t.Helper()
	l := LifetimesOf(tr)
	for _, i := range moments {
		want := MapAt(tr, i)
		if got := mapOf(l, i); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: the map after event %d is not MapAt's: %d segments, %d bytes free; want %d, %d", tr.Path, i,
				len(got.Segments), got.FreeBytes, len(want.Segments), want.FreeBytes)
		}
	}
	for k := 1; k < len(l.Blocks); k++ {
		a, b := &l.Blocks[k-1], &l.Blocks[k]
		if a.From > b.From || a.From == b.From && a.Addr >= b.Addr {
			t.Fatalf("%s: block %d from event %d at %#x comes before one from %d at %#x", tr.Path, k-1, a.From, a.Addr,
				b.From, b.Addr)
		}
	}
}

// Of random events, sane or not (frees of what is not live, blocks over blocks, ranges unmapped twice), every moment.
func TestLifetimesOfRandomEvents(t *testing.T) {
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 1))
		tr := &recording.Trace{Path: "random", Streams: []uint64{0, 7}, Pools: []recording.PoolID{{}, {1, 0}},
			Stacks: []recording.Stack{nil, nil, nil}}
		for range r.IntN(5) {
			tr.Initial = append(tr.Initial, recording.Block{Addr: r.Uint64N(8) << 21, Size: 1 << 20, Requested: 1<<20 - 3,
				State: recording.BlockState(r.IntN(3))})
		}
		tr.Initial = slices.CompactFunc(tr.Initial, func(a, b recording.Block) bool { return a.Addr == b.Addr })
		for i := range 200 {
			e := event.Event{Kind: event.Kind(1 + r.IntN(10)), Addr: r.Uint64N(24) << 20, Size: 1 + r.Uint64N(3<<20),
				TimeUS: int64(1000 + i), Stream: uint32(r.IntN(2)), Pool: uint32(r.IntN(2)), Stack: uint32(r.IntN(3))}
			if e.Kind >= event.SegmentAlloc && e.Kind <= event.SegmentUnmap {
				e.Addr, e.Size = e.Addr>>21<<21, (1+r.Uint64N(3))<<21
			}
			if e.Kind == event.SegmentAlloc || e.Kind == event.SegmentMap { // no range lies over another
				tr.Events = append(tr.Events, event.Event{Kind: event.SegmentUnmap, Addr: e.Addr, Size: e.Size, TimeUS: e.TimeUS})
			}
			tr.Events = append(tr.Events, e)
		}
		moments := []int{-1}
		for i := range tr.Events {
			moments = append(moments, i)
		}
		checkLifetimes(t, tr, moments)
	}
}

// Of recorded runs: before the first event, at the peak, at the end and at some others.
func TestLifetimesOfRecordedRuns(t *testing.T) {
	files, _ := filepath.Glob("../recording/testdata/*.pickle.gz")
	if dir := os.Getenv("CISTERN_TRACES"); dir != "" && !testing.Short() {
		more, _ := filepath.Glob(filepath.Join(dir, "*.pickle.gz"))
		files = append(files, more...)
	}
	if len(files) == 0 {
		t.Fatal("there are no recorded runs in recording/testdata")
	}
	for _, path := range files {
		f, err := open.File(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, tr := range f.Traces {
			_, peak := tr.PeakLive()
			n := len(tr.Events)
			checkLifetimes(t, tr, []int{-1, peak, n / 3, n - 1})
		}
	}
}
