package deadline

import (
	"syscall"
	"time"
)

// Nap waits for about so long, without a timer of Go's.
func Nap(d time.Duration) {
	ts := syscall.NsecToTimespec(int64(d))
	_ = syscall.Nanosleep(&ts, nil) // interrupted, it was shorter
}
