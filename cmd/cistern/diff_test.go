package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/driver"
)

// Of driver traces with several processes on a device each process is compared with one of the other run's, by its own
// calls, and what has no counterpart is named.
func TestDiffOfProcesses(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, programs ...string) string {
		var b bytes.Buffer
		w, err := driver.NewWriter(&b, 0, []string{"program"})
		if err != nil {
			t.Fatal(err)
		}
		for i, program := range programs {
			pid := uint32(100*i + 100)
			p := w.Process(recording.Process{PID: pid, Program: "/bin/" + program})
			for k := range uint64(i + 1) {
				w.Call(&recording.Call{Kind: recording.MemAlloc, TimeNS: 1000*uint64(i+1) + 100*k, TookNS: 10, Addr: 1<<30 + k<<21, Size: 2 << 20, Process: p, Thread: pid + 1})
			}
		}
		if err := w.Close(recording.DriverEnd{}); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, b.Bytes(), 0o666); err != nil {
			t.Fatal(err)
		}
		return path
	}
	a, b := write("a.cistern", "loader", "worker", "worker"), write("b.cistern", "worker", "other", "loader", "worker")
	out, errs, code := cistern(t, "", "diff", "--json", a, b)
	if code != 0 || errs != "" {
		t.Fatalf("code %d: %s", code, errs)
	}
	type side struct {
		Process     recording.Owner `json:"process"`
		DriverCalls int             `json:"driver_calls"`
		DriverNS    int             `json:"driver_ns"`
	}
	var got struct {
		Devices []struct {
			A, B  side
			Notes []string
		}
	}
	if err := json.Unmarshal([]byte(out), &got); err != nil {
		t.Fatal(err)
	}
	var pairs [][2]uint32
	for _, d := range got.Devices {
		pairs = append(pairs, [2]uint32{d.A.Process.PID, d.B.Process.PID})
		for _, s := range []side{d.A, d.B} {
			if n := int(s.Process.PID / 100); s.DriverCalls != n || s.DriverNS != 10*n {
				t.Errorf("process %d: %d calls that took %d ns, want %d that took %d", s.Process.PID, s.DriverCalls, s.DriverNS, n, 10*n)
			}
		}
		if !slices.Contains(d.Notes, "device 0, process 200 (other) is in B only") {
			t.Errorf("%q does not name who is alone", d.Notes)
		}
	}
	if want := [][2]uint32{{100, 300}, {200, 100}, {300, 400}}; !slices.Equal(pairs, want) {
		t.Errorf("processes %v were compared, want %v", pairs, want)
	}
	out, _, _ = cistern(t, "", "inspect", a)
	for _, want := range []string{"device 0, process 100 (loader), cistern", "device 0, process 300 (worker), cistern"} {
		if !bytes.Contains([]byte(out), []byte(want)) {
			t.Errorf("inspect has no title %q:\n%s", want, out)
		}
	}
}
