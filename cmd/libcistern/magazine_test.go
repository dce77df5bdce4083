//go:build linux && cgo

package main

import (
	"encoding/json"
	"math"
	"runtime"
	"strconv"
	"testing"

	"github.com/cistern-gpu/cistern/internal/rerun"
	"github.com/cistern-gpu/cistern/internal/slow"
)

// TestMagazines: what C answers without Go leaves the same books, whatever comes between.
func TestMagazines(t *testing.T) {
	t.Parallel()
	p := program(t, "magazines.c", libraryPath(t))
	for i, conf := range []string{"", ",backend:malloc", ",single_handle:true", ",history:100", ",magazine:off", ",cross_stream:ready"} {
		passes(t, "driver:sim:64GiB"+conf, nil, p, "50000", strconv.Itoa(i))
	}
}

// TestMagazineSteps: what another thread does between two steps of magazine.c. The program does it where magazine.c waits, in the place
// of the processor's instruction for that.
func TestMagazineSteps(t *testing.T) {
	t.Parallel()
	if runtime.GOARCH != "amd64" {
		t.Skip("the program takes the place of an instruction of amd64")
	}
	passes(t, "", nil, magazineSteps(t))
}

// TestMagazineThreads: threads that request, free, pause and keep histories, in magazine.c alone, under tools that watch every
// access.
func TestMagazineThreads(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"thread", "address,undefined"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			needSanitizer(t, name)
			passes(t, "", nil, magazineSteps(t, "-fsanitize="+name), "30000")
		})
	}
}

func magazineSteps(t *testing.T, flags ...string) string {
	rerun.OnChange(t, "magazine.c", "magazine.h", "shim.h")
	return program(t, "magazinesteps.c", "", flags...)
}

// TestSlowMagazinesAreUsed: a request of a size that was just freed, and frees, cost a fraction of a call into Go. The best of a few
// counts, taken in turn, of many on a busy machine.
func TestSlowMagazinesAreUsed(t *testing.T) {
	slow.Only(t)
	p := program(t, "bench.c", libraryPath(t))
	type cost struct{ pair, threads float64 } // ns
	better := func(c cost, conf string) cost {
		var r map[string]float64
		out := run(t, "driver:sim:64GiB"+conf, nil, p)
		if err := json.Unmarshal([]byte(out.out), &r); err != nil || out.err != nil {
			t.Fatalf("%v, %v\n%s%s", err, out.err, out.out, out.report)
		}
		return cost{min(c.pair, r["pair_1048576"]), min(c.threads, r["threads_4"])}
	}
	fast := cost{math.Inf(1), math.Inf(1)}
	inGo := fast
	dear := func() bool { return fast.pair > inGo.pair/2 || fast.threads > inGo.threads }
	for tries := 0; tries < 3 || tries < 12 && dear(); tries++ {
		fast, inGo = better(fast, ""), better(inGo, ",magazine:off")
	}
	t.Logf("pair %.0f ns, in Go %.0f; four threads %.0f ns, in Go %.0f", fast.pair, inGo.pair, fast.threads, inGo.threads)
	if dear() {
		t.Errorf("pair %.0f ns, in Go %.0f; four threads %.0f ns, in Go %.0f", fast.pair, inGo.pair, fast.threads, inGo.threads)
	}
}
