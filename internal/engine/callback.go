package engine

import (
	"slices"

	"github.com/cistern-gpu/cistern/internal/lockrank"
)

// Functions that a reclaim stage asks for memory when the allocator has none left: those of other libraries, by
// Device.OnOutOfMemory, and a pool's own (PoolOptions.OnOutOfMemory).

// callback is such a function, and how often it is being called. Guarded by Device.mu.
type callback struct {
	f     func(need uint64) bool
	gone  bool // it is not called again
	calls int
	idle  chan struct{} // closed when no call is under way; nil: no thread waits for that
}

// Registration is what OnOutOfMemory registered.
type Registration struct {
	dev *Device
	c   *callback
}

// OnOutOfMemory registers a function that a reclaim stage calls, with no lock held, when everything else has failed and before
// a request does: another library's cache that can give memory back to the driver or to this allocator. need is the number of
// bytes that are missing. The function reports whether it did anything. It must not allocate from this device.
func (d *Device) OnOutOfMemory(f func(need uint64) bool) *Registration {
	c := &callback{f: f}
	d.mu.Lock()
	d.state.callbacks.all = append(d.state.callbacks.all, c)
	d.mu.Unlock()
	return &Registration{d, c}
}

// Remove takes the registration back. When it returns no call of the function is under way, so the function must not
// call it. A second call does nothing.
func (r *Registration) Remove() {
	d := r.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	r.c.gone = true
	// A new list: a request may be going through this one.
	d.state.callbacks.all = slices.DeleteFunc(slices.Clone(d.state.callbacks.all), func(c *callback) bool { return c == r.c })
	for r.c.calls > 0 {
		if r.c.idle == nil {
			r.c.idle = make(chan struct{})
		}
		idle := r.c.idle
		d.mu.Unlock()
		<-idle
		d.mu.Lock()
	}
}

// call calls a function unless it was taken back. The caller holds Device.mu and nothing else; it is let go meanwhile.
//
// +checklocks:cb.gpu.mu
func (cb *callbacks) call(c *callback, need uint64) bool {
	if c.gone {
		return false
	}
	c.calls++
	defer c.called() // also if f panics
	cb.gpu.mu.Unlock()
	defer cb.gpu.mu.Lock()
	lockrank.MayCall()
	return c.f(need)
}

// called ends a call of callbacks.call.
func (c *callback) called() {
	if c.calls--; c.calls == 0 && c.idle != nil {
		close(c.idle)
		c.idle = nil
	}
}
