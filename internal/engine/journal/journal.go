// Package journal is what is recorded while things happen on a device: a bounded history of events, the numbers by which
// events name streams and pools, the stacks of requests, and the label that a block keeps of its request.
//
// # Locks
//
// A [Journal] has one lock of rank lockrank.History, a leaf: its methods may be called with any lock of the engine held.
// [Numbers] and labels have none. The table of [Stacks] has a leaf of its own, and a stack that is known is found without it.
package journal

import (
	"sync/atomic"
	"time"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine/health"
	"github.com/cistern-gpu/cistern/internal/lockrank"
)

// Journal is the history of one device: a ring of events. While it is on (health.State.Recording) every operation takes the
// slow path.
type Journal struct {
	Streams Names
	Pools   Names

	health *health.State
	thread *Thread

	mu    lockrank.Mutex
	limit int // +checklocks:mu
	// +checklocks:mu
	ring  []event.Event // len is a power of two or limit; event i of count is at (first+i) % len
	first int           // +checklocks:mu
	count int           // +checklocks:mu
	// +checklocks:mu
	lost uint64 // events that were overwritten since the last Take
	// +checklocks:mu
	ever uint64 // events that were recorded, ever: the number of the newest
	// +checklocks:mu
	taken uint64 // the first event that Take returned last; 0 where that is long ago
	// +checklocks:mu
	sizes uint64       // hash of the requests that were met since the last TakeHash; 0 while nothing is recorded
	now   func() int64 // +checklocks:mu
}

// Thread finds out the kernel's number of the calling thread for events that name none.
type Thread struct{ f atomic.Pointer[func() uint32] }

// Set sets the function that knows the number; nil: none does. It is called with locks of the engine held.
func (t *Thread) Set(f func() uint32) {
	if f == nil {
		t.f.Store(nil)
		return
	}
	t.f.Store(&f)
}

// New is a journal that records nothing yet. Journals of several devices may share a Thread.
func New(h *health.State, thread *Thread) *Journal {
	j := &Journal{health: h, thread: thread, mu: lockrank.Mutex{Rank: lockrank.History}}
	j.Streams.journal, j.Pools.journal = j, j
	return j
}

// SetLimit starts recording the last n events (n > 0), or stops and forgets them (0).
func (j *Journal) SetLimit(n int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	switch {
	case n == 0:
		j.sizes = 0
	case j.limit == 0:
		j.sizes = event.HashStart
	}
	j.limit, j.ring, j.first, j.count, j.lost = n, nil, 0, 0, 0
	j.health.SetRecording(n > 0)
}

// SetClock replaces the clock of events and of the limit of free memory, which otherwise is the wall clock in microseconds since 1970.
func (j *Journal) SetClock(now func() int64) {
	j.mu.Lock()
	j.now = now
	j.mu.Unlock()
}

// Now is the time by that clock.
func (j *Journal) Now() int64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.clock()
}

// +checklocks:j.mu
func (j *Journal) clock() int64 {
	if j.now != nil {
		return j.now()
	}
	return time.Now().UnixMicro()
}

// Events returns the recorded events, oldest first, and how many older ones the ring no longer holds.
func (j *Journal) Events() (events []event.Event, lost uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.appendTo(nil, 0, j.count), j.lost
}

// Newest returns the newest n events, oldest first, and how many older ones there were.
func (j *Journal) Newest(n int) (events []event.Event, older uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	n = max(0, min(n, j.count))
	left := j.count - n
	return j.appendTo(nil, left, n), j.lost + uint64(left)
}

// Take moves the oldest events, at most n, to the end of buf, and says how many older ones were overwritten since it was
// last called. The streams and pools of these events keep their numbers until it is called again.
func (j *Journal) Take(buf []event.Event, n int) (events []event.Event, lost uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	n = max(0, min(n, j.count))
	j.taken = j.ever - uint64(j.count) + 1
	buf = j.appendTo(buf, 0, n)
	if n > 0 {
		j.first = (j.first + n) % len(j.ring)
		j.count -= n
	}
	lost, j.lost = j.lost, 0
	return buf, lost
}

// TakeHash is the hash of the sizes of the requests that were met since it was last called, in their order; 0 where nothing is recorded.
func (j *Journal) TakeHash() uint64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	hash := j.sizes
	if hash != 0 {
		j.sizes = event.HashStart
	}
	return hash
}

// appendTo appends n events to buf, from event i of the ring on.
//
// +checklocks:j.mu
func (j *Journal) appendTo(buf []event.Event, i, n int) []event.Event {
	if n == 0 {
		return buf
	}
	first := (j.first + i) % len(j.ring)
	a := j.ring[first:min(first+n, len(j.ring))] // up to the end of the ring; the rest is at its start
	return append(append(buf, a...), j.ring[:n-len(a)]...)
}

// Record appends an event, if events are recorded.
func (j *Journal) Record(e event.Event) {
	if !j.health.Recording() {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	e.TimeUS = j.clock()
	if f := j.thread.f.Load(); e.Thread == 0 && f != nil {
		e.Thread = (*f)()
	}
	if e.Kind == event.Alloc && j.sizes != 0 {
		j.sizes = event.Mix(j.sizes, e.Size)
	}
	j.ever++
	j.Streams.note(e.Stream, j.ever)
	j.Pools.note(e.Pool, j.ever)
	switch {
	case j.count == j.limit:
		j.first = (j.first + 1) % len(j.ring)
		j.count--
		j.lost++
		if j.ever-j.taken > uint64(j.limit)+keptTaken {
			j.taken = 0 // there may never be another Take
		}
	case j.count == len(j.ring):
		ring := make([]event.Event, min(max(2*len(j.ring), 64), j.limit))
		j.appendTo(ring[:0], 0, j.count)
		j.ring, j.first = ring, 0
	}
	j.ring[(j.first+j.count)%len(j.ring)] = e
	j.count++
}

// oldest is the oldest event whose stream and pool may still be asked for: of those in the ring, and of those that were
// taken last.
//
// +checklocks:j.mu
func (j *Journal) oldest() uint64 {
	if j.taken != 0 {
		return j.taken
	}
	return j.ever - uint64(j.count) + 1
}

// keptTaken is how many events after a Take, beyond those that the ring holds, its streams and pools are still named.
const keptTaken = 1 << 16
