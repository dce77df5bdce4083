//go:build !linux

package cputime

import "time"

// Thread is of the whole process: that of a thread is not known here.
func Thread() time.Duration { return Process() }
