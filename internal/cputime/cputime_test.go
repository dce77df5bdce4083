package cputime

import (
	"runtime"
	"testing"
	"time"
)

// TestTimes: work takes CPU time, in both; sleep does not.
func TestTimes(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	const work = 20 * time.Millisecond
	process, thread, began := Process(), Thread(), time.Now()
	for Thread()-thread < work {
		if time.Since(began) > 5*time.Minute {
			t.Fatalf("after %v of work the thread has had %v", time.Since(began), Thread()-thread)
		}
	}
	if had := Process() - process; had < work/2 { // its clock may be coarser
		t.Errorf("the process has had %v, its thread %v", had, Thread()-thread)
	}
	if runtime.GOOS != "linux" {
		return
	}
	const pause = 300 * time.Millisecond
	thread = Thread()
	time.Sleep(pause)
	if had := Thread() - thread; had > pause/2 {
		t.Errorf("a thread that slept for %v has had %v", pause, had)
	}
}
