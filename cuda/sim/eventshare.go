package sim

import (
	"time"

	"github.com/cistern-gpu/cistern/cuda"
)

// Events of several drivers. Each record says what it comes after, and how long the recording driver takes until it is
// complete; for another driver that time begins when it first looks.

// sharedEvent is an event with a file.
type sharedEvent struct {
	*stateFile
	own  bool   // made by this driver
	last uint64 // number of the record that the event shows; 0 is none
}

// EventCreateShared makes an event that other drivers may open.
func (d *Driver) EventCreateShared(dev cuda.Device) (cuda.Event, error) {
	d.mu.Lock()
	defer d.leave()
	if err := d.beginContext(callEventCreate, dev, 0, d.costs.EventCreate); err != nil {
		return 0, err
	}
	var none encoder
	none.number(0) // not destroyed
	none.number(0) // no record
	f, err := d.newFile(fileEvent, 0, uint64(dev), none)
	if err != nil {
		return 0, d.errorOf(callEventCreate, dev, 0, unusable)
	}
	return d.newEvent(dev, &sharedEvent{stateFile: f, own: true}), nil
}

// EventExport names an event in other drivers.
func (d *Driver) EventExport(dev cuda.Device, h cuda.Event) (cuda.EventHandle, error) {
	d.mu.Lock()
	defer d.leave()
	e, err := d.eventCall(callEventExport, dev, h, 0)
	if err != nil {
		return cuda.EventHandle{}, err
	}
	if e.shared == nil || !e.shared.own {
		return cuda.EventHandle{}, d.errorOf(callEventExport, dev, 0, cuda.ErrInvalidHandle)
	}
	return e.shared.name.bytes(fileEvent), nil
}

// EventOpen opens an event of another driver.
func (d *Driver) EventOpen(dev cuda.Device, h cuda.EventHandle) (cuda.Event, error) {
	d.mu.Lock()
	defer d.leave()
	if err := d.beginContext(callEventOpen, dev, 0, 0); err != nil {
		return 0, err
	}
	n, ok := nameOf(h, fileEvent)
	switch {
	case !ok:
		return 0, d.errorOf(callEventOpen, dev, 0, cuda.ErrInvalidValue)
	case n.driver == d.identity:
		return 0, d.errorOf(callEventOpen, dev, 0, cuda.ErrInvalidContext)
	case d.meet() != nil:
		return 0, d.errorOf(callEventOpen, dev, 0, unusable)
	}
	f, err := openStateFile(fileEvent, n)
	if err != nil {
		return 0, d.errorOf(callEventOpen, dev, 0, cuda.ErrInvalidHandle)
	}
	return d.newEvent(dev, &sharedEvent{stateFile: f}), nil
}

// closeEvent ends this driver's part in an event.
func (d *Driver) closeEvent(s *sharedEvent) {
	if s.own {
		s.failed(s.locked(func() error {
			var gone encoder
			gone.number(1)
			gone.number(s.last)
			return s.store(gone)
		}))
	}
	s.file.close()
}

// publish makes a record known to the drivers that have the event.
func (d *Driver) publish(e *event, c call, dev cuda.Device) error {
	err := e.shared.locked(func() error {
		state, err := e.shared.load()
		if err != nil {
			return err
		}
		x := decoder{b: state}
		if x.number() != 0 {
			return errGone
		}
		var b encoder
		b.number(0)
		e.shared.last = x.number() + 1
		b.number(e.shared.last)
		b.number(uint64(max(0, e.done-d.clock.read())))
		return e.shared.store(d.encodeVector(b, e.seen))
	})
	return d.eventFault(err, c, dev)
}

// refresh takes over the last record of an event, whoever made it.
func (d *Driver) refresh(e *event, c call, dev cuda.Device) error {
	if e.shared == nil {
		return nil
	}
	err := e.shared.locked(func() error {
		state, err := e.shared.load()
		if err != nil {
			return err
		}
		x := decoder{b: state}
		if x.number() != 0 {
			return errGone
		}
		n := x.number()
		if n == e.shared.last {
			return nil
		}
		left := time.Duration(x.number())
		seen := d.decodeVector(&x)
		if err := x.done(); err != nil {
			return err
		}
		e.shared.last, e.recorded, e.capture = n, true, nil
		e.done, e.seen = d.clock.read()+max(0, left), seen
		return nil
	})
	return d.eventFault(err, c, dev)
}

func (d *Driver) eventFault(err error, c call, dev cuda.Device) error {
	if err == nil {
		return nil
	}
	return d.found(&Fault{Kind: FaultShared, Op: callNames[c], Device: dev, code: cuda.ErrInvalidHandle,
		Detail: "the event of another process: " + err.Error()})
}
