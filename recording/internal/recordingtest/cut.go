package recordingtest

import (
	"bytes"
	"sort"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/recording/pytorch"
)

// state is what a forward walk over events finds: it knows nothing of package initial.
type state struct {
	live     map[uint64]recording.Block
	reserved uint64
}

func forward(t *recording.Trace, upTo int) state {
	s := state{live: map[uint64]recording.Block{}, reserved: t.InitialReserved()}
	for _, b := range t.Initial {
		s.live[b.Addr] = b
	}
	for _, e := range t.Events[:upTo] {
		switch e.Kind {
		case event.Alloc:
			s.live[e.Addr] = recording.Block{Addr: e.Addr, Requested: e.Size, State: recording.Active}
		case event.FreeRequested:
			b := s.live[e.Addr]
			b.State = recording.PendingFree
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

// CheckCut checks what a reader finds of a trace whose events before the one at are missing.
func CheckCut(t *testing.T, whole *recording.Trace, at int) {
	t.Helper()
	cut := *whole
	cut.Events, cut.Initial, cut.InitialSegments = whole.Events[at:], nil, nil
	var file bytes.Buffer
	if err := pytorch.Write(&file, &cut); err != nil {
		t.Fatal(err)
	}
	f, err := open.Read(&file, "cut")
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
