package timeline

import (
	"sync/atomic"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/lockrank"
	"github.com/cistern-gpu/cistern/internal/magazine"
)

// epochs are the open epoch of a stream, and its closed ones with the events that close them.
type epochs struct {
	open     atomic.Uint64
	magazine atomic.Pointer[magazine.Magazine] // the open epoch is published there; nil: there is none

	mu lockrank.Mutex
	// +checklocks:mu
	ring []closedEpoch // closed epochs that are not known to be over, oldest first
	// +checklocks:mu
	over uint64 // every epoch up to this one is over
	// +checklocks:mu
	asked uint64 // the turn in which the oldest event of ring was last seen incomplete
	// +checklocks:mu
	rerun int // how often the last entry of ring was recorded again
	// +checklocks:mu
	lost bool // the last record failed, and the stream may be gone by now: only the context covers it
}

type closedEpoch struct {
	epoch uint64
	event cuda.Event
}

const (
	// CloseBytes is how much a stream frees before its epoch is closed, once a second stream is active: a taker then
	// waits for work of at most this much allocation beyond what it must. An event record costs 0.15 us on an H200.
	CloseBytes = 32 << 20
	// maxRing bounds the events a stream holds. When it is full the newest entry is recorded again instead.
	maxRing = 64
	// maxRerun bounds how often the event of a short-lived stream is recorded again before a new one is used, so that
	// the older one can be seen complete while frees go on.
	maxRerun = 64
)

// begin opens an epoch, for Go code and for C code that frees in the stream's order.
func (e *epochs) begin(epoch uint64) {
	e.open.Store(epoch)
	if f := e.magazine.Load(); f != nil {
		f.SetEpoch(epoch)
	}
}

// closeLate closes the open epoch of a stream that may not exist any more.
//
// +checklocks:e.mu
func (e *epochs) closeLate(q *Queue) error {
	if e.lost {
		return ErrLost
	}
	return e.close(q, false)
}

// close closes the open epoch. again allows the last event to be recorded anew instead of using another one.
//
// +checklocks:e.mu
func (e *epochs) close(q *Queue, again bool) error {
	err := e.record(q, again)
	if err == nil {
		e.lost = false
	} else if !Unordered(err) && !q.Durable() {
		e.lost = true
	}
	return err
}

// +checklocks:e.mu
func (e *epochs) record(q *Queue, again bool) error {
	if err := q.Usable(); err != nil {
		return err
	}
	e.asked = 0
	epoch := e.open.Load()
	e.begin(epoch + 1)
	if n := len(e.ring); n > 0 && (n >= maxRing || again && e.rerun < maxRerun) {
		last := &e.ring[n-1]
		if err := q.record(last.event); err != nil {
			return err
		}
		last.epoch = epoch
		e.rerun++
		return nil
	}
	ev, err := q.dev.Event()
	if err != nil {
		return err
	}
	if err := q.record(ev); err != nil {
		q.dev.PutEvent(ev)
		return err
	}
	e.rerun = 0
	e.ring = append(e.ring, closedEpoch{epoch, ev})
	return nil
}

// poll asks for the completion of closed epochs, oldest first, up to the given one. An event that was seen incomplete is not
// asked about again in the same turn.
//
// +checklocks:e.mu
func (e *epochs) poll(d *Device, epoch uint64) {
	turn := d.turns.n.Load()
	h := d.health
	done := 0
	for done < len(e.ring) {
		c := e.ring[done]
		if c.epoch > e.over { // else it was waited for
			if e.over >= epoch || e.asked == turn {
				break
			}
			ok, err := h.Driver.EventQuery(h.ID, c.event)
			if err != nil {
				h.Failed(err)
				break
			}
			if !ok {
				e.asked = turn
				break
			}
			e.over = c.epoch
		}
		d.PutEvent(c.event)
		done++
	}
	if done > 0 {
		e.ring = e.ring[:copy(e.ring, e.ring[done:])]
	}
}

// covering is the event of the first closed epoch at or after the given one, closing the open one if it is not closed
// yet.
//
// +checklocks:e.mu
func (e *epochs) covering(q *Queue, epoch uint64) (closedEpoch, error) {
	if epoch >= e.open.Load() {
		if err := e.closeLate(q); err != nil {
			return closedEpoch{}, err
		}
	}
	for _, c := range e.ring {
		if c.epoch >= epoch {
			return c, nil
		}
	}
	// The epoch was closed but its event could not be recorded; a later event covers it.
	if err := e.closeLate(q); err != nil {
		return closedEpoch{}, err
	}
	return e.ring[len(e.ring)-1], nil
}
