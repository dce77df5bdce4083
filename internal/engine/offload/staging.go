package offload

import (
	"cmp"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/health"
	"github.com/cistern-gpu/cistern/internal/units"
)

// New host memory is mapped, touched by nearly all threads at once and only then page-locked, which is an order of magnitude
// faster than having the driver allocate it. The driver page-locks one slab at a time. Meanwhile the slabs behind that one are
// touched, and those before it are copied to.

// staging is the page-locked memory of a store.
type staging struct {
	health   *health.State
	slabs    []*slab
	register bool // memory is mapped and touched here, and registered
}

// slab is one registration of page-locked memory.
type slab struct {
	size uint64
	next uint64       // up to where it is given out
	live atomic.Int64 // bytes of contents in it
	made bool         // base is set
	base cuda.Ptr
	mem  hostMemory    // where it is registered, not allocated
	done chan struct{} // closed once it is made, or that failed
	err  error         // valid then

	untouched atomic.Int64  // pieces of it
	touched   chan struct{} // closed once there are none
}

const (
	slabMost  = 128 << 20 // larger ones are no faster to copy to, and would delay the first copy
	slabLeast = 2 << 20
)

// place finds room for a piece and appends it to the list, in parts where it takes several slabs. fill makes the slabs that it
// adds.
func (s *staging) place(list []*piece, p *piece) []*piece {
	for size := p.size; size > 0; {
		b := s.room()
		if b == nil {
			b = &slab{size: slabFor(size)}
			s.slabs = append(s.slabs, b)
		}
		n := min(size, b.size-b.next)
		list = append(list, &piece{addr: p.addr + p.size - size, size: n, slab: b, at: b.next})
		b.next += n
		b.live.Add(int64(n))
		size -= n
	}
	return list
}

// room is a slab that has some. A slab in which nothing is left is used again from its beginning.
func (s *staging) room() *slab {
	for _, b := range s.slabs {
		if b.live.Load() == 0 {
			b.next = 0
		}
		if b.next < b.size {
			return b
		}
	}
	return nil
}

// slabFor is the size of a new slab when so many bytes have no place.
func slabFor(bytes uint64) uint64 {
	size := uint64(slabLeast)
	for size < bytes && size < slabMost {
		size *= 2
	}
	return size
}

// wait is the address of the slab, once it has one.
func (s *slab) wait() (cuda.Ptr, error) {
	if !s.made {
		<-s.done
		if s.err != nil {
			return 0, s.err
		}
	}
	return s.base, nil
}

// fill makes the slabs that have no memory yet, in their order, and returns at once. stop waits until it is done and
// forgets slabs that could not be made.
func (s *staging) fill() (stop func() error) {
	var list []*slab
	bytes := uint64(0)
	for _, b := range s.slabs {
		if !b.made {
			b.done = make(chan struct{})
			list = append(list, b)
			bytes += b.size
		}
	}
	if len(list) == 0 {
		return func() error { return nil }
	}
	if err := enough(bytes); err != nil {
		for _, b := range list {
			b.err = err
			close(b.done)
		}
	} else if s.register {
		go s.registerAll(list)
	} else {
		go func() {
			for _, b := range list {
				b.base, b.err = s.health.Driver.HostAlloc(s.health.ID, b.size)
				close(b.done)
			}
		}()
	}
	return func() (first error) {
		for _, b := range list {
			<-b.done
			b.made = b.err == nil
			first = cmp.Or(first, b.err)
		}
		s.slabs = slices.DeleteFunc(s.slabs, func(b *slab) bool { return b.err != nil })
		return first
	}
}

// registerAll makes slabs of memory that the process maps: while one is page-locked, those behind it are touched.
func (s *staging) registerAll(list []*slab) {
	var pieces []untouched
	for _, b := range list {
		b.touched = make(chan struct{})
		if b.mem, b.err = mapHost(b.size); b.err != nil {
			close(b.touched)
			continue
		}
		mem := b.mem.bytes()
		b.untouched.Store(int64((len(mem) + touchPart - 1) / touchPart))
		for from := 0; from < len(mem); from += touchPart {
			pieces = append(pieces, untouched{b, mem[from:min(from+touchPart, len(mem))]})
		}
	}
	touch(pieces)
	for _, b := range list {
		<-b.touched
		if b.err == nil {
			b.err = s.pageLock(b)
		}
		close(b.done)
	}
}

// pageLock registers the memory of a slab, or has the driver allocate other memory where it does not allow that.
func (s *staging) pageLock(b *slab) error {
	drv, dev := s.health.Driver, s.health.ID
	b.base = b.mem.base()
	refused := drv.HostRegister(dev, b.base, b.size)
	if refused == nil {
		return nil
	}
	unmapHost(b.mem)
	b.mem = hostMemory{}
	var err error
	if b.base, err = drv.HostAlloc(dev, b.size); err != nil {
		return fmt.Errorf("page-locking %s of host memory: %w; and: %w", units.FormatBytes(b.size), refused, err)
	}
	return nil
}

// untouched is a piece of new memory.
type untouched struct {
	slab *slab
	mem  []byte
}

// touchPart is a large page. There is nothing to gain from touching more than one at a time: slabs are done in their order.
const touchPart = 2 << 20

// touch has the kernel find the pages of new memory, which takes it most of the time, in their order, by as many threads as
// there are, but for one that page-locks meanwhile. It returns at once.
func touch(list []untouched) {
	const page = 4096
	next := new(atomic.Int64)
	for range min(max(1, runtime.GOMAXPROCS(0)-1), touchMost, len(list)) {
		go func() {
			for {
				i := next.Add(1) - 1
				if i >= int64(len(list)) {
					return
				}
				x := list[i]
				for k := 0; k < len(x.mem); k += page {
					x.mem[k] = 0
				}
				if x.slab.untouched.Add(-1) == 0 {
					close(x.slab.touched)
				}
				runtime.Gosched() // a waiter may want this thread
			}
		}()
	}
}

// touchMost threads find pages as fast as the host's memory takes them.
const touchMost = 32

// Trim gives page-locked memory without contents back, as long as least bytes are left.
func (s *Store) Trim(least uint64) error {
	if err := s.Ready(); err != nil {
		return err
	}
	return s.staging.trim(least)
}

func (s *staging) trim(least uint64) (first error) {
	have := s.bytes()
	var list []*slab
	s.slabs = slices.DeleteFunc(s.slabs, func(b *slab) bool {
		if b.live.Load() > 0 || have < b.size+least {
			return false
		}
		have -= b.size
		list = append(list, b)
		return true
	})
	for _, b := range list {
		if err := s.free(b); err != nil {
			s.slabs = append(s.slabs, b)
			first = cmp.Or(first, err)
		}
	}
	return first
}

// free gives the memory of a slab back.
func (s *staging) free(b *slab) error {
	if !b.made {
		return nil
	}
	if !b.mem.is() {
		return s.health.Failed(s.health.Driver.HostFree(s.health.ID, b.base))
	}
	if err := s.health.Driver.HostUnregister(s.health.ID, b.base); err != nil {
		return s.health.Failed(err)
	}
	unmapHost(b.mem)
	return nil
}

func (s *staging) bytes() (n uint64) {
	for _, b := range s.slabs {
		n += b.size
	}
	return n
}

// Reserve has page-locked memory of at least so many bytes ready for the next pauses; 0 gives back what has no contents.
func (s *Store) Reserve(bytes uint64) error {
	x := &s.staging
	for have := x.bytes(); have < bytes; have = x.bytes() {
		x.slabs = append(x.slabs, &slab{size: slabFor(bytes - have)})
	}
	if err := x.fill()(); err != nil {
		return fmt.Errorf("pause buffers of %s: %w", units.FormatBytes(bytes), err)
	}
	return s.Trim(bytes)
}
