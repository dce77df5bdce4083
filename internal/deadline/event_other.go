//go:build !linux

package deadline

import (
	"sync/atomic"
	"time"
)

// Event happens once. Any number of goroutines wait for it.
type Event struct{ set atomic.Bool }

// Set ends all waits, now and from now on.
func (e *Event) Set() { e.set.Store(true) }

// IsSet reports whether it has happened.
func (e *Event) IsSet() bool { return e.set.Load() }

// Wait waits for so long at most, and reports whether it has happened.
func (e *Event) Wait(d time.Duration) bool {
	for end := time.Now().Add(d); !e.IsSet(); Nap(min(time.Millisecond, time.Until(end))) {
		if time.Until(end) <= 0 {
			return false
		}
	}
	return true
}
