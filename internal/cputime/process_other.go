//go:build !unix

package cputime

import "time"

var loaded = time.Now()

// Process is the time that passes: nobody says here what a process had of the processors.
func Process() time.Duration { return time.Since(loaded) }
