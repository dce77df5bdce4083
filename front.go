package cistern

import (
	"sync"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/front"
	"github.com/cistern-gpu/cistern/internal/heap"
)

// The C library hands blocks of the default pool out again, and takes them back, without a call into Go, as long as that
// is between the program and one lane: package internal/front. Here is the engine's side of it. Go programs have no
// fronts.

// laneMutex is a lane's lock. Where the lane has a front it excludes C as well, and whoever holds it finds the tray
// empty: what C code took back is free.
type laneMutex struct {
	mu    sync.Mutex
	front *front.Front // guarded by mu; set once
	lane  *lane        // where there is a front
}

func (m *laneMutex) Lock() {
	m.mu.Lock()
	if m.front != nil {
		m.front.Lock()
		m.lane.takeStock()
		m.lane.drain()
	}
}

func (m *laneMutex) Unlock() {
	if m.front != nil {
		m.lane.show()
		m.front.Unlock()
	}
	m.mu.Unlock()
}

// enter locks and leaves the tray as it is: the heap takes its blocks for used ones, and the gauges are as of the last
// stock. leave is for holders who changed nothing but the tray.
func (m *laneMutex) enter() {
	m.mu.Lock()
	m.front.Lock()
}

func (m *laneMutex) leave() {
	m.front.Unlock()
	m.mu.Unlock()
}

// takeStock brings the gauges up to date. A block in the tray counts as a free block of its own.
func (l *lane) takeStock() {
	for c := range l.classes {
		net, taken := l.mu.front.Stock(c)
		if net == (front.Amount{}) && taken == (front.Amount{}) {
			continue
		}
		g := &l.classes[c]
		g.now[gAllocs] -= net.Blocks
		g.now[gRequested] -= net.Requested
		g.now[gAllocated] -= net.Bytes
		g.now[gActive] -= net.Blocks
		g.now[gActiveBytes] -= net.Bytes
		g.now[gFree] += net.Blocks
		g.now[gFreeBytes] += net.Bytes
		g.sum[gAllocs] += taken.Blocks
		g.sum[gRequested] += taken.Requested
		g.sum[gAllocated] += taken.Bytes
		g.sum[gActive] += taken.Blocks
		g.sum[gActiveBytes] += taken.Bytes
		g.sum[gFree] += taken.Blocks + net.Blocks
		g.sum[gFreeBytes] += taken.Bytes + net.Bytes
	}
}

// drain frees the blocks in the tray. They were counted when they were put there, so all that changes is the number of
// free blocks, where they merge with their neighbours.
func (l *lane) drain() {
	f := l.mu.front
	for _, e := range f.Entries() {
		s := l.spaces[f.ClassOf(e.Requested)]
		id, place, ok := s.heap.Lookup(e.Addr)
		if !ok {
			panic("a block in the tray that the heap does not know")
		}
		n, before := s.heap.At(id).Size, s.heap.FreeBlocks
		s.heap.FreeAt(id, place, e.Stamp)
		s.gauges.now[gFree] += int64(s.heap.FreeBlocks - before - 1)
		s.noteFree(n)
	}
	f.Empty()
}

// show sets the limits of what C may do from the allowances.
func (l *lane) show() {
	var puts, takes [numClasses + 1]front.Amount
	var sum [numGauges]int64
	for c := range l.classes {
		g := &l.classes[c]
		for i, v := range g.now {
			sum[i] += v
		}
		puts[c], takes[c] = rooms(&g.now, &g.max)
	}
	puts[numClasses], takes[numClasses] = rooms(&sum, &l.most)
	l.mu.front.SetLimits(&puts, &takes)
}

// rooms is what may be given back, and handed out, without exceeding an allowance.
func rooms(now, max *[numGauges]int64) (puts, takes front.Amount) {
	return front.Amount{Blocks: max[gFree] - now[gFree], Bytes: max[gFreeBytes] - now[gFreeBytes]},
		front.Amount{
			Blocks:    min(max[gAllocs]-now[gAllocs], max[gActive]-now[gActive]),
			Bytes:     min(max[gAllocated]-now[gAllocated], max[gActiveBytes]-now[gActiveBytes]),
			Requested: max[gRequested] - now[gRequested],
		}
}

var _ [numClasses - front.Classes]struct{}

// AllocFront is Alloc for the C library. A front with the result says that the block may be given back, once, by putting
// it there instead of calling Free; it belongs to the stream on this device.
func (d *Device) AllocFront(size uint64, st *Stream) (cuda.Ptr, *front.Front, error) {
	f := st.front.Load()
	if f == nil || st.dev != d {
		p, err := d.Alloc(size, st)
		if err != nil || p == 0 {
			return p, nil, err
		}
		return p, d.frontOf(p, size, st), nil
	}
	if d.quick.Load() && size <= maxRequest && size != 0 {
		if s := d.pool0.spaceFor(st, f.ClassOf(size)); s != nil {
			s.mu.enter()
			addr, o := f.Take(size, d.waiting.Load())
			if o == front.Due {
				f.Polled()
			}
			s.mu.leave()
			switch o {
			case front.Taken:
				return cuda.Ptr(addr), f, nil
			case front.Due:
				p, err := d.pool0.allocSlow(size, d.pool0.round(size), st, 0)
				if err != nil {
					return 0, nil, err
				}
				return p, d.frontOf(p, size, st), nil
			}
		}
	}
	p, err := d.Alloc(size, st)
	if err != nil || p == 0 {
		return p, nil, err
	}
	return p, d.frontOf(p, size, st), nil
}

// frontOf is the front that a block that was just handed out may be put back to, made if need be: nil unless the block
// lies in the default pool where a request of its size belongs, and the stream lasts.
func (d *Device) frontOf(p cuda.Ptr, size uint64, st *Stream) *front.Front {
	s := d.a.spaceOf(p)
	if s.pool != d.pool0 || s.stream != st || !st.durable.Load() || st.perThread || s.class != d.classOf(d.pool0.round(size)) {
		return nil
	}
	if f := st.front.Load(); f != nil {
		return f
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if f := st.front.Load(); f != nil {
		return f
	}
	f := front.New(d.pool0.mask, smallMax)
	f.SetRouted(st.route.Load() != nil)
	s.mu.Lock()
	f.Lock()
	s.mu.front, s.mu.lane = f, s.lane
	st.mu.Lock()
	f.SetEpoch(st.epoch.Load())
	st.front.Store(f)
	st.mu.Unlock()
	s.mu.Unlock()
	return f
}

// FrontFlags are the device's flags for C code.
func (d *Device) FrontFlags() *front.Flags { return d.flags }

// freeFront takes a block back into the tray of the lane's front, so that the next request of its size meets it there. It
// reports false where that is not for the front: such a block is freed as any other.
func (s *space) freeFront(f *front.Front, p cuda.Ptr) (bool, error) {
	s.mu.enter()
	requested, ok, err := s.forTray(f, p)
	if !ok || err != nil {
		s.mu.leave()
		return err != nil, err
	}
	if f.Full() {
		s.takeStock()
		s.drain()
		s.show()
	}
	ok = f.Put(uint64(p), requested)
	s.mu.leave()
	if ok {
		return true, nil
	}
	// An allowance would be exceeded.
	d := s.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	s.mu.enter()
	defer s.mu.Unlock()
	requested, ok, err = s.forTray(f, p)
	s.takeStock()
	if f.Full() {
		s.drain()
	}
	if ok {
		f.PutBeyond(uint64(p), requested)
		s.takeStock()
		d.settle(s, nil)
	}
	return ok || err != nil, err
}

// forTray reports whether a block may be put into the tray, and the bytes that were asked for, or that there is no such
// block. The caller has entered.
func (s *space) forTray(f *front.Front, p cuda.Ptr) (requested uint64, ok bool, err error) {
	id, _, known := s.heap.Lookup(uint64(p))
	if !known || f.Has(uint64(p)) {
		return 0, false, &PointerError{Op: "free", Ptr: p}
	}
	b := s.heap.At(id)
	ok = b.State == heap.Used && b.Uses == 0 && b.Tag == 0 && s.dev.quick.Load() && s.class == f.ClassOf(b.Requested)
	return b.Requested, ok, nil
}
