package host

import (
	"errors"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
)

// A pause that fails may leave memory paused that could not come back: it is returned when the consent ends.
func TestDenyAfterFailedPause(t *testing.T) {
	h := &Host{Consents: &Consents{}, Find: func(cuda.Device) (Device, bool) { return nil, true }}
	failed, returned := errors.New("it failed"), 0
	err := h.Consents.Allow(0, Consent{
		Pause:  func() (uint64, error) { return 0, failed },
		Resume: func() (uint64, error) { return 0, nil },
		Return: func() error { returned++; return nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.Pause(0); err != failed {
		t.Error(err)
	}
	if err := h.Consents.Deny(0); err != nil || returned != 1 {
		t.Errorf("%v, returned %d times", err, returned)
	}
	if err := h.Consents.Deny(0); err != nil || returned != 1 {
		t.Errorf("%v, returned %d times", err, returned)
	}
}
