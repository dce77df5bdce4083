package engine_test

import (
	"testing"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine"
)

// Option history records from the start: every hand-out and free, the mappings under them and a failure, in order, and
// no more than it was given room for.
func TestHistoryFromTheStart(t *testing.T) {
	opts, err := config.Parse("history:6,limit:8MiB")
	if err != nil {
		t.Fatal(err)
	}
	e := newEngine(t, sim.Options{}, opts, 1)
	a, d, st := e.a, e.dev, e.streams[0]
	now := int64(0)
	d.History.SetClock(func() int64 { now++; return now })
	p := e.alloc(t, 1000, st)
	e.free(t, p)
	if _, err := d.Alloc(1<<30, st); err == nil {
		t.Fatal("a request beyond the limit was met")
	}
	events, lost := d.History.Read()
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
	if events, lost = d.History.Read(); len(events) != 6 || lost != 1 || events[5].Kind != event.Alloc {
		t.Errorf("%d events, %d lost, the last %v; want 6, 1, alloc", len(events), lost, events[5].Kind)
	}
	d.History.SetLimit(0)
	if events, lost = d.History.Read(); len(events) != 0 || lost != 0 {
		t.Errorf("%d events after the history was turned off", len(events))
	}
	if err := a.Free(p); err != nil {
		t.Fatal(err)
	}
}

// TakeHistory hands the events out in pieces, in order, and says how many went unseen between two of them.
func TestTakeHistory(t *testing.T) {
	const room = 100
	e := newEngine(t, sim.Options{}, config.Options{History: room}, 1)
	now := int64(0)
	e.dev.History.SetClock(func() int64 { now++; return now })
	seen := int64(0) // time of the last event that was handed out or lost
	var buf []event.Event
	for i, n := range []int{0, 1, 10, 150, 150, 3, 0, 1000, 99, 100, 101} {
		for range i * 13 {
			e.free(t, e.alloc(t, 512, e.streams[0]))
		}
		events, lost := e.dev.History.Take(buf[:0], n)
		seen += int64(lost)
		if len(events) > n || len(events) < n && seen+int64(len(events)) != now {
			t.Fatalf("call %d: %d events of at most %d, %d recorded", i, len(events), n, now)
		}
		for _, x := range events {
			if seen++; x.TimeUS != seen {
				t.Fatalf("call %d: event %d comes where %d should, %d lost", i, x.TimeUS, seen, lost)
			}
		}
		if rest, missing := e.dev.History.Read(); int64(len(rest)) != now-seen || missing != 0 || len(rest) > room {
			t.Fatalf("call %d: %d events are left and %d lost, of %d unseen", i, len(rest), missing, now-seen)
		}
		buf = events
	}
}

// What is asked for before a device is in use holds for it too, and is taken back for all.
func TestHistoryOfEveryDevice(t *testing.T) {
	a, err := engine.New(sim.New(sim.Options{Devices: 2}), config.Options{History: 7})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	events := func(d cuda.Device) int {
		dev, err := a.Device(d)
		if err != nil {
			t.Fatal(err)
		}
		st, err := dev.Stream(cuda.StreamNull)
		if err != nil {
			t.Fatal(err)
		}
		p, err := dev.Alloc(1000, st)
		if err != nil {
			t.Fatal(err)
		}
		if err := a.Free(p); err != nil {
			t.Fatal(err)
		}
		all, _ := dev.History.Read()
		return len(all)
	}
	if n := events(0); n == 0 {
		t.Error("the options ask for a history, and there is none")
	}
	a.SetHistory(0)
	if n := events(0); n != 0 {
		t.Errorf("%d events after the histories were turned off", n)
	}
	if n := events(1); n != 0 {
		t.Errorf("%d events on a device that came into use after the histories were turned off", n)
	}
	a.SetHistory(1)
	for d := range cuda.Device(2) {
		if n := events(d); n != 1 {
			t.Errorf("device %d: %d events, want the last one", d, n)
		}
	}
	b, err := engine.New(sim.New(sim.Options{Devices: 2}), config.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	b.SetHistory(100)
	a = b
	if n := events(1); n == 0 {
		t.Error("no events on a device that came into use after the histories were turned on")
	}
}

// Events whose request names no thread have the number of the one that calls, on every device, in use now or later.
func TestHistoryThread(t *testing.T) {
	a, err := engine.New(sim.New(sim.Options{Devices: 2}), config.Options{History: 100})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	const caller, named = 7, 9
	if _, err := a.Device(0); err != nil {
		t.Fatal(err)
	}
	a.SetHistoryThread(func() uint32 { return caller })
	for id := range cuda.Device(2) {
		d, err := a.Device(id)
		if err != nil {
			t.Fatal(err)
		}
		st, err := d.Stream(cuda.StreamNull)
		if err != nil {
			t.Fatal(err)
		}
		p, err := d.AllocWith(1000, st, engine.AllocOptions{Thread: named})
		if err == nil {
			err = a.Free(p)
		}
		if err == nil {
			err = d.Trim()
		}
		if err != nil {
			t.Fatal(err)
		}
		seen := map[event.Kind]uint32{}
		for _, e := range d.History.Drain(nil) {
			seen[e.Kind] = e.Thread
		}
		want := map[event.Kind]uint32{event.SegmentMap: named, event.Alloc: named, event.FreeRequested: caller,
			event.FreeCompleted: caller, event.SegmentUnmap: caller}
		for kind, thread := range want {
			if seen[kind] != thread {
				t.Errorf("device %d: %v by thread %d, want %d", id, kind, seen[kind], thread)
			}
		}
	}
}
