package timeline

import (
	"errors"
	"sync/atomic"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/lockrank"
	"github.com/cistern-gpu/cistern/internal/magazine"
)

// Stream is the time of one CUDA stream. A recycled handle is another Stream.
type Stream struct {
	dev    *Device
	handle cuda.Stream
	id     cuda.StreamID
	// durable: the stream is never destroyed, so an epoch can still be closed later.
	durable atomic.Bool
	// eager: an event is recorded behind every free, because the stream might not exist later, or because its frees are
	// waited for on the host.
	eager atomic.Bool
	// perThread: the handle means another stream in every thread, so nothing is ever recorded on it.
	perThread bool
	// Marked is the engine's, guarded by its device's lock: something depends on the stream.
	Marked bool

	epoch    atomic.Uint64 // the open epoch
	capture  atomic.Uint32 // number of the announced capture that is under way, 0 none
	magazine atomic.Pointer[magazine.Magazine]

	waitMu lockrank.Mutex // held over no wait
	// waited is, by stream of the device, the epoch of that stream which this one waits for on the GPU, and pruneAt the
	// length at which those that are over are next dropped.
	waited  map[*Stream]uint64 // +checklocks:waitMu
	pruneAt int                // +checklocks:waitMu

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
	lost bool // the last record failed, and it may be gone by now: only the context covers it
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

// Init makes t the time of a stream of the device. The default stream is never destroyed.
func (t *Stream) Init(d *Device, id cuda.StreamID, h cuda.Stream) {
	t.dev, t.handle, t.id, t.perThread = d, h, id, h == cuda.StreamPerThread
	t.mu.Rank, t.waitMu.Rank = lockrank.Stream, lockrank.Waits
	t.SetDurable(h == cuda.StreamNull || h == cuda.StreamLegacy)
	t.epoch.Store(1)
}

// Handle is the CUDA handle that the stream was made known by.
func (t *Stream) Handle() cuda.Stream { return t.handle }

// ID identifies the stream for the life of the process.
func (t *Stream) ID() cuda.StreamID { return t.id }

// Device is the time of the stream's device.
func (t *Stream) Device() *Device { return t.dev }

// Broken reports whether the stream's context is broken, so that all of its work is over.
func (t *Stream) Broken() bool { return t.dev.health.Broken() != nil }

// Durable reports whether the stream is never destroyed.
func (t *Stream) Durable() bool { return t.durable.Load() }

// SetDurable says whether the stream is never destroyed. Frees of one that is need no event of their own.
func (t *Stream) SetDurable(on bool) {
	t.durable.Store(on)
	t.eager.Store(!on)
}

// Eager reports whether an event is recorded behind every free.
func (t *Stream) Eager() bool { return t.eager.Load() }

// SetEager has an event recorded behind every free from now on.
func (t *Stream) SetEager() { t.eager.Store(true) }

// PerThread reports whether the handle means another stream in every thread.
func (t *Stream) PerThread() bool { return t.perThread }

// Epoch is the open epoch.
func (t *Stream) Epoch() uint64 { return t.epoch.Load() }

// Capture is the number of the announced capture that is under way, 0 for none.
func (t *Stream) Capture() uint32 { return t.capture.Load() }

// SetCapture begins an announced capture, or ends it (0). No thread is recording on the stream meanwhile.
func (t *Stream) SetCapture(number uint32) {
	t.mu.Lock()
	t.capture.Store(number)
	t.mu.Unlock()
}

// Magazine is the memory in which C code frees in the stream's order, nil if there is none.
func (t *Stream) Magazine() *magazine.Magazine { return t.magazine.Load() }

// SetMagazine publishes the open epoch there from now on.
func (t *Stream) SetMagazine(f *magazine.Magazine) {
	t.mu.Lock()
	f.SetEpoch(t.epoch.Load())
	t.magazine.Store(f)
	t.mu.Unlock()
}

// open opens an epoch, for Go code and for C code that frees in the stream's order.
func (t *Stream) open(epoch uint64) {
	t.epoch.Store(epoch)
	if f := t.magazine.Load(); f != nil {
		f.SetEpoch(epoch)
	}
}

// Usable says, as an error, why nothing may be recorded on the stream, nor the stream be made to wait: it is being
// captured, whether or not that was announced, or it is the legacy default stream and a stream that blocks with it is
// captured, or its context is broken.
func (t *Stream) Usable() error {
	switch {
	case t.perThread:
		return ErrPerThread
	case t.capture.Load() != 0:
		return ErrCapturing
	}
	h := t.dev.health
	if err := h.Broken(); err != nil {
		return err
	}
	status, _, err := h.Driver.StreamCapture(h.ID, t.handle)
	if errors.Is(err, cuda.ErrStreamCaptureImplicit) || err == nil && status != cuda.CaptureNone {
		return ErrCapturing
	}
	if err != nil {
		return h.Failed(err)
	}
	return nil
}

// Close closes the open epoch with an event, for a caller that names the stream, which therefore exists.
func (t *Stream) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.closeLocked(false)
}

// CloseLate is Close for a caller that only found the stream to be the last user of memory.
func (t *Stream) CloseLate() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.closeLateLocked()
}

// Freed notes a free: it closes the epoch where that has to be done at once.
func (t *Stream) Freed() {
	if !t.eager.Load() || t.perThread || t.capture.Load() != 0 {
		return
	}
	t.mu.Lock()
	t.closeLocked(!t.durable.Load()) // an error is kept by the device; the memory stays unavailable to other streams
	t.mu.Unlock()
}

// +checklocks:t.mu
func (t *Stream) closeLateLocked() error {
	if t.lost {
		return ErrLost
	}
	return t.closeLocked(false)
}

// closeLocked closes the open epoch. again allows the last event to be recorded anew instead of using another one.
//
// +checklocks:t.mu
func (t *Stream) closeLocked(again bool) error {
	err := t.record(again)
	if err == nil {
		t.lost = false
	} else if !Unordered(err) && !t.durable.Load() {
		t.lost = true
	}
	return err
}

// +checklocks:t.mu
func (t *Stream) record(again bool) error {
	if err := t.Usable(); err != nil {
		return err
	}
	t.asked = 0
	e := t.epoch.Load()
	t.open(e + 1)
	h := t.dev.health
	if n := len(t.ring); n > 0 && (n >= maxRing || again && t.rerun < maxRerun) {
		last := &t.ring[n-1]
		if err := h.Driver.EventRecord(h.ID, last.event, t.handle); err != nil {
			return h.Failed(err)
		}
		last.epoch = e
		t.rerun++
		return nil
	}
	ev, err := t.dev.Event()
	if err != nil {
		return err
	}
	if err := h.Driver.EventRecord(h.ID, ev, t.handle); err != nil {
		t.dev.PutEvent(ev)
		return h.Failed(err)
	}
	t.rerun = 0
	t.ring = append(t.ring, closedEpoch{e, ev})
	return nil
}

// IsOver reports whether the host knows that the epoch is over, asking the driver about its event if need be.
func (t *Stream) IsOver(epoch uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.poll(epoch)
	return t.over >= epoch
}

// Progress is how well the end of an epoch is known.
type Progress int

const (
	Done    Progress = iota // it is over
	Marked                  // an event was recorded behind it
	Running                 // neither
)

// Progress is how well the end of an epoch is known; epoch 0 is over.
func (t *Stream) Progress(epoch uint64) Progress {
	switch {
	case epoch == 0 || t.IsOver(epoch):
		return Done
	case epoch < t.epoch.Load():
		return Marked
	}
	return Running
}

// Idle reports whether every closed epoch is over, and the stream has no event any more.
func (t *Stream) Idle() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.poll(t.epoch.Load() - 1) // which gives its events back
	return len(t.ring) == 0
}

// Forget drops what the stream keeps beyond its epochs. It is idle.
func (t *Stream) Forget() {
	t.waitMu.Lock()
	t.waited, t.pruneAt = nil, 0
	t.waitMu.Unlock()
	t.mu.Lock()
	t.ring = nil
	t.mu.Unlock()
}

// Finish gives the stream's events back: all work on it is over.
func (t *Stream) Finish() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, c := range t.ring {
		t.dev.PutEvent(c.event)
	}
	t.ring = nil
	t.over = t.epoch.Load() - 1
}

// Size is how many waits and events the stream keeps.
func (t *Stream) Size() (waits, events int) {
	t.waitMu.Lock()
	waits = len(t.waited)
	t.waitMu.Unlock()
	t.mu.Lock()
	defer t.mu.Unlock()
	return waits, cap(t.ring)
}

// poll asks for the completion of closed epochs, oldest first, up to the given one. What was seen incomplete is not asked
// again in the same turn.
//
// +checklocks:t.mu
func (t *Stream) poll(epoch uint64) {
	turn := t.dev.turns.n.Load()
	h := t.dev.health
	done := 0
	for done < len(t.ring) {
		c := t.ring[done]
		if c.epoch > t.over { // else it was waited for
			if t.over >= epoch || t.asked == turn {
				break
			}
			ok, err := h.Driver.EventQuery(h.ID, c.event)
			if err != nil {
				h.Failed(err)
				break
			}
			if !ok {
				t.asked = turn
				break
			}
			t.over = c.epoch
		}
		t.dev.PutEvent(c.event)
		done++
	}
	if done > 0 {
		t.ring = t.ring[:copy(t.ring, t.ring[done:])]
	}
}

// covering is the event of the first closed epoch at or after the given one, closing the open one if it is not closed
// yet.
//
// +checklocks:t.mu
func (t *Stream) covering(epoch uint64) (closedEpoch, error) {
	if epoch >= t.epoch.Load() {
		if err := t.closeLateLocked(); err != nil {
			return closedEpoch{}, err
		}
	}
	for _, c := range t.ring {
		if c.epoch >= epoch {
			return c, nil
		}
	}
	// The epoch was closed but its event could not be recorded; a later event covers it.
	if err := t.closeLateLocked(); err != nil {
		return closedEpoch{}, err
	}
	return t.ring[len(t.ring)-1], nil
}

// ended notes that an epoch is over.
func (t *Stream) ended(epoch uint64) {
	t.mu.Lock()
	t.over = max(t.over, epoch)
	t.mu.Unlock()
}
