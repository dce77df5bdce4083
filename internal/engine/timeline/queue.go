package timeline

import (
	"errors"
	"sync/atomic"

	"github.com/cistern-gpu/cistern/cuda"
)

// Queue is a CUDA stream as the driver has it: its handle, how long it exists, and what is queued there.
type Queue struct {
	dev    *Device
	handle cuda.Stream
	id     cuda.StreamID
	// durable: the stream is never destroyed, so an epoch can still be closed later.
	durable atomic.Bool
	// eager: an event is recorded behind every free, because the stream might not exist later, or because its frees are
	// waited for on the host.
	eager   atomic.Bool
	capture atomic.Uint32 // number of the announced capture that is under way, 0 none
}

// Handle is the CUDA handle that the stream was made known by.
func (q *Queue) Handle() cuda.Stream { return q.handle }

// ID identifies the stream for the life of the process.
func (q *Queue) ID() cuda.StreamID { return q.id }

// PerThread reports whether the handle means another stream in every thread, so that nothing is ever recorded on it.
func (q *Queue) PerThread() bool { return q.handle == cuda.StreamPerThread }

// Broken reports whether the stream's context is broken, so that all of its work is over.
func (q *Queue) Broken() bool { return q.dev.health.Broken() != nil }

// Durable reports whether the stream is never destroyed.
func (q *Queue) Durable() bool { return q.durable.Load() }

// SetDurable says whether the stream is never destroyed. Frees of one that is need no event of their own.
func (q *Queue) SetDurable(on bool) {
	q.durable.Store(on)
	q.eager.Store(!on)
}

// Eager reports whether an event is recorded behind every free.
func (q *Queue) Eager() bool { return q.eager.Load() }

// SetEager has an event recorded behind every free from now on.
func (q *Queue) SetEager() { q.eager.Store(true) }

// Usable says, as an error, why nothing may be recorded on the stream, nor the stream be made to wait: it is being
// captured, whether or not that was announced, or it is the legacy default stream and a stream that blocks with it is
// captured, or its context is broken.
func (q *Queue) Usable() error {
	switch {
	case q.PerThread():
		return ErrPerThread
	case q.capture.Load() != 0:
		return ErrCapturing
	}
	h := q.dev.health
	if err := h.Broken(); err != nil {
		return err
	}
	status, _, err := h.Driver.StreamCapture(h.ID, q.handle)
	if errors.Is(err, cuda.ErrStreamCaptureImplicit) || err == nil && status != cuda.CaptureNone {
		return ErrCapturing
	}
	if err != nil {
		return h.Failed(err)
	}
	return nil
}

// record queues an event.
func (q *Queue) record(e cuda.Event) error {
	h := q.dev.health
	if err := h.Driver.EventRecord(h.ID, e, q.handle); err != nil {
		return h.Failed(err)
	}
	return nil
}

// wait queues a wait for an event, which may be of another device.
func (q *Queue) wait(e cuda.Event) error {
	h := q.dev.health
	if err := h.Driver.StreamWaitEvent(h.ID, q.handle, e); err != nil {
		return h.Failed(err)
	}
	return nil
}
