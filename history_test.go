package cistern_test

import (
	"testing"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/event"
)

// Option history records from the start: every hand-out and free, the mappings under them and a failure, in order, and
// no more than it was given room for.
func TestHistoryFromTheStart(t *testing.T) {
	opts, err := cistern.ParseOptions("history:6,limit:8MiB")
	if err != nil {
		t.Fatal(err)
	}
	a, err := cistern.New(sim.New(sim.Options{}), opts)
	if err != nil {
		t.Fatal(err)
	}
	d, err := a.Device(0)
	if err != nil {
		t.Fatal(err)
	}
	st, err := d.Stream(0)
	if err != nil {
		t.Fatal(err)
	}
	now := int64(0)
	d.SetHistoryClock(func() int64 { now++; return now })
	p, err := d.Alloc(1000, st)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Free(p); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Alloc(1<<30, st); err == nil {
		t.Fatal("a request beyond the limit was met")
	}
	events, lost := d.History()
	var kinds []event.Kind
	for i, e := range events {
		kinds = append(kinds, e.Kind)
		if i > 0 && e.TimeUS <= events[i-1].TimeUS {
			t.Errorf("event %d at %d us comes after one at %d us", i, e.TimeUS, events[i-1].TimeUS)
		}
		switch e.Kind {
		case event.Alloc, event.FreeRequested, event.FreeCompleted:
			if e.Addr != uint64(p) || e.Size != 1000 {
				t.Errorf("%v of %d bytes at %#x; the block has 1000 at %#x", e.Kind, e.Size, e.Addr, uint64(p))
			}
		}
	}
	want := []event.Kind{event.SegmentMap, event.Retry, event.Alloc, event.FreeRequested, event.FreeCompleted, event.OOM}
	if len(kinds) != len(want) || lost != 0 {
		t.Fatalf("recorded %v, %d lost; want %v", kinds, lost, want)
	}
	for i := range want {
		if kinds[i] != want[i] {
			t.Fatalf("recorded %v, want %v", kinds, want)
		}
	}
	if p, err = d.Alloc(1000, st); err != nil {
		t.Fatal(err)
	}
	if events, lost = d.History(); len(events) != 6 || lost != 1 || events[5].Kind != event.Alloc {
		t.Errorf("%d events, %d lost, the last %v; want 6, 1, alloc", len(events), lost, events[5].Kind)
	}
	d.SetHistory(0)
	if events, lost = d.History(); len(events) != 0 || lost != 0 {
		t.Errorf("%d events after the history was turned off", len(events))
	}
	if err := a.Free(p); err != nil {
		t.Fatal(err)
	}
}
