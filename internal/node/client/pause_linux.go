package client

import (
	"math"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// pausing begins what the broker asks for, in a goroutine of its own: it may copy for seconds, in which the broker may ask for unused
// memory too. There is one at a time.
func (c *Client) pausing(l *link, m protocol.Message) {
	p, ok := c.cfg.Host.(Pauser)
	dev, known := c.bySlot(m.Slot)
	answer := protocol.Message{Kind: protocol.Paused, ID: m.ID, Slot: m.Slot}
	switch {
	case !ok:
		answer.Keep, answer.Text = 1, "the program does not allow it"
	case !known:
		answer.Text = "the device is not in use"
	case !c.busy.CompareAndSwap(false, true):
		answer.Text = "another pause or resume is under way"
	default:
		c.over.Go(func() {
			defer c.panicked()
			f := p.Pause
			switch m.Keep {
			case protocol.PauseResume:
				f = p.Resume
			case protocol.PauseForOthers:
				f = p.PauseForOthers
			}
			bytes, err := f(dev)
			answer.Bytes = bytes
			answer.Status, _ = c.cfg.Host.Status(dev)
			if err != nil {
				answer.Text = err.Error()
				if p.NoConsent(err) {
					answer.Keep = 1
				}
			}
			c.busy.Store(false) // before the broker may ask for the next
			c.send(l, &answer)
			c.declareAgain(dev)
		})
		return
	}
	c.send(l, &answer)
}

// declareAgain is Declare after a pause or resume, whose outcome says something as well.
func (c *Client) declareAgain(dev cuda.Device) {
	if d := c.device(dev); d != nil {
		d.declaring.Lock()
		d.declared = unsaid
		d.declaring.Unlock()
	}
	c.Declare(dev)
}

// unsaid is no number of bytes.
const unsaid = math.MaxUint64

// Declare has the broker know what it may pause for other processes, where that is something else than it knows. It is called with
// no lock, after what the host says about it has changed.
func (c *Client) Declare(dev cuda.Device) {
	p, ok := c.cfg.Host.(Pauser)
	d := c.device(dev)
	if !ok || d == nil {
		return
	}
	d.declaring.Lock() // so that what is said last is what is true last
	defer d.declaring.Unlock()
	l, slot := c.link.Load(), d.slot.Load()
	if l == nil || slot < 0 {
		return
	}
	bytes := p.Pausable(dev)
	if d.declaredTo == l && d.declared == bytes || d.declaredTo != l && bytes == 0 {
		return
	}
	d.declared, d.declaredTo = bytes, l
	c.send(l, &protocol.Message{Kind: protocol.Pausable, Slot: uint64(slot), Bytes: bytes})
}
