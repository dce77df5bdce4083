package driver

import (
	"github.com/cistern-gpu/cistern/internal/leaves"
	"github.com/cistern-gpu/cistern/recording"
)

// MemoryKind is where memory that a call got is.
type MemoryKind uint8

const (
	DeviceMemory  MemoryKind = iota // cuMemAlloc, cuMemAllocPitch, arrays
	VirtualMemory                   // cuMemCreate on a device
	PoolMemory                      // stream-ordered
	GraphMemory                     // what the graphs of a device hold together
	ManagedMemory
	HostMemory     // page-locked by the driver, or created there
	ImportedMemory // of another process
	NumMemoryKinds
)

var memoryNames = [NumMemoryKinds]string{"device", "virtual", "pool", "graph", "managed", "host", "imported"}

// String is the word for the kind.
func (k MemoryKind) String() string { return memoryNames[k] }

// OnDevice reports whether memory of this kind is the process's own on its device.
func (k MemoryKind) OnDevice() bool { return k <= GraphMemory }

// Holding is memory that a call got and that was not given back yet.
type Holding struct {
	recording.Call // by which it was got
	Memory         MemoryKind
	At             uint64 // its address; for physical memory, which has none, a number above all addresses
	key            holdKey
	refs           int // handles and mappings of physical memory; how often imported memory was opened
	handles        int // of refs: those that a release is to come of
}

// Tracker follows the allocations, call by call in the order in which they were recorded, which is that in which they
// ended.
type Tracker struct {
	held    map[holdKey]*Holding
	mapped  map[uint32]*leaves.List[mapped] // virtual memory by process and the address at which it is mapped
	tiles   map[holdKey]tile                // and by where it is in sparse arrays
	pools   map[holdKey]*poolReserved       // by handle
	pooled  map[deviceKey]uint64            // what the pools of a device hold together
	early   map[holdKey]int                 // frees that are still to be seen of memory that was seen allocated again
	virtual uint64                          // bytes of physical memory that were numbered so far

	// What ends together: keys of held by context and by device, of tiles by array, of pools by device.
	byContext, byArray    map[holdKey]keys
	byDevice, poolsDevice map[deviceKey]keys
}

type keys = map[holdKey]struct{}

// join and leave keep what ends together.
func join[K comparable](groups map[K]keys, group K, k holdKey) {
	if groups[group] == nil {
		groups[group] = keys{}
	}
	groups[group][k] = struct{}{}
}

func leave[K comparable](groups map[K]keys, group K, k holdKey) {
	if delete(groups[group], k); len(groups[group]) == 0 {
		delete(groups, group)
	}
}

// mapped is virtual memory at an address.
type mapped struct {
	addr uint64
	h    *Holding
}

type holdKey struct {
	process uint32
	space   uint8
	key     uint64
}

const (
	spaceAddr   = iota // addresses, of devices and of the host
	spaceHandle        // of physical memory
	spaceArray
	spacePool
	spaceGraphs // by device
	spaceTile
	spaceMoved // of physical memory whose handle was given to other memory
	spaceContext
)

type tile struct {
	h     *Holding
	array uint64
}

type poolReserved struct {
	device         int16
	bytes, current uint64
}

// NewTracker follows a program from its start.
func NewTracker() *Tracker {
	return &Tracker{held: map[holdKey]*Holding{}, mapped: map[uint32]*leaves.List[mapped]{}, tiles: map[holdKey]tile{}, pools: map[holdKey]*poolReserved{},
		pooled: map[deviceKey]uint64{}, early: map[holdKey]int{}, byContext: map[holdKey]keys{}, byArray: map[holdKey]keys{},
		byDevice: map[deviceKey]keys{}, poolsDevice: map[deviceKey]keys{}}
}

// Held calls f for everything that is held, in no order.
func (t *Tracker) Held(f func(h *Holding)) {
	for _, h := range t.held {
		f(h)
	}
}

// PoolReserved is what the pools of a process's device hold, by what they said last.
func (t *Tracker) PoolReserved(process uint32, device int16) uint64 {
	return t.pooled[deviceKey{process, device}]
}

// change has f change a pool, and keeps the sum.
func (t *Tracker) change(process uint32, p *poolReserved, f func()) {
	k := deviceKey{process, p.device}
	before := max(p.bytes, p.current)
	f()
	t.pooled[k] += max(p.bytes, p.current) - before
}

// Call takes in the next call, and tells of what it got and gave back. Both functions are called with a holding that
// they must not keep.
func (t *Tracker) Call(c *recording.Call, got, gone func(h *Holding)) {
	if c.Failed() {
		return
	}
	at := holdKey{c.Process, spaceAddr, c.Addr}
	switch c.Kind {
	case recording.MemAlloc, recording.MemAllocPitch, recording.MemAllocManaged, recording.MemAllocHost, recording.MemHostAlloc, recording.MemHostRegister, recording.MemAllocAsync,
		recording.MemAllocFromPoolAsync, recording.MemPoolImportPointer, recording.IpcOpenMemHandle:
		t.allocated(c, got, gone)
	case recording.MemFree, recording.MemFreeHost, recording.MemHostUnregister, recording.MemFreeAsync:
		t.free(at, gone)
	case recording.IpcCloseMemHandle:
		if h := t.held[at]; h != nil && h.refs > 1 {
			h.refs--
			return
		}
		t.free(at, gone)
	case recording.MemPoolCreate:
		k := holdKey{c.Process, spacePool, c.Pool}
		t.endPool(k)
		t.newPool(k, c.Device)
	case recording.MemPoolTrimTo:
		t.pool(c)
	case recording.MemPoolDestroy:
		t.endPool(holdKey{c.Process, spacePool, c.Pool})
	case recording.ArrayCreate, recording.Array3DCreate, recording.MipmappedArrayCreate:
		h := t.hold(c, holdKey{c.Process, spaceArray, c.Handle}, DeviceMemory, gone)
		t.enter(h)
		t.number(h, got)
	case recording.ArrayDestroy, recording.MipmappedArrayDestroy:
		t.endArray(holdKey{c.Process, spaceArray, c.Handle}, gone)
	case recording.MemMapArrayAsync:
		t.tile(c, gone)
	case recording.GraphLaunch, recording.GraphUpload, recording.DeviceGraphMemTrim:
		t.graphs(c, got, gone)
	case recording.CtxDestroy:
		for k := range t.byContext[holdKey{c.Process, spaceContext, c.Handle}] {
			t.drop(t.held[k], gone)
		}
	case recording.MemCreate, recording.MemImportFromShareableHandle, recording.MemRetainAllocationHandle, recording.MemRelease, recording.MemMap, recording.MemUnmap:
		t.virtualCall(c, got, gone)
	case recording.DevicePrimaryCtxReset, recording.DevicePrimaryCtxRelease:
		if c.Extra != 0 {
			t.reset(c, gone)
		}
	}
}

// allocated follows a call that gives an address.
func (t *Tracker) allocated(c *recording.Call, got, gone func(h *Holding)) {
	if c.Addr == 0 {
		return
	}
	at := holdKey{c.Process, spaceAddr, c.Addr}
	m, device := DeviceMemory, c.Device
	switch c.Kind {
	case recording.MemAllocManaged:
		m = ManagedMemory
	case recording.MemAllocHost, recording.MemHostAlloc, recording.MemHostRegister:
		m = HostMemory
	case recording.MemAllocAsync, recording.MemAllocFromPoolAsync:
		m = PoolMemory
		p := t.pool(c)
		t.change(c.Process, p, func() { p.current += c.Size })
		device = p.device // which need not be the one that is current
	case recording.MemPoolImportPointer, recording.IpcOpenMemHandle:
		if h := t.held[at]; h != nil && h.Memory == ImportedMemory {
			h.refs++ // the same address again
			return
		}
		m = ImportedMemory
	}
	h := t.hold(c, at, m, gone)
	h.Device = device
	t.enter(h)
	got(h)
}

// virtualCall follows a call of CUDA's virtual memory management.
func (t *Tracker) virtualCall(c *recording.Call, got, gone func(h *Holding)) {
	k := holdKey{c.Process, spaceHandle, c.Handle}
	switch c.Kind {
	case recording.MemCreate:
		m := VirtualMemory
		if c.Extra != 1 {
			m = HostMemory
		}
		t.number(t.hold(c, k, m, gone), got)
	case recording.MemImportFromShareableHandle:
		t.number(t.hold(c, k, ImportedMemory, gone), got)
	case recording.MemRetainAllocationHandle:
		if h := t.held[k]; h != nil {
			h.refs++
			h.handles++
		}
	case recording.MemRelease:
		if h := t.held[k]; !t.late(k) && h != nil && h.handles > 0 {
			h.handles--
			t.release(h, gone)
		}
	case recording.MemMap:
		if old := t.mapAt(c); old != nil { // its unmapping was not recorded
			t.release(old, gone)
		}
	case recording.MemUnmap:
		t.unmap(c, gone)
	}
}

// hold notes memory that a call gave.
func (t *Tracker) hold(c *recording.Call, k holdKey, m MemoryKind, gone func(h *Holding)) *Holding {
	if old := t.held[k]; old != nil && k.space == spaceHandle {
		// The old one's handle was released, which may still be to be recorded; its mappings keep it.
		delete(t.held, k)
		old.key = holdKey{c.Process, spaceMoved, old.At}
		t.held[old.key] = old
		if n := old.handles; n > 0 {
			t.early[k] += n
			old.refs, old.handles = old.refs-n+1, 0
			t.release(old, gone)
		}
	} else if old != nil {
		// Its free is still to be recorded: another thread was given the address before the free's record was written.
		t.early[k]++
		t.drop(old, gone)
	}
	h := &Holding{Call: *c, Memory: m, At: k.key, key: k, refs: 1}
	if k.space == spaceHandle {
		h.handles = 1
	}
	t.held[k] = h
	return h
}

// late reports whether a free is that of memory whose address was given again before.
func (t *Tracker) late(k holdKey) bool {
	n := t.early[k]
	if n > 1 {
		t.early[k] = n - 1
	} else {
		delete(t.early, k)
	}
	return n > 0
}

func (t *Tracker) free(k holdKey, gone func(h *Holding)) {
	if t.late(k) {
		return
	}
	if h := t.held[k]; h != nil {
		t.drop(h, gone)
	}
}

func (t *Tracker) endArray(array holdKey, gone func(h *Holding)) {
	for k := range t.byArray[array] {
		h := t.tiles[k].h
		delete(t.tiles, k)
		t.release(h, gone)
	}
	delete(t.byArray, array)
	t.free(array, gone)
}

// pool is what is known of the pool of a call.
func (t *Tracker) pool(c *recording.Call) *poolReserved {
	k := holdKey{c.Process, spacePool, c.Pool}
	p := t.pools[k]
	if p == nil {
		p = t.newPool(k, c.Device)
	}
	t.change(c.Process, p, func() { p.bytes = c.Extra })
	return p
}

func (t *Tracker) newPool(k holdKey, device int16) *poolReserved {
	p := &poolReserved{device: device}
	t.pools[k] = p
	join(t.poolsDevice, deviceKey{k.process, device}, k)
	return p
}

// enter makes memory known to what it ends with: the context in which it was got, and the device's reset. Physical memory
// belongs to neither.
func (t *Tracker) enter(h *Holding) {
	join(t.byDevice, deviceKey{h.Process, h.Device}, h.key)
	if ofContext(h.Kind) {
		join(t.byContext, holdKey{h.Process, spaceContext, h.Extra}, h.key)
	}
}

// mapAt maps memory at an address, and returns what was mapped there.
func (t *Tracker) mapAt(c *recording.Call) (old *Holding) {
	list := t.mapped[c.Process]
	if list == nil {
		list = &leaves.List[mapped]{}
		t.mapped[c.Process] = list
	}
	p := list.Search(func(m *mapped) bool { return m.addr >= c.Addr })
	if m := list.At(p); m != nil && m.addr == c.Addr {
		old = m.h
		p = list.Delete(p)
	}
	if h := t.held[holdKey{c.Process, spaceHandle, c.Handle}]; h != nil {
		h.refs++
		list.Insert(p, mapped{c.Addr, h})
	}
	return old
}

// ofContext reports whether what function k gets belongs to the context that was current, and ends with it.
func ofContext(k recording.CallKind) bool {
	switch k {
	case recording.MemAlloc, recording.MemAllocPitch, recording.MemAllocManaged, recording.MemAllocHost, recording.MemHostAlloc, recording.MemHostRegister, recording.IpcOpenMemHandle, recording.ArrayCreate, recording.Array3DCreate,
		recording.MipmappedArrayCreate, recording.ImportExternalMemory:
		return true
	}
	return false
}

// graphs takes what the graphs of a device hold together for one allocation, which is another one with each amount.
func (t *Tracker) graphs(c *recording.Call, got, gone func(*Holding)) {
	k := holdKey{c.Process, spaceGraphs, uint64(c.Device)}
	old := t.held[k]
	if old != nil && old.Size == c.Extra || old == nil && c.Extra == 0 {
		return
	}
	if old != nil {
		t.drop(old, gone)
	}
	if c.Extra == 0 {
		return
	}
	h := &Holding{Call: *c, Memory: GraphMemory, key: k, refs: 1}
	h.Size = c.Extra
	t.held[k] = h
	t.enter(h)
	t.number(h, got)
}

// tile maps a piece of physical memory into a sparse array, or out of it.
func (t *Tracker) tile(c *recording.Call, gone func(*Holding)) {
	k := holdKey{c.Process, spaceTile, c.Addr}
	old, was := t.tiles[k]
	if was {
		delete(t.tiles, k)
		leave(t.byArray, holdKey{c.Process, spaceArray, old.array}, k)
	}
	if h := t.held[holdKey{c.Process, spaceHandle, c.Handle}]; h != nil && c.Extra != 0 {
		h.refs++
		t.tiles[k] = tile{h, c.Pool}
		join(t.byArray, holdKey{c.Process, spaceArray, c.Pool}, k)
	}
	if was {
		t.release(old.h, gone)
	}
}

func (t *Tracker) endPool(k holdKey) {
	if p := t.pools[k]; p != nil {
		t.change(k.process, p, func() { *p = poolReserved{device: p.device} })
		delete(t.pools, k)
		leave(t.poolsDevice, deviceKey{k.process, p.device}, k)
	}
}

// number gives physical memory and arrays a place of their own among the addresses.
func (t *Tracker) number(h *Holding, got func(*Holding)) {
	h.At = recording.VirtualBase + t.virtual
	t.virtual += max(1, (h.Size+granularity-1)/granularity) * granularity
	got(h)
}

const granularity = 2 << 20

func (t *Tracker) drop(h *Holding, gone func(*Holding)) {
	if h.Memory == PoolMemory {
		if p := t.pools[holdKey{h.Process, spacePool, h.Pool}]; p != nil {
			t.change(h.Process, p, func() { p.current -= min(p.current, h.Size) })
		}
	}
	delete(t.held, h.key)
	leave(t.byDevice, deviceKey{h.Process, h.Device}, h.key)
	leave(t.byContext, holdKey{h.Process, spaceContext, h.Extra}, h.key)
	gone(h)
}

// release takes a handle's or a mapping's hold on physical memory.
func (t *Tracker) release(h *Holding, gone func(*Holding)) {
	if h.refs--; h.refs == 0 {
		t.drop(h, gone)
	}
}

// unmap ends the mappings in a range.
func (t *Tracker) unmap(c *recording.Call, gone func(*Holding)) {
	list := t.mapped[c.Process]
	if list == nil {
		return
	}
	p := list.Search(func(m *mapped) bool { return m.addr >= c.Addr })
	for m := list.At(p); m != nil && m.addr-c.Addr < c.Size; m = list.At(p) {
		h := m.h
		p = list.Delete(p)
		t.release(h, gone)
	}
}

// reset ends everything of a process on a device but physical memory, which is no context's.
func (t *Tracker) reset(c *recording.Call, gone func(*Holding)) {
	device := deviceKey{c.Process, c.Device}
	for k := range t.byDevice[device] {
		t.drop(t.held[k], gone)
	}
	for k := range t.poolsDevice[device] {
		t.endPool(k)
	}
}
