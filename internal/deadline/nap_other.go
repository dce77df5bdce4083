//go:build !linux

package deadline

import "time"

// Nap waits for about so long. On Linux it does so without a timer of Go's.
func Nap(d time.Duration) { time.Sleep(d) }
