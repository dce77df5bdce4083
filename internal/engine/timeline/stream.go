package timeline

import (
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/lockrank"
	"github.com/cistern-gpu/cistern/internal/magazine"
)

// Stream is the time of one CUDA stream. A recycled handle is another Stream.
type Stream struct {
	Queue  Queue
	epochs epochs
	waits  gpuWaits
	// Marked is the engine's, guarded by its device's lock: something depends on the stream.
	Marked bool
}

// Init makes t the time of a stream of the device. The default stream is never destroyed.
func (t *Stream) Init(d *Device, id cuda.StreamID, h cuda.Stream) {
	t.Queue.dev, t.Queue.handle, t.Queue.id = d, h, id
	t.Queue.SetDurable(h == cuda.StreamNull || h == cuda.StreamLegacy)
	t.epochs.mu.Rank, t.waits.mu.Rank = lockrank.Stream, lockrank.Waits
	t.epochs.open.Store(1)
}

// Device is the time of the stream's device.
func (t *Stream) Device() *Device { return t.Queue.dev }

// Epoch is the open epoch.
func (t *Stream) Epoch() uint64 { return t.epochs.open.Load() }

// Capture is the number of the announced capture that is under way, 0 for none.
func (t *Stream) Capture() uint32 { return t.Queue.capture.Load() }

// SetCapture begins an announced capture, or ends it (0). No thread is recording on the stream meanwhile.
func (t *Stream) SetCapture(number uint32) {
	t.epochs.mu.Lock()
	t.Queue.capture.Store(number)
	t.epochs.mu.Unlock()
}

// Magazine is the memory in which C code frees in the stream's order, nil if there is none.
func (t *Stream) Magazine() *magazine.Magazine { return t.epochs.magazine.Load() }

// SetMagazine publishes the open epoch there from now on.
func (t *Stream) SetMagazine(f *magazine.Magazine) {
	t.epochs.mu.Lock()
	f.SetEpoch(t.epochs.open.Load())
	t.epochs.magazine.Store(f)
	t.epochs.mu.Unlock()
}

// Close closes the open epoch with an event, for a caller that names the stream, which therefore exists.
func (t *Stream) Close() error {
	t.epochs.mu.Lock()
	defer t.epochs.mu.Unlock()
	return t.epochs.close(&t.Queue, false)
}

// CloseLate is Close for a caller that only found the stream to be the last user of memory.
func (t *Stream) CloseLate() error {
	t.epochs.mu.Lock()
	defer t.epochs.mu.Unlock()
	return t.epochs.closeLate(&t.Queue)
}

// Freed notes a free: it closes the epoch where that has to be done at once.
func (t *Stream) Freed() {
	if !t.Queue.Eager() || t.Queue.PerThread() || t.Queue.capture.Load() != 0 {
		return
	}
	t.epochs.mu.Lock()
	t.epochs.close(&t.Queue, !t.Queue.Durable()) // an error is kept by the device; the memory stays unavailable to other streams
	t.epochs.mu.Unlock()
}

// IsOver reports whether the host knows that the epoch is over, asking the driver about its event if need be.
func (t *Stream) IsOver(epoch uint64) bool {
	t.epochs.mu.Lock()
	defer t.epochs.mu.Unlock()
	t.epochs.poll(t.Queue.dev, epoch)
	return t.epochs.over >= epoch
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
	case epoch < t.epochs.open.Load():
		return Marked
	}
	return Running
}

// Idle reports whether every closed epoch is over, and the stream has no event any more.
func (t *Stream) Idle() bool {
	t.epochs.mu.Lock()
	defer t.epochs.mu.Unlock()
	t.epochs.poll(t.Queue.dev, t.epochs.open.Load()-1) // which gives its events back
	return len(t.epochs.ring) == 0
}

// Forget drops what the stream keeps beyond its epochs. It is idle.
func (t *Stream) Forget() {
	t.waits.forget()
	t.epochs.mu.Lock()
	t.epochs.ring = nil
	t.epochs.mu.Unlock()
}

// Finish gives the stream's events back: all work on it is over.
func (t *Stream) Finish() {
	t.epochs.mu.Lock()
	defer t.epochs.mu.Unlock()
	for _, c := range t.epochs.ring {
		t.Queue.dev.PutEvent(c.event)
	}
	t.epochs.ring = nil
	t.epochs.over = t.epochs.open.Load() - 1
}

// Size is how many waits and events the stream keeps.
func (t *Stream) Size() (waits, events int) {
	waits = t.waits.size()
	t.epochs.mu.Lock()
	defer t.epochs.mu.Unlock()
	return waits, cap(t.epochs.ring)
}

// ended notes that an epoch is over.
func (t *Stream) ended(epoch uint64) {
	t.epochs.mu.Lock()
	t.epochs.over = max(t.epochs.over, epoch)
	t.epochs.mu.Unlock()
}
