//go:build !linux

package client

import (
	"time"

	"github.com/cistern-gpu/cistern/cuda"
)

// Client is a process's connection to the broker, on Linux.
type Client struct{}

// New is a client that never connects.
func New(Config) *Client { return &Client{} }

// Sockets are none.
func Sockets() []string { return nil }

// Close does nothing.
func (*Client) Close() {}

// Join does nothing.
func (*Client) Join(cuda.Device, [16]byte, uint64) {}

// Admit admits all.
func (*Client) Admit(cuda.Device, uint64) bool { return true }

// Ask gets nothing.
func (*Client) Ask(cuda.Device, uint64, time.Duration) (uint64, string) {
	return 0, "no broker is connected"
}

// Done does nothing.
func (*Client) Done(cuda.Device, uint64) {}

// Grown does nothing.
func (*Client) Grown(cuda.Device) {}

// Available knows nothing.
func (*Client) Available(cuda.Device) (bytes, limit uint64, known bool) { return 0, 0, false }

// Declare does nothing.
func (*Client) Declare(cuda.Device) {}

// Others is nothing.
func (*Client) Others(cuda.Device) uint64 { return 0 }
