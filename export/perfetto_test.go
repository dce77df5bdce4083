package export

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/trace"
)

// What a timeline says, against analyze and against what Perfetto makes of it.

// Counters end at, and never exceed, what analyze says; the highest of live and reserved are the peaks.
func TestPerfettoAgreesWithAnalyze(t *testing.T) {
	recorded(t, func(t *testing.T, f *trace.File) {
		for _, tr := range f.Traces {
			one := &trace.File{Path: f.Path, Traces: []*trace.Trace{tr}}
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

// Events that the record gives one time, as a replay's are, are each an instant of their own, in order.
func TestEventsOfOneTime(t *testing.T) {
	const n, us = 3000, 1_700_000_000_000_000
	tr := &trace.Trace{Path: "x", Streams: []uint64{0}, Pools: []trace.PoolID{{}}, Stacks: []trace.Stack{nil}, FromStart: true}
	for i := range uint64(n) {
		tr.Events = append(tr.Events, event.Event{Kind: event.SegmentAlloc, Addr: i << 21, Size: 1 << 21, TimeUS: us, Thread: 7})
	}
	tr.Events = append(tr.Events, event.Event{Kind: event.SegmentFree, Size: 1 << 21, TimeUS: us + 2, Thread: 7}, // too soon for so many
		event.Event{Kind: event.Snapshot, TimeUS: us + 10, Thread: 7})
	times := map[uint64][]uint64{}
	for _, p := range packets(t, written(t, func(b *bytes.Buffer) error { return WritePerfetto(b, &trace.File{Traces: []*trace.Trace{tr}}) })) {
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
