//go:build unix

package trace

import (
	"syscall"
	"testing"
	"time"
)

// processorTime is what this process has had of the processors, of which a busy machine gives less than there is time.
func processorTime(t *testing.T) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
