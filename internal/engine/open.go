package engine

import (
	"encoding/binary"
	"fmt"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/phys"
	"github.com/cistern-gpu/cistern/internal/lockrank"
	"github.com/cistern-gpu/cistern/memory"
)

// Memory of other processes. It is mapped at addresses of its own, apart from every stream heap, and counts only as imported in the
// statistics: physical memory is held by the process that made it. No engine lock is held while the other process or
// the driver is waited for.

// opened is what is open here. The zero value is ready.
type opened struct {
	mu lockrank.Mutex
	// +checklocks:mu
	maps map[string]*importedMemory // by what is mapped, and for which device
	ptrs map[cuda.Ptr]*openBlock    // +checklocks:mu
}

// openBlock is an address that Open or OpenOwn returned.
type openBlock struct {
	times int
	in    *importedMemory // nil: this process's own
}

// importedMemory is memory of another process, mapped here once.
type importedMemory struct {
	key   string
	dev   cuda.Device
	base  cuda.Ptr
	size  uint64        // bytes; 0 where it was opened by an IPC handle
	bytes uint64        // for the statistics: the size, or what is known of it
	pool  cuda.MemPool  // imported for it, where it is stream-ordered memory
	users int           // guarded by opened.mu
	ready chan struct{} // closed once base or err is set
	err   error
}

// Open makes memory that another process exported usable by the device and returns the address of the block's first byte. from
// names the exporting process for all time. descriptor gives the descriptor of the i-th chunk, is asked for them in order, and
// keeps each until it is asked for the next; it may wait for the other process. Memory that is mapped already is not mapped
// again. Each Open is undone by one Close of the address.
//
// Memory that lies on another GPU than the device can be opened where the device reaches it.
func (sh *Sharing) Open(dev cuda.Device, from string, m memory.Shared, descriptor func(i int) (int, error)) (cuda.Ptr, error) {
	d, err := sh.a.Device(dev)
	if err != nil {
		return 0, err
	}
	if err := d.health.Broken(); err != nil {
		return 0, err
	}
	size, err := importedSize(&m, d.info.Granularity)
	if err != nil {
		return 0, err
	}
	o := &sh.opened
	key := importedKey(&m, dev, from)
	o.mu.Lock()
	f := o.maps[key]
	if f == nil {
		f = &importedMemory{key: key, dev: dev, size: size, ready: make(chan struct{}), bytes: max(size, m.Size)}
		if o.maps == nil {
			o.maps = map[string]*importedMemory{}
		}
		o.maps[key] = f
		o.mu.Unlock()
		f.err = fmt.Errorf("open: the thread that was to map it failed") // should descriptor panic
		defer func() {
			if f.err != nil {
				o.mu.Lock()
				delete(o.maps, key)
				o.mu.Unlock()
			}
			close(f.ready)
		}()
		switch {
		case size == 0:
			f.base, err = d.state.imports.mapper().OpenIPC(m.IPC)
		case m.Pool != cuda.PoolPtr{}:
			f.base, f.pool, err = d.state.imports.openPool(m, descriptor)
		default:
			f.base, err = d.state.imports.open(m, descriptor)
		}
		if f.err = err; err != nil {
			return 0, d.state.imports.unreachable(m.UUID, err)
		}
		d.mu.Lock()
		d.state.imports.bytes += f.bytes
		d.mu.Unlock()
		o.mu.Lock()
	} else {
		o.mu.Unlock()
		<-f.ready
		if f.err != nil {
			return 0, d.state.imports.unreachable(m.UUID, f.err)
		}
		o.mu.Lock()
		if o.maps[key] != f { // closed by all its users before this one came to it
			o.mu.Unlock()
			return sh.Open(dev, from, m, descriptor)
		}
	}
	f.users++
	p := f.base + cuda.Ptr(m.Offset)
	o.count(p, f)
	o.mu.Unlock()
	return p, nil
}

// OpenOwn opens an export of this process's for the device that it lies on: the block itself. It is undone by one Close, which
// leaves the block as it is.
func (sh *Sharing) OpenOwn(e *Export) (cuda.Ptr, error) {
	if err := e.Live(); err != nil {
		return 0, err
	}
	sh.opened.mu.Lock()
	sh.opened.count(e.Ptr, nil)
	sh.opened.mu.Unlock()
	return e.Ptr, nil
}

// count notes an address.
//
// +checklocks:o.mu
func (o *opened) count(p cuda.Ptr, f *importedMemory) {
	b := o.ptrs[p]
	if b == nil {
		b = &openBlock{in: f}
		if o.ptrs == nil {
			o.ptrs = map[cuda.Ptr]*openBlock{}
		}
		o.ptrs[p] = b
	}
	b.times++
}

// Close undoes one Open or OpenOwn. The caller knows that the GPU is done with the memory: the last Close unmaps it, and
// unmapping does not wait. Memory of a stream-ordered pool is freed instead, which waits (cuMemFree).
func (sh *Sharing) Close(p cuda.Ptr) error {
	o := &sh.opened
	o.mu.Lock()
	b := o.ptrs[p]
	if b == nil {
		o.mu.Unlock()
		return &memory.PointerError{Op: "close", Ptr: p, Detail: "nor is it open from another process"}
	}
	if b.times--; b.times == 0 {
		delete(o.ptrs, p)
	}
	f := b.in
	if f != nil {
		f.users--
	}
	if f == nil || f.users > 0 {
		o.mu.Unlock()
		return nil
	}
	delete(o.maps, f.key)
	o.mu.Unlock()
	d := sh.a.devices[f.dev].Load()
	d.mu.Lock()
	d.state.imports.bytes -= f.bytes
	delete(d.state.imports.imported, f.base)
	delete(d.state.imports.readOnly, f.base)
	delete(d.state.imports.pooled, f.base)
	d.mu.Unlock()
	if d.health.Broken() != nil { // bookkeeping only
		return nil
	}
	if f.pool != 0 {
		return d.state.imports.mapper().ClosePool(f.base, f.pool)
	}
	return d.state.imports.mapper().Close(f.base, f.size)
}

// WaitIdle waits for all work of a device, before memory of other processes is unmapped. While a capture is under way it fails.
func (sh *Sharing) WaitIdle(dev cuda.Device) error {
	d, err := sh.a.Device(dev)
	if err != nil || d.health.Broken() != nil { // nothing runs any more
		return err
	}
	return d.health.Failed(d.timeline.SyncContext(dev))
}

func (im *imports) mapper() phys.Imports {
	return phys.Imports{Health: im.gpu.health, Granularity: im.gpu.info.Granularity}
}

// importedSize is the size of the mapping, 0 for memory that is opened by an IPC handle. The figures of another process are
// checked, not believed.
func importedSize(m *memory.Shared, granularity uint64) (uint64, error) {
	var sum uint64
	if (m.Pool != cuda.PoolPtr{}) {
		granularity = 1
		if len(m.Chunks) != 1 {
			return 0, fmt.Errorf("open: memory of a pool comes with %d descriptors: expected 1", len(m.Chunks))
		}
	}
	for _, c := range m.Chunks {
		if c.Size == 0 || c.Size%granularity != 0 || c.Size > maxRequest || sum > maxRequest {
			return 0, fmt.Errorf("open: chunks of %d bytes cannot be mapped in units of %d", c.Size, granularity)
		}
		sum += c.Size
	}
	if m.Size == 0 || m.Size > maxRequest || m.Offset > maxRequest || len(m.Chunks) != 0 && m.Offset+m.Size > sum {
		return 0, fmt.Errorf("open: %d bytes at %d do not lie in memory of %d bytes", m.Size, m.Offset, sum)
	}
	return sum, nil
}

// importedKey identifies a mapping: the process, the device that it is for, and the memory.
func importedKey(m *memory.Shared, dev cuda.Device, from string) string {
	b := make([]byte, 0, len(from)+25+8*len(m.Chunks)+len(m.IPC))
	b = append(b, from...)
	if m.ReadOnly {
		b = append(b, 'r')
	}
	b = binary.LittleEndian.AppendUint64(b, uint64(dev))
	b = append(b, m.UUID[:]...)
	for _, c := range m.Chunks {
		b = binary.LittleEndian.AppendUint64(b, c.Serial)
	}
	if len(m.Chunks) == 0 {
		b = append(b, m.IPC[:]...)
	}
	return string(b)
}

// open maps the chunks of an export.
func (im *imports) open(m memory.Shared, descriptor func(i int) (int, error)) (cuda.Ptr, error) {
	x := phys.Imported{Owner: im.gpu.id, Descriptor: descriptor, Access: im.adopt}
	if m.ReadOnly {
		x.Access = im.adoptReadOnly
	}
	if m.UUID != im.gpu.info.UUID {
		if v, ok := im.gpu.a.Sharing.byUUID(m.UUID); ok {
			x.Owner = v
		}
		set := im.gpu.drv.MemSetAccess
		if m.ReadOnly {
			set = im.gpu.drv.MemSetReadOnly
		}
		x.Access = func(base cuda.Ptr, size uint64) error { return set(base, size, []cuda.Device{im.gpu.id}) }
	}
	for _, c := range m.Chunks {
		x.Sizes = append(x.Sizes, c.Size)
	}
	return im.mapper().Map(x)
}

// openPool maps memory of another process's stream-ordered pool, which is accessible to the device that it lies on.
func (im *imports) openPool(m memory.Shared, descriptor func(i int) (int, error)) (cuda.Ptr, cuda.MemPool, error) {
	base, pool, err := im.mapper().OpenPool(m.Pool, descriptor)
	if err != nil {
		return 0, 0, err
	}
	if m.UUID == im.gpu.info.UUID {
		err = im.adoptPool(base, pool)
	} else {
		err = im.gpu.health.Failed(im.gpu.drv.MemPoolSetAccess(im.gpu.id, pool, []cuda.Device{im.gpu.id}))
	}
	if err != nil {
		_ = im.mapper().ClosePool(base, pool)
		return 0, 0, err
	}
	return base, pool, nil
}

// adoptPool is adopt for memory of a stream-ordered pool.
func (im *imports) adoptPool(base cuda.Ptr, pool cuda.MemPool) error {
	im.gpu.mu.Lock()
	defer im.gpu.mu.Unlock()
	if peers := im.phys.mem.Access.Devices()[1:]; len(peers) > 0 {
		if err := im.gpu.drv.MemPoolSetAccess(im.gpu.id, pool, peers); err != nil {
			return im.gpu.health.Failed(err)
		}
	}
	if im.pooled == nil {
		im.pooled = map[cuda.Ptr]cuda.MemPool{}
	}
	im.pooled[base] = pool
	return nil
}

// adopt makes memory of another process that lies on this device accessible to it and its peers, those to come included.
func (im *imports) adopt(base cuda.Ptr, size uint64) error {
	im.gpu.mu.Lock()
	defer im.gpu.mu.Unlock()
	if err := im.phys.mem.Access.Set(base, size); err != nil {
		return im.gpu.health.Failed(err)
	}
	if im.imported == nil {
		im.imported = map[cuda.Ptr]uint64{}
	}
	im.imported[base] = size
	return nil
}

// adoptReadOnly is adopt for memory that is read only: also by peers, those to come included.
func (im *imports) adoptReadOnly(base cuda.Ptr, size uint64) error {
	im.gpu.mu.Lock()
	defer im.gpu.mu.Unlock()
	if err := im.gpu.drv.MemSetReadOnly(base, size, im.phys.mem.Access.Devices()); err != nil {
		return im.gpu.health.Failed(err)
	}
	if im.readOnly == nil {
		im.readOnly = map[cuda.Ptr]uint64{}
	}
	im.readOnly[base] = size
	return nil
}

// byUUID is the device with that UUID, if this process sees it.
func (sh *Sharing) byUUID(uuid [16]byte) (cuda.Device, bool) {
	for v := range sh.a.devices {
		if info, err := sh.a.drv.DeviceInfo(cuda.Device(v)); err == nil && info.UUID == uuid {
			return cuda.Device(v), true
		}
	}
	return 0, false
}

// unreachable adds, to an error of opening memory that lies on another GPU, that it does.
func (im *imports) unreachable(uuid [16]byte, err error) error {
	if uuid == im.gpu.info.UUID {
		return err
	}
	where := "which this process does not see"
	if v, ok := im.gpu.a.Sharing.byUUID(uuid); ok {
		where = fmt.Sprintf("device %d here", v)
	}
	return fmt.Errorf("the memory lies on GPU %x (%s), not on device %d, and cannot be used from there: %w", uuid, where, im.gpu.id, err)
}
