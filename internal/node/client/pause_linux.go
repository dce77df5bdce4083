package client

import (
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
			if m.Keep == 0 {
				f = p.Resume
			}
			bytes, err := f(dev)
			answer.Bytes = bytes
			if err != nil {
				answer.Text = err.Error()
				if p.NoConsent(err) {
					answer.Keep = 1
				}
			}
			c.busy.Store(false) // before the broker may ask for the next
			c.send(l, &answer)
		})
		return
	}
	c.send(l, &answer)
}
