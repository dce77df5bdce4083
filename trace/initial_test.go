package trace

import (
	"bytes"
	"path/filepath"
	"sort"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// state is what a forward walk over events finds: it knows nothing of walkBack.
type state struct {
	live     map[uint64]Block
	reserved uint64
}

func forward(t *Trace, upTo int) state {
	s := state{live: map[uint64]Block{}, reserved: t.InitialReserved()}
	for _, b := range t.Initial {
		s.live[b.Addr] = b
	}
	for _, e := range t.Events[:upTo] {
		switch e.Kind {
		case event.Alloc:
			s.live[e.Addr] = Block{Addr: e.Addr, Requested: e.Size, State: Active}
		case event.FreeRequested:
			b := s.live[e.Addr]
			b.State = PendingFree
			s.live[e.Addr] = b
		case event.FreeCompleted:
			delete(s.live, e.Addr)
		case event.SegmentAlloc, event.SegmentMap:
			s.reserved += e.Size
		case event.SegmentFree, event.SegmentUnmap:
			s.reserved -= e.Size
		}
	}
	return s
}

// A trace cut after N events, keeping its final segments, gives the same later live bytes as the whole, and the same
// blocks and reserved bytes at the cut.
func TestCutTrace(t *testing.T) {
	for _, path := range samples(t) {
		t.Run(filepath.Base(path), func(t *testing.T) {
			for _, whole := range mustRead(t, path).Traces {
				n := len(whole.Events)
				for _, at := range []int{1, 2, n / 7, n / 3, n / 2, n * 9 / 10, n - 1} {
					checkCut(t, whole, at)
				}
			}
		})
	}
}

func checkCut(t *testing.T, whole *Trace, at int) {
	t.Helper()
	cut := *whole
	cut.Events, cut.Initial, cut.InitialSegments = whole.Events[at:], nil, nil
	var file bytes.Buffer
	if err := WritePyTorch(&file, &cut); err != nil {
		t.Fatal(err)
	}
	f, err := Read(&file, "cut")
	if err != nil {
		t.Fatal(err)
	}
	got := f.Traces[0]

	want := forward(whole, at)
	var addrs []uint64
	for a := range want.live {
		addrs = append(addrs, a)
	}
	sort.Slice(addrs, func(i, j int) bool { return addrs[i] < addrs[j] })
	if len(addrs) != len(got.Initial) {
		t.Fatalf("cut at %d: %d initial blocks; expected %d", at, len(got.Initial), len(addrs))
	}
	for i, a := range addrs {
		w := want.live[a]
		if g := got.Initial[i]; g.Addr != a || g.Requested != w.Requested || g.State != w.State || g.Size < g.Requested {
			t.Fatalf("cut at %d: initial block %+v; expected %+v", at, g, w)
		}
	}
	if got.InitialReserved() != want.reserved {
		t.Fatalf("cut at %d: %d bytes reserved at the start; expected %d", at, got.InitialReserved(), want.reserved)
	}
	for i := 1; i < len(got.InitialSegments); i++ {
		if a, b := got.InitialSegments[i-1], got.InitialSegments[i]; a.Addr+a.Size > b.Addr {
			t.Fatalf("cut at %d: initial segments overlap: %+v %+v", at, a, b)
		}
	}
	if empty := len(addrs) == 0 && want.reserved == 0; got.FromStart != empty {
		t.Errorf("cut at %d: FromStart %v", at, got.FromStart)
	}
	var wantLive, gotLive []uint64
	whole.Live(func(i int, n uint64) {
		if i >= at {
			wantLive = append(wantLive, n)
		}
	})
	got.Live(func(_ int, n uint64) { gotLive = append(gotLive, n) })
	if len(wantLive) != len(gotLive) {
		t.Fatalf("cut at %d: %d changes of live bytes; expected %d", at, len(gotLive), len(wantLive))
	}
	for i := range wantLive {
		if wantLive[i] != gotLive[i] {
			t.Fatalf("cut at %d: %d bytes live after change %d; expected %d", at, gotLive[i], i, wantLive[i])
		}
	}
}

// trans is a little trace built by hand: its events and what the file ended with.
func trans(final []Segment, events ...event.Event) *Trace {
	t := &Trace{Events: events, Final: final, Streams: []uint64{0}, Pools: []PoolID{{}, {0, 5}}, Stacks: []Stack{nil}}
	if err := t.walkBack(newBudget(nothing, nothing), final != nil, false); err != nil {
		panic(err)
	}
	return t
}

func TestWalkBack(t *testing.T) {
	const mib = 1 << 20
	ev := func(k event.Kind, addr, size uint64) event.Event { return event.Event{Kind: k, Addr: addr, Size: size} }
	opts := cmp.Options{cmpopts.EquateEmpty()}
	for _, c := range []struct {
		name     string
		tr       *Trace
		blocks   []Block
		segments []Segment
		note     string // a part of one of the notes
	}{
		{name: "a block pending at the end was active at the start",
			tr: trans([]Segment{{Addr: 0x1000000, Size: 2 * mib, Blocks: []Block{{Addr: 0x1000000, Size: 1024, Requested: 700,
				State: PendingFree}}}}, ev(event.FreeRequested, 0x1000000, 700)),
			blocks:   []Block{{Addr: 0x1000000, Size: 1024, Requested: 700, State: Active}},
			segments: []Segment{{Addr: 0x1000000, Size: 2 * mib}}, note: "1 blocks were freed but still in use"},
		{name: "a free completed first was pending at the start",
			tr:       trans([]Segment{{Addr: 0x1000000, Size: 2 * mib}}, ev(event.FreeCompleted, 0x1000200, 700)),
			blocks:   []Block{{Addr: 0x1000200, Size: 1024, Requested: 700, State: PendingFree}},
			segments: []Segment{{Addr: 0x1000000, Size: 2 * mib}}, note: "recording began mid-run"},
		{name: "an address used again keeps its first life apart",
			tr: trans([]Segment{}, ev(event.FreeRequested, 0x1000000, 512), ev(event.FreeCompleted, 0x1000000, 512),
				ev(event.SegmentFree, 0x1000000, 2*mib), ev(event.SegmentAlloc, 0x1000000, 4*mib),
				ev(event.Alloc, 0x1000000, 3*mib), ev(event.FreeRequested, 0x1000000, 3*mib),
				ev(event.FreeCompleted, 0x1000000, 3*mib), ev(event.SegmentFree, 0x1000000, 4*mib)),
			blocks:   []Block{{Addr: 0x1000000, Size: 512, Requested: 512, State: Active}},
			segments: []Segment{{Addr: 0x1000000, Size: 2 * mib}}, note: "2 segments were given back"},
		{name: "unmapping splits what was mapped at the start",
			tr: trans([]Segment{{Addr: 0x1000000, Size: 20 * mib, Large: true, Expandable: true}},
				ev(event.SegmentUnmap, 0x1000000+20*mib, 20*mib), ev(event.SegmentMap, 0x1000000+60*mib, 20*mib),
				ev(event.SegmentUnmap, 0x1000000+60*mib, 20*mib)),
			segments: []Segment{{Addr: 0x1000000, Size: 40 * mib, Large: true, Expandable: true}}},
		{name: "mapping in the middle leaves both sides",
			tr: trans([]Segment{{Addr: 0x1000000, Size: 60 * mib, Large: true, Expandable: true}},
				ev(event.SegmentMap, 0x1000000+20*mib, 20*mib)),
			segments: []Segment{{Addr: 0x1000000, Size: 20 * mib, Large: true, Expandable: true},
				{Addr: 0x1000000 + 40*mib, Size: 20 * mib, Large: true, Expandable: true}}},
		{name: "without a final state only frees speak",
			tr: trans(nil, ev(event.Alloc, 0x2000, 10), ev(event.FreeRequested, 0x9000, 512),
				ev(event.FreeCompleted, 0x9000, 512)),
			blocks: []Block{{Addr: 0x9000, Size: 512, Requested: 512, State: Active}}, note: "freed without an alloc"},
		{name: "an alloc that nothing frees and no block shows is said",
			tr: trans([]Segment{}, ev(event.Alloc, 0x2000, 10)), note: "1 allocs without a free"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if d := cmp.Diff(c.blocks, c.tr.Initial, opts); d != "" {
				t.Errorf("initial blocks (-want +got):\n%s", d)
			}
			if d := cmp.Diff(c.segments, c.tr.InitialSegments, opts); d != "" {
				t.Errorf("initial segments (-want +got):\n%s", d)
			}
			if want := len(c.blocks)+len(c.segments) == 0; c.tr.FromStart != want {
				t.Errorf("FromStart %v", c.tr.FromStart)
			}
			if !strings.Contains(strings.Join(c.tr.Notes, "; "), c.note) {
				t.Errorf("notes %q; expected %q", c.tr.Notes, c.note)
			}
		})
	}
}

// Events take the pool of the segment they lie in as long as the file still knows it: an earlier segment at the same
// address, given back since, may have been another pool's.
func TestPoolOfEvents(t *testing.T) {
	const mib = 1 << 20
	ev := func(k event.Kind, addr, size uint64) event.Event { return event.Event{Kind: k, Addr: addr, Size: size} }
	tr := trans([]Segment{{Addr: 0x1000000, Size: 2 * mib, Pool: 1}, {Addr: 0x5000000, Size: 2 * mib}},
		ev(event.SegmentAlloc, 0x1000000, 2*mib), ev(event.Alloc, 0x1000200, 512), ev(event.FreeRequested, 0x1000200, 512),
		ev(event.FreeCompleted, 0x1000200, 512), ev(event.SegmentFree, 0x1000000, 2*mib),
		ev(event.SegmentAlloc, 0x5000000, 2*mib), ev(event.SegmentAlloc, 0x1000000, 2*mib), ev(event.Alloc, 0x1000000, 512),
		ev(event.Alloc, 0x5000000, 512))
	want := []uint32{0, 0, 0, 0, 0, 0, 1, 1, 0}
	for i, e := range tr.Events {
		if e.Pool != want[i] {
			t.Errorf("event %d, %s at 0x%x: pool %d; expected %d", i, e.Kind, e.Addr, e.Pool, want[i])
		}
	}
}
