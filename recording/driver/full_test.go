package driver

import (
	"errors"
	"testing"

	"github.com/cistern-gpu/cistern/recording"
)

// fullDisk takes so many bytes and no more.
type fullDisk int

func (f *fullDisk) Write(b []byte) (int, error) {
	if len(b) > int(*f) {
		return 0, errors.New("no space left on device")
	}
	*f -= fullDisk(len(b))
	return len(b), nil
}

// TestDriverFullDisk: a program goes on for days after its disk was full, and what cannot be written is not kept.
func TestDriverFullDisk(t *testing.T) {
	disk := fullDisk(10000)
	w, err := NewWriter(&disk, 0, []string{"program"})
	if err != nil {
		t.Fatal(err)
	}
	p := w.Process(recording.Process{PID: 10, Program: "/bin/program"})
	failed := 0
	for i := range uint64(200000) {
		w.Call(&recording.Call{Kind: recording.MemAlloc, Addr: (i + 1) << 12, Size: 4096, TimeNS: i, Process: p})
		w.Call(&recording.Call{Kind: recording.MemFree, Addr: (i + 1) << 12, TimeNS: i, Process: p})
		if i%100 == 0 && w.Flush() != nil {
			failed++
		}
	}
	kept := cap(w.d.Calls)
	for _, dt := range w.order {
		kept += cap(dt.pending)
	}
	if failed < 1000 || kept > 5000 {
		t.Errorf("%d flushes failed, %d calls and events are kept", failed, kept)
	}
	if w.Close(recording.DriverEnd{}) == nil {
		t.Error("it was closed as if all had been written")
	}
}
