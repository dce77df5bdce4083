package main

import (
	"bytes"
	"errors"
	"testing"

	"github.com/cistern-gpu/cistern/internal/audit"
	"github.com/cistern-gpu/cistern/trace"
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
		r.record(&audit.Record{Type: audit.RecordCall, PID: pid, Call: uint8(trace.MemAlloc), Addr: uint64(i+1) << 21, Size: 1 << 20, Device: i})
	}
	if n := len(r.run.Devices()); n != trace.MaxDevices {
		t.Errorf("%d devices; expected %d", n, trace.MaxDevices)
	}
	if err := r.w.Close(trace.DriverEnd{}); err != nil {
		t.Fatal(err)
	}
	f, err := trace.Read(&file, "recorded")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range f.Driver.Calls {
		if int(c.Device) >= trace.MaxDevices {
			t.Fatalf("a call for device %d", c.Device)
		}
	}
	if len(f.Traces) != trace.MaxDevices {
		t.Errorf("%d traces; expected %d", len(f.Traces), trace.MaxDevices)
	}
}
