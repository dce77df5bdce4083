//go:build !unix

// Package cputime is how long processors have worked for somebody: unlike the time that passes, it leaves out for how long
// others had them, or the machine's own host, where those are busy.
package cputime

import "time"

var loaded = time.Now()

// Process is the time that passes: nobody says here what a process had of the processors.
func Process() time.Duration { return time.Since(loaded) }
