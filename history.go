package cistern

import (
	"math"
	"time"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/internal/lockrank"
)

// history is a bounded ring of events. While it is on (health.State.Recording) every operation takes the slow path.
type history struct {
	mu    lockrank.Mutex
	limit int // +checklocks:mu
	// +checklocks:mu
	ring  []event.Event // len is a power of two or limit; event i of count is at (first+i) % len
	first int           // +checklocks:mu
	count int           // +checklocks:mu
	// +checklocks:mu
	lost uint64 // events that were overwritten since the last TakeHistory
	// +checklocks:mu
	ever uint64 // events that were recorded, ever: the number of the newest
	// +checklocks:mu
	taken uint64       // the first event that TakeHistory returned last; 0 where that is long ago
	now   func() int64 // +checklocks:mu
}

// SetHistory has every device record its last n events (n > 0), or stop and forget them (0): those that are in use, and
// those that come into use later.
func (a *Allocator) SetHistory(n int) {
	a.mu.Lock() // not held while devices are asked, as in KeepStacks
	a.history = n
	a.mu.Unlock()
	a.started(func(d *Device) error {
		d.SetHistory(n)
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
			d.SetHistory(n)
			began = true
		}
		return nil
	})
	return began
}

// SetHistory starts recording the last n events (n > 0), or stops and forgets them (0).
func (d *Device) SetHistory(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.hist.mu.Lock()
	d.setHistory(n)
	d.hist.mu.Unlock()
	// A request or a free that has found the device quick looks again once it has the lane's lock, so from here on all are recorded.
	for _, l := range d.lanes {
		l.mu.lookIn()
		l.mu.Unlock()
	}
}

// setHistory is SetHistory. The caller holds Device.mu and history.mu, or is the first to have the device.
//
// +checklocks:d.mu
// +checklocks:d.hist.mu
func (d *Device) setHistory(n int) {
	h := &d.hist
	h.limit, h.ring, h.first, h.count, h.lost = n, nil, 0, 0, 0
	d.health.SetRecording(n > 0)
}

// SetHistoryClock replaces the clock of the history, which otherwise is the wall clock in microseconds since 1970.
func (d *Device) SetHistoryClock(now func() int64) {
	d.hist.mu.Lock()
	d.hist.now = now
	d.hist.mu.Unlock()
}

// SetHistoryThread sets the function (nil: none) that tells the kernel's number of the calling thread. Events whose request did
// not name a thread then have that of the caller, on every device. It is called with locks of the device held.
func (a *Allocator) SetHistoryThread(f func() uint32) {
	if f == nil {
		a.thread.Store(nil)
		return
	}
	a.thread.Store(&f)
}

// History returns the recorded events, oldest first, and how many older ones the ring no longer holds. Event.Stream
// is an index into Streams, Event.Pool into Pools.
func (d *Device) History() (events []event.Event, lost uint64) {
	h := &d.hist
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.oldest(nil, h.count), h.lost
}

// newest is the newest n events, oldest first, and how many older ones there were.
func (h *history) newest(n int) (events []event.Event, older uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	left := max(0, h.count-n)
	if h.count == left {
		return nil, h.lost + uint64(left)
	}
	part := history{ring: h.ring, first: (h.first + left) % len(h.ring)}
	return part.oldest(nil, h.count-left), h.lost + uint64(left) // +checklocksignore: nobody else has part
}

// TakeHistory moves the oldest recorded events, at most n of them, to the end of buf, and says how many older ones were
// overwritten since it was last called. Ask for Streams and Pools after it, not before, and before it is called again.
func (d *Device) TakeHistory(buf []event.Event, n int) (events []event.Event, lost uint64) {
	h := &d.hist
	h.mu.Lock()
	defer h.mu.Unlock()
	n = max(0, min(n, h.count))
	h.taken = h.ever - uint64(h.count) + 1
	buf = h.oldest(buf, n)
	if n > 0 {
		h.first = (h.first + n) % len(h.ring)
		h.count -= n
	}
	lost, h.lost = h.lost, 0
	return buf, lost
}

// DrainHistory moves all recorded events to the end of buf, oldest first.
func (d *Device) DrainHistory(buf []event.Event) []event.Event {
	buf, _ = d.TakeHistory(buf, math.MaxInt)
	return buf
}

// oldest appends the n oldest events to buf.
//
// +checklocks:h.mu
func (h *history) oldest(buf []event.Event, n int) []event.Event {
	if n == 0 {
		return buf
	}
	a := h.ring[h.first:min(h.first+n, len(h.ring))] // up to the end of the ring; the rest is at its start
	return append(append(buf, a...), h.ring[:n-len(a)]...)
}

// record appends an event.
//
// +checklocks:d.mu
func (d *Device) record(e event.Event) {
	h := &d.hist
	if !d.health.Recording() {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.now != nil {
		e.TimeUS = h.now()
	} else {
		e.TimeUS = time.Now().UnixMicro()
	}
	if f := d.a.thread.Load(); e.Thread == 0 && f != nil {
		e.Thread = (*f)()
	}
	h.ever++
	d.streamNumbers.note(e.Stream, h.ever)
	d.poolNumbers.note(e.Pool, h.ever)
	switch {
	case h.count == h.limit:
		h.first = (h.first + 1) % len(h.ring)
		h.count--
		h.lost++
		if h.ever-h.taken > uint64(h.limit)+keptTaken {
			h.taken = 0 // there may never be another TakeHistory
		}
	case h.count == len(h.ring):
		ring := make([]event.Event, min(max(2*len(h.ring), 64), h.limit))
		h.oldest(ring[:0], h.count)
		h.ring, h.first = ring, 0
	}
	h.ring[(h.first+h.count)%len(h.ring)] = e
	h.count++
}

// oldestNamed is the oldest event whose stream and pool may still be asked for: of those that are kept, and of those that
// were taken last.
func (h *history) oldestNamed() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.taken != 0 {
		return h.taken
	}
	return h.ever - uint64(h.count) + 1
}

// keptTaken is how many events after a TakeHistory, beyond those that the ring holds, its streams and pools are still named.
const keptTaken = 1 << 16

// +checklocks:d.mu
func (d *Device) recordSegment(s *space, addr, size uint64, got bool, by origin) {
	kind := event.SegmentAlloc
	if !got {
		kind = event.SegmentFree
	}
	d.record(event.Event{Kind: kind, Addr: addr, Size: size, Stream: s.stream.number(), Pool: s.pool.number,
		Stack: by.stack, Thread: by.thread})
}

// event is what happened to a block, caused from a stack by a thread. The caller holds Device.mu and the lane's lock.
//
// +checklocks:s.dev.mu
func (s *space) event(kind event.Kind, id heap.ID, stack, thread uint32) event.Event {
	b := s.heap.At(id)
	if stack == 0 {
		stack = s.heap.Stack(id)
	}
	return event.Event{Kind: kind, Addr: b.Addr, Size: b.Requested, Stream: s.streamOf(b).number(), Pool: s.pool.number,
		Tag: uint16(b.Tag), Library: libraryOf(b.Tag), Stack: stack, Thread: thread}
}
