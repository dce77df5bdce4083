//go:build !linux

package grants

import (
	"errors"
	"time"
)

var errNotLinux = errors.New("grants: the broker of a node runs on Linux only")

// Segment is the broker's side, on Linux.
type Segment struct{}

// New fails.
func New() (*Segment, error) { return nil, errNotLinux }

// Set does nothing.
func (*Segment) Set(slot, granted, released uint64, lasts time.Duration) {}

// Descriptor is none.
func (*Segment) Descriptor() int { return -1 }

// Close does nothing.
func (*Segment) Close() {}

// View is a client's side, on Linux.
type View struct{}

// Open fails.
func Open(int) (*View, error) { return nil, errNotLinux }

// Granted is nothing.
func (*View) Granted(uint64) (granted, released uint64) { return 0, 0 }

// Close does nothing.
func (*View) Close() bool { return true }
