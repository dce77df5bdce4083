package export

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

// What a timeline says, against analyze, and the order in which Perfetto's page draws it.

// Counters end at, and never exceed, what analyze says; the highest of live and reserved are the peaks.
func TestPerfettoAgreesWithAnalyze(t *testing.T) {
	recorded(t, func(t *testing.T, f *recording.File) {
		for _, tr := range f.Traces {
			one := &recording.File{Path: f.Path, Traces: []*recording.Trace{tr}}
			groupsAddUp(t, one)
			names := map[uint64]string{}
			highest, last := map[string]uint64{}, map[string]uint64{}
			instants := map[string]int{}
			for _, p := range packets(t, written(t, func(b *bytes.Buffer) error { return WritePerfetto(b, one) })) {
				if d := p.get("track_descriptor").m; d != nil {
					name, _, _ := strings.Cut(d.get("name").s, ":")
					names[d.get("uuid").n] = name
				}
				e := p.get("track_event").m
				switch {
				case e == nil:
				case e.get("type").n == typeCounter:
					name := names[e.get("track_uuid").n]
					highest[name] = max(highest[name], e.get("counter_value").n)
					last[name] = e.get("counter_value").n
				default:
					instants[e.get("name").s]++
				}
			}
			in := analyze.Inspect(tr)
			end := analyze.MomentAt(tr, len(tr.Events)-1)
			for _, c := range []struct {
				what      string
				got, want uint64
			}{
				{"peak live", highest["live"], in.PeakLive}, {"peak active", highest["active"], in.PeakAllocated},
				{"peak reserved", highest["reserved"], in.RecordedReserved}, {"live at the end", last["live"], end.Live},
				{"active at the end", last["active"], end.Allocated}, {"reserved at the end", last["reserved"], end.Reserved},
			} {
				if c.got != c.want {
					t.Errorf("device %d: %s is %d, analyze says %d", tr.Device, c.what, c.got, c.want)
				}
			}
			for kind, n := range in.Kinds {
				if k, _ := event.Parse(kind); k >= event.SegmentAlloc && instants[kind] != n {
					t.Errorf("device %d: %d instants %s, want %d", tr.Device, instants[kind], kind, n)
				}
			}
		}
	})
}

// Perfetto's page draws tracks in the order that the file tells: GPUs by number and then the program, streams and pools by
// number, on one scale with the others of their group. It keeps that order only below a track that says so.
func TestPerfettoOrder(t *testing.T) {
	f := sampleLabels()
	tr := f.Traces[0]
	tr.Streams = []uint64{0, 10, 0x5581a2c0, 2}
	tr.Pools = []recording.PoolID{{}, {10, 0}, {2, 0}}
	names, ordered := map[uint64]string{}, map[uint64]bool{}
	got := map[string]map[uint64]string{}
	for _, p := range packets(t, written(t, func(b *bytes.Buffer) error { return WritePerfetto(b, f) })) {
		d := p.get("track_descriptor").m
		if d == nil || d.get("thread").m != nil {
			continue
		}
		id, parent := d.get("uuid").n, d.get("parent_uuid").n
		name, rank := d.get("name").s, d.get("sibling_order_rank").n
		if process := d.get("process").m; process != nil {
			name = process.get("process_name").s
		}
		if ordered[parent] && id != 0 {
			group := names[parent]
			if got[group] == nil {
				got[group] = map[uint64]string{}
			}
			if rank == 0 || got[group][rank] != "" {
				t.Errorf("%s: %q and %q have rank %d", group, got[group][rank], name, rank)
			}
			got[group][rank] = name
		}
		if c := d.get("counter").m; c != nil {
			if scale := c.get("y_axis_share_key").s; scale == "" || ordered[parent] && !strings.HasSuffix(names[parent], "/"+scale) {
				t.Errorf("%s is drawn on the scale %q", name, scale)
			}
		}
		if ordered[id] = d.get("child_ordering").n == childrenByRank || d.get("process_ordering").n == processesByRank; id != 0 {
			names[id] = strings.TrimPrefix(names[parent]+"/"+name, "/")
		}
	}
	want := map[string]map[uint64]string{
		"":                                   {1: "GPU 0: run.cistern", 2: "GPU 1: run.cistern", 3: "python3"},
		"GPU 0: run.cistern/live by stream":  {1: "live on stream 0", 2: "live on stream 2", 3: "live on stream 10", 4: "live on stream 0x5581a2c0"},
		"GPU 0: run.cistern/live by pool":    {1: "live in pool default", 2: "live in pool 2,0", 3: "live in pool 10,0"},
		"GPU 0: run.cistern/live by tag":     {1: "live without a tag", 2: "live with tag weights", 3: "live with tag optimizer, state"},
		"GPU 0: run.cistern/live by library": {2: "live of torch", 4: "live of library 3"},
		"GPU 1: run.cistern/live by library": {1: "live of no library", 2: "live of torch"},
	}
	if d := gocmp.Diff(want, got); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
}

// groupsAddUp checks that the counters of a group add up to what is live, at every moment of a file of one device.
func groupsAddUp(t *testing.T, one *recording.File) {
	t.Helper()
	tracks := map[uint64]string{}
	now := map[string]uint64{}
	check := func() {
		sums := map[string]uint64{}
		for name, v := range now {
			if group, _, ok := strings.Cut(name, "/"); ok {
				sums[group] += v
			}
		}
		for group, sum := range sums {
			if sum != now["live: requested and not yet returned"] {
				t.Fatalf("device %d: %s adds up to %d: %v", one.Traces[0].Device, group, sum, now)
			}
		}
	}
	last := uint64(0)
	for _, p := range packets(t, written(t, func(b *bytes.Buffer) error { return WritePerfetto(b, one) })) {
		if d := p.get("track_descriptor").m; d != nil {
			tracks[d.get("uuid").n] = d.get("name").s
			if parent := tracks[d.get("parent_uuid").n]; parent != "" {
				tracks[d.get("uuid").n] = parent + "/" + d.get("name").s
			}
		}
		if e := p.get("track_event").m; e != nil && e.get("type").n == typeCounter {
			if at := p.get("timestamp").n; at != last {
				check()
				last = at
			}
			now[tracks[e.get("track_uuid").n]] = e.get("counter_value").n
		}
	}
	check()
}

// Events that the record gives one time, as a replay's are, are each an instant of their own, in order.
func TestEventsOfOneTime(t *testing.T) {
	const n, us = 3000, 1_700_000_000_000_000
	tr := &recording.Trace{Path: "x", Streams: []uint64{0}, Pools: []recording.PoolID{{}}, Stacks: []recording.Stack{nil}, FromStart: true}
	for i := range uint64(n) {
		tr.Events = append(tr.Events, event.Event{Kind: event.SegmentAlloc, Addr: i << 21, Size: 1 << 21, TimeUS: us, Thread: 7})
	}
	tr.Events = append(tr.Events, event.Event{Kind: event.SegmentFree, Size: 1 << 21, TimeUS: us + 2, Thread: 7}, // too soon for so many
		event.Event{Kind: event.Snapshot, TimeUS: us + 10, Thread: 7})
	times := map[uint64][]uint64{}
	for _, p := range packets(t, written(t, func(b *bytes.Buffer) error { return WritePerfetto(b, &recording.File{Traces: []*recording.Trace{tr}}) })) {
		if e := p.get("track_event").m; e != nil && e.get("type").n == typeInstant {
			id := e.get("track_uuid").n
			times[id] = append(times[id], p.get("timestamp").n)
		}
	}
	var counts []int
	for id, at := range times {
		counts = append(counts, len(at))
		for i, ns := range at {
			want := uint64(us*1000 + i)
			if len(at) == 1 {
				want = (us + 10) * 1000 // the mark: what is late by then is on time again
			}
			if ns != want {
				t.Fatalf("instant %d of track %d is at %d, want %d", i, id, ns, want)
			}
		}
	}
	slices.Sort(counts)
	if want := []int{1, n + 1, n + 1}; !slices.Equal(counts, want) { // the mark, the driver's track, the thread's
		t.Errorf("instants by track: %v, want %v", counts, want)
	}
}
