// Package host puts an allocator behind the client of the node's broker: what a process has, what it gives back, and how much it may
// use.
package host

import (
	"fmt"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/live"
	"github.com/cistern-gpu/cistern/internal/node/client"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
	"github.com/cistern-gpu/cistern/memory"
)

// Device is a device of an allocator.
type Device interface {
	ID() cuda.Device
	Info() cuda.DeviceInfo
	Gauges(g *memory.Gauges)
	GiveBack(need, keep uint64) (released uint64, err error)
}

// Host is a client.Host over an allocator.
type Host struct {
	Driver cuda.Driver
	// Find is a device that is in use.
	Find func(dev cuda.Device) (Device, bool)
	// Limit sets the limit of the broker's policy.
	Limit func(dev cuda.Device, bytes uint64)
	// Consents are what the program lets the node pause; nil: nothing.
	Consents *Consents
	// Panic is called with a panic in one of the client's goroutines; nil: it goes on.
	Panic func(v any)
}

// GiveBack releases unused memory.
func (h *Host) GiveBack(dev cuda.Device, need, keep uint64) (uint64, error) {
	d, ok := h.Find(dev)
	if !ok {
		return 0, fmt.Errorf("device %d is not in use", dev)
	}
	return d.GiveBack(need, keep)
}

// Status is what a device has.
func (h *Host) Status(dev cuda.Device) (s protocol.Status, ok bool) {
	d, ok := h.Find(dev)
	if !ok {
		return s, false
	}
	var g memory.Gauges
	d.Gauges(&g)
	return protocol.Status{Reserved: g.Reserved, Allocated: g.Allocated, Active: physical(&g), Cached: g.Cached, Paused: g.Paused, Pinned: g.Pinned,
		Peaks: g.Recent}, true
}

// physical is what is active with physical memory.
func physical(g *memory.Gauges) uint64 { return g.Active - min(g.Active, g.Paused) }

// Free is the driver's free memory.
func (h *Host) Free(dev cuda.Device) (uint64, error) {
	free, _, err := h.Driver.MemInfo(dev)
	return free, err
}

// SetMax limits what a device may reserve.
func (h *Host) SetMax(dev cuda.Device, bytes uint64) { h.Limit(dev, bytes) }

// Panicked passes a panic on.
func (h *Host) Panicked(v any) {
	if h.Panic == nil {
		panic(v)
	}
	h.Panic(v)
}

// Figures appends what a device has as a status segment says it.
func Figures(into []live.Device, dev Device, g *memory.Gauges) []live.Device {
	info := dev.Info()
	dev.Gauges(g)
	x := live.Device{Ordinal: int(dev.ID()), UUID: info.UUID, Name: info.Name, Total: info.TotalBytes, Reserved: g.Reserved, Allocated: g.Allocated,
		Active: g.Active, Cached: g.Cached, Paused: g.Paused, PeakReserved: g.PeakReserved, PeakAllocated: g.PeakAllocated, Limit: g.Limit,
		DriverCalls: g.DriverCalls, Retries: g.Retries, OOMs: g.OOMs, Pinned: g.Pinned, Recent: g.Recent}
	return append(into, x)
}

// Available is how many bytes requests of a process can get of a device now, beside what is allocated: what it has cached, what is
// free in the driver and not granted to others, and what other processes would release, within the limits. c may be nil.
func Available(dev Device, free uint64, c *client.Client) uint64 {
	more := free
	if c != nil {
		more -= min(more, c.Others(dev.ID()))
		others, _, _ := c.Available(dev.ID())
		more += others
	}
	var g memory.Gauges
	dev.Gauges(&g)
	if g.Limit != 0 {
		more = min(more, g.Limit-min(g.Limit, g.Reserved))
	}
	return g.Cached - min(g.Cached, g.Pinned) + more
}
