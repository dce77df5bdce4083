package host

import (
	"errors"
	"sync"
	"sync/atomic"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/node/client"
)

// Consent is what the program lets the node do with memory of a device, which it promises not to use meanwhile. Pause and Resume
// return the physical bytes that went or came; in the C library they call no function of the program. Return is the program's own way
// to have all of it again.
type Consent struct {
	Pause, Resume func() (bytes uint64, err error)
	Return        func() error
	// Pausable is how many bytes Pause would return now, where the broker may pause for other processes too; nil: it may not.
	Pausable func() uint64
}

// Consents are those of a process. The zero value has none.
type Consents struct {
	mu      sync.Mutex
	of      map[cuda.Device]*consent // +checklocks:mu
	declare func(dev cuda.Device)    // +checklocks:mu
}

// consent is the state of a device.
type consent struct {
	mu     sync.Mutex              // held while memory is paused or resumed
	given  *Consent                // nil: none; +checklocks:mu
	paused *Consent                // under which the node paused or tried to, nil: it did not; +checklocks:mu
	others atomic.Pointer[Consent] // under which the broker may pause for other processes; nil: it may not
}

// OnChange has f called when what the broker may pause for other processes has changed, with no lock.
func (c *Consents) OnChange(f func(dev cuda.Device)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.declare = f
}

// changed notifies the client.
func (c *Consents) changed(dev cuda.Device) {
	c.mu.Lock()
	f := c.declare
	c.mu.Unlock()
	if f != nil {
		f(dev)
	}
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
	if err := c.device(dev).allow(&to); err != nil {
		return err
	}
	if to.Pausable != nil {
		c.changed(dev)
	}
	return nil
}

func (x *consent) allow(to *Consent) error {
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
	x.given = to
	if to.Pausable != nil {
		x.others.Store(to)
	}
	return nil
}

// Deny ends the consent, and returns what the node paused. It waits for a pause that is under way. After an error the memory stays
// paused; Deny may be called again.
func (c *Consents) Deny(dev cuda.Device) error {
	x := c.device(dev)
	if x.others.Swap(nil) != nil { // before the wait: from now on no pause for others begins
		c.changed(dev)
	}
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

// PauseForOthers pauses memory of a device for another process, where the program lets the broker do so.
func (h *Host) PauseForOthers(dev cuda.Device) (uint64, error) {
	x, err := h.consent(dev)
	if err != nil {
		return 0, err
	}
	if x.others.Load() == nil { // it is not to wait for a resume that is under way
		return 0, ErrNoConsent
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	to := x.others.Load()
	if to == nil {
		return 0, ErrNoConsent
	}
	x.paused = to
	return to.Pause()
}

// Pausable is what PauseForOthers would return to the device.
func (h *Host) Pausable(dev cuda.Device) uint64 {
	x, err := h.consent(dev)
	if err != nil {
		return 0
	}
	if to := x.others.Load(); to != nil {
		return to.Pausable()
	}
	return 0
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
