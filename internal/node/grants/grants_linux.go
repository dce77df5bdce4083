package grants

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Segment is the broker's side.
type Segment struct {
	fd  int
	mem []byte
}

// New makes a segment.
func New() (*Segment, error) {
	fd, err := unix.MemfdCreate("cistern-grants", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("grants: memfd_create: %w", err)
	}
	s := &Segment{fd: fd}
	if err := s.make(); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("grants: %w", err)
	}
	return s, nil
}

func (s *Segment) make() (err error) {
	if err := unix.Ftruncate(s.fd, bytes); err != nil {
		return fmt.Errorf("ftruncate: %w", err)
	}
	if s.mem, err = unix.Mmap(s.fd, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return fmt.Errorf("mmap: %w", err)
	}
	*at(s.mem, 1), *at(s.mem, 0) = layout, magic
	const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL | unix.F_SEAL_FUTURE_WRITE
	if _, err = unix.FcntlInt(uintptr(s.fd), unix.F_ADD_SEALS, seals); err != nil {
		_ = unix.Munmap(s.mem)
		return fmt.Errorf("sealing (Linux 5.1 and later): %w", err)
	}
	return nil
}

// at is a word of a mapping, which is aligned to a page.
func at(mem []byte, word int) *uint64 { return (*uint64)(unsafe.Pointer(&mem[8*word])) }

// Set states what is granted of a slot, and how much of that was released, for so long.
func (s *Segment) Set(slot uint64, granted, released uint64, lasts time.Duration) {
	w := slotsAt + perSlot*int(slot)
	atomic.StoreUint64(at(s.mem, w+2), uint64(monotonic()+lasts))
	atomic.StoreUint64(at(s.mem, w+1), released)
	atomic.StoreUint64(at(s.mem, w), granted)
}

// Descriptor is that of the file, open until Close. Mappings of it cannot be written.
func (s *Segment) Descriptor() int { return s.fd }

// Close ends the segment here. Clients keep theirs.
func (s *Segment) Close() {
	_ = unix.Munmap(s.mem)
	unix.Close(s.fd)
}

// View is a client's side. Any thread may read it at any time, also after Close.
type View struct {
	mem     []byte
	readers atomic.Int64
	closed  atomic.Bool
}

// Open maps the file of a descriptor, which the caller closes.
func Open(fd int) (*View, error) {
	const sealed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || seals&sealed != sealed {
		return nil, errors.New("grants: the broker's segment may shrink: expected a sealed file")
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Size != bytes {
		return nil, fmt.Errorf("grants: the broker's segment has %d bytes: expected %d", st.Size, bytes)
	}
	mem, err := unix.Mmap(fd, 0, bytes, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("grants: mmap: %w", err)
	}
	if number(mem, 0) != magic || number(mem, 1) != layout {
		_ = unix.Munmap(mem)
		return nil, errors.New("grants: the broker's segment is of another layout")
	}
	_ = unix.Madvise(mem, unix.MADV_DONTFORK) // a child of fork has no use for it
	return &View{mem: mem}, nil
}

// Granted is what is granted of a slot now, and how much of that was released. It does not wait, and asks the kernel for nothing
// where there are no grants. After Close there are none.
func (v *View) Granted(slot uint64) (granted, released uint64) {
	// Either a reader sees that the view is closed, or Close sees the reader.
	v.readers.Add(1)
	defer v.readers.Add(-1)
	if v.closed.Load() {
		return 0, 0
	}
	w := slotsAt + perSlot*int(slot%Slots)
	granted = atomic.LoadUint64(at(v.mem, w))
	if granted == 0 || time.Duration(atomic.LoadUint64(at(v.mem, w+2))) < monotonic() {
		return 0, 0
	}
	return granted, min(granted, atomic.LoadUint64(at(v.mem, w+1)))
}

// Close unmaps the view, and reports whether it did: not while a thread reads. Then Close has to be called again. It is called by one
// goroutine.
func (v *View) Close() bool {
	v.closed.Store(true)
	if v.readers.Load() != 0 {
		return false
	}
	if v.mem != nil {
		_ = unix.Munmap(v.mem)
		v.mem = nil
	}
	return true
}

func monotonic() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return time.Duration(ts.Nano())
}
