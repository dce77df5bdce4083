//go:build unix

// Package cputime is how long processors have worked for somebody: unlike the time that passes, it leaves out for how long
// others had them, or the machine's own host, where those are busy.
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
