package phys

import (
	"errors"
	"slices"

	"github.com/cistern-gpu/cistern/cuda"
)

// Access is the devices that may use the memory of one device.
type Access struct {
	drv     cuda.Driver
	devices []cuda.Device // the device itself first; replaced, never changed
}

// Devices are the devices, that of the memory first.
func (a *Access) Devices() []cuda.Device { return a.devices }

// Add adds a peer. Memory that is mapped already is the caller's to make accessible.
func (a *Access) Add(peer cuda.Device) { a.devices = append(slices.Clone(a.devices), peer) }

// Set makes newly mapped memory accessible. That a peer's context is broken does not keep this device from the memory.
func (a *Access) Set(p cuda.Ptr, size uint64) error {
	err := a.drv.MemSetAccess(p, size, a.devices)
	var code cuda.Code
	if errors.As(err, &code) && code.Poisons() && len(a.devices) > 1 && a.drv.MemSetAccess(p, size, a.devices[:1]) == nil {
		return nil
	}
	return err
}
