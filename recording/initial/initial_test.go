package initial_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/initial"
	"github.com/cistern-gpu/cistern/recording/internal/input"
	"github.com/cistern-gpu/cistern/recording/internal/recordingtest"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// A trace cut after N events, keeping its final segments, gives the same later live bytes as the whole, and the same
// blocks and reserved bytes at the cut.
func TestCutTrace(t *testing.T) {
	for _, path := range recordingtest.Samples(t) {
		t.Run(filepath.Base(path), func(t *testing.T) {
			for _, whole := range recordingtest.Read(t, path).Traces {
				n := len(whole.Events)
				for _, at := range []int{1, 2, n / 7, n / 3, n / 2, n * 9 / 10, n - 1} {
					recordingtest.CheckCut(t, whole, at)
				}
			}
		})
	}
}

// trans is a little trace built by hand: its events and what the file ended with.
func trans(final []recording.Segment, events ...event.Event) *recording.Trace {
	t := &recording.Trace{Events: events, Final: final, Streams: []uint64{0}, Pools: []recording.PoolID{{}, {0, 5}}, Stacks: []recording.Stack{nil}}
	if err := initial.Find(t, initial.Options{InferPools: true, Charge: input.NewBudget(nothing, nothing).Take}); err != nil {
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
		tr       *recording.Trace
		blocks   []recording.Block
		segments []recording.Segment
		note     string // a part of one of the notes
	}{
		{name: "a block pending at the end was active at the start",
			tr: trans([]recording.Segment{{Addr: 0x1000000, Size: 2 * mib, Blocks: []recording.Block{{Addr: 0x1000000, Size: 1024, Requested: 700,
				State: recording.PendingFree}}}}, ev(event.FreeRequested, 0x1000000, 700)),
			blocks:   []recording.Block{{Addr: 0x1000000, Size: 1024, Requested: 700, State: recording.Active}},
			segments: []recording.Segment{{Addr: 0x1000000, Size: 2 * mib}}, note: "1 block freed, but still in use by a stream"},
		{name: "a free completed first was pending at the start",
			tr:       trans([]recording.Segment{{Addr: 0x1000000, Size: 2 * mib}}, ev(event.FreeCompleted, 0x1000200, 700)),
			blocks:   []recording.Block{{Addr: 0x1000200, Size: 1024, Requested: 700, State: recording.PendingFree}},
			segments: []recording.Segment{{Addr: 0x1000000, Size: 2 * mib}}, note: "recording began mid-run"},
		{name: "an address used again keeps its first life apart",
			tr: trans([]recording.Segment{}, ev(event.FreeRequested, 0x1000000, 512), ev(event.FreeCompleted, 0x1000000, 512),
				ev(event.SegmentFree, 0x1000000, 2*mib), ev(event.SegmentAlloc, 0x1000000, 4*mib),
				ev(event.Alloc, 0x1000000, 3*mib), ev(event.FreeRequested, 0x1000000, 3*mib),
				ev(event.FreeCompleted, 0x1000000, 3*mib), ev(event.SegmentFree, 0x1000000, 4*mib)),
			blocks:   []recording.Block{{Addr: 0x1000000, Size: 512, Requested: 512, State: recording.Active}},
			segments: []recording.Segment{{Addr: 0x1000000, Size: 2 * mib}}, note: "2 segments were given back"},
		{name: "unmapping splits what was mapped at the start",
			tr: trans([]recording.Segment{{Addr: 0x1000000, Size: 20 * mib, Large: true, Expandable: true}},
				ev(event.SegmentUnmap, 0x1000000+20*mib, 20*mib), ev(event.SegmentMap, 0x1000000+60*mib, 20*mib),
				ev(event.SegmentUnmap, 0x1000000+60*mib, 20*mib)),
			segments: []recording.Segment{{Addr: 0x1000000, Size: 40 * mib, Large: true, Expandable: true}}},
		{name: "mapping in the middle leaves both sides",
			tr: trans([]recording.Segment{{Addr: 0x1000000, Size: 60 * mib, Large: true, Expandable: true}},
				ev(event.SegmentMap, 0x1000000+20*mib, 20*mib)),
			segments: []recording.Segment{{Addr: 0x1000000, Size: 20 * mib, Large: true, Expandable: true},
				{Addr: 0x1000000 + 40*mib, Size: 20 * mib, Large: true, Expandable: true}}},
		{name: "without a final state only frees speak",
			tr: trans(nil, ev(event.Alloc, 0x2000, 10), ev(event.FreeRequested, 0x9000, 512),
				ev(event.FreeCompleted, 0x9000, 512)),
			blocks: []recording.Block{{Addr: 0x9000, Size: 512, Requested: 512, State: recording.Active}}, note: "freed without an alloc"},
		{name: "an alloc that nothing frees and no block shows is noted",
			tr: trans([]recording.Segment{}, ev(event.Alloc, 0x2000, 10)), note: "1 allocs without a free"},
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
	tr := trans([]recording.Segment{{Addr: 0x1000000, Size: 2 * mib, Pool: 1}, {Addr: 0x5000000, Size: 2 * mib}},
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

// nothing and plenty are what a budget has read.
func nothing() int64 { return 0 }
