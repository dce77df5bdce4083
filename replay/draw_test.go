package replay

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
)

// In every draw segments are apart from each other, in an order of the draw's own; in draw 0 they rise.
func TestDrawsOfAddresses(t *testing.T) {
	orders := map[string]bool{}
	for n := range 20 {
		p := &torch{env: &Env{draw: newDraw(n)}, nextAddr: firstAddr}
		seen := map[uint64]bool{}
		falls, order, last := 0, "", uint64(0)
		for range 1<<orderBits + 10 {
			const size = 20 * mib
			at := p.place(size, event.SegmentAlloc)
			if slot := at / size; seen[slot] || seen[slot-1] && n > 0 && len(seen) <= 1<<orderBits {
				t.Fatalf("draw %d: segment %d at %#x, where one is", n, len(seen), at)
			} else {
				seen[slot] = true
			}
			if at < last {
				falls++
			}
			if len(seen) <= 10 {
				order += fmt.Sprint(at < last)
			}
			last = at
		}
		if n == 0 && falls != 0 || n > 0 && (falls < 1<<orderBits/3 || falls > 1<<orderBits*2/3) {
			t.Errorf("draw %d: %d segments lie below the one before", n, falls)
		}
		orders[order] = true
	}
	if len(orders) < 10 {
		t.Errorf("20 draws begin in %d orders", len(orders))
	}
}

// Best fit breaks ties by address: which of two free blocks of a size is split depends on where their segments lie, and
// with that what fits afterwards.
func TestDrawDecidesTies(t *testing.T) {
	tr := &recording.Trace{Format: recording.FormatPyTorch, Streams: []uint64{0}, Pools: []recording.PoolID{{}}, FromStart: true}
	add := func(k event.Kind, addr, size uint64) {
		tr.Events = append(tr.Events, event.Event{Kind: k, Addr: addr << 30, Size: size, TimeUS: int64(1 + len(tr.Events))})
	}
	add(event.Alloc, 1, 40*mib)
	add(event.Alloc, 2, 40*mib)
	add(event.FreeCompleted, 1, 40*mib)
	add(event.FreeCompleted, 2, 40*mib)
	add(event.Alloc, 3, 12*mib)
	add(event.Alloc, 4, 30*mib)
	first := map[bool]int{}
	for n := 1; n <= 32; n++ {
		var events []event.Event
		for range 2 {
			rec := &Recording{}
			if _, err := Run(tr, Spec{Name: "torch"}, Options{Draw: n, Record: rec}); err != nil {
				t.Fatal(err)
			}
			if again := rec.Trace().Events; events != nil && !slices.Equal(events, again) {
				t.Fatalf("draw %d differs from itself", n)
			}
			events = rec.Trace().Events
		}
		at := slices.IndexFunc(events, func(e event.Event) bool { return e.Kind == event.Alloc && e.Size == 12*mib })
		first[events[at].Addr == events[0].Addr]++
	}
	if first[true] < 8 || first[false] < 8 {
		t.Errorf("the first segment was split in %d of 32 draws", first[true])
	}
}

// A free that other streams delay completes after half to twice its time in the record; others are where the record has them.
func TestDrawsOfCompletions(t *testing.T) {
	tr := &recording.Trace{Streams: []uint64{0}, Pools: []recording.PoolID{{}}, FromStart: true}
	add := func(k event.Kind, addr uint64, us int64) {
		tr.Events = append(tr.Events, event.Event{Kind: k, Addr: addr << 30, Size: mib, TimeUS: us})
	}
	add(event.Alloc, 1, 1)
	add(event.Alloc, 2, 2)
	add(event.FreeRequested, 1, 1000)
	add(event.FreeCompleted, 1, 2000)
	add(event.FreeRequested, 2, 3000)
	add(event.FreeCompleted, 2, 3000)
	add(event.Alloc, 3, 4000)
	early, late := 0, 0
	for n := range 40 {
		rec := &Recording{}
		if _, err := Run(tr, Spec{Name: "direct"}, Options{Draw: n, Record: rec}); err != nil {
			t.Fatal(err)
		}
		var free []int64
		for _, e := range rec.Trace().Events {
			if e.Kind == event.FreeCompleted {
				free = append(free, e.TimeUS)
			}
		}
		// What is due between two events is seen at the later.
		if len(free) != 2 || free[1] != 3000 || n == 0 && free[0] != 2000 || n > 0 && free[0] != 3000 {
			t.Fatalf("draw %d: freed at %v", n, free)
		}
		c := newCompletions(NewPlan(tr), newDraw(n))
		c.requested(0, 1000, 2000)
		if n == 0 {
			continue
		}
		switch us := c.due[0].us; {
		case us < 1500 || us > 3000:
			t.Errorf("draw %d: free at %d", n, us)
		case us < 2000:
			early++
		default:
			late++
		}
	}
	if early == 0 || late == 0 {
		t.Errorf("%d frees early and %d late", early, late)
	}
}

// The run's own settings repeat what was recorded, failure included.
func TestOwnSettingsRepeatTheRecord(t *testing.T) {
	for _, name := range []string{"detection", "gpt2_varlen", "multistream_prefetch"} {
		f, err := open.File("../recording/testdata/" + name + ".pickle.gz")
		if err != nil {
			t.Fatal(err)
		}
		tr := f.Traces[0]
		free, err := Run(tr, Spec{Name: "torch"}, Options{})
		if err != nil {
			t.Fatal(err)
		}
		rec := &Recording{}
		died, err := Run(tr, Spec{Name: "torch"}, Options{Capacity: free.PeakLive + 64*mib, Draw: 3, Record: rec})
		if err != nil || died.Completed {
			t.Fatalf("%s: completed: %v, %v", name, err == nil && died.Completed, err)
		}
		again, err := Run(rec.Trace(), Spec{Name: "torch"}, Options{Verify: true})
		if err != nil {
			t.Fatal(err)
		}
		if again.OOMs != 1 || again.Capacity != died.Capacity || !again.Verify.OK() {
			t.Errorf("%s: %d failures, limit %d of %d, verify %+v", name, again.OOMs, again.Capacity, died.Capacity, again.Verify)
		}
	}
}

// A run that is cancelled ends.
func TestStopped(t *testing.T) {
	done := make(chan struct{})
	close(done)
	tr := &recording.Trace{Streams: []uint64{0}, Pools: []recording.PoolID{{}}, Events: []event.Event{{Kind: event.Alloc, Addr: 1 << 30, Size: mib}}}
	if _, err := Run(tr, Spec{Name: "torch"}, Options{Done: done}); !errors.Is(err, ErrStopped) {
		t.Errorf("%v, want %v", err, ErrStopped)
	}
}

// The limit that explains failed requests to the driver itself is what was held and what was free.
func TestCapacityWithoutSegments(t *testing.T) {
	tr := &recording.Trace{Events: []event.Event{{Kind: event.Alloc, Addr: 1 << 30, Size: 10 * mib}, {Kind: event.Alloc, Addr: 2 << 30, Size: 20 * mib},
		{Kind: event.FreeCompleted, Addr: 1 << 30, Size: 10 * mib}, {Kind: event.OOM, Size: 70 * mib, Addr: 50 * mib}}}
	if got, from := CapacityFromTrace(tr); got != 70*mib || from != "oom at event 3: reserved then and free on the device" {
		t.Errorf("%d, %s", got, from)
	}
	tr.Events[3].Addr = 0 // RMM's log does not say what was free
	if got, from := CapacityFromTrace(tr); got != 0 || from != "unlimited" {
		t.Errorf("%d, %s", got, from)
	}
	// Memory that is mapped twice is there once.
	tr = &recording.Trace{Events: []event.Event{{Kind: event.SegmentMap, Addr: 1 << 30, Size: 10 * mib, Handle: 5},
		{Kind: event.SegmentMap, Addr: 2 << 30, Size: 10 * mib, Handle: 5}, {Kind: event.SegmentUnmap, Addr: 1 << 30, Size: 10 * mib, Handle: 5},
		{Kind: event.OOM, Size: 70 * mib, Addr: 50 * mib}}}
	if got, _ := CapacityFromTrace(tr); got != 60*mib {
		t.Errorf("%d, want 60 MiB", got)
	}
}

// Draws that are taken for the same have the same odds: as many requests are met, with as much reserved.
func TestSameDraw(t *testing.T) {
	tr := randomTrace(3, 2000, true)
	for i := range tr.Events {
		tr.Events[i].TimeUS *= 500
	}
	delayed := *tr
	delayed.Events = slices.Clone(tr.Events)
	for i := range delayed.Events {
		if delayed.Events[i].Kind == event.FreeCompleted {
			delayed.Events[i].TimeUS += 100
		}
	}
	plan := NewPlan(tr)
	for policy, want := range map[string]int{"torch": nativeDraws, "cistern": 3, "torch-async": 1, "rmm-pool": 1, "direct": 1} {
		spec := Spec{Name: policy}
		capacity := plan.PeakLive + plan.PeakLive/50
		known := map[int]*Result{}
		for n := 1; n <= nativeDraws; n++ {
			r, err := plan.Run(spec, Options{Capacity: capacity, GPULag: 20 * time.Millisecond, Draw: n})
			if err != nil {
				t.Fatal(err)
			}
			same := plan.SameDraw(spec, n)
			if known[same] == nil {
				known[same] = r
			}
			if k := known[same]; k.PeakReserved != r.PeakReserved || k.Completed != r.Completed || !slices.Equal(k.FailedOOMs, r.FailedOOMs) ||
				k.FailedRequest != r.FailedRequest || fmt.Sprint(k.Calls) != fmt.Sprint(r.Calls) {
				t.Errorf("%s: draws %d and %d differ:\n%+v\n%+v", policy, same, n, k, r)
			}
		}
		if len(known) != want {
			t.Errorf("%s: %d draws differ; expected %d", policy, len(known), want)
		}
		if n := NewPlan(&delayed).SameDraw(spec, nativeDraws); n != nativeDraws {
			t.Errorf("%s: draw %d stands for one that delays frees at other times", policy, n)
		}
	}
}
