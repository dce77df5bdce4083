//go:build linux && cgo

package main

import (
	"runtime"
	"sync"
)

// Go's runtime makes a thread whenever something could run and no thread is idle, ends the process where it gets none, and never
// ends an idle one. So the threads that it will need are made at the start, and found there when the process or its container may
// have no more. ready.c has asked whether it may have these.
const (
	threadsRunning = 16 // at most: of a collection on a machine with many processors
	threadsWaiting = 8  // for files, sockets and driver calls, each on a thread of its own
)

// keepThreads makes them.
func keepThreads() {
	var made sync.WaitGroup
	done := make(chan struct{})
	for range min(runtime.GOMAXPROCS(0), threadsRunning) + threadsWaiting {
		made.Add(1)
		go func() {
			runtime.LockOSThread() // which makes the thread this goroutine's own while it waits
			defer runtime.UnlockOSThread()
			made.Done()
			<-done
		}()
	}
	made.Wait()
	close(done)
}
