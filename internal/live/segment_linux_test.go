package live

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// segmentOf is a reader of a page that a test writes.
func segmentOf(t testing.TB, gauges func(into []Device) []Device) (*Page, *Segment) {
	t.Helper()
	p, err := PublishUnlisted(Process{}, gauges)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	fd, err := p.Descriptor()
	if err != nil {
		t.Fatal(err)
	}
	s, err := NewSegment(fd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return p, s
}

// A segment's reader takes the newest figures that are whole, and keeps those while newer ones are being written.
func TestSegmentIsWritten(t *testing.T) {
	fd, err := unix.MemfdCreate("x", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	s := &Segment{fd: fd}
	t.Cleanup(s.Close)
	if err := unix.Ftruncate(fd, gaugesAt+2*gaugesStep); err != nil {
		t.Fatal(err)
	}
	part := func(n, reserved uint64) []byte {
		contents := encodeGauges(nil, time.Now(), 0, []Device{{Reserved: reserved}})
		b := make([]byte, head+len(contents))
		put(b, n, contents)
		return b
	}
	write := func(b []byte, slot int64) {
		t.Helper()
		if _, err := unix.Pwrite(fd, b, gaugesAt+slot*gaugesStep); err != nil {
			t.Fatal(err)
		}
	}
	is := func(want uint64) {
		t.Helper()
		p, err := s.Read()
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case want == 0 && len(p.Devices) == 0:
		case len(p.Devices) != 1 || p.Devices[0].Reserved != want:
			t.Errorf("%+v, want %d", p.Devices, want)
		}
	}
	is(0)
	write(part(1, 10), 1)
	is(10)
	write(part(2, 20), 0)
	is(20)
	torn := part(3, 30)
	torn[len(torn)-1]++
	write(torn, 1)
	is(20)
	write(make([]byte, 8), 1) // the number goes first
	is(20)
	write(part(3, 30), 1)
	is(30)
	is(30)
	both := &Segment{fd: fd} // one that comes now takes the older where the newer is not whole
	torn = part(4, 40)
	torn[len(torn)-1]++
	write(torn, 0)
	if p, err := both.Read(); err != nil || len(p.Devices) != 1 || p.Devices[0].Reserved != 30 {
		t.Error(p, err)
	}
}

// BenchmarkSegment: a reader whose process has nothing new.
func BenchmarkSegment(b *testing.B) {
	_, s := segmentOf(b, func(into []Device) []Device { return append(into, Device{UUID: [16]byte{1}, Total: 1 << 30}) })
	for b.Loop() {
		if p, err := s.Read(); err != nil || len(p.Devices) > 1 {
			b.Fatal(err)
		}
	}
}
