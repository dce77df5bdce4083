package sim

import (
	"fmt"
	"slices"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
)

// poolGrain is what a pool takes from the device at a time, in bytes (H200, driver 580: 64 MiB and 100 bytes take 96 MiB).
const poolGrain = 32 << 20

// poolBase and poolStep make handles that look like pointers.
const (
	poolBase = 0x40000000
	poolStep = 0x100
)

// pool is a pool of stream-ordered memory: ranges of device memory, cut into blocks in units of 512 bytes.
//
// What a block's free leaves is memory that is free in the order of its stream. An allocation takes it if it is on the
// same stream, if the host has waited since, or as the pool's attributes allow: where the allocation's stream comes after
// the free by events (known with CheckOrder), where the work before the free is complete, and, when no more is
// available, by making the stream wait for it. Allocating and freeing are uses of the memory to the order checker, so that a
// use that does not come after the allocation, or before the free, is found.
type pool struct {
	handle    cuda.MemPool
	device    *device
	handles   cuda.HandleType
	max       uint64
	attr      [cuda.MemPoolUsedHigh + 1]uint64
	access    uint64 // a bit for each device
	arenas    []*arena
	destroyed bool
	from      *fileName  // of an imported pool
	imports   []*mapping // its memory
}

// arena is one range of a pool's memory.
type arena struct {
	pool   *pool
	m      *mapping
	blocks []*block // live, by address
	free   []freed  // by address
}

// block is one allocation.
type block struct {
	region
	asked uint64 // bytes
}

// freed is memory without a block.
type freed struct {
	lo, hi uint64
	stream uint64        // whose order it is free in, 0 where it is free for all
	done   time.Duration // when the work before the free is complete
	last   mark          // the free, with CheckOrder
	seen   vector        // what comes before it
}

// index is that of the first block beyond the address.
func (a *arena) index(addr uint64) int {
	i, _ := slices.BinarySearchFunc(a.blocks, addr, func(b *block, at uint64) int {
		if b.base <= at {
			return -1
		}
		return 1
	})
	return i
}

// at is the block that may hold the address.
func (a *arena) at(addr uint64) *region {
	if i := a.index(addr); i > 0 {
		return &a.blocks[i-1].region
	}
	return nil
}

// reclaim frees for all what the given function says, and makes one of neighbours that are free to the same.
func (a *arena) reclaim(is func(f *freed) bool) {
	out := a.free[:0]
	for _, f := range a.free {
		if f.stream != 0 && is(&f) {
			f.stream = 0
		}
		if n := len(out); n > 0 && out[n-1].hi == f.lo && out[n-1].stream == f.stream {
			o := &out[n-1]
			o.hi = f.hi
			if f.last.n > o.last.n {
				o.last = f.last
			}
			o.done = max(o.done, f.done)
			o.seen.join(f.seen)
			continue
		}
		out = append(out, f)
	}
	clear(a.free[len(out):])
	a.free = out
}

// idle reports whether nothing is allocated in the arena, nor freed by work that is not known to be complete.
func (a *arena) idle() bool { return len(a.blocks) == 0 && len(a.free) == 1 && a.free[0].stream == 0 }

// poolOf is the pool of a handle, or nil.
func (d *Driver) poolOf(h cuda.MemPool) *pool {
	for _, p := range d.pools {
		if p.handle == h && !p.destroyed {
			return p
		}
	}
	return nil
}

func (d *Driver) noPool(c call, dev cuda.Device) error {
	return d.found(&Fault{Kind: FaultPool, Op: callNames[c], Device: dev, code: cuda.ErrInvalidValue,
		Detail: "the pool does not exist (any more)"})
}

// poolCall begins a call on a pool. A pool that was destroyed is a fault: the real driver's behaviour is undefined.
func (d *Driver) poolCall(c call, dev cuda.Device, h cuda.MemPool) (*pool, error) {
	if err := d.beginContext(c, dev, 0, d.costs.Attribute); err != nil {
		return nil, err
	}
	if p := d.poolOf(h); p != nil {
		return p, nil
	}
	return nil, d.noPool(c, dev)
}

func (d *Driver) newPool(v *device, handles cuda.HandleType, size uint64) *pool {
	d.poolSeq++
	p := &pool{handle: poolBase + d.poolSeq*poolStep, device: v, handles: handles, max: size, access: 1 << v.id}
	for a := cuda.MemPoolReuseFollowEventDependencies; a <= cuda.MemPoolReuseAllowInternal; a++ {
		p.attr[a] = 1
	}
	d.pools = append(d.pools, p)
	return p
}

// MemPoolCreate makes a pool. Handle types must be among Options.Handles.
func (d *Driver) MemPoolCreate(props cuda.MemPoolProps) (cuda.MemPool, error) {
	d.mu.Lock()
	defer d.leave()
	const c = callPoolCreate
	if err := d.beginContext(c, props.Device, props.MaxSize, d.costs.Attribute); err != nil {
		return 0, err
	}
	switch {
	case props.Handles&(props.Handles-1) != 0:
		return 0, d.errorOf(c, props.Device, props.MaxSize, cuda.ErrInvalidValue)
	case props.Handles&^d.opt.Handles != 0:
		return 0, d.errorOf(c, props.Device, props.MaxSize, cuda.ErrNotSupported)
	}
	d.live.pools++
	return d.newPool(d.devices[props.Device], props.Handles, props.MaxSize).handle, nil
}

// MemPoolDestroy destroys a pool; its memory goes once the last block is freed and the work before that is complete.
func (d *Driver) MemPoolDestroy(dev cuda.Device, h cuda.MemPool) error {
	d.mu.Lock()
	defer d.leave()
	p, err := d.poolCall(callPoolDestroy, dev, h)
	if err != nil {
		return err
	}
	if p == p.device.pool {
		return d.errorOf(callPoolDestroy, dev, 0, cuda.ErrInvalidValue)
	}
	p.destroyed = true
	d.live.pools--
	d.shrinkPools(callPoolDestroy)
	return nil
}

// MemPoolDefault is the device's own pool, which lives as long as the device.
func (d *Driver) MemPoolDefault(dev cuda.Device) (cuda.MemPool, error) {
	d.mu.Lock()
	defer d.leave()
	if err := d.beginContext(callPoolDefault, dev, 0, d.costs.Attribute); err != nil {
		return 0, err
	}
	v := d.devices[dev]
	if v.pool == nil {
		v.pool = d.newPool(v, cuda.HandleNone, 0)
	}
	return v.pool.handle, nil
}

// MemPoolGet reads an attribute.
func (d *Driver) MemPoolGet(dev cuda.Device, h cuda.MemPool, attr cuda.MemPoolAttr) (uint64, error) {
	d.mu.Lock()
	defer d.leave()
	p, err := d.poolCall(callPoolGet, dev, h)
	if err != nil {
		return 0, err
	}
	if attr < cuda.MemPoolReuseFollowEventDependencies || attr > cuda.MemPoolUsedHigh {
		return 0, d.errorOf(callPoolGet, dev, 0, cuda.ErrInvalidValue)
	}
	return p.attr[attr], nil
}

// MemPoolSet sets an attribute; the highest figures can only be reset.
func (d *Driver) MemPoolSet(dev cuda.Device, h cuda.MemPool, attr cuda.MemPoolAttr, value uint64) error {
	d.mu.Lock()
	defer d.leave()
	p, err := d.poolCall(callPoolSet, dev, h)
	if err != nil {
		return err
	}
	switch attr {
	case cuda.MemPoolReleaseThreshold:
		p.attr[attr] = value
		return nil
	case cuda.MemPoolReuseFollowEventDependencies, cuda.MemPoolReuseAllowOpportunistic, cuda.MemPoolReuseAllowInternal:
		if value <= 1 {
			p.attr[attr] = value
			return nil
		}
	case cuda.MemPoolReservedHigh, cuda.MemPoolUsedHigh:
		if value == 0 {
			p.attr[attr] = p.attr[attr-1] // what is current
			return nil
		}
	}
	return d.errorOf(callPoolSet, dev, 0, cuda.ErrInvalidValue)
}

// MemPoolTrim gives back what is idle, as long as keep bytes remain.
func (d *Driver) MemPoolTrim(dev cuda.Device, h cuda.MemPool, keep uint64) error {
	d.mu.Lock()
	defer d.leave()
	p, err := d.poolCall(callPoolTrim, dev, h)
	if err != nil {
		return err
	}
	d.shrink(p, callPoolTrim, func(a *arena) bool {
		return p.attr[cuda.MemPoolReservedCurrent] >= keep+a.m.pages
	})
	return nil
}

// MemPoolSetAccess lets devices use the pool's memory, what it has and what it will have.
func (d *Driver) MemPoolSetAccess(dev cuda.Device, h cuda.MemPool, devs []cuda.Device) error {
	d.mu.Lock()
	defer d.leave()
	p, err := d.poolCall(callPoolSetAccess, dev, h)
	if err != nil {
		return err
	}
	if len(devs) == 0 {
		return d.errorOf(callPoolSetAccess, dev, 0, cuda.ErrInvalidValue)
	}
	access := p.access
	for _, v := range devs {
		if uint(v) >= uint(len(d.devices)) {
			return d.errorOf(callPoolSetAccess, v, 0, cuda.ErrInvalidDevice)
		}
		if d.opt.Isolated && v != p.device.id {
			return d.errorOf(callPoolSetAccess, v, 0, cuda.ErrNotSupported)
		}
		access |= 1 << v
	}
	p.access = access
	for _, a := range p.arenas {
		a.m.access |= access
	}
	for _, m := range p.imports {
		m.access |= access
	}
	return nil
}

// MemAllocAsync takes memory from a pool, for work of the stream from here on.
func (d *Driver) MemAllocAsync(dev cuda.Device, size uint64, h cuda.MemPool, sh cuda.Stream) (cuda.Ptr, error) {
	d.mu.Lock()
	defer d.leave()
	const c = callMemAllocAsync
	s, err := d.streamCall(c, dev, sh, d.costs.MallocAsync(size))
	if err != nil {
		return 0, err
	}
	p := d.poolOf(h)
	switch {
	case p == nil:
		return 0, d.noPool(c, dev)
	case p.from != nil:
		return 0, d.errorOf(c, dev, size, cuda.ErrInvalidValue)
	}
	if err := d.refuseCaptured(c, dev, s); err != nil || size == 0 {
		return 0, err
	}
	if d.opt.Check >= CheckOrder {
		d.order.prepare(s)
	}
	need := (size + unit - 1) / unit * unit
	var a *arena
	var at int
	code := cuda.ErrOutOfMemory
	if need >= size && need <= p.device.capacity {
		a, at = d.fit(p, s, need, false)
		if a == nil {
			if code = d.grow(p, need); code == cuda.Success {
				a, at = d.fit(p, s, need, false)
			}
		}
		if a == nil && p.attr[cuda.MemPoolReuseAllowInternal] != 0 {
			a, at = d.fit(p, s, need, true)
		}
	}
	if a == nil {
		return 0, d.errorOf(c, dev, size, code)
	}
	return cuda.Ptr(d.place(a, at, need, size, s)), nil
}

// fit looks for free memory that an allocation on s may take; waiting says that s may be made to wait for it.
func (d *Driver) fit(p *pool, s *stream, need uint64, waiting bool) (*arena, int) {
	for _, a := range p.arenas {
		if p.attr[cuda.MemPoolReuseAllowOpportunistic] != 0 {
			a.reclaim(func(f *freed) bool { return d.clock.reached(f.done) })
		}
		for i := range a.free {
			f := &a.free[i]
			follows := p.attr[cuda.MemPoolReuseFollowEventDependencies] != 0 && f.last.n != 0 && s.seen.covers(f.last)
			if f.hi-f.lo >= need && (waiting || f.stream == 0 || f.stream == s.id || follows) {
				return a, i
			}
		}
	}
	return nil, 0
}

// place cuts a block from the free memory at index i of the arena.
func (d *Driver) place(a *arena, i int, need, size uint64, s *stream) uint64 {
	f := &a.free[i]
	base, off := f.lo, f.lo-a.m.base
	if f.stream != 0 && f.stream != s.id {
		s.extend(max(s.ready(), f.done))
	}
	d.mapSeq++
	b := &block{region: region{base: base, size: need, seq: d.mapSeq}, asked: size}
	if d.opt.Check >= CheckOrder {
		s.seen.join(f.seen)
		m := d.order.next(s)
		a.m.chunk.uses.touch(off, off+need, m, false, s.seen, d.order.host)
		b.use(m)
	}
	if f.lo += need; f.lo == f.hi {
		a.free = slices.Delete(a.free, i, i+1)
	}
	a.blocks = slices.Insert(a.blocks, a.index(base), b)
	p := a.pool
	p.attr[cuda.MemPoolUsedCurrent] += size
	p.attr[cuda.MemPoolUsedHigh] = max(p.attr[cuda.MemPoolUsedHigh], p.attr[cuda.MemPoolUsedCurrent])
	d.live.asyncs++
	d.note(recAlloc, s.id, base, need, a.m.chunk, off)
	return base
}

// grow takes memory for a block from the device. What is idle is given back first, if that is
// what it takes.
func (d *Driver) grow(p *pool, need uint64) cuda.Code {
	code := cuda.ErrOutOfMemory
	grain := max(poolGrain, d.opt.Granularity)
	size := (need + grain - 1) / grain * grain
	limit := (p.max + grain - 1) / grain * grain
	for _, again := range [...]bool{true, false} {
		held := p.attr[cuda.MemPoolReservedCurrent]
		if p.max == 0 || size <= limit && held <= limit-size {
			var m *mapping
			if m, code = d.allocPages(p.device.id, size); code == cuda.Success {
				a := &arena{pool: p, m: m, free: []freed{{lo: m.base, hi: m.base + size}}}
				m.arena, m.access = a, p.access
				p.arenas = append(p.arenas, a)
				p.attr[cuda.MemPoolReservedCurrent] += size
				p.attr[cuda.MemPoolReservedHigh] = max(p.attr[cuda.MemPoolReservedHigh], held+size)
				d.charge(callMemAllocAsync, d.costs.PoolGrow(size))
				return code
			}
		}
		if again {
			d.shrink(p, callMemAllocAsync, func(*arena) bool { return true })
		}
	}
	return code
}

// MemFreeAsync gives memory back to its pool: in the order of the stream nothing may use it from here on, and on other
// streams nothing at all.
func (d *Driver) MemFreeAsync(dev cuda.Device, ptr cuda.Ptr, sh cuda.Stream) error {
	d.mu.Lock()
	defer d.leave()
	const c = callMemFreeAsync
	s, err := d.streamCall(c, dev, sh, d.costs.FreeAsync(0))
	if err != nil {
		return err
	}
	if err := d.refuseCaptured(c, dev, s); err != nil {
		return err
	}
	m := d.space.find(uint64(ptr))
	if m != nil && m.pooled != nil && m.base == uint64(ptr) {
		return d.freeImportedAsync(dev, m, s)
	}
	if m == nil || m.arena == nil || m.arena.at(uint64(ptr)) == nil || m.arena.at(uint64(ptr)).base != uint64(ptr) {
		return d.errorOf(c, dev, 0, cuda.ErrInvalidValue)
	}
	a := m.arena
	b := a.blocks[a.index(uint64(ptr))-1]
	f := freed{lo: b.base, hi: b.base + b.size, stream: s.id, done: d.behind(s.ready())}
	if d.opt.Check == CheckUse && b.busy > f.done && !d.clock.reached(b.busy) {
		return d.found(&Fault{Kind: FaultInUse, Op: callNames[c], Device: dev, Stream: s.id, Addr: b.base, Size: b.size,
			chunk: m.chunk, off: b.base - m.base,
			Detail: fmt.Sprintf("the memory is freed at %v on its stream, and work on another uses it until %v", f.done, b.busy)})
	}
	off := b.base - m.base
	if x := d.stillOpen(m.chunk, off); x != nil {
		x.Op, x.Device, x.Stream, x.Addr, x.Size = callNames[c], dev, s.id, b.base, b.size
		return d.found(x)
	}
	if d.opt.Check >= CheckOrder {
		d.order.prepare(s)
		f.last = d.order.next(s)
		f.seen = slices.Clone(s.seen)
		if by := d.touchUses(s, m.chunk, off, off+b.size, f.last, false); by != "" {
			return d.found(&Fault{Kind: FaultRace, Op: callNames[c], Device: dev, Stream: s.id, Addr: b.base, Size: b.size,
				chunk: m.chunk, off: off, Detail: "the memory is freed without order after a use of it on " + by})
		}
	}
	d.endExport(m.chunk, off, b.size, f.last, s)
	d.unplace(a, b, f, s.id)
	return nil
}

// freePooled is MemFree of memory from a pool.
func (d *Driver) freePooled(dev cuda.Device, a *arena, addr uint64) error {
	r := a.at(addr)
	if err := d.beginContext(callMemFree, dev, 0, d.costs.FreeAsync(0)); err != nil {
		return err
	}
	if r == nil || r.base != addr {
		return d.errorOf(callMemFree, dev, 0, cuda.ErrInvalidValue)
	}
	if d.opt.Check >= CheckUse {
		if f := d.stillUsed(r, a.m.chunk, r.base-a.m.base, callMemFree, dev); f != nil {
			return d.found(f)
		}
	}
	off := addr - a.m.base
	if x := d.stillOpen(a.m.chunk, off); x != nil {
		x.Op, x.Device, x.Addr, x.Size = callNames[callMemFree], dev, r.base, r.size
		return d.found(x)
	}
	if w, _ := a.m.chunk.window(off, 1); w != nil && d.opt.Check >= CheckOrder {
		if by := d.unseenUse(w); by != "" {
			return d.found(&Fault{Kind: FaultInUse, Op: callNames[callMemFree], Device: dev, Addr: r.base, Size: r.size, chunk: a.m.chunk, off: off,
				Detail: "the host has not seen its use complete on " + by})
		}
	}
	d.freeWaits(dev)
	b := a.blocks[a.index(addr)-1]
	d.endExport(a.m.chunk, off, b.size, mark{}, nil)
	d.unplace(a, b, freed{lo: b.base, hi: b.base + b.size, seen: slices.Clone(d.order.host)}, 0)
	return nil
}

// unplace makes free memory of a block.
func (d *Driver) unplace(a *arena, b *block, f freed, stream uint64) {
	p := a.pool
	off := b.base - a.m.base
	a.m.chunk.forget(off, b.size)
	d.note(recFree, stream, b.base, b.size, a.m.chunk, off)
	i := a.index(b.base) - 1
	a.blocks = slices.Delete(a.blocks, i, i+1)
	at, _ := slices.BinarySearchFunc(a.free, f.lo, func(o freed, lo uint64) int {
		if o.lo < lo {
			return -1
		}
		return 1
	})
	a.free = slices.Insert(a.free, at, f)
	a.reclaim(func(*freed) bool { return false })
	p.attr[cuda.MemPoolUsedCurrent] -= b.asked
	d.live.asyncs--
	if p.destroyed {
		d.shrinkPools(callMemFreeAsync)
	}
}

// shrinkPools is what pools do when the host has waited: memory whose free is complete is free for all, and what is idle
// goes while more is held than the threshold says.
func (d *Driver) shrinkPools(by call) {
	if len(d.pools) == 0 {
		return
	}
	for _, p := range d.pools {
		d.shrink(p, by, func(*arena) bool {
			return p.destroyed || p.attr[cuda.MemPoolReservedCurrent] > p.attr[cuda.MemPoolReleaseThreshold]
		})
	}
	d.pools = slices.DeleteFunc(d.pools, func(p *pool) bool { return p.destroyed && len(p.arenas) == 0 })
}

// shrink gives back the idle arenas that may go, those that were made last first.
func (d *Driver) shrink(p *pool, by call, may func(a *arena) bool) {
	for i := len(p.arenas) - 1; i >= 0; i-- {
		a := p.arenas[i]
		a.reclaim(func(f *freed) bool { return d.clock.reached(f.done) })
		if !a.idle() || !may(a) {
			continue
		}
		size := a.m.pages
		p.arenas = slices.Delete(p.arenas, i, i+1)
		p.attr[cuda.MemPoolReservedCurrent] -= size
		d.charge(by, d.costs.PoolShrink(size))
		d.space.set(a.m.base, size, nil)
		d.space.give(a.m.base, size)
		a.m.chunk.maps--
		d.releaseUnused(a.m.chunk)
	}
}
