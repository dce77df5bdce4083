package replay

import (
	"errors"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

// In whatever order segments lie, they are apart from each other.
func TestOrdersOfSegments(t *testing.T) {
	for order := range 4 {
		p := &torch{env: &Env{Order: order}, nextAddr: firstAddr}
		seen := map[uint64]bool{}
		falls := 0
		last := uint64(0)
		for range 1<<orderBits + 10 {
			const size = 20 * mib
			at := p.place(size, event.SegmentAlloc)
			if slot := at / (2 * mib); seen[slot] || order > 0 && len(seen) < 1<<orderBits && at%maxRequest != firstAddr%maxRequest {
				t.Fatalf("order %d: segment %d at %#x, where one is", order, len(seen), at)
			} else {
				seen[slot] = true
			}
			if at < last {
				falls++
			}
			last = at
		}
		if rising := falls == 0; rising != (order == 0) || order == 1 && falls < 1<<orderBits-1 || order > 1 && falls > 1<<orderBits*3/4 {
			t.Errorf("order %d: %d segments lie below the one before", order, falls)
		}
	}
}

// Best fit breaks ties by address: which of two free blocks of a size is split depends on where their segments lie, and
// with that what fits afterwards.
func TestOrderDecidesTies(t *testing.T) {
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
	placed := map[int]uint64{}
	for order := range 2 {
		rec := &Recording{}
		if _, err := Run(tr, Spec{Name: "torch"}, Options{Order: order, Record: rec}); err != nil {
			t.Fatal(err)
		}
		var first uint64
		for _, e := range rec.Trace().Events {
			switch {
			case e.Kind == event.SegmentAlloc && first == 0:
				first = e.Addr
			case e.Kind == event.Alloc && e.Size == 12*mib:
				placed[order] = e.Addr - first
			}
		}
	}
	if placed[0] != 0 || placed[1] == 0 {
		t.Errorf("12 MiB lie %#x above the first segment in rising order and %#x in falling, want 0 and the second", placed[0], placed[1])
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
