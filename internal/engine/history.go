package engine

import (
	"math"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine/journal"
	"github.com/cistern-gpu/cistern/internal/heap"
)

// SetHistory has every device record its last n events (n > 0), or stop and forget them (0): those that are in use, and
// those that come into use later.
func (a *Allocator) SetHistory(n int) {
	a.mu.Lock() // not held while devices are asked, as in Stacks.Keep
	a.history = n
	a.mu.Unlock()
	a.started(func(d *Device) error {
		d.History.SetLimit(n)
		return nil
	})
}

// NeedHistory has every device that keeps no events record its last n from now on, likewise those that come into use later; the
// others go on as they are. It reports whether any history is new.
func (a *Allocator) NeedHistory(n int) (began bool) {
	a.mu.Lock()
	if a.history == 0 {
		a.history, began = n, true
	}
	a.mu.Unlock()
	a.started(func(d *Device) error {
		if !d.health.Recording() {
			d.History.SetLimit(n)
			began = true
		}
		return nil
	})
	return began
}

// SetLimit starts recording the last n events (n > 0), or stops and forgets them (0).
func (h *History) SetLimit(n int) {
	h.gpu.mu.Lock()
	defer h.gpu.mu.Unlock()
	h.gpu.journal.SetLimit(n)
	// A request or a free that has found the device quick looks again once it has the arena's lock, so from here on all are recorded.
	for _, l := range h.pools.arenas {
		l.LookIn()
		l.Unlock()
	}
}

// SetClock replaces the clock of the history and of the limit of free memory, which otherwise is the wall clock in microseconds since 1970.
func (h *History) SetClock(now func() int64) { h.gpu.journal.SetClock(now) }

// SetHistoryThread sets the function (nil: none) that returns the kernel's number of the calling thread. Events whose request
// did not name a thread then have that of the caller, on every device. It is called with locks of the device held.
func (a *Allocator) SetHistoryThread(f func() uint32) { a.thread.Set(f) }

// Read returns the recorded events, oldest first, and how many older ones the ring no longer has. Event.Stream is an index into
// Views.Streams, Event.Pool into Views.Pools.
func (h *History) Read() (events []event.Event, lost uint64) { return h.gpu.journal.Events() }

// Take moves the oldest recorded events, at most n of them, to the end of buf, and says how many older ones were overwritten
// since it was last called. Ask for Views.Streams and Views.Pools after it, not before, and before it is called again.
func (h *History) Take(buf []event.Event, n int) (events []event.Event, lost uint64) {
	return h.gpu.journal.Take(buf, n)
}

// TakeHash is the hash of the sizes of the requests that were met since it was last called (event.Mix), 0 where nothing is recorded.
func (h *History) TakeHash() uint64 { return h.gpu.journal.TakeHash() }

// Drain moves all recorded events to the end of buf, oldest first.
func (h *History) Drain(buf []event.Event) []event.Event {
	buf, _ = h.Take(buf, math.MaxInt)
	return buf
}

// record appends an event.
//
// +checklocks:g.mu
func (g *gpu) record(e event.Event) { g.journal.Record(e) }

// +checklocks:g.mu
func (g *gpu) recordSegment(s *streamHeap, addr, size uint64, got bool, by origin) {
	kind := event.SegmentAlloc
	if !got {
		kind = event.SegmentFree
	}
	g.record(event.Event{Kind: kind, Addr: addr, Size: size, Stream: s.stream.number(), Pool: s.pool.number,
		Stack: by.stack, Thread: by.thread})
}

// event is what happened to a block, caused from a stack by a thread. The caller holds Device.mu and the arena's lock.
//
// +checklocks:s.dev.gpu.mu
func (s *streamHeap) event(kind event.Kind, id heap.ID, stack, thread uint32) event.Event {
	b := s.blocks.At(id)
	if stack == 0 {
		stack = s.blocks.Stacks.Of(id)
	}
	return event.Event{Kind: kind, Addr: b.Addr, Size: b.Requested, Stream: s.streamOf(b).number(), Pool: s.pool.number,
		Tag: uint16(b.Tag), Library: journal.LibraryOf(b.Tag), Stack: stack, Thread: thread}
}
