package pause

import (
	"strings"
	"testing"

	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
	"github.com/cistern-gpu/cistern/lab/cli"
)

// Over the simulated device everything is played that a GPU is to do, with contents that are compared.
func TestSimulated(t *testing.T) {
	size := uint64(48 << 20)
	if testing.Short() { // as under the race detector, which makes the host's part many times slower
		size = 8 << 20
	}
	r, err := measure(config{device: cli.Device{Driver: "sim:2GiB"}, size: size, disk: size / 2, dir: t.TempDir(), cycles: 60, repeat: 2, rounds: 2})
	if err != nil {
		t.Fatal(err)
	}
	if r.DeviceGrown != 0 || r.FilesGrown != 0 || r.DiskBytes != size/2 || r.WarmOut <= 0 || r.WarmIn <= 0 ||
		r.ColdOut <= 0 || len(r.ColdOuts) != 3 || len(r.FirstDrops) != 2 {
		t.Errorf("%+v", r)
	}
	for _, kind := range []string{"fresh memory", "fresh memory, one block", "dropped", "very first", "warm", "cold"} {
		if len(r.Calls[kind+", pause"]) == 0 || len(r.Calls[kind+", resume"]) == 0 {
			t.Errorf("%s: no calls: %v", kind, r.Calls)
		}
	}
	if s := words([]Call{{"unmap", 3, 1.5}, {"map", 4, 0.01}}); s != "unmap 1.50 (3)" {
		t.Errorf("calls in words: %s", s)
	}
}

// What is worse than promised is printed.
func TestJudge(t *testing.T) {
	good := Result{PlainOut: 55, PlainIn: 55, WarmOut: 54, WarmIn: 53, FirstDropMS: 5, DropMS: 1, DropResumeMS: 1}
	if good.judge(); good.Missed != nil {
		t.Errorf("%v", good.Missed)
	}
	for what, bad := range map[string]func(*Result){
		"pausing copies":  func(r *Result) { r.WarmOut = 49 },
		"resuming copies": func(r *Result) { r.WarmIn = 20 },
		"pausing takes":   func(r *Result) { r.DropMS = 11 },
		"the first time":  func(r *Result) { r.FirstDropMS = 17 },
		"of one block":    func(r *Result) { r.OneDropMS = 17 },
		"resuming takes":  func(r *Result) { r.DropResumeMS = 12 },
		"device memory":   func(r *Result) { r.DeviceGrown = 1 << 30 },
		"host memory":     func(r *Result) { r.HostGrown = 1 << 30 },
		"descriptors":     func(r *Result) { r.FilesGrown = 3 },
	} {
		r := good
		bad(&r)
		if r.judge(); len(r.Missed) != 1 || !strings.Contains(r.Missed[0], what) {
			t.Errorf("%s: %v", what, r.Missed)
		}
	}
}
