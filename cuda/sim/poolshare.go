package sim

import (
	"errors"
	"slices"

	"github.com/cistern-gpu/cistern/cuda"
)

// Pools of several drivers. A pool's descriptor names it. Memory that is exported has a file (statefile.go), which holds its
// contents and its uses from then on, for the exporting driver and for those that import it. So the checker knows of uses in
// other processes, and order comes from shared events, or from what a host has seen complete.
//
// Rules that are checked, as the driver's manual has them (cuMemPoolImportFromShareableHandle, cuMemPoolImportPointer): an
// imported pool allocates nothing; it has the accesses that the importer gave it; memory is used there after its allocation;
// the exporter frees it after every importer has, in an order that events give or a host has seen.

var errGone = errors.New("its maker has destroyed it")

// window is a part of a chunk that has a file.
type window struct {
	lo, hi uint64 // in the chunk
	file   *stateFile
}

// window is the one at off, or nil, and how many of the next n bytes that is true for.
func (c *chunk) window(off, n uint64) (*window, uint64) {
	for _, w := range c.windows {
		if off >= w.lo && off < w.hi {
			return w, min(n, w.hi-off)
		}
		if w.lo > off {
			n = min(n, w.lo-off)
		}
	}
	return nil, n
}

// blockState is the state of exported memory.
type blockState struct {
	gone    bool // the exporter has freed it
	openers []opener
	hosts   []fileName // where it says what the host has seen, of every driver that used the memory
	uses    ranges
}

// opener is a driver that has the memory imported.
type opener struct {
	driver     uint64
	pid, start uint64
	times      uint64
}

func (d *Driver) encodeBlock(s *blockState) []byte {
	var e encoder
	gone := uint64(0)
	if s.gone {
		gone = 1
	}
	e.number(gone)
	e.number(uint64(len(s.openers)))
	for _, o := range s.openers {
		for _, v := range [...]uint64{o.driver, o.pid, o.start, o.times} {
			e.number(v)
		}
	}
	e.number(uint64(len(s.hosts)))
	for _, h := range s.hosts {
		for _, v := range [...]uint64{h.driver, h.serial, h.pid, h.fd} {
			e.number(v)
		}
	}
	spans := s.uses.all(nil)
	e.number(uint64(len(spans)))
	for _, x := range spans {
		e.number(x.lo)
		e.number(x.hi)
		d.encodeMark(&e, x.write)
		e.number(uint64(len(x.reads)))
		for _, m := range x.reads {
			d.encodeMark(&e, m)
		}
	}
	return e
}

// decodeBlock reads the state of size bytes of memory.
func (d *Driver) decodeBlock(b []byte, size uint64) (*blockState, error) {
	x := decoder{b: b}
	s := &blockState{gone: x.number() != 0, uses: ranges{hi: size}}
	for range x.count(4) {
		s.openers = append(s.openers, opener{x.number(), x.number(), x.number(), x.number()})
	}
	for range x.count(4) {
		s.hosts = append(s.hosts, fileName{driver: x.number(), serial: x.number(), pid: x.number(), fd: x.number()})
	}
	at := uint64(0)
	for range x.count(6) {
		p := span{lo: x.number(), hi: x.number(), write: d.decodeMark(&x)}
		if p.lo < at || p.hi <= p.lo || p.hi > size {
			x.bad = true
		}
		at = p.hi
		for range x.count(3) {
			p.reads = append(p.reads, d.decodeMark(&x))
		}
		s.uses.spans = append(s.uses.spans, p)
	}
	return s, x.done()
}

// all appends the spans, in order.
func (r *ranges) all(out []span) []span {
	if r.halves != nil {
		return r.halves[1].all(r.halves[0].all(out))
	}
	return append(out, r.spans...)
}

// change reads the state of exported memory, and writes it again where f says so.
func (d *Driver) change(w *window, f func(s *blockState) (store bool, err error)) error {
	return w.file.locked(func() error {
		b, err := w.file.load()
		if err != nil {
			return err
		}
		s, err := d.decodeBlock(b, w.hi-w.lo)
		if err != nil {
			return err
		}
		store, err := f(s)
		if err == nil && store {
			err = w.file.store(d.encodeBlock(s))
		}
		return err
	})
}

// touchUses notes that work m of s uses [lo, hi) of a chunk. It names the stream of a use that this is not ordered with; "" is
// none.
func (d *Driver) touchUses(s *stream, c *chunk, lo, hi uint64, m mark, read bool) (by string) {
	for lo < hi {
		w, n := c.window(lo, hi-lo)
		found := ""
		if w != nil {
			found = d.touchWindow(s, w, lo-w.lo, lo-w.lo+n, m, read)
		} else if old, bad := c.uses.touch(lo, lo+n, m, read, s.seen, d.order.host); bad {
			found = d.order.name(old.rank)
		}
		if by == "" {
			by = found
		}
		lo += n
	}
	return by
}

func (d *Driver) touchWindow(s *stream, w *window, lo, hi uint64, m mark, read bool) (by string) {
	for last := false; ; last = true {
		var again bool
		err := d.change(w, func(st *blockState) (bool, error) {
			old, bad := st.uses.touch(lo, hi, m, read, s.seen, d.order.host)
			if bad && !last {
				d.learn(st.hosts)
				s.seen.join(d.order.host)
				again = true
				return false, nil
			}
			if bad {
				by = d.order.name(old.rank)
			}
			if b := d.elsewhere.board; b != nil { // else the driver is closed
				st.meet(b.name)
			}
			return true, nil
		})
		if err != nil {
			return "an unknown stream: its file: " + err.Error()
		}
		if !again {
			return by
		}
	}
}

// meet notes where a driver says what its host has seen.
func (s *blockState) meet(n fileName) {
	if !slices.ContainsFunc(s.hosts, func(h fileName) bool { return h == n }) {
		s.hosts = append(s.hosts, n)
	}
}

// unseenUse names a stream whose use of exported memory no host has seen complete; "" is none.
func (d *Driver) unseenUse(w *window) (by string) {
	err := d.change(w, func(s *blockState) (bool, error) {
		d.learn(s.hosts)
		for _, x := range s.uses.all(nil) {
			for _, m := range append(x.reads, x.write) {
				if !d.order.host.covers(m) {
					by = d.order.name(m.rank)
				}
			}
		}
		return false, nil
	})
	if err != nil {
		return "an unknown stream: its file: " + err.Error()
	}
	return by
}

// stillOpen is the fault of freeing exported memory that a driver has imported, in a process that lives.
func (d *Driver) stillOpen(c *chunk, off uint64) *Fault {
	w, _ := c.window(off, 1)
	if w == nil || d.opt.Check < CheckUse {
		return nil
	}
	f := &Fault{Kind: FaultShared, chunk: c, off: off, code: cuda.ErrInvalidValue}
	err := d.change(w, func(s *blockState) (bool, error) {
		for _, o := range s.openers {
			if !processEnded(o.pid, o.start) {
				f.Detail = "process " + itoa(o.pid) + " has imported the memory and has not freed it"
			}
		}
		return false, nil
	})
	if err != nil {
		f.Detail = "its file: " + err.Error()
	}
	if f.Detail == "" {
		return nil
	}
	return f
}

// endExport makes memory this driver's alone again, which it frees by work m of s; without a stream the host has waited.
func (d *Driver) endExport(c *chunk, off, size uint64, m mark, s *stream) {
	w, _ := c.window(off, 1)
	if w == nil {
		return
	}
	_ = d.change(w, func(st *blockState) (bool, error) {
		st.gone = true
		return true, nil
	})
	w.file.file.close()
	c.windows = slices.DeleteFunc(c.windows, func(o *window) bool { return o == w })
	if s != nil && m.n != 0 {
		c.uses.touch(off, off+size, m, false, s.seen, d.order.host) // checked by the file's uses
	}
}

// MemPoolExport makes a descriptor of a pool: a file that names it.
func (d *Driver) MemPoolExport(dev cuda.Device, h cuda.MemPool) (int, error) {
	d.mu.Lock()
	defer d.leave()
	p, err := d.poolCall(callPoolExport, dev, h)
	if err != nil {
		return -1, err
	}
	if p.handles&cuda.HandlePosix == 0 || p.from != nil {
		return -1, d.errorOf(callPoolExport, dev, 0, cuda.ErrInvalidValue)
	}
	b := fileName{driver: d.identity, serial: uint64(p.handle), of: uint64(p.device.id)}.bytes(filePool)
	fd, err := memoryFile(b[:])
	if err != nil {
		return -1, d.errorOf(callPoolExport, dev, 0, unusable)
	}
	return fd, nil
}

// MemPoolImport makes a pool of a descriptor.
func (d *Driver) MemPoolImport(dev cuda.Device, fd int) (cuda.MemPool, error) {
	d.mu.Lock()
	defer d.leave()
	if err := d.beginContext(callPoolImport, dev, 0, 0); err != nil {
		return 0, err
	}
	var b [nameSize]byte
	n, ok := fileName{}, readFile(fd, b[:])
	if ok {
		n, ok = nameOf(b, filePool)
	}
	if !ok {
		return 0, d.errorOf(callPoolImport, dev, 0, cuda.ErrInvalidValue)
	}
	if n.of < uint64(len(d.devices)) { // else it lies on one that is not visible here
		dev = cuda.Device(n.of)
	}
	d.live.pools++
	p := d.newPool(d.devices[dev], cuda.HandleNone, 0)
	p.from = &n
	return p.handle, nil
}

// MemPoolExportPtr names memory of a pool that has a descriptor, or could have.
func (d *Driver) MemPoolExportPtr(dev cuda.Device, ptr cuda.Ptr) (cuda.PoolPtr, error) {
	d.mu.Lock()
	defer d.leave()
	const c = callPoolExportPtr
	if err := d.beginContext(c, dev, 0, 0); err != nil {
		return cuda.PoolPtr{}, err
	}
	m := d.space.find(uint64(ptr))
	if m == nil || m.arena == nil || m.arena.pool.handles&cuda.HandlePosix == 0 {
		return cuda.PoolPtr{}, d.errorOf(c, dev, 0, cuda.ErrInvalidValue)
	}
	r := m.arena.at(uint64(ptr))
	if r == nil || r.base != uint64(ptr) {
		return cuda.PoolPtr{}, d.errorOf(c, dev, 0, cuda.ErrInvalidValue)
	}
	off := r.base - m.base
	w, _ := m.chunk.window(off, 1)
	if w == nil {
		var err error
		if w, err = d.export(m.chunk, off, r.size, uint64(m.arena.pool.handle)); err != nil {
			return cuda.PoolPtr{}, d.errorOf(c, dev, r.size, unusable)
		}
	}
	return w.file.name.bytes(fileBlock), nil
}

// export makes the file of a part of a chunk.
func (d *Driver) export(c *chunk, off, size, pool uint64) (*window, error) {
	if err := d.meet(); err != nil {
		return nil, err
	}
	s := &blockState{uses: ranges{hi: size}}
	s.meet(d.elsewhere.board.name)
	for _, x := range c.uses.all(nil) {
		if x.lo = max(x.lo, off); x.lo < min(x.hi, off+size) {
			x.lo, x.hi = x.lo-off, min(x.hi, off+size)-off
			s.uses.spans = append(s.uses.spans, x)
		}
	}
	f, err := d.newFile(fileBlock, size, pool, d.encodeBlock(s))
	if err != nil {
		return nil, err
	}
	if c.data != nil {
		for n, page := range c.data.pages {
			lo, hi := max(n*contentPage, off), min((n+1)*contentPage, off+size)
			if lo < hi {
				f.put(lo-off, page[lo-n*contentPage:hi-n*contentPage])
			}
		}
		c.forgetOwn(off, size)
	}
	w := &window{off, off + size, f}
	c.windows = append(c.windows, w)
	return w, nil
}

// MemPoolImportPtr maps memory of an imported pool.
func (d *Driver) MemPoolImportPtr(dev cuda.Device, h cuda.MemPool, name cuda.PoolPtr) (cuda.Ptr, error) {
	d.mu.Lock()
	defer d.leave()
	const c = callPoolImportPtr
	p, err := d.poolCall(c, dev, h)
	if err != nil {
		return 0, err
	}
	n, ok := nameOf(name, fileBlock)
	if !ok || p.from == nil || n.driver != p.from.driver || n.of != p.from.serial || n.size == 0 || n.size > d.opt.AddressSpace {
		return 0, d.errorOf(c, dev, 0, cuda.ErrInvalidValue)
	}
	pid, start, err := thisProcess()
	if err != nil || d.meet() != nil {
		return 0, d.errorOf(c, dev, n.size, unusable)
	}
	pages := (n.size + d.opt.Granularity - 1) / d.opt.Granularity * d.opt.Granularity
	base := d.space.take(pages, d.opt.Granularity, 0)
	if base == 0 {
		return 0, d.errorOf(c, dev, n.size, cuda.ErrOutOfMemory)
	}
	f, err := openStateFile(fileBlock, n)
	w := &window{0, n.size, f}
	if err == nil {
		if err = d.change(w, func(s *blockState) (bool, error) {
			if s.gone {
				return false, errGone
			}
			s.opens(d.identity, pid, start)
			return true, nil
		}); err != nil {
			f.file.close()
		}
	}
	if err != nil {
		d.space.give(base, pages)
		return 0, d.errorOf(c, dev, n.size, cuda.ErrInvalidValue)
	}
	k := d.otherChunk(p.device.id, n.size, cuda.HandleNone)
	k.maps, k.windows = 1, []*window{w}
	d.mapSeq++
	m := &mapping{region: region{base: base, size: n.size, seq: d.mapSeq}, chunk: k, pages: pages, access: p.access, pooled: p}
	d.space.set(base, pages, m)
	p.imports = append(p.imports, m)
	p.attr[cuda.MemPoolUsedCurrent] += n.size
	p.attr[cuda.MemPoolUsedHigh] = max(p.attr[cuda.MemPoolUsedHigh], p.attr[cuda.MemPoolUsedCurrent])
	d.live.asyncs++
	d.note(recAlloc, 0, base, n.size, k, 0)
	return cuda.Ptr(base), nil
}

func (s *blockState) opens(driver, pid, start uint64) {
	for i := range s.openers {
		if s.openers[i].driver == driver {
			s.openers[i].times++
			return
		}
	}
	s.openers = append(s.openers, opener{driver, pid, start, 1})
}

// freeImportedAsync is MemFreeAsync of imported memory: a use of it, which the exporter's free comes after.
func (d *Driver) freeImportedAsync(dev cuda.Device, m *mapping, s *stream) error {
	f := &Fault{Op: callNames[callMemFreeAsync], Device: dev, Stream: s.id, Addr: m.base, Size: m.size, chunk: m.chunk}
	done := d.behind(s.ready())
	if d.opt.Check == CheckUse && m.busy > done && !d.clock.reached(m.busy) {
		f.Kind, f.Detail = FaultInUse, "work on another stream uses the memory when it is freed"
		return d.found(f)
	}
	if d.opt.Check >= CheckOrder {
		d.order.prepare(s)
		if by := d.touchUses(s, m.chunk, 0, m.size, d.order.next(s), false); by != "" {
			f.Kind, f.Detail = FaultRace, "the memory is freed without order after a use of it on "+by
			return d.found(f)
		}
	}
	d.dropImported(m, s.id)
	return nil
}

// freeImported is MemFree of imported memory.
func (d *Driver) freeImported(dev cuda.Device, m *mapping) error {
	if err := d.beginContext(callMemFree, dev, m.size, d.costs.FreeAsync(0)); err != nil {
		return err
	}
	if d.opt.Check >= CheckUse {
		if f := d.stillUsed(&m.region, m.chunk, 0, callMemFree, dev); f != nil {
			return d.found(f)
		}
	}
	d.freeWaits(dev)
	d.dropImported(m, 0)
	return nil
}

func (d *Driver) dropImported(m *mapping, stream uint64) {
	w := m.chunk.windows[0]
	_ = d.change(w, func(s *blockState) (bool, error) { // a file that cannot be read is a fault of the next use
		s.openers = slices.DeleteFunc(s.openers, func(o opener) bool { return o.driver == d.identity && o.times == 1 })
		for i := range s.openers {
			if s.openers[i].driver == d.identity {
				s.openers[i].times--
			}
		}
		return true, nil
	})
	w.file.file.close()
	d.note(recFree, stream, m.base, m.size, m.chunk, 0)
	p := m.pooled
	p.imports = slices.DeleteFunc(p.imports, func(o *mapping) bool { return o == m })
	p.attr[cuda.MemPoolUsedCurrent] -= m.size
	d.live.asyncs--
	d.space.set(m.base, m.pages, nil)
	d.space.give(m.base, m.pages)
	m.chunk.maps--
	d.releaseUnused(m.chunk)
}
