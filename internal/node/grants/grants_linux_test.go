package grants

import (
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestSegment(t *testing.T) {
	s, err := New()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	v, err := Open(s.Descriptor())
	if err != nil {
		t.Fatal(err)
	}
	defer v.Close()
	is := func(slot, granted, released uint64) {
		t.Helper()
		if g, r := v.Granted(slot); g != granted || r != released {
			t.Errorf("slot %d: %d granted, %d of it released; want %d, %d", slot, g, r, granted, released)
		}
	}
	is(3, 0, 0)
	s.Set(3, 5<<30, 2<<30, time.Hour)
	is(3, 5<<30, 2<<30)
	is(3+Slots, 5<<30, 2<<30)
	is(2, 0, 0)
	is(4, 0, 0)
	s.Set(3, 5<<30, 2<<30, -time.Second) // a grant that is over does not count
	is(3, 0, 0)
	s.Set(3, 0, 0, time.Hour)
	is(3, 0, 0)
}

// A view that is closed while threads read it is unmapped once none does.
func TestCloseWhileRead(t *testing.T) {
	s, err := New()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	s.Set(3, 5<<30, 0, time.Hour)
	for range 200 {
		v, err := Open(s.Descriptor())
		if err != nil {
			t.Fatal(err)
		}
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				for {
					switch g, _ := v.Granted(3); g {
					case 5 << 30:
					case 0:
						return
					default:
						t.Errorf("%d granted", g)
						return
					}
				}
			})
		}
		for !v.Close() {
			runtime.Gosched()
		}
		all.Wait()
		if v.mem != nil || !v.Close() {
			t.Error("it is mapped")
		}
	}
}

// A thread that reads keeps the view mapped.
func TestCloseLater(t *testing.T) {
	s, err := New()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	v, err := Open(s.Descriptor())
	if err != nil {
		t.Fatal(err)
	}
	v.readers.Add(1)
	if v.Close() || v.mem == nil {
		t.Error("it is unmapped")
	}
	v.readers.Add(-1)
	if !v.Close() || v.mem != nil {
		t.Error("it is mapped")
	}
}

// A client can neither write the segment nor change its size.
func TestClientsCannotWrite(t *testing.T) {
	s, err := New()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	fd := s.Descriptor()
	if _, err := unix.Mmap(fd, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
		t.Error("mapped to write")
	}
	if _, err := unix.Pwrite(fd, []byte{1}, 0); err == nil {
		t.Error("written")
	}
	for _, size := range []int64{0, 2 * bytes} {
		if unix.Ftruncate(fd, size) == nil {
			t.Errorf("it has %d bytes now", size)
		}
	}
}

// A file that may shrink under its readers, or is something else, is refused.
func TestOpenRefuses(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fd, err := unix.MemfdCreate("x", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	for range 3 {
		for _, fd := range []int{int(f.Fd()), fd, -1} {
			if _, err := Open(fd); err == nil {
				t.Error("opened")
			}
		}
		switch _, seals := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0); {
		case seals != nil:
			t.Fatal(seals)
		default: // sealed with another size, then with another content
			_ = unix.Ftruncate(fd, bytes)
			_, _ = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW)
		}
	}
}
