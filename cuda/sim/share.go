package sim

import (
	"encoding/binary"
	"slices"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
)

// Memory shared between simulated drivers, of one process or of several: what is shared is that the memory exists,
// how large it is, and the contents of exported chunks. Of exported pools more is shared, see poolshare.go. Imported memory takes none of the importing driver's capacity. What the calls on legacy handles (cuIpc) cost has
// not been measured; these are counted and priced at nothing.

// Exportable is the handle types that this system lets the simulated driver grant (Options.Handles).
const Exportable = exportable

// export is what an exported chunk or allocation is known by elsewhere: 64 bytes, as many as an IpcHandle has.
type export struct {
	driver uint64 // the exporting driver
	serial uint64 // its chunk
	size   uint64 // bytes
	device uint64
}

const handleMagic = "cistern-sim-1\x00\x00\x00"

func (t export) bytes() (b cuda.IpcHandle) {
	copy(b[:], handleMagic)
	for i, v := range []uint64{t.driver, t.serial, t.size, t.device} {
		binary.LittleEndian.PutUint64(b[16+8*i:], v)
	}
	return b
}

func exportOf(b cuda.IpcHandle) (t export, ok bool) {
	v := func(i int) uint64 { return binary.LittleEndian.Uint64(b[16+8*i:]) }
	return export{v(0), v(1), v(2), v(3)}, string(b[:16]) == handleMagic
}

// MemExport makes a descriptor of a chunk: a file in memory that says which chunk it is, and with Options.Shared has its contents. It keeps those, but
// the memory counts only as long as a driver has the chunk: the exporter, or once that has ended an importer. On an H200 with driver
// 580.159.04 a descriptor keeps the memory too, contents intact, even after SIGKILL of the exporter, and so does an import. NVML then charges the memory to an importer with a context, and to no process where only a descriptor is left.
func (d *Driver) MemExport(h cuda.Handle) (int, error) {
	d.mu.Lock()
	defer d.leave()
	c, err := d.handleCall(callMemExport, h, func(uint64) time.Duration { return d.costs.MemExport })
	if err != nil {
		return -1, err
	}
	if c.prop.Handles&cuda.HandlePosix == 0 {
		return -1, d.errorOf(callMemExport, c.prop.Device, c.size, cuda.ErrNotSupported)
	}
	var fd int
	if d.shared == nil || c.file != nil && c.file.fd < 0 {
		t := export{d.identity, c.serial, c.size, uint64(c.prop.Device)}.bytes()
		fd, err = memoryFile(t[:])
	} else {
		fd, err = d.exportFile(c)
	}
	if err != nil {
		return -1, d.errorOf(callMemExport, c.prop.Device, c.size, cuda.ErrUnknown)
	}
	return fd, nil
}

// MemImport makes a chunk of a descriptor. Its own driver gives the chunk that it was made of.
func (d *Driver) MemImport(dev cuda.Device, fd int) (cuda.Handle, error) {
	d.mu.Lock()
	defer d.leave()
	if err := d.begin(callMemImport, dev, 0, 0); err != nil {
		return 0, err
	}
	if code := d.poisoned(dev); code != cuda.Success {
		return 0, d.errorOf(callMemImport, dev, 0, code)
	}
	f, t, ok := openChunkFile(fd)
	if !ok || t.size%d.opt.Granularity != 0 {
		f.close()
		return 0, d.errorOf(callMemImport, dev, 0, cuda.ErrInvalidValue)
	}
	d.charge(callMemImport, d.costs.MemImport(t.size))
	if t.driver == d.identity {
		for _, c := range d.chunks {
			if c != nil && c.serial == t.serial {
				f.close()
				c.refs++
				d.live.handles++
				return c.handle, nil
			}
		}
	}
	own, code := d.inherit(d.devices[dev], f, t.size)
	if code != cuda.Success {
		f.close()
		return 0, d.errorOf(callMemImport, dev, t.size, code)
	}
	c := d.otherChunk(dev, t.size, cuda.HandlePosix)
	c.file, c.other = f, !own
	d.giveHandle(c)
	d.note(recCreate, 0, 0, t.size, c, 0)
	return c.handle, nil
}

// otherChunk is memory that another driver holds.
func (d *Driver) otherChunk(dev cuda.Device, size uint64, handles cuda.HandleType) *chunk {
	d.live.chunks++
	d.mapSeq++
	return &chunk{serial: d.mapSeq, size: size, prop: cuda.MemProp{Device: dev, Handles: handles}, other: true,
		uses: ranges{hi: size}}
}

// ipcMapping is memory of another driver's MemAlloc that is open here.
type ipcMapping struct {
	handle cuda.IpcHandle
	base   uint64
	device cuda.Device
	opened int
	m      *mapping
}

// IpcExport names an allocation in other processes.
func (d *Driver) IpcExport(dev cuda.Device, p cuda.Ptr) (cuda.IpcHandle, error) {
	d.mu.Lock()
	defer d.leave()
	if err := d.beginContext(callIpcGet, dev, 0, 0); err != nil {
		return cuda.IpcHandle{}, err
	}
	m := d.space.find(uint64(p))
	// Mapped chunks and what was opened from elsewhere have no such handle. Nor, here, have small allocations: the
	// driver shares the whole granule that they lie in, which is hardly what a caller wants.
	if m == nil || m.resv != nil || m.chunk.other || m.slab != nil || m.arena != nil || m.base != uint64(p) || m.chunk.prop.Device != dev {
		return cuda.IpcHandle{}, d.errorOf(callIpcGet, dev, 0, cuda.ErrInvalidValue)
	}
	return export{d.identity, m.chunk.serial, m.pages, uint64(dev)}.bytes(), nil
}

// IpcOpen maps an allocation of another driver.
func (d *Driver) IpcOpen(dev cuda.Device, h cuda.IpcHandle) (cuda.Ptr, error) {
	d.mu.Lock()
	defer d.leave()
	if err := d.beginContext(callIpcOpen, dev, 0, 0); err != nil {
		return 0, err
	}
	t, ok := exportOf(h)
	switch {
	case !ok || t.size == 0 || t.size%d.opt.Granularity != 0:
		return 0, d.errorOf(callIpcOpen, dev, 0, cuda.ErrInvalidValue)
	case t.driver == d.identity:
		return 0, d.errorOf(callIpcOpen, dev, 0, cuda.ErrInvalidContext)
	}
	for _, i := range d.ipc {
		if i.handle == h && i.device == dev {
			i.opened++
			return cuda.Ptr(i.base), nil
		}
	}
	base := d.space.take(t.size, d.opt.Granularity, 0)
	if base == 0 {
		return 0, d.errorOf(callIpcOpen, dev, t.size, cuda.ErrOutOfMemory)
	}
	c := d.otherChunk(dev, t.size, cuda.HandleNone)
	c.maps = 1
	d.mapSeq++
	m := &mapping{region: region{base: base, size: t.size, seq: d.mapSeq}, chunk: c, pages: t.size, access: 1 << dev}
	d.space.set(base, t.size, m)
	d.ipc = append(d.ipc, &ipcMapping{h, base, dev, 1, m})
	d.live.allocs++
	d.note(recAlloc, 0, base, t.size, c, 0)
	return cuda.Ptr(base), nil
}

// IpcClose undoes one IpcOpen. Like unmapping it is a fault while queued work uses the memory.
func (d *Driver) IpcClose(dev cuda.Device, p cuda.Ptr) error {
	d.mu.Lock()
	defer d.leave()
	if err := d.beginContext(callIpcClose, dev, 0, 0); err != nil {
		return err
	}
	at := slices.IndexFunc(d.ipc, func(i *ipcMapping) bool { return i.base == uint64(p) && i.device == dev })
	if at < 0 {
		return d.errorOf(callIpcClose, dev, 0, cuda.ErrInvalidValue)
	}
	i := d.ipc[at]
	if i.opened > 1 {
		i.opened--
		return nil
	}
	if d.opt.Check >= CheckUse {
		if f := d.stillUsed(&i.m.region, i.m.chunk, 0, callIpcClose, dev); f != nil {
			return d.found(f)
		}
	}
	d.note(recFree, 0, i.base, i.m.size, i.m.chunk, 0)
	d.ipc = slices.Delete(d.ipc, at, at+1)
	d.live.allocs--
	d.space.set(i.base, i.m.pages, nil)
	d.space.give(i.base, i.m.pages)
	i.m.chunk.maps--
	d.releaseUnused(i.m.chunk)
	return nil
}
