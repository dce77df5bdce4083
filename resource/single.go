package resource

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/lockrank"
)

// SingleHandle is memory as segments of one physical handle each, mapped alone into a reservation of its own: what
// registration for RDMA and NCCL's user buffers accept, and what can be exported as a whole. Sizes are rounded up to the
// granularity. It is a Backing: a segment's memory can go and come again while its addresses stay.
type SingleHandle struct {
	drv         cuda.Driver
	prop        cuda.MemProp
	name        string
	granularity uint64
	access      func(cuda.Ptr, uint64) error

	mu       lockrank.Mutex
	segments map[cuda.Ptr]*segment // +checklocks:mu
	// +checklocks:mu
	peers []cuda.Device // devices beside those that access makes it accessible to
	// +checklocks:mu
	left []leftover // what the driver would not take back
}

// segment is one reservation that is in use.
type segment struct {
	size   uint64      // bytes, rounded up
	handle cuda.Handle // 0 without memory, or once it was released though the mapping could not be undone
	mapped bool
	ready  bool // and accessible
}

// leftover is a reservation that no segment has any more, perhaps with its memory, or memory alone.
type leftover struct {
	base   cuda.Ptr // 0: no reservation
	size   uint64
	mapped bool // and still its memory
	handle cuda.Handle
}

// Single makes that upstream. access makes a segment, once mapped, accessible to the devices that may use it.
func Single(drv cuda.Driver, prop cuda.MemProp, granularity uint64, access func(p cuda.Ptr, size uint64) error) *SingleHandle {
	s := &SingleHandle{drv: drv, prop: prop, name: "virtual", granularity: granularity, access: access,
		segments: map[cuda.Ptr]*segment{}, mu: lockrank.Mutex{Rank: lockrank.Segments}}
	if prop.Location == cuda.LocationHostNUMA {
		s.name = "host_numa"
	}
	return s
}

// Segments is Single for the device's own memory, accessible to the device, and exportable in the ways that it grants.
func Segments(drv cuda.Driver, dev cuda.Device) (*SingleHandle, error) {
	info, err := drv.DeviceInfo(dev)
	if err != nil {
		return nil, err
	}
	if !info.VMM {
		return nil, fmt.Errorf("device %d (%s) has no virtual memory management", dev, info.Name)
	}
	s := Single(drv, cuda.MemProp{Device: dev, Handles: cuda.HandleFabric | cuda.HandlePosix, RDMA: info.RDMA}, info.Granularity,
		func(p cuda.Ptr, size uint64) error { return drv.MemSetAccess(p, size, []cuda.Device{dev}) })
	return s, s.probe()
}

// probe finds out how the memory can be exported, by making some: most capable first, as cuda.Driver.ProbeHandles does.
func (s *SingleHandle) probe() error {
	for {
		h, err := s.drv.MemCreate(s.granularity, s.prop)
		if err == nil {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.drop(leftover{size: s.granularity, handle: h})
			if len(s.left) > 0 {
				s.retry() // this resource may get no more requests
			}
			return nil
		}
		refused := errors.Is(err, cuda.ErrNotSupported) || errors.Is(err, cuda.ErrNotPermitted) || errors.Is(err, cuda.ErrInvalidValue)
		switch {
		case !refused || s.prop.Handles == cuda.HandleNone:
			return fmt.Errorf("%s memory of device %d: %w", s.name, s.prop.Device, err)
		case s.prop.Handles&cuda.HandleFabric != 0:
			s.prop.Handles = cuda.HandlePosix
		default:
			s.prop.Handles = cuda.HandleNone
		}
	}
}

// HostNUMA is Single for host memory of one NUMA node, mapped for the device and for the host's processors, at one
// address (extended GPU memory). A negative node is the one that the driver calls nearest to the device.
func HostNUMA(drv cuda.Driver, dev cuda.Device, node int) (*SingleHandle, error) {
	info, err := drv.DeviceInfo(dev)
	if err != nil {
		return nil, err
	}
	if !info.HostVMM || !info.VMM {
		return nil, fmt.Errorf("device %d (%s) cannot map memory of the host's NUMA nodes", dev, info.Name)
	}
	if node < 0 {
		node = max(info.HostNUMA, 0)
	}
	prop := cuda.MemProp{Device: dev, Location: cuda.LocationHostNUMA, NUMANode: node, Handles: cuda.HandlePosix}
	s := Single(drv, prop, info.Granularity, func(p cuda.Ptr, size uint64) error {
		if err := drv.MemSetAccess(p, size, []cuda.Device{dev}); err != nil {
			return err
		}
		return drv.MemSetHostAccess(p, size, node)
	})
	return s, s.probe()
}

// Alloc gets a segment. What was got is given back when a later call fails.
func (s *SingleHandle) Alloc(size, align uint64, _ cuda.Stream) (p cuda.Ptr, err error) {
	if size == 0 {
		return 0, nil
	}
	if err := Check(s.name, s.prop.Device, size, align, s.granularity); err != nil {
		return 0, err
	}
	x := &segment{size: roundUp(size, s.granularity)}
	s.mu.Lock()
	defer s.mu.Unlock()
	if p, err = s.drv.AddressReserve(x.size, s.granularity, 0); err != nil {
		return 0, err
	}
	if err = s.back(p, x); err != nil {
		s.drop(leftover{p, x.size, x.mapped, x.handle})
		return 0, err
	}
	s.segments[p] = x
	return p, nil
}

// back gives a segment memory: what it lacks of a handle, a mapping, and access. The caller holds s.mu.
//
// +checklocks:s.mu
func (s *SingleHandle) back(p cuda.Ptr, x *segment) (err error) {
	if !x.mapped {
		if x.handle == 0 {
			if x.handle, err = s.drv.MemCreate(x.size, s.prop); err != nil {
				x.handle = 0
				return err
			}
		}
		if err = s.drv.MemMap(p, x.size, x.handle); err != nil {
			return err
		}
		x.mapped = true
	}
	if err = s.access(p, x.size); err == nil && len(s.peers) > 0 {
		err = s.drv.MemSetAccess(p, x.size, s.peers)
	}
	x.ready = err == nil
	return err
}

// unback takes a segment's memory: the handle first, whose memory stays while it is mapped, then the mapping. So
// whichever call fails, the segment has either no memory or is as usable as before. The caller holds s.mu.
func (s *SingleHandle) unback(p cuda.Ptr, x *segment) error {
	if x.handle != 0 {
		if err := s.drv.MemRelease(x.handle); err != nil {
			return err
		}
		x.handle = 0
	}
	if x.mapped {
		if err := s.drv.MemUnmap(p, x.size); err != nil {
			return err
		}
		x.mapped, x.ready = false, false
	}
	return nil
}

// Free gives a segment back, with its memory or without.
func (s *SingleHandle) Free(p cuda.Ptr, size, _ uint64, _ cuda.Stream) error {
	if p == 0 {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	x, err := s.at(p, size)
	if err != nil {
		return err
	}
	if err := s.unback(p, x); err != nil {
		return err
	}
	delete(s.segments, p)
	s.drop(leftover{base: p, size: x.size})
	return nil
}

// at is the segment at p. The caller holds s.mu.
//
// +checklocks:s.mu
func (s *SingleHandle) at(p cuda.Ptr, size uint64) (*segment, error) {
	x := s.segments[p]
	if x == nil || x.size != roundUp(size, s.granularity) {
		return nil, fmt.Errorf("%s memory: there is no segment of %d bytes at %#x: %w", s.name, size, uint64(p), cuda.ErrInvalidValue)
	}
	return x, nil
}

// Unback drops the memory of the segment at p; its addresses stay. Without memory already, it is no failure.
func (s *SingleHandle) Unback(p cuda.Ptr, size uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	x, err := s.at(p, size)
	if err != nil {
		return err
	}
	return s.unback(p, x)
}

// Back gives the segment at p memory again, with undefined contents. With memory already, it is no failure.
func (s *SingleHandle) Back(p cuda.Ptr, size uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	x, err := s.at(p, size)
	if err != nil || x.ready {
		return err
	}
	if err = s.back(p, x); err != nil {
		// What cannot be undone is what the next Back begins with.
		if !x.mapped && x.handle != 0 && s.drv.MemRelease(x.handle) == nil {
			x.handle = 0
		} else if x.mapped {
			_ = s.unback(p, x)
		}
	}
	return err
}

// EnablePeer makes the segments, those there are and those to come, accessible to another device.
func (s *SingleHandle) EnablePeer(peer cuda.Device) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if slices.Contains(s.peers, peer) || peer == s.prop.Device {
		return nil
	}
	can, err := s.drv.CanAccessPeer(peer, s.prop.Device)
	if err != nil {
		return err
	}
	if !can && s.prop.Location == cuda.LocationDevice {
		return &cuda.Error{Op: "cuMemSetAccess", Device: peer, Code: cuda.ErrPeerAccessUnsupported}
	}
	for p, x := range s.segments {
		if x.ready {
			if err := s.drv.MemSetAccess(p, x.size, []cuda.Device{peer}); err != nil {
				return err
			}
		}
	}
	s.peers = append(s.peers, peer)
	return nil
}

// Handle is the physical handle of the segment at p, for exporting it; 0 where there is none.
func (s *SingleHandle) Handle(p cuda.Ptr) cuda.Handle {
	s.mu.Lock()
	defer s.mu.Unlock()
	if x := s.segments[p]; x != nil {
		return x.handle
	}
	return 0
}

// Drain gives back what the driver would not take back when a segment went, or could not be made, and reports whether
// anything went.
func (s *SingleHandle) Drain() (any bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.left)
	err = s.retry()
	return len(s.left) < n, err
}

// Trim is Drain: nothing else is kept.
func (s *SingleHandle) Trim() error {
	_, err := s.Drain()
	return err
}

// drop undoes what is left of a segment. The caller holds s.mu.
//
// +checklocks:s.mu
func (s *SingleHandle) drop(x leftover) {
	s.left = append(s.left, x)
	s.retry() // what fails is tried again at the next occasion
}

// +checklocks:s.mu
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
		if err == nil && x.base != 0 {
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

// MemInfo is the device's memory, or the host's.
func (s *SingleHandle) MemInfo() (free, total uint64, err error) {
	if s.prop.Location == cuda.LocationHostNUMA {
		return hostMemory(s.prop.NUMANode)
	}
	return s.drv.MemInfo(s.prop.Device)
}

func (s *SingleHandle) Equal(other Resource) bool { return Resource(s) == other }

func (s *SingleHandle) Traits() Traits {
	host := s.prop.Location == cuda.LocationHostNUMA
	return Traits{Name: s.name, Device: s.prop.Device, OnDevice: !host, HostAccessible: host, DeviceAccessible: true,
		Align: s.granularity, Handles: s.prop.Handles}
}
