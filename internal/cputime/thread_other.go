//go:build !linux

package cputime

import "time"

// Thread is of the whole process: nobody says here what a thread had.
func Thread() time.Duration { return Process() }
