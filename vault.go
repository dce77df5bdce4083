package cistern

import (
	"cmp"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/units"
)

// vault is the page-locked host memory of a device for contents, in slabs. It keeps what it got, for the next pause, as
// page-locking takes longer than copying. What has to be new is mapped, touched by nearly all threads at once and only then
// page-locked, which is an order of magnitude faster than having the driver allocate it. While slabs are page-locked, one
// after the other, as the driver does no two of them at once, those behind them are touched and those before them copied to.
type vault struct {
	dev   *Device
	slabs []*slab // guarded by Device.pausing
}

// slab is one piece of it: one registration, which no copy may cross.
type slab struct {
	size uint64
	next uint64 // guarded by Device.pausing: up to where it is given out
	live uint64 // guarded by Device.mu: bytes of contents in it
	made bool   // guarded by Device.pausing: base is set
	base cuda.Ptr
	mem  hostMemory    // where it is registered, not allocated
	done chan struct{} // closed once it is made, or could not be
	err  error         // valid then

	untouched atomic.Int64  // pieces of it
	touched   chan struct{} // closed once there are none
}

const (
	slabMost  = stretchMost // larger ones are no faster to copy to, and would have the first copy wait
	slabLeast = 2 << 20
)

// place finds room for a piece and appends it to the list, in parts where it takes several slabs. Slabs that it has to
// add are made by fill. The caller holds Device.pausing and Device.mu.
//
// +checklocks:v.dev.mu
func (v *vault) place(list []*piece, p *piece) []*piece {
	for size := p.size; size > 0; {
		s := v.room()
		if s == nil {
			s = &slab{size: slabFor(size)}
			v.slabs = append(v.slabs, s)
		}
		n := min(size, s.size-s.next)
		list = append(list, &piece{addr: p.addr + p.size - size, size: n, slab: s, at: s.next})
		s.next += n
		s.live += n
		size -= n
	}
	return list
}

// room is a slab that has some.
func (v *vault) room() *slab {
	for _, s := range v.slabs {
		if s.live == 0 {
			s.next = 0
		}
		if s.next < s.size {
			return s
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

// fill makes the slabs that have no memory yet, in their order, and returns at once. stop waits until it is done, and
// forgets those that could not be made.
func (v *vault) fill() (stop func() error) {
	var list []*slab
	bytes := uint64(0)
	for _, s := range v.slabs {
		if !s.made {
			s.done = make(chan struct{})
			list = append(list, s)
			bytes += s.size
		}
	}
	if len(list) == 0 {
		return func() error { return nil }
	}
	if err := enough(bytes); err != nil {
		for _, s := range list {
			s.err = err
			close(s.done)
		}
	} else if v.dev.drv.Name() == "sim" || !canMap {
		go func() {
			for _, s := range list {
				s.base, s.err = v.dev.drv.HostAlloc(v.dev.id, s.size)
				close(s.done)
			}
		}()
	} else {
		go v.register(list)
	}
	return func() (first error) {
		for _, s := range list {
			<-s.done
			s.made = s.err == nil
			first = cmp.Or(first, s.err)
		}
		v.slabs = slices.DeleteFunc(v.slabs, func(s *slab) bool { return s.err != nil })
		return first
	}
}

// register makes slabs of memory that the process maps: while one is page-locked, those behind it are touched.
func (v *vault) register(list []*slab) {
	d := v.dev
	var pieces []untouched
	for _, s := range list {
		s.touched = make(chan struct{})
		if s.mem, s.err = mapHost(s.size); s.err != nil {
			close(s.touched)
			continue
		}
		b := s.mem.bytes()
		s.untouched.Store(int64((len(b) + touchPart - 1) / touchPart))
		for from := 0; from < len(b); from += touchPart {
			pieces = append(pieces, untouched{s, b[from:min(from+touchPart, len(b))]})
		}
	}
	touch(pieces)
	for _, s := range list {
		<-s.touched
		if s.err == nil {
			s.base = s.mem.base()
			if err := d.drv.HostRegister(d.id, s.base, s.size); err != nil {
				unmapHost(s.mem)
				s.mem = hostMemory{}
				// Perhaps it is the registering that is not allowed here.
				if s.base, s.err = d.drv.HostAlloc(d.id, s.size); s.err != nil {
					s.err = fmt.Errorf("page-locking %s of host memory: %w; and: %w", units.FormatBytes(s.size), err, s.err)
				}
			}
		}
		close(s.done)
	}
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
				runtime.Gosched() // whoever waits for it may want this thread
			}
		}()
	}
}

// touchMost threads find pages as fast as the host's memory takes them.
const touchMost = 32

// drop gives slabs back that hold nothing, as long as least bytes are left. The caller holds Device.pausing and
// Device.mu; the latter is let go meanwhile.
//
// +checklocks:v.dev.mu
// +checklocks:v.dev.pausing
func (v *vault) drop(least uint64) (first error) {
	d := v.dev
	if err := d.sure(); err != nil {
		return err
	}
	have := v.bytes()
	var list []*slab
	v.slabs = slices.DeleteFunc(v.slabs, func(s *slab) bool {
		if s.live > 0 || have < s.size+least {
			return false
		}
		have -= s.size
		list = append(list, s)
		return true
	})
	d.mu.Unlock()
	defer d.mu.Lock()
	for _, s := range list {
		var err error
		if !s.made {
			continue
		} else if !s.mem.is() {
			err = d.drv.HostFree(d.id, s.base)
		} else if err = d.drv.HostUnregister(d.id, s.base); err == nil {
			unmapHost(s.mem)
		}
		if err != nil {
			v.slabs = append(v.slabs, s)
			first = cmp.Or(first, d.health.Failed(err))
		}
	}
	return first
}

func (v *vault) bytes() (n uint64) {
	for _, s := range v.slabs {
		n += s.size
	}
	return n
}

// PauseBuffers keeps page-locked memory of at least so many bytes for the contents of the next pauses, which are much
// faster with it; 0 gives back what holds nothing. Without it a pause keeps what it got for the next one.
func (d *Device) PauseBuffers(bytes uint64) error {
	d.pausing.Lock()
	defer d.pausing.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.health.Broken(); err != nil {
		return err
	}
	v := &d.vault
	for have := v.bytes(); have < bytes; have = v.bytes() {
		v.slabs = append(v.slabs, &slab{size: slabFor(bytes - have)})
	}
	d.mu.Unlock()
	err := v.fill()()
	d.mu.Lock()
	if err != nil {
		return fmt.Errorf("pause buffers of %s: %w", units.FormatBytes(bytes), err)
	}
	return v.drop(bytes)
}
