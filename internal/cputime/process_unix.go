//go:build unix

package cputime

import (
	"syscall"
	"time"
)

// Process is of all threads of this process, those of the kernel's work for it included.
func Process() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
