package sim

import (
	"sync/atomic"
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
)

// With Options.Shared, the contents of an exported chunk lie in the file that its descriptors are of, where every driver that has
// imported it reads and writes them. So they outlive the process that made the chunk, which keeps one descriptor for each. Uses are not shared, other than those of pools.

const (
	chunkHead    = 4096 // bytes before the contents
	chunkCharged = 48   // where in the head the driver is named that the memory is charged to
)

// chunkFile is the mapped file of an exported chunk.
type chunkFile struct {
	b  []byte // the head, then the contents, kept such that what was never written reads as Poison
	fd int    // -1 where the chunk was imported
}

// newChunkFile makes the file of a chunk.
func newChunkFile(t export) (*chunkFile, error) {
	head := t.bytes()
	fd, err := memoryFile(head[:])
	if err != nil {
		return nil, err
	}
	b, err := mapChunk(fd, chunkHead+t.size, true)
	if err != nil {
		closeFile(fd)
		return nil, err
	}
	f := &chunkFile{b: b, fd: fd}
	f.charged().Store(t.driver)
	return f, nil
}

// openChunkFile maps the file of a descriptor; f is nil where it has no contents. ok is false where it is none of a chunk.
func openChunkFile(fd int) (f *chunkFile, t export, ok bool) {
	var head cuda.IpcHandle
	if !readHead(fd, head[:]) {
		return nil, t, false
	}
	if t, ok = exportOf(head); !ok || t.size == 0 || t.size > 1<<56 {
		return nil, t, false
	}
	if readFile(fd, head[:]) { // it has nothing else
		return nil, t, true
	}
	b, err := mapChunk(fd, chunkHead+t.size, false)
	if err != nil {
		return nil, t, false
	}
	return &chunkFile{b: b, fd: -1}, t, true
}

// charged names the driver that the memory is charged to.
func (f *chunkFile) charged() *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&f.b[chunkCharged]))
}

func (f *chunkFile) put(off uint64, b []byte) {
	to := f.b[chunkHead+off:]
	for i, v := range b {
		to[i] = v ^ Poison
	}
}

func (f *chunkFile) get(off uint64, b []byte) {
	from := f.b[chunkHead+off:]
	for i := range b {
		b[i] = from[i] ^ Poison
	}
}

func (f *chunkFile) close() {
	if f == nil {
		return
	}
	unmapChunk(f.b)
	if f.fd >= 0 {
		closeFile(f.fd)
	}
}

// exportFile is a descriptor of the chunk's file, which it gets at the first.
func (d *Driver) exportFile(c *chunk) (int, error) {
	if c.file == nil {
		f, err := newChunkFile(export{d.identity, c.serial, c.size, uint64(c.prop.Device)})
		if err != nil {
			return -1, err
		}
		if c.data != nil {
			for n, page := range c.data.pages {
				f.put(n*contentPage, page[:min(contentPage, c.size-n*contentPage)])
			}
		}
		c.file, c.data = f, nil
	}
	return copyFile(c.file.fd)
}

// inherit charges imported memory to this driver where the one that it was charged to has ended, as the real driver does. It
// reports whether it did.
func (d *Driver) inherit(v *device, f *chunkFile, size uint64) (bool, cuda.Code) {
	if d.shared == nil || f == nil {
		return false, cuda.Success
	}
	was := f.charged().Load()
	ended, code := d.shared.without(v, was)
	if code != cuda.Success || !ended {
		return false, code
	}
	if code := d.takeDevice(v, size); code != cuda.Success {
		return false, code
	}
	if f.charged().CompareAndSwap(was, d.identity) {
		return true, cuda.Success
	}
	v.used -= size // another importer was faster
	d.shared.give(v)
	return false, cuda.Success
}

// without reports whether a driver has no memory of a device, as one that has ended.
func (s *shared) without(v *device, driver uint64) (ended bool, code cuda.Code) {
	code = s.code(s.locked(func() error {
		if err := s.read(); err != nil {
			return err
		}
		if err := s.dropEnded(); err != nil {
			return err
		}
		ended = true
		for _, r := range s.records {
			if r.bytes != 0 && r.driver == driver && r.device == uint64(v.id) {
				ended = false
			}
		}
		return nil
	}))
	return ended, code
}
