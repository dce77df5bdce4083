//go:build !linux

package audit

import "time"

// Slots is how many records a ring holds by default.
const Slots = 1 << 16

// Ring is the reader's end of a ring; there is none here.
type Ring struct{}

// New fails.
func New(int, Stacks) (*Ring, error) { return nil, ErrNotLinux }

// Value is empty.
func (*Ring) Value() string { return "" }

// Dropped is 0.
func (*Ring) Dropped() uint64 { return 0 }

// Spent is 0.
func (*Ring) Spent() time.Duration { return 0 }

// Lost is 0.
func (*Ring) Lost() uint64 { return 0 }

// Spoiled is false.
func (*Ring) Spoiled() bool { return false }

// Stop does nothing.
func (*Ring) Stop() {}

// Close does nothing.
func (*Ring) Close() error { return nil }

// Drain finds nothing.
func (*Ring) Drain(int, bool, func(*Record)) int { return 0 }

// Waits has nothing to wait for.
func (*Ring) Waits() bool { return false }

// Watch looks for processes that are not traced; there is none here.
type Watch struct{}

// NewWatch returns none.
func (*Ring) NewWatch(int, func(int) bool) *Watch { return nil }

// Heard does nothing.
func (*Watch) Heard(uint32) {}

// Look finds none.
func (*Watch) Look(time.Time) ([]Untraced, time.Duration) { return nil, 0 }
