package objects

import (
	"errors"
	"fmt"
	"io"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/cistern-gpu/cistern/cuda"
)

// Driver is what a broker uses of the driver. No call makes a context.
type Driver interface {
	DeviceCount() (int, error)
	DeviceInfo(d cuda.Device) (cuda.DeviceInfo, error)
	MemCreate(size uint64, prop cuda.MemProp) (cuda.Handle, error)
	MemRelease(h cuda.Handle) error
	MemExport(h cuda.Handle) (fd int, err error)
	MemImport(dev cuda.Device, fd int) (cuda.Handle, error)
}

// MaxChunk is the size of the chunks of an object, the last excepted. Mapping costs by chunk, and a broker keeps a descriptor for each.
const MaxChunk = 4 << 30

// MaxChunks is the most chunks of an object.
const MaxChunks = 256

// Chunks is the number of an object's chunks.
func (o *Object) Chunks() int { return int((o.Reserved + MaxChunk - 1) / MaxChunk) }

// Chunk is a part of an object's memory.
type Chunk struct {
	Size   uint64
	FD     int // of the exported chunk
	handle cuda.Handle
	has    bool // handle is to be released
}

// Memory is what keeps one generation: descriptors, which keep the memory by themselves, and the driver's handles, which have it
// charged to this process.
type Memory struct {
	Chunks []Chunk
	Layout int          // a sealed file in memory
	using  sync.RWMutex // held for writing while the descriptors are closed
}

// Use calls f while the descriptors stay open, unless they are closed already.
func (m *Memory) Use(f func()) {
	m.using.RLock()
	defer m.using.RUnlock()
	if m.Layout >= 0 {
		f()
	}
}

// Create makes and exports size bytes of device memory. Where a call fails, those before it are undone. The layout is taken over, also
// then.
func Create(drv Driver, dev cuda.Device, size uint64, layout int) (*Memory, error) {
	m := &Memory{Layout: layout}
	for size > 0 {
		n := min(size, MaxChunk)
		size -= n
		h, err := drv.MemCreate(n, cuda.MemProp{Device: dev, Handles: cuda.HandlePosix})
		if err == nil {
			m.Chunks = append(m.Chunks, Chunk{Size: n, FD: -1, handle: h, has: true})
			c := &m.Chunks[len(m.Chunks)-1]
			if c.FD, err = drv.MemExport(h); err != nil {
				c.FD = -1
			}
		}
		if err != nil {
			return nil, errors.Join(err, m.Release(drv))
		}
	}
	return m, nil
}

// Charged reports whether the driver has the chunk charged to this process.
func (c *Chunk) Charged() bool { return c.has }

// Charge notes the handle of an import of the chunk, which Release releases.
func (c *Chunk) Charge(h cuda.Handle) { c.handle, c.has = h, true }

// Release gives up the memory. It goes when no process maps it any more.
func (m *Memory) Release(drv Driver) (err error) {
	m.using.Lock()
	defer m.using.Unlock()
	for _, c := range m.Chunks {
		if c.FD >= 0 {
			unix.Close(c.FD)
		}
		if !c.has {
			continue
		}
		bad := drv.MemRelease(c.handle)
		if bad != nil {
			bad = drv.MemRelease(c.handle) // once more: nothing else would
		}
		err = errors.Join(err, bad)
	}
	m.Chunks = nil
	if m.Layout >= 0 {
		unix.Close(m.Layout)
		m.Layout = -1
	}
	return err
}

// seals are what a layout's file must have: it does not change any more.
const seals = unix.F_SEAL_WRITE | unix.F_SEAL_GROW | unix.F_SEAL_SHRINK

// NewFile makes a sealed file in memory.
func NewFile(name string, b []byte) (fd int, err error) {
	if fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING); err != nil {
		return -1, fmt.Errorf("memfd_create: %w", err)
	}
	for len(b) > 0 && err == nil {
		var n int
		if n, err = unix.Write(fd, b); err == unix.EINTR {
			err = nil
		}
		b = b[max(n, 0):]
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals|unix.F_SEAL_SEAL)
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("a file in memory: %w", err)
	}
	return fd, nil
}

// ReadFile reads a sealed file of another process, whole. It does not wait: such files are in memory.
func ReadFile(fd int, most int64) ([]byte, error) {
	got, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || got&seals != seals {
		return nil, errors.New("expected a file in memory with the seals write, grow and shrink")
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if st.Size > most {
		return nil, fmt.Errorf("a file of %d bytes: expected at most %d", st.Size, most)
	}
	b := make([]byte, st.Size)
	for at := 0; at < len(b); {
		n, err := unix.Pread(fd, b[at:], int64(at))
		switch {
		case err == unix.EINTR:
		case err != nil:
			return nil, err
		case n == 0:
			return nil, io.ErrUnexpectedEOF
		}
		at += max(n, 0)
	}
	return b, nil
}
