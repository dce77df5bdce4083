package cistern

import (
	"errors"
	"sync/atomic"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/front"
	"github.com/cistern-gpu/cistern/internal/lockrank"
)

// Stream is a CUDA stream that the engine knows: by context and id, so that a recycled handle is another Stream. It is valid
// for as long as the program has it. The engine itself forgets a stream that may have been destroyed and that nothing
// depends on any more (retire.go); its next use makes it known again.
//
// # Epochs
//
// The engine numbers the time of a stream in epochs, from 1. A free is marked with the epoch that is open then; the
// epoch is closed by raising the number first and recording an event second, so that the event is recorded after
// whatever was queued before any free marked with that epoch. A closed epoch is over when its event, or that of a
// later one, is complete. Epochs close when somebody needs the order, every closeBytes of frees once a second stream
// is active, and at every free of a stream that might be destroyed next.
//
// A stream that is not promised to last is used only for those who name it: at its requests, at frees in its order and at
// the end of its captures. So all that is free in its lanes is marked with epochs that are closed then, and nothing has to
// be asked of it afterwards. A free in the order of another stream (FreeOn) waits for that one and leaves no mark.
type Stream struct {
	dev *Device
	// index is the stream's place in Device.streams, -1 while the device does not know it. Changed by holders of Device.mu.
	index  atomic.Int32
	handle cuda.Stream
	id     cuda.StreamID
	// durable: the stream is never destroyed, so an epoch can still be closed later. The default stream is.
	durable atomic.Bool
	// eager: an event is recorded behind every free, because the stream might not exist later, or because somebody waits
	// for its frees in the host's order.
	eager atomic.Bool
	// perThread: the handle means another stream in every thread, so nothing is ever recorded on it.
	perThread bool

	epoch     atomic.Uint64        // the open epoch
	capturing atomic.Uint32        // number of the capture under way that was announced (Device.BeginCapture), 0 none
	route     atomic.Pointer[Pool] // set by setRoute
	front     atomic.Pointer[front.Front]

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
	// +checklocks:dev.mu
	active bool // it has allocated
	// +checklocks:dev.mu
	routes []route // those not ended; the last one counts
	// +checklocks:dev.mu
	order *graphOrder // while it is captured; nil where nobody asked
	// waited is, by stream, the epoch of that stream which this one waits for, and pruneAt the length at which those that
	// are over are next dropped.
	waited  map[*Stream]uint64 // +checklocks:dev.mu
	pruneAt int                // +checklocks:dev.mu
	// +checklocks:dev.mu
	marked bool // something depends on it, as Device.forgetStreams found
}

type closedEpoch struct {
	epoch uint64
	event cuda.Event
}

const (
	// closeBytes is how much a stream frees before its epoch is closed, once a second stream is active: a taker then
	// waits for work of at most this much allocation beyond what it must. An event record costs 0.15 us on an H200.
	closeBytes = 32 << 20
	// maxRing bounds the events a stream holds. When it is full the newest entry is recorded again instead.
	maxRing = 64
	// maxRerun bounds how often the event of a short-lived stream is recorded again before a new one is used, so that
	// the older one can be seen complete while frees go on.
	maxRerun = 64
)

var (
	errPerThread = errors.New("the per-thread default stream cannot be ordered from another thread")
	errCapturing = errors.New("the stream is being captured")
	errLost      = errors.New("the stream may have been destroyed, and no event was recorded on it before")
)

// usable says, as an error, why nothing may be recorded on the stream, nor the stream be made to wait: it is being
// captured, whether or not that was announced, or it is the legacy default stream and a stream that blocks with it is
// captured, or its context is broken. The caller holds t.mu or is about to use the stream's own queue.
func (t *Stream) usable() error {
	switch {
	case t.perThread:
		return errPerThread
	case t.capturing.Load() != 0:
		return errCapturing
	}
	if err := t.dev.health.Broken(); err != nil {
		return err
	}
	status, _, err := t.dev.drv.StreamCapture(t.dev.id, t.handle)
	if errors.Is(err, cuda.ErrStreamCaptureImplicit) || err == nil && status != cuda.CaptureNone {
		return errCapturing
	}
	if err != nil {
		return t.dev.health.Failed(err)
	}
	return nil
}

// ownReason tells the reasons of this file, which go away or are a property of the stream, from a driver's error.
func ownReason(err error) bool {
	return errors.Is(err, errPerThread) || errors.Is(err, errCapturing) || errors.Is(err, errLost)
}

// Handle is the CUDA handle that the stream was made known by.
func (t *Stream) Handle() cuda.Stream { return t.handle }

// ID identifies the stream for the life of the process.
func (t *Stream) ID() cuda.StreamID { return t.id }

// Device is the device the stream belongs to.
func (t *Stream) Device() *Device { return t.dev }

// close closes the open epoch with an event, for a caller who names the stream, which therefore exists.
func (t *Stream) close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.closeLocked(false)
}

// closeLate is close for those who only found the stream to be the last user of memory.
func (t *Stream) closeLate() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.closeLateLocked()
}

// +checklocks:t.mu
func (t *Stream) closeLateLocked() error {
	if t.lost {
		return errLost
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
	} else if !ownReason(err) && !t.durable.Load() {
		t.lost = true
	}
	return err
}

// open opens an epoch, for Go code and for C code that frees in the stream's order.
func (t *Stream) open(epoch uint64) {
	t.epoch.Store(epoch)
	if f := t.front.Load(); f != nil {
		f.SetEpoch(epoch)
	}
}

// +checklocks:t.mu
func (t *Stream) record(again bool) error {
	if err := t.usable(); err != nil {
		return err
	}
	t.asked = 0
	e := t.epoch.Load()
	t.open(e + 1)
	drv := t.dev.drv
	if n := len(t.ring); n > 0 && (n >= maxRing || again && t.rerun < maxRerun) {
		last := &t.ring[n-1]
		if err := drv.EventRecord(t.dev.id, last.event, t.handle); err != nil {
			return t.dev.health.Failed(err)
		}
		last.epoch = e
		t.rerun++
		return nil
	}
	ev, err := t.dev.event()
	if err != nil {
		return err
	}
	if err := drv.EventRecord(t.dev.id, ev, t.handle); err != nil {
		t.dev.putEvent(ev)
		return t.dev.health.Failed(err)
	}
	t.rerun = 0
	t.ring = append(t.ring, closedEpoch{e, ev})
	return nil
}

// isOver reports whether the host knows that the epoch is over, asking the driver about its event if need be.
func (t *Stream) isOver(epoch uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.poll(epoch)
	return t.over >= epoch
}

// poll asks for the completion of closed epochs, oldest first, up to the given one. What was seen incomplete is not
// asked again in the same turn: one request on the ladder looks at thousands of blocks.
//
// +checklocks:t.mu
func (t *Stream) poll(epoch uint64) {
	turn := t.dev.a.turn.Load()
	done := 0
	for done < len(t.ring) {
		c := t.ring[done]
		if c.epoch > t.over { // else it was waited for
			if t.over >= epoch || t.asked == turn {
				break
			}
			ok, err := t.dev.drv.EventQuery(t.dev.id, c.event)
			if err != nil {
				t.dev.health.Failed(err)
				break
			}
			if !ok {
				t.asked = turn
				break
			}
			t.over = c.epoch
		}
		t.dev.putEvent(c.event)
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

// waitFor makes later work of t wait on the GPU for what other had queued by the end of the epoch. The caller holds
// Device.mu.
//
// +checklocks:t.dev.mu
func (t *Stream) waitFor(other *Stream, epoch uint64) error {
	if t == other || epoch == 0 {
		return nil
	}
	sameDevice := t.dev == other.dev // whose lock the caller holds
	if sameDevice {
		if t.waited[other] >= epoch {
			return nil
		}
		t.prune()
	}
	other.mu.Lock()
	defer other.mu.Unlock()
	if other.over >= epoch {
		return nil
	}
	if err := t.usable(); err != nil {
		return err
	}
	c, err := other.covering(epoch)
	if err != nil {
		return err
	}
	if err := t.dev.drv.StreamWaitEvent(t.dev.id, t.handle, c.event); err != nil {
		return t.dev.health.Failed(err)
	}
	if sameDevice {
		if t.waited == nil {
			t.waited = map[*Stream]uint64{}
		}
		t.waited[other] = c.epoch
	}
	return nil
}

// prune drops the waits that are over, each time that their number has doubled.
//
// +checklocks:t.dev.mu
func (t *Stream) prune() {
	if len(t.waited) < max(t.pruneAt, 64) {
		return
	}
	for other, epoch := range t.waited {
		other.mu.Lock()
		if other.over >= epoch {
			delete(t.waited, other)
		}
		other.mu.Unlock()
	}
	t.pruneAt = 2 * len(t.waited)
}

// settle waits on the host until the epoch is over. No other lock may be held.
func (t *Stream) settle(epoch uint64) error {
	whole, err := t.settleOwn(epoch)
	if whole {
		return t.dev.settleWhole([]wait{{t, epoch}})
	}
	return err
}

// settleOwn is settle where an event covers the epoch. Where none does, as nothing was recorded on the stream, it ends the
// epoch, waits for nothing, and reports that only a wait for the whole context covers it.
func (t *Stream) settleOwn(epoch uint64) (whole bool, err error) {
	t.mu.Lock()
	t.poll(epoch)
	if t.over >= epoch {
		t.mu.Unlock()
		return false, nil
	}
	c, err := t.covering(epoch)
	if errors.Is(err, errPerThread) || errors.Is(err, errLost) {
		if epoch >= t.epoch.Load() {
			t.open(epoch + 1)
		}
		t.mu.Unlock()
		return true, nil
	}
	t.mu.Unlock()
	if err != nil {
		return false, err
	}
	t.dev.syncs.Add(1)
	if err := t.dev.drv.EventSynchronize(t.dev.id, c.event); err != nil {
		return false, t.dev.health.Failed(err)
	}
	t.ended(epoch)
	return false, nil
}

// settleWhole waits for the context, which covers epochs of the device's streams that have ended. No lock may be held.
func (d *Device) settleWhole(waits []wait) error {
	if err := d.waitAll(d.id); err != nil {
		return d.health.Failed(err)
	}
	for _, w := range waits {
		w.stream.ended(w.epoch)
	}
	return nil
}

// ended notes that an epoch is over.
func (t *Stream) ended(epoch uint64) {
	t.mu.Lock()
	t.over = max(t.over, epoch)
	t.mu.Unlock()
}

// waitAll waits on the host for all work of the context of a device, this one or a peer; not while a capture is announced
// there (errCapturing). No lock may be held.
func (d *Device) waitAll(of cuda.Device) error {
	gate := &d.a.gates[of]
	if !gate.startWait() {
		return errCapturing
	}
	defer gate.endWait()
	d.syncs.Add(1)
	return d.drv.ContextSynchronize(of)
}

// freed notes a free: it closes the epoch where that is to be done at once.
func (t *Stream) freed() {
	if !t.eager.Load() || t.perThread || t.capturing.Load() != 0 {
		return
	}
	t.mu.Lock()
	t.closeLocked(!t.durable.Load()) // an error is kept by the device; the memory stays unavailable to other streams
	t.mu.Unlock()
}

// StreamOption qualifies a stream when it is made known.
type StreamOption uint8

const (
	// StreamDurable promises that the stream is not destroyed while the allocator is in use, as PyTorch's pooled
	// streams are not. Its frees then need no event of their own.
	StreamDurable StreamOption = 1 << iota
)

// Stream makes a CUDA stream known to the device. Look a stream up once and keep the result: the look-up asks the
// driver for the stream's id. The per-thread default stream is the calling thread's.
func (d *Device) Stream(h cuda.Stream, opts ...StreamOption) (*Stream, error) {
	var o StreamOption
	for _, x := range opts {
		o |= x
	}
	if t := d.capturedStream(h); t != nil {
		t.qualify(o)
		return t, nil
	}
	id, err := d.drv.StreamID(d.id, h)
	if err != nil {
		return nil, d.health.Failed(err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.byID[id] == nil {
		d.retire()
	}
	t := d.byID[id]
	if t == nil {
		if t = d.gone[id].Value(); t == nil {
			t = d.newStream(id, h)
		}
		d.enlist(t)
	}
	t.qualify(o)
	return t, nil
}

// qualify notes what a caller promises of a stream that is known.
func (t *Stream) qualify(o StreamOption) {
	if o&StreamDurable != 0 {
		t.durable.Store(true)
		t.eager.Store(false)
	}
}

// capturedStream is the stream of that handle whose capture is announced, nil if there is none. It exists until the capture
// ends, and until then the driver may give it another id (cuda.Driver.StreamID).
func (d *Device) capturedStream(h cuda.Stream) *Stream {
	if h == cuda.StreamPerThread || !d.gate.announced() {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, t := range d.capturing {
		if t.handle == h {
			return t
		}
	}
	return nil
}

func (d *Device) newStream(id cuda.StreamID, h cuda.Stream) *Stream {
	t := &Stream{dev: d, handle: h, id: id, perThread: h == cuda.StreamPerThread, mu: lockrank.Mutex{Rank: lockrank.Stream}}
	t.index.Store(-1)
	t.durable.Store(h == cuda.StreamNull || h == cuda.StreamLegacy)
	t.eager.Store(!t.durable.Load())
	t.epoch.Store(1)
	return t
}

// number is by what events name the stream.
//
// +checklocks:t.dev.mu
func (t *Stream) number() uint32 { return uint32(t.index.Load()) }
