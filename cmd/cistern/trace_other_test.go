//go:build linux && amd64

package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/trace"
)

// TestTraceOtherWays: memory that comes and goes without a call that allocates or frees it.
func TestTraceOtherWays(t *testing.T) {
	x := newTraced(t)
	program := x.compile("graphs", "testdata/graphs.c", "-ldl")
	d, _, stderr, code := x.run(nil, "--", program)
	if code != 0 {
		t.Fatalf("code %d\n%s", code, stderr)
	}
	// What is held after each call that changes it, in MiB.
	run := analyze.NewDriverRun()
	tracker := trace.NewTracker()
	var held uint64
	var got []string
	for i := range d.Calls {
		q := &d.Calls[i]
		before := held
		tracker.Call(q, func(h *trace.Holding) {
			if h.Memory.OnDevice() {
				held += h.Size
			}
		}, func(h *trace.Holding) {
			if h.Memory.OnDevice() {
				held -= h.Size
			}
		})
		run.Call(q)
		if held != before {
			got = append(got, fmt.Sprintf("%s %d", q.Kind, held>>20))
		}
	}
	want := []string{"cuMemAlloc 1", "cuGraphUpload 9", "cuGraphLaunch 13", "cuDeviceGraphMemTrim 5", "cuDeviceGraphMemTrim 1",
		"cuMemCreate 3", "cuMemCreate 7", "cuMemMapArrayAsync 5", "cuArrayDestroy 1", "cuMemAlloc 21", "cuCtxDestroy 1"}
	if !slices.Equal(got, want) {
		t.Errorf("held: %q\nwant  %q", got, want)
	}
	count := map[trace.CallKind]int{}
	for i := range d.Calls {
		count[d.Calls[i].Kind]++
	}
	// Launches that change nothing are no events, and what is captured is no allocation of a pool.
	if count[trace.GraphLaunch] != 1 || count[trace.GraphUpload] != 1 || count[trace.GraphAddMemAllocNode] != 3 || count[trace.MemAllocAsync] != 0 {
		t.Errorf("calls: %v", count)
	}
	s := analyze.SummarizeDriver(d)
	if dev := s.Devices[0]; dev.PeakRequested != 21<<20 || s.KeptBytes != 1<<20 || s.HostPeak != 8192 || s.Managed != 1<<20 {
		t.Errorf("summary: %+v", s)
	}
	if !strings.Contains(stderr, "never freed: 1.00 MiB in 1 allocation") {
		t.Errorf("the table is\n%s", stderr)
	}
}
