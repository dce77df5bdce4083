package cistern

import (
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/front"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/internal/lockrank"
)

// The C library hands blocks of the default pool out again, and takes them back, without a call into Go, as long as that
// is between the program and one lane: package internal/front. Here is the engine's side of it. Go programs have no
// fronts.

// laneMutex is a lane's lock. Where the lane has a front it excludes C as well, and whoever holds it finds the tray
// empty: what C code took back is free.
type laneMutex struct {
	mu    lockrank.Mutex
	front *front.Front // guarded by mu; set once
	lane  *lane        // where there is a front
}

// +checklocksignore: it is the lock
func (m *laneMutex) Lock() {
	if lockrank.Checking() {
		m.mu.Lock()
	} else {
		m.mu.Mutex.Lock()
	}
	if m.front != nil {
		m.empty()
	}
}

// TryLock is Lock where no thread has to be waited for.
func (m *laneMutex) TryLock() bool {
	if !m.mu.TryLock() {
		return false
	}
	if m.front != nil {
		m.empty()
	}
	return true
}

// lookIn is Lock for those who read the gauges and nothing else: the tray stays as it is.
func (m *laneMutex) lookIn() {
	m.mu.Lock()
	if m.front != nil {
		m.front.Lock()
		m.lane.takeStock()
	}
}

// +checklocksignore: it is the lock
func (m *laneMutex) Unlock() {
	if m.front != nil {
		m.refill()
	}
	if lockrank.Checking() {
		m.mu.Unlock()
	} else {
		m.mu.Mutex.Unlock()
	}
}

func (m *laneMutex) refill() {
	m.lane.show()
	m.front.Unlock()
}

// empty excludes C and empties the tray.
func (m *laneMutex) empty() {
	m.front.Lock()
	m.lane.takeStock()
	m.lane.drain()
	m.front.Advance()
}

// enter locks and leaves the tray as it is: the heap takes its blocks for used ones, and the gauges are as of the last
// stock. leave is for holders who changed nothing but the tray.
func (m *laneMutex) enter() {
	m.mu.Lock()
	m.front.Lock()
}

// +checklocksignore: it is the lock
func (m *laneMutex) leave() {
	m.front.Unlock()
	m.mu.Unlock()
}

// takeStock brings the gauges up to date. A block in the tray counts as a free block of its own.
func (l *lane) takeStock() {
	for c := range l.quota.Classes {
		net, taken := l.mu.front.Stock(c)
		if net == (front.Amount{}) && taken == (front.Amount{}) {
			continue
		}
		l.quota.Classes[c].Exchange(net, taken)
		l.spaces[c].noteFree(uint64(taken.Bytes + net.Bytes))
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
		if b := s.heap.At(id); b.Uses != 0 {
			s.takeOut(b)
			continue
		}
		before := s.heap.FreeBlocks
		s.heap.FreeAt(id, place, e.Stamp)
		s.gauges.Merge(s.heap.FreeBlocks - before)
	}
	f.Empty()
}

// takeOut does with a block in the tray what Go does with a free that needs the device's lock: it was paused while C was
// putting it there. It counted as free, and is in use for some moments more.
func (s *space) takeOut(b *heap.Block) {
	s.gauges.TakeOut(b.Requested, b.Size)
	go s.freeSlow(cuda.Ptr(b.Addr), FreeOptions{})
}

// OnTicketsEnd sets the function that is called when C code must forget which blocks it may put into trays, because some
// are paused. It is called with locks held and must neither call the allocator nor wait for a lock.
func (d *Device) OnTicketsEnd(f func()) {
	d.mu.Lock()
	d.forget = f
	d.mu.Unlock()
}

// endTickets makes frees of all blocks the engine's, and blocks that are in trays all the same nobody's to take. The caller
// holds Device.mu and all lanes' locks.
//
// +checklocks:d.mu
func (d *Device) endTickets() {
	if d.forget != nil {
		d.forget()
	}
	for _, l := range d.lanes {
		if l.mu.front != nil {
			l.mu.front.Outdate()
		}
	}
}

// show sets the limits of what C may do from the allowances: of what it may put into the tray, and of what it may take
// from it. While nothing is taken but what was put after the tray was empty, there is nothing to exceed that was not
// reached when it was; so that limit is 0, except for blocks that stay in the tray.
func (l *lane) show() {
	f := l.mu.front
	*f.PutLimits() = l.quota.FreeRoom()
	for c, s := range l.spaces {
		if s != nil {
			f.SetFrees(c, s.untilClose())
		}
	}
	if len(f.Entries()) == 0 {
		f.NoTakes()
		return
	}
	*f.TakeLimits() = l.quota.AllocRoom()
}

var _ [quota.NumClasses - front.Classes]struct{}

// AllocFront is Alloc for the C library. A ticket says that the block may be given back, once, by putting it into the
// tray of that front, which is the stream's on this device, instead of calling Free.
func (d *Device) AllocFront(size uint64, st *Stream) (cuda.Ptr, front.Ticket, error) {
	if f := st.timeline.Front(); f != nil && st.dev == d && st.route.Load() == nil && d.health.Quick() && size-1 < maxRequest {
		if s := d.pool0.spaceFor(st, f.ClassOf(size)); s != nil {
			if p, mark := s.allocFront(f, size); p != 0 {
				return p, front.Ticket{Front: f, Mark: mark}, nil
			}
			p, err := d.pool0.allocSlow(size, d.pool0.round(size), st, origin{})
			if err != nil {
				return 0, front.Ticket{}, err
			}
			return p, d.ticket(p, size, st), nil
		}
	}
	pool := st.route.Load()
	if pool == nil || pool.dev != d {
		pool = d.pool0
	}
	p, err := pool.alloc(size, st, origin{}) // what may go into a tray has no stack
	if err != nil || p == 0 {
		return p, front.Ticket{}, err
	}
	return p, d.ticket(p, size, st), nil
}

// allocFront meets a request from the tray or, once the tray is empty, from the heap; 0 if it cannot. The front's own lock
// excludes whoever has taken the mutex before it, so where it is free the mutex is not needed.
func (s *space) allocFront(f *front.Front, size uint64) (cuda.Ptr, uint32) {
	if !f.TryLock() {
		s.mu.enter()
		defer s.mu.mu.Unlock()
	}
	if !s.dev.health.Quick() {
		f.Unlock()
		return 0, 0
	}
	addr, mark, o := f.Take(size, s.dev.health.Waiting(), 0)
	if o == front.Taken {
		f.Unlock()
		return cuda.Ptr(addr), mark
	}
	s.takeStock()
	s.drain()
	if o == front.Due {
		f.Polled()
	} else if n := s.pool.round(size); s.quota.RoomForAlloc(s.class, size, n) && !s.collectDue() && s.stream.timeline.Capture() == 0 {
		if id := s.heap.Take(n, size); id != 0 {
			s.gauges.Alloc(size, n, s.heap.FreeBlocks)
			mark = f.Advance()
			b := s.heap.At(id)
			b.Tag, b.Capture, b.Mark = 0, 0, uint8(mark)
			addr = b.Addr
		}
	}
	s.show()
	f.Unlock()
	return cuda.Ptr(addr), mark
}

// ticket is that of a block which was just handed out: none unless the block lies in the default pool where a request of
// its size belongs, and the stream lasts. It has no mark, because others may have been handed out since.
func (d *Device) ticket(p cuda.Ptr, size uint64, st *Stream) front.Ticket {
	return front.Ticket{Front: d.frontOf(p, size, st)}
}

// frontOf is the stream's front, made if need be, if the block may be put there.
func (d *Device) frontOf(p cuda.Ptr, size uint64, st *Stream) *front.Front {
	s := d.a.spaceOf(p)
	if d.opts.NoFront || s.pool != d.pool0 || s.stream != st || !st.timeline.Durable() || st.timeline.PerThread() || s.class != d.classOf(d.pool0.round(size)) {
		return nil
	}
	if f := st.timeline.Front(); f != nil {
		return f
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if f := st.timeline.Front(); f != nil {
		return f
	}
	f := front.New(d.pool0.mask, smallMax)
	f.SetRouted(st.route.Load() != nil)
	s.mu.Lock()
	f.Lock()
	s.mu.front, s.mu.lane = f, s.lane
	st.timeline.SetFront(f)
	s.mu.Unlock()
	return f
}

// FrontFlags are the device's flags for C code.
func (d *Device) FrontFlags() *front.Flags { return d.health.Flags() }

// freeFront takes a block back into the tray of the lane's front, so that the next request of its size meets it there. It
// reports false where that is not for the front: such a block is freed as any other.
func (s *space) freeFront(f *front.Front, p cuda.Ptr) (bool, error) {
	s.mu.enter()
	b, err := s.forTray(f, p)
	if b == nil {
		s.mu.leave()
		return err != nil, err
	}
	if f.Put(uint64(p), b.Requested, f.Recent(b.Mark), 0) {
		s.mu.leave()
		return true, nil
	}
	s.takeStock()
	if s.quota.RoomForFree(s.class, b.Size, 0) {
		s.putAlone(f, b)
		s.mu.Unlock()
		return true, nil
	}
	s.mu.Unlock()
	// An allowance would be exceeded.
	d := s.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	s.mu.enter()
	defer s.mu.Unlock()
	s.takeStock()
	if b, err = s.forTray(f, p); b == nil {
		return err != nil, err
	}
	s.putAlone(f, b)
	d.rebalance(s, nil)
	return true, nil
}

// putAlone puts a block into the tray, which is emptied if it is full, and takes stock of it. The caller has entered, taken
// stock and will show.
func (s *space) putAlone(f *front.Front, b *heap.Block) {
	if f.Full() {
		s.drain()
	}
	f.PutBeyond(b.Addr, b.Requested, f.Recent(b.Mark))
	s.takeStock()
}

// forTray finds a block that may be put into the tray; nil if it is not for the tray, with an error if there is no such
// block. The caller has entered.
func (s *space) forTray(f *front.Front, p cuda.Ptr) (*heap.Block, error) {
	id, _, known := s.heap.Lookup(uint64(p))
	if !known || f.Has(uint64(p)) {
		return nil, &PointerError{Op: "free", Ptr: p}
	}
	b := s.heap.At(id)
	if b.State != heap.Used || b.Uses != 0 || b.Tag != 0 || s.heap.Stack(id) != 0 || !s.dev.health.Quick() || s.class != f.ClassOf(b.Requested) {
		return nil, nil
	}
	return b, nil
}
