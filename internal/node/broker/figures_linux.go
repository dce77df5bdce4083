package broker

import (
	"sync"
	"time"

	"github.com/cistern-gpu/cistern/internal/node/grants"
	"github.com/cistern-gpu/cistern/internal/node/ledger"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// Observer is notified of what the broker does, for metrics. Its methods are called from any goroutine, and neither wait nor call
// the broker.
type Observer interface {
	// Answered is a question for need bytes of a device that was answered after a time.
	Answered(device string, need, granted uint64, took time.Duration)
	// Gave is the answer of a victim after a time.
	Gave(device string, released uint64, took time.Duration)
}

// load is what was asked for on a device since the broker began.
type load struct {
	mu      sync.Mutex
	figures protocol.Load // +checklocks:mu
	since   time.Time     // the first of the questions that are open began; +checklocks:mu
}

// began notes that a question is open; refault: its client gave memory a moment ago.
func (l *load) began(now time.Time, refault bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.figures.Waiting == 0 {
		l.since = now
	}
	l.figures.Waiting++
	if refault {
		l.figures.Refaults++
	}
}

// ended notes that a question is open no more; answered: its client was told what it was granted.
func (l *load) ended(now time.Time, need, granted uint64, answered bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.figures.Waiting--; l.figures.Waiting == 0 {
		l.figures.Pressure += now.Sub(l.since).Seconds()
	}
	switch {
	case !answered:
		l.figures.Abandoned++
	case granted >= need:
		l.figures.Met++
	case granted > 0:
		l.figures.Partly++
	default:
		l.figures.Unmet++
	}
}

// gave notes a victim's answer, missed one that did not come.
func (l *load) gave(p ledger.Part, released uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.figures.Given += released
	if p.Pause && released > 0 {
		l.figures.Pauses++
	}
}

func (l *load) missed() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.figures.Missed++
}

// forget makes room for another device.
func (l *load) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.figures = protocol.Load{}
}

// read is a copy, with the time of questions that are still open.
func (l *load) read(now time.Time) protocol.Load {
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.figures
	if f.Waiting > 0 {
		f.Pressure += now.Sub(l.since).Seconds()
	}
	return f
}

// loads are those of all devices.
type loads [grants.Slots]load

// observeAnswer passes an answered question on.
func (b *Broker) observeAnswer(slot ledger.Slot, need, granted uint64, took time.Duration) {
	if b.opt.Observer != nil {
		b.opt.Observer.Answered(b.deviceOf(slot), need, granted, took)
	}
}

// observeGift passes a victim's answer on.
//
// +checklocks:b.mu
func (b *Broker) observeGift(slot ledger.Slot, released uint64, took time.Duration) {
	if b.opt.Observer != nil {
		b.opt.Observer.Gave(UUID(b.uuids[slot]), released, took)
	}
}

func (b *Broker) deviceOf(slot ledger.Slot) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return UUID(b.uuids[slot])
}

// Clients are all clients, by device.
func (b *Broker) Clients() []protocol.Entry { return b.entries(&client{}) }

// Devices are the devices that clients use or used, with sums over all clients.
func (b *Broker) Devices() []protocol.Device {
	b.mu.Lock()
	n := ledger.Slot(len(b.slots))
	b.mu.Unlock()
	all := make([]protocol.Device, 0, n)
	for slot := range n {
		b.refresh(slot)
		b.mu.Lock()
		uuid := b.uuids[slot]
		d := protocol.Device{Device: UUID(uuid), Total: b.ledger.Total(slot)}
		d.Granted, _ = b.ledger.Granted(slot)
		for _, a := range b.ledger.Accounts(slot) {
			d.Clients++
			d.Reserved += a.Status.Reserved
			d.Active += a.Status.Active
			d.Cached += a.Status.Cached
			d.Paused += a.Status.Paused
			d.Pausable += a.Pausable
			d.Spare += b.ledger.Spare(b.now(), a.Client, slot)
		}
		b.mu.Unlock()
		d.ObjectBytes, d.Objects = b.objects.reserved(uuid)
		d.Load = b.counts.loads[slot].read(time.Now())
		all = append(all, d)
	}
	return all
}
