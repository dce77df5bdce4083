package recordingtest

import (
	"fmt"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// plain is a trace with every index replaced by what it means, so that traces whose tables are ordered differently
// compare equal.
type plain struct {
	Device                 int
	Events                 []plainEvent
	Initial                []plainBlock
	InitialSegments, Final []plainSegment
	FromStart, HasFinal    bool
	Settings               recording.Settings
	Environment            recording.Environment
	PeakLive, PeakReserved uint64
	Duration               int64
}

type plainEvent struct {
	Addr, Size, Handle, Stream uint64
	TimeUS                     int64
	Pool                       recording.PoolID
	Kind                       event.Kind
	Flags                      uint8
	Stack                      string
	Tag, Library, Thread       string
}

type plainBlock struct {
	Addr, Size, Requested, Stream uint64
	Pool                          recording.PoolID
	State                         recording.BlockState
	Stack                         []recording.Frame
	Tag, Library                  string
}

type plainSegment struct {
	Addr, Size, Stream uint64
	Pool               recording.PoolID
	Large, Expandable  bool
	Stack              []recording.Frame
	Blocks             []plainBlock
}

func plainOf(t *recording.Trace) plain {
	stack := func(i uint32) (out []recording.Frame) {
		for _, f := range t.Stacks[i] {
			out = append(out, t.Frames[f])
		}
		return out
	}
	blocks := func(in []recording.Block) (out []plainBlock) {
		for _, b := range in {
			out = append(out, plainBlock{b.Addr, b.Size, b.Requested, t.Streams[b.Stream], t.Pools[b.Pool], b.State,
				stack(b.Stack), t.TagName(b.Tag), t.LibraryName(b.Library)})
		}
		return out
	}
	segments := func(in []recording.Segment) (out []plainSegment) {
		for _, s := range in {
			out = append(out, plainSegment{s.Addr, s.Size, t.Streams[s.Stream], t.Pools[s.Pool], s.Large, s.Expandable,
				stack(s.Stack), blocks(s.Blocks)})
		}
		return out
	}
	p := plain{Device: t.Device, FromStart: t.FromStart, HasFinal: t.Final != nil, Settings: t.Settings, Environment: t.Environment,
		Initial: blocks(t.Initial), InitialSegments: segments(t.InitialSegments), Final: segments(t.Final),
		PeakReserved: t.RecordedPeakReserved(), Duration: t.Duration()}
	p.PeakLive, _ = t.PeakLive()
	text := make([]string, len(t.Stacks))
	for i := range text {
		text[i] = fmt.Sprint(stack(uint32(i)))
	}
	for _, e := range t.Events {
		p.Events = append(p.Events, plainEvent{e.Addr, e.Size, e.Handle, t.Streams[e.Stream], e.TimeUS, t.Pools[e.Pool],
			e.Kind, e.Flags, text[e.Stack], t.TagName(e.Tag), t.LibraryName(e.Library), t.ThreadName(e.Thread)})
	}
	return p
}

// Diff reports the first differences between two lists of traces by what they mean.
func Diff(t testing.TB, got, want []*recording.Trace) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%d traces; expected %d", len(got), len(want))
	}
	for i := range want {
		g, w := plainOf(got[i]), plainOf(want[i])
		if len(g.Events) != len(w.Events) {
			t.Fatalf("%d events; expected %d", len(g.Events), len(w.Events))
		}
		for j := range w.Events {
			if w.Events[j] != g.Events[j] {
				t.Fatalf("event %d: got\n%+v; expected\n%+v", j, g.Events[j], w.Events[j])
			}
		}
		g.Events, w.Events = nil, nil
		if d := cmp.Diff(w, g, cmpopts.EquateEmpty()); d != "" {
			t.Fatalf("device %d (-want +got):\n%s", want[i].Device, d)
		}
	}
}
