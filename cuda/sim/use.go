package sim

import (
	"time"

	"github.com/cistern-gpu/cistern/cuda"
)

// lagged is the duration of work that takes Options.Lag.
const lagged time.Duration = -1

// Use queues work on the stream that reads and writes [addr, addr+size), as a kernel launch would, and completes
// Options.Lag after now (never before earlier work of the stream, nor before what the stream waits for). Size 0 is
// work that touches no memory. It is no counted call. The error is a fault, or that the context is dead.
func (d *Driver) Use(dev cuda.Device, s cuda.Stream, addr cuda.Ptr, size uint64) error {
	return d.work(dev, s, addr, size, lagged, false)
}

// UseFor is Use for work that takes the given time once it starts.
func (d *Driver) UseFor(dev cuda.Device, s cuda.Stream, addr cuda.Ptr, size uint64, duration time.Duration) error {
	return d.work(dev, s, addr, size, max(duration, 0), false)
}

// Read is Use for work that only reads: reads need no order among themselves.
func (d *Driver) Read(dev cuda.Device, s cuda.Stream, addr cuda.Ptr, size uint64) error {
	return d.work(dev, s, addr, size, lagged, true)
}

// ReadFor is Read for work that takes the given time once it starts.
func (d *Driver) ReadFor(dev cuda.Device, s cuda.Stream, addr cuda.Ptr, size uint64, duration time.Duration) error {
	return d.work(dev, s, addr, size, max(duration, 0), true)
}

const launch = "cuLaunchKernel"

func (d *Driver) work(dev cuda.Device, h cuda.Stream, addr cuda.Ptr, size uint64, duration time.Duration, read bool) error {
	d.mu.Lock()
	defer d.leave()
	s, err := d.launchOn(dev, h)
	if err != nil {
		return err
	}
	if s.capture != nil {
		return d.capturedWork(s, dev, uint64(addr), size, duration, read)
	}
	if d.opt.Check == CheckNone || size == 0 {
		d.queue(s, duration)
		if d.opt.Check >= CheckOrder {
			d.order.prepare(s)
			d.order.next(s)
		}
		return nil
	}
	f := d.mapped(dev, uint64(addr), size, launch)
	if f == nil && !read {
		f = d.readOnly(dev, uint64(addr), size, launch)
	}
	if f != nil {
		f.Stream = s.id
		return d.found(f)
	}
	t := d.queue(s, duration)
	var m mark
	if d.opt.Check >= CheckOrder {
		d.order.prepare(s)
		m = d.order.next(s)
	}
	return d.found(d.touch(s, dev, uint64(addr), size, t, m, read, launch))
}

// launchOn is the stream that work on dev goes to.
func (d *Driver) launchOn(dev cuda.Device, h cuda.Stream) (*stream, error) {
	if uint(dev) >= uint(len(d.devices)) {
		return nil, &cuda.Error{Op: launch, Device: dev, Code: cuda.ErrInvalidDevice}
	}
	s := d.resolve(dev, h)
	if s == nil {
		return nil, d.found(&Fault{Kind: FaultStream, Op: launch, Device: dev,
			Detail: "the stream does not exist (any more)", code: cuda.ErrInvalidHandle})
	}
	if s.ctx.poison != cuda.Success {
		return nil, &cuda.Error{Op: launch, Device: dev, Code: s.ctx.poison}
	}
	if s.capture != nil || len(s.ctx.captures) > 0 {
		if code := s.implicit(); code != cuda.Success {
			return nil, &cuda.Error{Op: launch, Device: dev, Code: code}
		}
	}
	return s, nil
}

// mapped looks for a byte of [addr, addr+size) that dev cannot use.
func (d *Driver) mapped(dev cuda.Device, addr, size uint64, op string) *Fault {
	end := addr + size
	for p := addr; p < end || end < addr; {
		m, r := d.regionAt(p)
		if r == nil {
			return &Fault{Kind: FaultUnmapped, Op: op, Device: dev, Addr: addr, Size: size, at: p,
				Detail: "no memory is there", code: cuda.ErrIllegalAddress}
		}
		if m.access>>dev&1 == 0 && (m.resv != nil || m.arena != nil || m.pooled != nil || d.devices[dev].peers>>m.chunk.prop.Device&1 == 0) {
			return &Fault{Kind: FaultNoAccess, Op: op, Device: dev, Addr: addr, Size: size, at: p, chunk: m.chunk,
				Detail: "the memory is mapped, but the device was not given access", code: cuda.ErrIllegalAddress}
		}
		p = r.base + r.size
	}
	return nil
}

// readOnly looks for a byte of [addr, addr+size), which is mapped, that dev may only read.
func (d *Driver) readOnly(dev cuda.Device, addr, size uint64, op string) *Fault {
	end := addr + size
	for p := addr; p < end; {
		m, r := d.regionAt(p)
		if m.locked>>dev&1 != 0 {
			return &Fault{Kind: FaultNoAccess, Op: op, Device: dev, Addr: addr, Size: size, at: p, chunk: m.chunk,
				Detail: "the memory is mapped, but the device may only read it", code: cuda.ErrIllegalAddress}
		}
		p = r.base + r.size
	}
	return nil
}

// regionAt is the mapping and the region that hold the address; nil where nothing usable is there.
func (d *Driver) regionAt(p uint64) (*mapping, *region) {
	m := d.space.find(p)
	if m == nil {
		if m = d.hostAt(p); m == nil {
			return nil, nil
		}
	}
	r := &m.region
	if m.resv == nil {
		switch {
		case m.slab != nil:
			r = m.slab.units[(p-m.base)/unit]
		case m.arena != nil:
			r = m.arena.at(p)
		}
	}
	if r == nil || p-r.base >= r.size {
		return nil, nil
	}
	return m, r
}

// touch notes that work m of s, complete at t, uses [addr, addr+size), which is mapped, and checks its order.
func (d *Driver) touch(s *stream, dev cuda.Device, addr, size uint64, t time.Duration, m mark, read bool, op string) *Fault {
	var found *Fault
	end := addr + size
	for p := addr; p < end; {
		k, r := d.regionAt(p)
		hi := min(end, r.base+r.size)
		r.busy = max(r.busy, t)
		d.pieces++
		off := p - k.base
		if d.opt.Check >= CheckOrder {
			r.use(m)
			if by := d.touchUses(s, k.chunk, off, off+hi-p, m, read); by != "" && found == nil {
				found = &Fault{Kind: FaultRace, Op: op, Device: dev, Stream: s.id, Addr: addr, Size: size, at: p,
					chunk: k.chunk, off: off, code: cuda.ErrIllegalAddress,
					Detail: "not ordered after a use of the same bytes on " + by}
				found.History = d.historyOf(found, hi-p)
			}
		}
		what := recUse
		if read {
			what = recRead
		}
		d.note(what, s.id, p, hi-p, k.chunk, off)
		p = hi
	}
	return found
}

// use notes the last use of each rank.
func (r *region) use(m mark) {
	for i := range r.uses {
		if r.uses[i].rank == m.rank {
			r.uses[i] = m
			return
		}
	}
	r.uses = append(r.uses, m)
}
