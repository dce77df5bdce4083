package timeline

import (
	"errors"

	"github.com/cistern-gpu/cistern/internal/lockrank"
)

// gpuWaits are the epochs of other streams of the device that a stream waits for on the GPU.
type gpuWaits struct {
	mu lockrank.Mutex // held over no wait
	// epochs is the latest by stream, and pruneAt how many there are when those that are over are next dropped.
	epochs  map[*Stream]uint64 // +checklocks:mu
	pruneAt int                // +checklocks:mu
}

// +checklocks:w.mu
func (w *gpuWaits) add(other *Stream, epoch uint64) {
	if w.epochs == nil {
		w.epochs = map[*Stream]uint64{}
	}
	w.epochs[other] = epoch
}

// prune drops the waits that are over, each time that their number has doubled.
//
// +checklocks:w.mu
func (w *gpuWaits) prune() {
	if len(w.epochs) < max(w.pruneAt, 64) {
		return
	}
	for other, epoch := range w.epochs {
		other.epochs.mu.Lock()
		if other.epochs.over >= epoch {
			delete(w.epochs, other)
		}
		other.epochs.mu.Unlock()
	}
	w.pruneAt = 2 * len(w.epochs)
}

func (w *gpuWaits) size() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.epochs)
}

func (w *gpuWaits) forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.epochs, w.pruneAt = nil, 0
}

// WaitFor makes later work of t wait on the GPU for what other, which may be of another device, had queued by the end of the
// epoch.
func (t *Stream) WaitFor(other *Stream, epoch uint64) error {
	if t == other || epoch == 0 {
		return nil
	}
	t.waits.mu.Lock()
	defer t.waits.mu.Unlock()
	if t.Device() == other.Device() {
		if t.waits.epochs[other] >= epoch {
			return nil
		}
		t.waits.prune()
	}
	event, err := t.queueWait(other, epoch)
	if event != 0 && t.Device() == other.Device() {
		t.waits.add(other, event)
	}
	return err
}

// queueWait queues the wait, and returns the epoch that it covers; 0 where there is nothing to wait for.
func (t *Stream) queueWait(other *Stream, epoch uint64) (uint64, error) {
	other.epochs.mu.Lock()
	defer other.epochs.mu.Unlock()
	if other.epochs.over >= epoch {
		return 0, nil
	}
	if err := t.Queue.Usable(); err != nil {
		return 0, err
	}
	c, err := other.epochs.covering(&other.Queue, epoch)
	if err != nil {
		return 0, err
	}
	if err := t.Queue.wait(c.event); err != nil {
		return 0, err
	}
	return c.epoch, nil
}

// Sync waits on the host until the epoch is over. No lock may be held.
func (t *Stream) Sync(epoch uint64) error {
	whole, err := t.syncEvent(epoch)
	if whole {
		return t.Queue.dev.syncWhole([]Wait{{t, epoch}})
	}
	return err
}

// syncEvent is Sync where an event covers the epoch. Where none does, as nothing was recorded on the stream, it ends the
// epoch, waits for nothing, and reports that only a wait for the whole context covers it.
func (t *Stream) syncEvent(epoch uint64) (whole bool, err error) {
	t.epochs.mu.Lock()
	t.epochs.poll(t.Queue.dev, epoch)
	if t.epochs.over >= epoch {
		t.epochs.mu.Unlock()
		return false, nil
	}
	c, err := t.epochs.covering(&t.Queue, epoch)
	if errors.Is(err, ErrPerThread) || errors.Is(err, ErrLost) {
		if epoch >= t.epochs.open.Load() {
			t.epochs.begin(epoch + 1)
		}
		t.epochs.mu.Unlock()
		return true, nil
	}
	t.epochs.mu.Unlock()
	if err != nil {
		return false, err
	}
	t.Queue.dev.CountWait()
	h := t.Queue.dev.health
	if err := h.Driver.EventSynchronize(h.ID, c.event); err != nil {
		return false, h.Failed(err)
	}
	t.ended(epoch)
	return false, nil
}
