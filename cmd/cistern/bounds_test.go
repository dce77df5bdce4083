package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/audit"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/native"
	"github.com/cistern-gpu/cistern/recording/open"
)

// A traced program that makes up device numbers is followed on no more than any machine has.
func TestRecordedDeviceNumbers(t *testing.T) {
	ring, err := audit.New(1, 0)
	if errors.Is(err, audit.ErrNotLinux) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	ring.Close()
	var file bytes.Buffer
	r, err := newRecorder(&file, []string{"program"})
	if err != nil {
		t.Fatal(err)
	}
	defer r.live.close()
	const pid = 1 << 30
	r.record(&audit.Record{Type: audit.RecordProcess, PID: pid})
	for i := range int32(2000) {
		r.record(&audit.Record{Type: audit.RecordCall, PID: pid, Call: uint8(recording.MemAlloc), Addr: uint64(i+1) << 21, Size: 1 << 20, Device: i})
	}
	if n := len(r.run.Devices()); n != recording.MaxDevices {
		t.Errorf("%d devices; expected %d", n, recording.MaxDevices)
	}
	if err := r.w.Close(recording.DriverEnd{}); err != nil {
		t.Fatal(err)
	}
	f, err := open.Read(&file, "recorded")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range f.Driver.Calls {
		if int(c.Device) >= recording.MaxDevices {
			t.Fatalf("a call for device %d", c.Device)
		}
	}
	if len(f.Traces) != recording.MaxDevices {
		t.Errorf("%d traces; expected %d", len(f.Traces), recording.MaxDevices)
	}
}

// What is searched of a file is bounded by its size, however many devices it tells of.
func TestDevicesShareWork(t *testing.T) {
	var file recording.File
	for device := range 2 {
		tr := &recording.Trace{Device: device, Streams: []uint64{0}, Pools: []recording.PoolID{{}}, Stacks: []recording.Stack{nil}, FromStart: true}
		for i := range 40_000 {
			tr.Events = append(tr.Events, event.Event{Kind: event.Alloc + event.Kind(i%2)*(event.FreeCompleted-event.Alloc), Addr: 1 << 40, Size: 1 << 30, TimeUS: int64(i)})
		}
		tr.Events = append(tr.Events, event.Event{Kind: event.OOM, Addr: 1 << 30, Size: 2 << 30, TimeUS: 40_000})
		file.Traces = append(file.Traces, tr)
	}
	path := filepath.Join(t.TempDir(), "run.cistern")
	var b, out, errs bytes.Buffer
	if err := native.Write(&b, &file); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	if code := run(t.Context(), []string{"report", "--capacity", "1GiB", "--json", path}, strings.NewReader(""), &out, &errs); code != exitOK {
		t.Fatalf("code %d: %s", code, errs.String())
	}
	var got struct {
		Reports []struct{ Failures []struct{ Replays int } }
	}
	if err := json.Unmarshal(out.Bytes(), &got); err != nil || len(got.Reports) != 2 {
		t.Fatalf("%v, %d reports", err, len(got.Reports))
	}
	if first, second := got.Reports[0].Failures[0].Replays, got.Reports[1].Failures[0].Replays; first < 2 || second >= first {
		t.Errorf("%d replays for one device and %d for the other, of the same run; expected that the first leaves little", first, second)
	}
}
