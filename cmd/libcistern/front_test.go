//go:build linux && cgo

package main

import (
	"encoding/json"
	"math"
	"strconv"
	"testing"
)

// TestFronts: what C answers without Go leaves the same books, whatever comes between.
func TestFronts(t *testing.T) {
	t.Parallel()
	p := program(t, "fronts.c", libraryPath(t))
	for i, conf := range []string{"", ",backend:malloc", ",single_handle:true", ",history:100", ",front:off", ",cross_stream:ready"} {
		passes(t, "driver:sim:64GiB"+conf, nil, p, "50000", strconv.Itoa(i))
	}
}

// TestFrontsAreUsed: a request of a size that was just freed, and frees, cost a fraction of a call into Go.
func TestFrontsAreUsed(t *testing.T) {
	p := program(t, "bench.c", libraryPath(t))
	best := func(conf string) (pair, threads float64) {
		pair, threads = math.Inf(1), math.Inf(1)
		for range 3 {
			var r map[string]float64
			out := run(t, "driver:sim:64GiB"+conf, nil, p)
			if err := json.Unmarshal([]byte(out.out), &r); err != nil || out.err != nil {
				t.Fatalf("%v, %v\n%s%s", err, out.err, out.out, out.report)
			}
			pair, threads = min(pair, r["pair_1048576"]), min(threads, r["threads_4"])
		}
		return pair, threads
	}
	pair, threads := best("")
	slow, slowThreads := best(",front:off")
	t.Logf("pair %.0f ns, in Go %.0f; four threads %.0f ns, in Go %.0f", pair, slow, threads, slowThreads)
	if pair > slow/2 || threads > slowThreads {
		t.Errorf("pair %.0f ns, in Go %.0f; four threads %.0f ns, in Go %.0f", pair, slow, threads, slowThreads)
	}
}
