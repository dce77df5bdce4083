package client

import (
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/live"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
	"github.com/cistern-gpu/cistern/internal/socket"
)

// Host is the process's allocator. Its methods are called from the client's goroutines, and SetMax and Free from any; none with a lock
// of the client.
type Host interface {
	// GiveBack releases unused memory, as engine.Device.GiveBack.
	GiveBack(dev cuda.Device, need, keep uint64) (released uint64, err error)
	// Status is what the device has now.
	Status(dev cuda.Device) (protocol.Status, bool)
	// Free is the driver's free memory. It is called with the engine's locks.
	Free(dev cuda.Device) (uint64, error)
	// SetMax limits what may be reserved, 0 does not.
	SetMax(dev cuda.Device, bytes uint64)
	// Panicked is called with a panic in one of the client's goroutines.
	Panicked(v any)
}

// Config is what a client needs.
type Config struct {
	Socket  string // "": the usual ones, tried in turn
	Label   string
	Version string
	Page    func() (*live.Page, error) // the status segment, which is there from the first link on
	Guard   socket.Guard               // nil: the process does not fork
	// Headroom is how much of a device with so many bytes the driver is to keep free; nil: nothing.
	Headroom func(total uint64) uint64
	Host     Host
}

// Pauser is a Host that pauses memory for the node.
type Pauser interface {
	// Pause pauses what the program lets the node pause of a device, and returns the physical bytes that went; Resume resumes
	// it. An error that matches NoConsent is that the program does not allow it now.
	Pause(dev cuda.Device) (uint64, error)
	Resume(dev cuda.Device) (uint64, error)
	NoConsent(err error) bool
	// Pausable is what the broker may pause for other processes now, in physical bytes; PauseForOthers pauses it, as Pause.
	Pausable(dev cuda.Device) uint64
	PauseForOthers(dev cuda.Device) (uint64, error)
}
