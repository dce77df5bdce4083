package cputime

import (
	"time"

	"golang.org/x/sys/unix"
)

// Thread is of the calling thread. A goroutine that takes the difference of two locks itself to its thread.
func Thread() time.Duration {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t) != nil {
		return 0
	}
	return time.Duration(t.Nano())
}
