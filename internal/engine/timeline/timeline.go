// Package timeline says what the GPU is known to be done with: streams numbered in epochs, the events that close epochs,
// waits for them on the GPU and on the host, and the order of captured work.
//
// # Epochs
//
// The time of a stream is numbered in epochs, from 1. A free is marked with the epoch that is open then; the epoch is
// closed by raising the number first and recording an event second, so that the event is recorded after whatever was queued
// before any free marked with that epoch. A closed epoch is over when its event, or that of a later one, is complete.
// Epochs close when their order is needed, every CloseBytes of frees once a second stream is active, and at every free of a
// stream that might be destroyed next.
//
// A stream that is not promised to last is used only while its caller names it: at its requests, at frees in its order and
// at the end of its captures. So all that is free on it is marked with epochs that are closed then, and nothing has to be
// asked of it afterwards. A free in the order of another stream waits for that one and leaves no mark.
//
// # Locks
//
// A stream has two leaf locks, of ranks lockrank.Waits and lockrank.Stream; the cache of events has another. Functions that
// wait for the GPU say so, and want no lock of the engine to be held.
package timeline

import (
	"cmp"
	"errors"
	"sync/atomic"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/health"
	"github.com/cistern-gpu/cistern/internal/lockrank"
)

// The reasons why nothing can be recorded on a stream, nor the stream be made to wait. They pass, or are a property of the
// stream.
var (
	ErrPerThread = errors.New("the per-thread default stream cannot be ordered from another thread")
	ErrCapturing = errors.New("the stream is being captured")
	ErrLost      = errors.New("the stream may have been destroyed, and no event was recorded on it before")
)

// Unordered distinguishes the reasons above from a driver's error.
func Unordered(err error) bool {
	return errors.Is(err, ErrPerThread) || errors.Is(err, ErrCapturing) || errors.Is(err, ErrLost)
}

// Turns counts the occasions on which the GPU is asked how far it is: slow requests and waits. An event that was seen
// incomplete is not asked about again in the same turn, as one request looks at thousands of blocks. The devices of a process
// share one.
type Turns struct{ n atomic.Uint64 }

// Next begins a turn.
func (t *Turns) Next() { t.n.Add(1) }

// Device is the time of one device: its events, and the waits of host threads for it.
type Device struct {
	health *health.State
	gates  []Gate // of all devices, by ordinal
	turns  *Turns
	waits  atomic.Int64
	shared atomic.Bool // more than one stream has allocated

	mu lockrank.Mutex
	// +checklocks:mu
	events []cuda.Event // unused ones
}

// New is the time of a device. The gates are those of all devices.
func New(h *health.State, gates []Gate, turns *Turns) *Device {
	return &Device{health: h, gates: gates, turns: turns, mu: lockrank.Mutex{Rank: lockrank.Events}}
}

// Gate is the gate of the device.
func (d *Device) Gate() *Gate { return &d.gates[d.health.ID] }

// GateOf is the gate of another device.
func (d *Device) GateOf(peer cuda.Device) *Gate { return &d.gates[peer] }

// Shared reports whether more than one stream has allocated, so that one may wait for another.
func (d *Device) Shared() bool { return d.shared.Load() }

// SetShared notes that more than one stream has allocated.
func (d *Device) SetShared() { d.shared.Store(true) }

// Event is an event from the cache, or a new one.
func (d *Device) Event() (cuda.Event, error) {
	d.mu.Lock()
	if n := len(d.events); n > 0 {
		e := d.events[n-1]
		d.events = d.events[:n-1]
		d.mu.Unlock()
		return e, nil
	}
	d.mu.Unlock()
	e, err := d.health.Driver.EventCreate(d.health.ID)
	if err != nil {
		return 0, d.health.Failed(err)
	}
	return e, nil
}

// PutEvent gives an event back to the cache.
func (d *Device) PutEvent(e cuda.Event) {
	d.mu.Lock()
	d.events = append(d.events, e)
	d.mu.Unlock()
}

// DestroyEvents destroys the events of the cache. On error the rest stays there.
func (d *Device) DestroyEvents() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for n := len(d.events); n > 0; n-- {
		if err := d.health.Driver.EventDestroy(d.health.ID, d.events[n-1]); err != nil {
			return d.health.Failed(err)
		}
		d.events = d.events[:n-1]
	}
	return nil
}

// CountWait counts a wait of a host thread for the GPU; Waits is their number, until ResetWaits.
func (d *Device) CountWait()   { d.waits.Add(1) }
func (d *Device) Waits() int64 { return d.waits.Load() }
func (d *Device) ResetWaits()  { d.waits.Store(0) }

// SyncContext waits on the host for all work of the context of a device, this one or a peer; not while a capture is
// announced there (ErrCapturing). No lock may be held.
func (d *Device) SyncContext(of cuda.Device) error {
	gate := &d.gates[of]
	if !gate.startWait() {
		return ErrCapturing
	}
	defer gate.endWait()
	d.CountWait()
	return d.health.Driver.ContextSynchronize(of)
}

// syncWhole waits for the context, which covers epochs of the device's streams that have ended. No lock may be held.
func (d *Device) syncWhole(waits []Wait) error {
	if err := d.SyncContext(d.health.ID); err != nil {
		return d.health.Failed(err)
	}
	for _, w := range waits {
		w.Stream.ended(w.Epoch)
	}
	return nil
}

// Wait is an epoch of a stream that must be over.
type Wait struct {
	Stream *Stream
	Epoch  uint64
}

// Waits are epochs that must be over, one for each stream.
type Waits []Wait

// Add adds an epoch.
func (w *Waits) Add(t *Stream, epoch uint64) {
	for i := range *w {
		if x := &(*w)[i]; x.Stream == t {
			x.Epoch = max(x.Epoch, epoch)
			return
		}
	}
	*w = append(*w, Wait{t, epoch})
}

// AddUnfinished adds an epoch unless it is known to be over.
func (w *Waits) AddUnfinished(t *Stream, epoch uint64) {
	if !t.IsOver(epoch) {
		w.Add(t, epoch)
	}
}

// Sync waits until the host knows the epochs to be over, except of streams that are being captured. The work of another
// device whose context is broken is over. No lock may be held.
func (d *Device) Sync(waits Waits) error {
	defer d.turns.Next()
	var first error
	failed := func(o *Device, err error) {
		if o != d && o.health.Broken() != nil {
			return
		}
		if err != nil && !Unordered(err) {
			first = cmp.Or(first, err)
		}
	}
	whole := map[*Device][]Wait{}
	for _, w := range waits {
		only, err := w.Stream.syncEvent(w.Epoch)
		if only {
			whole[w.Stream.Device()] = append(whole[w.Stream.Device()], w)
		}
		failed(w.Stream.Device(), err)
	}
	for o, waits := range whole {
		failed(o, o.syncWhole(waits))
	}
	return first
}
