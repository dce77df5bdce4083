//go:build linux && cgo

package main

import (
	"runtime"
	"runtime/debug"
	"testing"
	"time"
)

// TestHeapLimit: the limit of the Go heap follows what is live, up and down, so that the collector never runs in vain.
func TestHeapLimit(t *testing.T) {
	startSim(t)
	t.Cleanup(func() { debug.SetGCPercent(100) })
	becomes := func(what string, ok func(limit int64) bool) {
		t.Helper()
		deadline := time.Now().Add(time.Minute)
		for !ok(debug.SetMemoryLimit(-1)) {
			if time.Now().After(deadline) {
				t.Fatalf("%s the limit is %d", what, debug.SetMemoryLimit(-1))
			}
			runtime.GC()
			time.Sleep(time.Millisecond)
		}
	}
	becomes("at first", func(limit int64) bool { return limit == heapLimit })
	held := make([]byte, 200<<20)
	becomes("with 200 MiB live", func(limit int64) bool { return limit >= 600<<20 && limit < 800<<20 })
	runtime.KeepAlive(held)
	becomes("with little live", func(limit int64) bool { return limit == heapLimit })
}

// TestTidy: the collector runs after slow calls once they left garbage, and not before.
func TestTidy(t *testing.T) {
	startSim(t)
	t.Cleanup(func() { debug.SetGCPercent(100) })
	runs := func() uint32 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.NumGC
	}
	runtime.GC()
	before := runs()
	for range 100 {
		tidy()
	}
	time.Sleep(20 * time.Millisecond) // it would run beside this
	if n := runs(); n != before {
		t.Fatalf("it ran %d times over nothing", n-before)
	}
	var garbage []byte
	for range 16 {
		garbage = make([]byte, heapSlack/8)
	}
	runtime.KeepAlive(garbage)
	if n := runs(); n != before {
		t.Fatalf("it ran %d times by itself", n-before)
	}
	deadline := time.Now().Add(time.Minute)
	for tidy(); runs() == before; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it never ran")
		}
	}
}

// TestScavenger: this version of Go has what is to be found.
func TestScavenger(t *testing.T) {
	if !stopScavenger() {
		t.Error("the scavenger was not found")
	}
}
