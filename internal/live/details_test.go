//go:build linux

package live

import (
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// readerOfFile reads a page without looking for it.
func readerOfFile(t *testing.T, page *Page) *Reader {
	t.Helper()
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", page.fd), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	r := &Reader{dir: "/proc/self", pid: os.Getpid(), fd: fd}
	t.Cleanup(r.Close)
	if r.id, err = decodeIdentity(file0(fd)); err != nil {
		t.Fatal(err)
	}
	return r
}

// TestDetailsInTurn: details are made only when a reader asks for them. Of those that are made the last and those before them are in the
// page: while some are written, which on a busy machine may take long, the others are there.
func TestDetailsInTurn(t *testing.T) {
	made := 0
	page := &Page{file: hidden, gauges: func(into []Device) []Device { return append(into, Device{}) },
		details: func() []Details {
			made++
			return []Details{{Tags: []Use{{Name: "weights", Blocks: 1, Bytes: uint64(made)}}}}
		}}
	if err := page.make(); err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(page.mem)
	defer unix.Close(page.fd)
	r := readerOfFile(t, page)
	now := time.Now() // of here on: nothing waits
	refresh := func(which int, at int64, d time.Duration) (times int) {
		for end := now.Add(d); now.Before(end); times++ {
			r.ask(which, at, now.Unix())
			now = now.Add(page.refresh(now))
		}
		return times
	}
	if next := page.refresh(now); next != Every {
		t.Errorf("it is refreshed again after %v, though no reader watches", next)
	}
	if n := refresh(0, watchedAt, 3*time.Second); made != 0 || n != 12 {
		t.Errorf("details were made %d times without a question, in %d refreshes in 3 s of being watched", made, n)
	}
	for range 10 {
		refresh(1, askedAt, Every)
		n := made
		if n < 2 {
			continue
		}
		last := page.mem[detailsAt+page.detailed%2*detailsStep:]
		number := le.Uint64(last)
		le.PutUint64(last, 0) // with which writing them began
		var p Process
		if err := decode(file0(page.fd), true, tries, &p); err != nil || p.Devices[0].Details == nil || p.Devices[0].Details.Tags[0].Bytes != uint64(n-1) {
			t.Fatalf("while details %d are written: %+v, %v", n, p.Devices, err)
		}
		le.PutUint64(last, number)
	}
	if made < 9 || made > 12 {
		t.Errorf("in ten seconds details were made %d times", made)
	}
}

// TestSlowDetails: details that take long are there until they are made again, which ends with the last reader.
func TestSlowDetails(t *testing.T) {
	made := uint64(0)
	page := &Page{file: hidden, gauges: func(into []Device) []Device { return append(into, Device{}) },
		details: func() []Details {
			made++
			return []Details{{Tags: []Use{{Name: "weights", Blocks: 1, Bytes: made}}}}
		}}
	if err := page.make(); err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(page.mem)
	defer unix.Close(page.fd)
	r := readerOfFile(t, page)
	seen := func() uint64 {
		t.Helper()
		var p Process
		if err := decode(file0(page.fd), true, tries, &p); err != nil {
			t.Fatal(err)
		}
		if p.Devices[0].Details == nil {
			return 0
		}
		return p.Devices[0].Details.Tags[0].Bytes
	}
	now := time.Now().Add(-3 * time.Second) // the clock goes on while they are made: here it has done so already
	for began := now; now.Before(began.Add(59 * time.Second)); now = now.Add(EveryWatched) {
		r.ask(1, askedAt, now.Unix())
		if page.refresh(now); made != 1 || seen() != 1 {
			t.Fatalf("after %v details were made %d times, those seen are %d", now.Sub(began), made, seen())
		}
	}
	asked := now
	for ; now.Before(asked.Add(20 * time.Second)); now = now.Add(Every) {
		page.refresh(now)
	}
	if n := seen(); n != 0 {
		t.Errorf("20 s after the last question details %d are there", n)
	}
	before := made
	r.ask(1, askedAt, now.Unix())
	if page.refresh(now); made != before+1 || seen() != made {
		t.Errorf("asked again details were made %d times, %d times before, those seen are %d", made, before, seen())
	}
}

// TestNoSizeYet: a file that is being made is not taken for one that is broken.
func TestNoSizeYet(t *testing.T) {
	fd, err := unix.MemfdCreate(hidden, unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	for _, size := range []int64{0, pageBytes} {
		if err := unix.Ftruncate(fd, size); err != nil {
			t.Fatal(err)
		}
		if _, err := decodeIdentity(file0(fd)); !errors.Is(err, errNotYet) {
			t.Errorf("of %d bytes: %v", size, err)
		}
	}
}
