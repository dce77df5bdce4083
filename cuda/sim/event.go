package sim

import (
	"time"

	"github.com/cistern-gpu/cistern/cuda"
)

// event is a mark in a stream's queue. The zero record (nothing recorded yet) is complete.
type event struct {
	handle   cuda.Event // 0 where the slot is free
	gen      uint32
	recorded bool
	ctx      *context
	done     time.Duration
	seen     vector       // work that the record comes after; only with CheckOrder
	capture  *capture     // that the last record was part of
	nodes    vector       // of the capture: nodes that the record comes after
	shared   *sharedEvent // nil for an event of this driver alone
}

// EventCreate makes an event.
func (d *Driver) EventCreate(dev cuda.Device) (cuda.Event, error) {
	d.mu.Lock()
	defer d.leave()
	if err := d.beginContext(callEventCreate, dev, 0, d.costs.EventCreate); err != nil {
		return 0, err
	}
	return d.newEvent(dev, nil), nil
}

func (d *Driver) newEvent(dev cuda.Device, shared *sharedEvent) cuda.Event {
	var slot uint32
	if n := len(d.freeEv); n > 0 {
		slot = d.freeEv[n-1]
		d.freeEv = d.freeEv[:n-1]
	} else {
		slot = uint32(len(d.events))
		d.events = append(d.events, event{})
	}
	e := &d.events[slot]
	e.handle = cuda.Event(uintptr(uint64(e.gen)<<32 | uint64(slot+1)))
	e.ctx = d.devices[dev].primary
	e.shared = shared
	d.live.events++
	return e.handle
}

// EventDestroy destroys an event. Waits that were queued for it stand.
func (d *Driver) EventDestroy(dev cuda.Device, h cuda.Event) error {
	d.mu.Lock()
	defer d.leave()
	e, err := d.eventCall(callEventDestroy, dev, h, d.costs.EventDestroy)
	if err != nil {
		return err
	}
	if e.shared != nil {
		d.closeEvent(e.shared)
	}
	*e = event{gen: e.gen + 1, seen: e.seen[:0], nodes: e.nodes[:0]}
	d.freeEv = append(d.freeEv, uint32(h)-1)
	d.live.events--
	return nil
}

func (d *Driver) eventCall(c call, dev cuda.Device, h cuda.Event, cost time.Duration) (*event, error) {
	if err := d.beginContext(c, dev, 0, cost); err != nil {
		return nil, err
	}
	if e := d.event(h); e != nil {
		return e, nil
	}
	return nil, d.errorOf(c, dev, 0, cuda.ErrInvalidHandle)
}

func (d *Driver) event(h cuda.Event) *event {
	slot := uint32(h) - 1
	if h == 0 || uint64(slot) >= uint64(len(d.events)) || d.events[slot].handle != h {
		return nil
	}
	return &d.events[slot]
}

// EventRecord marks the work queued on the stream so far. On a capturing stream it marks a place in the capture.
func (d *Driver) EventRecord(dev cuda.Device, h cuda.Event, sh cuda.Stream) error {
	d.mu.Lock()
	defer d.leave()
	s, err := d.streamCall(callEventRecord, dev, sh, d.costs.EventRecord)
	if err != nil {
		return err
	}
	e := d.event(h)
	if e == nil || e.ctx != s.ctx {
		return d.errorOf(callEventRecord, dev, 0, cuda.ErrInvalidHandle)
	}
	if s.capture != nil || len(s.ctx.captures) > 0 {
		if code := s.implicit(); code != cuda.Success {
			return d.captureError(callEventRecord, dev, code)
		}
		if s.capture != nil {
			if e.shared != nil { // other processes have no part in a graph
				return d.captureError(callEventRecord, dev, cuda.ErrStreamCaptureUnsupported)
			}
			e.recorded = true
			e.capture = s.capture
			e.nodes = append(e.nodes[:0], s.nodes...)
			return nil
		}
	}
	e.recorded = true
	e.capture = nil
	e.done = d.behind(s.ready())
	if d.opt.Busy || s.kind == streamLegacy {
		s.extend(e.done) // whatever is done on the legacy stream, later work of blocking streams waits for it
	}
	if d.opt.Check >= CheckOrder {
		d.order.prepare(s)
		e.seen = append(e.seen[:0], s.seen...)
	}
	if e.shared != nil {
		return d.publish(e, callEventRecord, dev)
	}
	return nil
}

// EventQuery reports whether the recorded work is done at the host's time.
func (d *Driver) EventQuery(dev cuda.Device, h cuda.Event) (bool, error) {
	d.mu.Lock()
	defer d.leave()
	e, err := d.eventCall(callEventQuery, dev, h, d.costs.EventQuery)
	if err != nil {
		return false, err
	}
	if err := d.refresh(e, callEventQuery, dev); err != nil {
		return false, err
	}
	if e.capture != nil {
		return false, d.captureError(callEventQuery, dev, e.capture.observed())
	}
	if !e.recorded {
		return true, nil
	}
	if !d.clock.reached(e.done) {
		return false, nil
	}
	if d.opt.Check >= CheckOrder {
		d.hostSaw(e.seen)
	}
	return true, nil
}

// EventSynchronize waits, in virtual time, for the recorded work.
func (d *Driver) EventSynchronize(dev cuda.Device, h cuda.Event) error {
	d.mu.Lock()
	defer d.leave()
	e, err := d.eventCall(callEventSynchronize, dev, h, d.costs.EventSynchronize)
	if err != nil {
		return err
	}
	d.eventSyncs++
	if err := d.refresh(e, callEventSynchronize, dev); err != nil {
		return err
	}
	if e.capture != nil {
		return d.captureError(callEventSynchronize, dev, e.capture.observed())
	}
	if e.recorded {
		d.waitFor(e.done)
		if d.opt.Check >= CheckOrder {
			d.hostSaw(e.seen)
		}
	}
	d.shrinkPools(callEventSynchronize)
	return nil
}

// StreamWaitEvent makes later work of the stream wait for the event, of whatever context or device. An event that was
// recorded in a capture draws the stream into the capture.
func (d *Driver) StreamWaitEvent(dev cuda.Device, sh cuda.Stream, h cuda.Event) error {
	d.mu.Lock()
	defer d.leave()
	s, err := d.streamCall(callStreamWaitEvent, dev, sh, d.costs.StreamWaitEvent)
	if err != nil {
		return err
	}
	e := d.event(h)
	if e == nil {
		return d.errorOf(callStreamWaitEvent, dev, 0, cuda.ErrInvalidHandle)
	}
	if err := d.refresh(e, callStreamWaitEvent, dev); err != nil {
		return err
	}
	if e.capture != nil || s.capture != nil || len(s.ctx.captures) > 0 {
		if code := s.waitCaptured(e); code != cuda.Success {
			return d.captureError(callStreamWaitEvent, dev, code)
		}
		if s.capture != nil {
			return nil
		}
	}
	if !e.recorded {
		return nil
	}
	s.extend(max(s.ready(), e.done))
	if d.opt.Check >= CheckOrder {
		d.order.prepare(s)
		s.seen.join(e.seen)
		d.order.publish(s)
	}
	return nil
}
