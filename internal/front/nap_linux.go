package front

import (
	"syscall"
	"time"
)

// Nap waits for about so long, without a timer of Go's: with its first one the runtime opens descriptors (epoll) that it needs
// from then on, and a program that closes all that it does not know, as many do that go into the background, would end with
// that.
func Nap(d time.Duration) {
	ts := syscall.NsecToTimespec(int64(d))
	_ = syscall.Nanosleep(&ts, nil) // interrupted, it was shorter
}
