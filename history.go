package cistern

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/cistern-gpu/cistern/event"
)

// history is a bounded ring of events. While it is on every operation takes the slow path.
type history struct {
	on    atomic.Bool
	limit int // guarded by Device.mu

	mu   sync.Mutex
	ring []event.Event // guarded by mu
	next uint64        // guarded by mu: events recorded so far; ring[next%len(ring)] is written next
	now  func() int64  // guarded by mu
}

// SetHistory starts recording the last n events (n > 0), or stops and forgets them (0).
func (d *Device) SetHistory(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.hist.mu.Lock()
	d.hist.limit = n
	d.hist.ring = make([]event.Event, 0, min(n, 1<<16))
	d.hist.next = 0
	d.hist.mu.Unlock()
	d.hist.on.Store(n > 0)
	d.updateQuick()
}

// SetHistoryClock replaces the clock of the history, which otherwise is the wall clock in microseconds since 1970.
func (d *Device) SetHistoryClock(now func() int64) {
	d.hist.mu.Lock()
	d.hist.now = now
	d.hist.mu.Unlock()
}

// History returns the recorded events, oldest first, and how many older ones the ring no longer holds. Event.Stream
// is an index into Streams, Event.Pool into Pools.
func (d *Device) History() (events []event.Event, lost uint64) {
	h := &d.hist
	h.mu.Lock()
	defer h.mu.Unlock()
	n := uint64(len(h.ring))
	if n == 0 {
		return nil, 0
	}
	at := h.next % n
	if h.next <= n {
		at = 0
	}
	events = append(events, h.ring[at:]...)
	return append(events, h.ring[:at]...), h.next - n
}

// record appends an event. The caller holds Device.mu.
func (d *Device) record(e event.Event) {
	h := &d.hist
	if !h.on.Load() {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.now != nil {
		e.TimeUS = h.now()
	} else {
		e.TimeUS = time.Now().UnixMicro()
	}
	if len(h.ring) < h.limit {
		h.ring = append(h.ring, e)
	} else {
		h.ring[h.next%uint64(h.limit)] = e
	}
	h.next++
}

func (d *Device) recordSegment(s *space, addr, size uint64, got bool) {
	kind := event.SegmentAlloc
	if !got {
		kind = event.SegmentFree
	}
	d.record(event.Event{Kind: kind, Addr: addr, Size: size, Stream: uint32(s.stream.index), Pool: s.pool.number})
}
