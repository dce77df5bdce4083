package host

import (
	"errors"
	"sync"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/node/client"
)

// Consent is what the program lets the node do with memory of a device, which it promises not to use meanwhile. Pause and Resume
// return the physical bytes that went or came; in the C library they call no function of the program. Return is the program's own way
// to have all of it again.
type Consent struct {
	Pause, Resume func() (bytes uint64, err error)
	Return        func() error
}

// Consents are those of a process. The zero value has none.
type Consents struct {
	mu sync.Mutex
	of map[cuda.Device]*consent // +checklocks:mu
}

// consent is the state of a device.
type consent struct {
	mu     sync.Mutex // held while memory is paused or resumed
	given  *Consent   // nil: none; +checklocks:mu
	paused *Consent   // under which the node paused or tried to, nil: it did not; +checklocks:mu
}

// ErrNoConsent is why memory is not paused.
var ErrNoConsent = errors.New("the process does not allow it now (allow_pause)")

func (c *Consents) device(dev cuda.Device) *consent {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.of == nil {
		c.of = map[cuda.Device]*consent{}
	}
	x := c.of[dev]
	if x == nil {
		x = &consent{}
		c.of[dev] = x
	}
	return x
}

// ErrAllowed is the error of a second consent for a device.
var ErrAllowed = errors.New("pausing by the node is allowed already: end that first")

// Allow gives consent for a device. Memory that is still paused, as Deny failed, is returned before.
func (c *Consents) Allow(dev cuda.Device, to Consent) error {
	x := c.device(dev)
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.given != nil {
		return ErrAllowed
	}
	if x.paused != nil {
		if err := x.paused.Return(); err != nil {
			return err
		}
		x.paused = nil
	}
	x.given = &to
	return nil
}

// Deny ends the consent, and returns what the node paused. It waits for a pause that is under way. After an error the memory stays
// paused; Deny may be called again.
func (c *Consents) Deny(dev cuda.Device) error {
	x := c.device(dev)
	x.mu.Lock()
	defer x.mu.Unlock()
	x.given = nil
	if x.paused == nil {
		return nil
	}
	err := x.paused.Return()
	if err == nil {
		x.paused = nil
	}
	return err
}

// Pause pauses memory of a device for the node. It is called from a goroutine of the client.
func (h *Host) Pause(dev cuda.Device) (uint64, error) {
	x, err := h.consent(dev)
	if err != nil {
		return 0, err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.given == nil {
		return 0, ErrNoConsent
	}
	x.paused = x.given // also if it fails: memory that cannot come back then stays paused
	return x.given.Pause()
}

// Resume resumes memory of a device for the node.
func (h *Host) Resume(dev cuda.Device) (uint64, error) {
	x, err := h.consent(dev)
	if err != nil {
		return 0, err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.paused == nil || x.given == nil { // the program resumes, or did
		return 0, nil
	}
	bytes, err := x.paused.Resume()
	if err == nil {
		x.paused = nil
	}
	return bytes, err
}

// consent is the state of a device that is in use.
func (h *Host) consent(dev cuda.Device) (*consent, error) {
	if _, ok := h.Find(dev); !ok || h.Consents == nil {
		return nil, ErrNoConsent
	}
	return h.Consents.device(dev), nil
}

// NoConsent reports whether an error is that the program does not allow it now.
func (*Host) NoConsent(err error) bool { return errors.Is(err, ErrNoConsent) }

var _ client.Pauser = (*Host)(nil)
