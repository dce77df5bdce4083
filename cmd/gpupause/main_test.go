package main

import (
	"strings"
	"testing"
)

// Over the simulated device everything is played that a GPU is to do, with contents that are compared.
func TestSimulated(t *testing.T) {
	r, err := measure(config{driver: "sim:2GiB", size: 48 << 20, disk: 20 << 20, dir: t.TempDir(), cycles: 60, repeat: 2})
	if err != nil {
		t.Fatal(err)
	}
	if r.DeviceGrown != 0 || r.FilesGrown != 0 || r.DiskBytes != 20<<20 || r.WarmOut <= 0 || r.WarmIn <= 0 {
		t.Errorf("%+v", r)
	}
}

// What is worse than promised is said.
func TestJudge(t *testing.T) {
	good := Result{PlainOut: 55, PlainIn: 55, WarmOut: 54, WarmIn: 53, FirstDropMS: 5, DropMS: 1, DropResumeMS: 1}
	if good.judge(); good.Missed != nil {
		t.Errorf("%v", good.Missed)
	}
	for what, bad := range map[string]func(*Result){
		"pausing copies":  func(r *Result) { r.WarmOut = 49 },
		"resuming copies": func(r *Result) { r.WarmIn = 20 },
		"pausing takes":   func(r *Result) { r.DropMS = 11 },
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
