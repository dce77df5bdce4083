package timeline

import "errors"

// WaitFor makes later work of t wait on the GPU for what other, which may be of another device, had queued by the end of the
// epoch.
func (t *Stream) WaitFor(other *Stream, epoch uint64) error {
	if t == other || epoch == 0 {
		return nil
	}
	t.waitMu.Lock()
	defer t.waitMu.Unlock()
	if t.dev == other.dev {
		if t.waited[other] >= epoch {
			return nil
		}
		t.prune()
	}
	event, err := t.queueWait(other, epoch)
	if event != 0 && t.dev == other.dev {
		if t.waited == nil {
			t.waited = map[*Stream]uint64{}
		}
		t.waited[other] = event
	}
	return err
}

// queueWait queues the wait, and returns the epoch that it covers; 0 where there is nothing to wait for.
func (t *Stream) queueWait(other *Stream, epoch uint64) (uint64, error) {
	other.mu.Lock()
	defer other.mu.Unlock()
	if other.over >= epoch {
		return 0, nil
	}
	if err := t.Usable(); err != nil {
		return 0, err
	}
	c, err := other.covering(epoch)
	if err != nil {
		return 0, err
	}
	h := t.dev.health
	if err := h.Driver.StreamWaitEvent(h.ID, t.handle, c.event); err != nil {
		return 0, h.Failed(err)
	}
	return c.epoch, nil
}

// prune drops the waits that are over, each time that their number has doubled.
//
// +checklocks:t.waitMu
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

// Sync waits on the host until the epoch is over. No lock may be held.
func (t *Stream) Sync(epoch uint64) error {
	whole, err := t.syncEvent(epoch)
	if whole {
		return t.dev.syncWhole([]Wait{{t, epoch}})
	}
	return err
}

// syncEvent is Sync where an event covers the epoch. Where none does, as nothing was recorded on the stream, it ends the
// epoch, waits for nothing, and reports that only a wait for the whole context covers it.
func (t *Stream) syncEvent(epoch uint64) (whole bool, err error) {
	t.mu.Lock()
	t.poll(epoch)
	if t.over >= epoch {
		t.mu.Unlock()
		return false, nil
	}
	c, err := t.covering(epoch)
	if errors.Is(err, ErrPerThread) || errors.Is(err, ErrLost) {
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
	t.dev.CountWait()
	h := t.dev.health
	if err := h.Driver.EventSynchronize(h.ID, c.event); err != nil {
		return false, h.Failed(err)
	}
	t.ended(epoch)
	return false, nil
}
