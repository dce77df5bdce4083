package resource

import (
	"cmp"
	"sync"

	"github.com/cistern-gpu/cistern/cuda"
)

// SingleHandle is the device's own memory as segments of one physical handle each, mapped alone into a reservation of
// its own: what registration for RDMA and NCCL's user buffers accept, and what can be exported as a whole.
type SingleHandle struct {
	drv         cuda.Driver
	prop        cuda.MemProp
	granularity uint64
	access      func(cuda.Ptr, uint64) error

	mu      sync.Mutex
	handles map[cuda.Ptr]cuda.Handle // guarded by mu: 0 once it was released though the mapping could not be undone
	left    []leftover               // guarded by mu: what the driver would not take back
}

// leftover is a reservation that no segment has any more.
type leftover struct {
	base   cuda.Ptr
	size   uint64
	mapped bool // and still its memory
	handle cuda.Handle
}

// Single makes that upstream. access makes a segment, once mapped, accessible to the devices that may use it.
func Single(drv cuda.Driver, prop cuda.MemProp, granularity uint64, access func(p cuda.Ptr, size uint64) error) *SingleHandle {
	return &SingleHandle{drv: drv, prop: prop, granularity: granularity, access: access, handles: map[cuda.Ptr]cuda.Handle{}}
}

// Alloc gets a segment; size must be a multiple of the granularity. What was got is given back when a later call fails.
func (s *SingleHandle) Alloc(size, _ uint64, _ cuda.Stream) (p cuda.Ptr, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p, err = s.drv.AddressReserve(size, s.granularity, 0); err != nil {
		return 0, err
	}
	h, err := s.drv.MemCreate(size, s.prop)
	if err != nil {
		s.drop(leftover{base: p, size: size})
		return 0, err
	}
	if err = s.drv.MemMap(p, size, h); err != nil {
		s.drop(leftover{base: p, size: size, handle: h})
		return 0, err
	}
	if err = s.access(p, size); err != nil {
		s.drop(leftover{p, size, true, h})
		return 0, err
	}
	s.handles[p] = h
	return p, nil
}

// Free gives a segment back: the handle first, whose memory stays while it is mapped, then the mapping. So whichever call
// fails, the segment is either gone or as usable as before.
func (s *SingleHandle) Free(p cuda.Ptr, size, _ uint64, _ cuda.Stream) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h := s.handles[p]; h != 0 {
		if err := s.drv.MemRelease(h); err != nil {
			return err
		}
		s.handles[p] = 0
	}
	if err := s.drv.MemUnmap(p, size); err != nil {
		return err
	}
	delete(s.handles, p)
	s.drop(leftover{base: p, size: size})
	return nil
}

// Handle is the physical handle of the segment at p, for exporting it; 0 where there is none.
func (s *SingleHandle) Handle(p cuda.Ptr) cuda.Handle {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.handles[p]
}

// Settle gives back what the driver would not take back when a segment went, or could not be made, and reports whether
// anything went.
func (s *SingleHandle) Settle() (any bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.left)
	err = s.retry()
	return len(s.left) < n, err
}

// drop undoes what is left of a segment. The caller holds s.mu.
func (s *SingleHandle) drop(x leftover) {
	s.left = append(s.left, x)
	s.retry() // what fails is tried again at the next occasion
}

func (s *SingleHandle) retry() (first error) {
	keep := s.left[:0]
	for _, x := range s.left {
		var err error
		if x.handle != 0 {
			if err = s.drv.MemRelease(x.handle); err == nil {
				x.handle = 0
			}
		}
		if x.mapped && err == nil {
			if err = s.drv.MemUnmap(x.base, x.size); err == nil {
				x.mapped = false
			}
		}
		if err == nil {
			err = s.drv.AddressFree(x.base, x.size)
		}
		if err != nil {
			first = cmp.Or(first, err)
			keep = append(keep, x)
		}
	}
	s.left = keep
	return first
}

func (s *SingleHandle) MemInfo() (free, total uint64, err error) { return s.drv.MemInfo(s.prop.Device) }

func (s *SingleHandle) Equal(other Resource) bool { return Resource(s) == other }

func (s *SingleHandle) Traits() Traits {
	return Traits{Name: "virtual", Device: s.prop.Device, OnDevice: s.prop.Location == cuda.LocationDevice, DeviceAccessible: true,
		Align: s.granularity, Handles: s.prop.Handles}
}
