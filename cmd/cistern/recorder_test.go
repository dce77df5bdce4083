package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"github.com/cistern-gpu/cistern/internal/audit"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
)

// FuzzRecords: a program that is traced can write any record. Whatever it is, the recorder writes its file and ends.
func FuzzRecords(f *testing.F) {
	const size = int(unsafe.Sizeof(audit.Record{}))
	seed := func(records ...audit.Record) {
		var b []byte
		for i := range records {
			b = append(b, (*[size]byte)(unsafe.Pointer(&records[i]))[:]...)
		}
		f.Add(b)
	}
	process := audit.Record{Type: audit.RecordProcess, PID: 7}
	module := audit.Record{Type: audit.RecordModule, PID: 7, Addr: 0x1000, Handle: 0x1000, Size: 1 << 40, Count: 9}
	seed(process, module, audit.Record{Type: audit.RecordCall, PID: 7, Call: 1, Addr: 1, Size: 1 << 63, Device: -70000, Count: 1})
	seed(process, audit.Record{Type: audit.RecordProcess, PID: 8, Extra: 7}, audit.Record{Type: audit.RecordProcess, PID: 7, Extra: 8}, module,
		audit.Record{Type: audit.RecordStack, PID: 7, Addr: 3, Handle: 4, Count: 4, Size: 2},
		audit.Record{Type: audit.RecordCode, PID: 7, Addr: 3, Handle: 144, Count: 144},
		audit.Record{Type: audit.RecordUnknown, Count: 144}, audit.Record{Type: audit.RecordPython, PID: 7, Count: 65535})
	for call := range uint8(50) {
		r := audit.Record{Type: audit.RecordCall, PID: 7, Call: call, Addr: 1 << 20, Size: 1 << 21, Handle: 5, Pool: 6, Extra: 7, Count: 1}
		seed(process, r, r)
	}
	ring, err := audit.New(1, 0)
	if err != nil {
		f.Skip(err)
	}
	defer ring.Close()
	f.Fuzz(func(t *testing.T, b []byte) {
		var file bytes.Buffer
		r, err := newRecorder(&file, []string{"program"})
		if err != nil {
			t.Fatal(err)
		}
		defer r.live.close()
		var rec audit.Record
		for n := 0; len(b) >= size && n < 64; n, b = n+1, b[size:] {
			copy((*[size]byte)(unsafe.Pointer(&rec))[:], b)
			rec.Type %= 9
			rec.Call %= 52
			// Real processes have their pages looked for, which no record should cost here.
			rec.PID = 1<<30 + rec.PID%4
			if binary.LittleEndian.Uint16(b)%3 == 0 {
				rec.Addr, rec.Handle, rec.Pool = rec.Addr%8, rec.Handle%8, rec.Pool%8
			}
			r.record(&rec)
		}
		if err := r.flush(); err != nil {
			t.Fatal(err)
		}
		if _, err := r.end(ring, 0); err != nil {
			t.Fatal(err)
		}
		if _, err := open.Read(&file, "file"); err != nil {
			t.Fatalf("what was written cannot be read: %v", err)
		}
	})
}

// TestRecorderLate: a process that has ended by the time its records are read holds nothing either, where it is known whose
// number it has; one that was not started here may be another one, in a PID namespace of its own.
func TestRecorderLate(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("there is no /proc")
	}
	ring, err := audit.New(1, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer ring.Close()
	self := uint32(os.Getpid())
	for _, c := range []struct {
		parent uint32
		most   uint64
	}{{self, 4 << 20}, {uint32(os.Getppid()), 8 << 20}, {1 << 30, 8 << 20}} {
		r, err := newRecorder(io.Discard, []string{"program"})
		if err != nil {
			t.Fatal(err)
		}
		defer r.live.close()
		calls := 0
		for range 2 {
			over := exec.Command("/bin/true")
			if err := over.Run(); err != nil {
				t.Fatal(err)
			}
			pid, then := uint32(over.Process.Pid), uint64(monotonic())
			r.record(&audit.Record{Type: audit.RecordProcess, PID: pid, Handle: uint64(c.parent), TimeNS: then})
			r.record(&audit.Record{Type: audit.RecordCall, Call: uint8(recording.MemAlloc), PID: pid, Addr: 8 << 20, Size: 4 << 20, TimeNS: then, Count: 1})
			calls++
			want := fmt.Sprintf(", %d call", calls) + map[bool]string{true: "s"}[calls > 1] + ", "
			if line := r.state(ring); !strings.Contains(line, want) || !strings.Contains(line, "; device 0: ") {
				t.Errorf("after call %d the state is %q", calls, line)
			}
		}
		if v := r.run.Device(0); v == nil || v.PeakHeld != c.most {
			t.Errorf("parent %d of %d: %+v, want %d held at most", c.parent, self, v, c.most)
		}
	}
}
