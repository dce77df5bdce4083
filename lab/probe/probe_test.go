//go:build linux && cgo

package probe

import (
	"encoding/csv"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/cuda/nvidia/standin"
	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
)

// The probe runs from end to end over the stand-in library: every call it makes is a legal one, every content check
// passes, and the table has a line for each thing that it is there to find out.
func TestProbe(t *testing.T) {
	out := filepath.Join(t.TempDir(), "probe.csv")
	p := &probe{out: t.Output(), csv: out, reps: 4, spin: 200 * time.Millisecond, largest: 20 * mib}
	p.device.Driver = "nvidia:" + standin.Build(t)
	if err := p.run(t.Context()); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(out)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	rows, err := csv.NewReader(f).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	measured := map[string]bool{}
	for _, row := range rows[1:] {
		section, call, size, load, n, note := row[0], row[1], row[2], row[3], row[4], row[9]
		measured[strings.Join([]string{section, call, size, load}, "|")] = n != "" && n != "0"
		if strings.Contains(note, "CUDA_ERROR") && section != "no context" && section != "addresses" && section != "capture" {
			t.Errorf("%v", row)
		}
		if strings.Contains(note, "WRONG") || strings.Contains(note, "left out") {
			t.Errorf("%v", row)
		}
	}
	for _, want := range []string{
		"chunk|cuMemCreate|2097152|idle", "chunk|cuMemMap second|20971520|side", "chunk|cuMemSetAccess|2097152|legacy",
		"chunk|cuMemUnmap first|2097152|side", "chunk|cuMemRelease|2097152|legacy", "malloc|cuMemFree|2097152|side",
		"batch 8 x 2 MiB|cuMemSetAccess, one call|16777216|idle", "order|cuEventQuery of pending work|0|idle",
		"order|cuStreamGetCaptureInfo|0|side", "addresses|cuMemAddressReserve|1099511627776|idle", "no context|cuMemCreate|0|",
		"capture|cuMemMap|0|a non-blocking stream captured", "contents|second mapping behind a running kernel|2097152|",
	} {
		if !measured[want] {
			t.Errorf("%s was not measured", want)
		}
	}
}

func TestProbeWithoutGPU(t *testing.T) {
	err := Run([]string{"-driver", "nvidia:/nowhere/libcuda.so.1"}, t.Output())
	if err == nil || strings.Contains(err.Error(), "\n") {
		t.Errorf("%v; want one line", err)
	}
}

// What has passed the limit is left out, and said to be.
func TestTimeLimit(t *testing.T) {
	out := filepath.Join(t.TempDir(), "probe.csv")
	args := []string{"-driver", "nvidia:" + standin.Build(t), "-csv", out, "-reps", "1", "-spin", "200ms", "-largest", "2MiB", "-limit", "0s"}
	if err := Run(args, t.Output()); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	for _, section := range []string{"chunk", "order", "malloc", "batch"} {
		if !strings.Contains(string(text), section+",,0,,,,,,,") {
			t.Errorf("nothing says that %s was left out", section)
		}
	}
}

// A call under load counts as waiting from 50 ms on; an idle GPU makes nothing wait.
func TestWait(t *testing.T) {
	for want, l := range map[string]*line{
		"":       {key: key{load: "idle"}, times: []time.Duration{time.Second}},
		"no":     {key: key{load: "side"}, times: []time.Duration{time.Millisecond, 50 * time.Millisecond}},
		"WAITS":  {key: key{load: "side"}, times: []time.Duration{time.Second, 51 * time.Millisecond}},
		"1 of 2": {key: key{load: "legacy"}, times: []time.Duration{time.Second, time.Millisecond}},
	} {
		if got := l.wait(); got != want {
			t.Errorf("%v: %q; want %q", l.times, got, want)
		}
	}
}
