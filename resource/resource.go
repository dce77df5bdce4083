// Package resource says where the engine gets memory from. An upstream is one of two kinds: Chunks hands out physical
// handles, which the engine maps where it likes; Segments hands out whole ranges of addresses. Nothing here caches.
//
// The upstreams of this package are called with engine locks held: they do not call the engine back and do not wait for
// the GPU. An upstream of segments that a user brings is called with none held, and may do either.
package resource

import "github.com/cistern-gpu/cistern/cuda"

// Chunks is an upstream of physical handles.
type Chunks interface {
	// Create makes a chunk of size bytes, a multiple of Granularity. Out of memory is an error for which
	// errors.Is(err, cuda.ErrOutOfMemory) holds.
	Create(size uint64) (cuda.Handle, error)
	// Release drops a chunk; its memory goes with its last mapping.
	Release(h cuda.Handle) error
	// Granularity is the unit of chunk sizes and addresses in bytes.
	Granularity() uint64
}

// Segments is an upstream of ranges.
type Segments interface {
	// Alloc gets a range of size bytes, aligned to 512 bytes at least, from which blocks for the stream are cut. Out of
	// memory is an error for which errors.Is(err, cuda.ErrOutOfMemory) holds.
	Alloc(size uint64, st cuda.Stream) (cuda.Ptr, error)
	// Free gives a whole range back. The caller knows that the GPU is done with it. After an error the range must still
	// be usable: it is given back again later.
	Free(p cuda.Ptr, size uint64, st cuda.Stream) error
}

// Virtual is the device's own memory as chunks (cuMemCreate).
func Virtual(drv cuda.Driver, prop cuda.MemProp, granularity uint64) Chunks {
	return &virtual{drv, prop, granularity}
}

type virtual struct {
	drv         cuda.Driver
	prop        cuda.MemProp
	granularity uint64
}

func (v *virtual) Create(size uint64) (cuda.Handle, error) { return v.drv.MemCreate(size, v.prop) }
func (v *virtual) Release(h cuda.Handle) error             { return v.drv.MemRelease(h) }
func (v *virtual) Granularity() uint64                     { return v.granularity }

// Plain is the device's own memory as segments (cuMemAlloc), which legacy IPC handles and RDMA registration accept.
func Plain(drv cuda.Driver, dev cuda.Device) Segments { return &plain{drv, dev} }

type plain struct {
	drv cuda.Driver
	dev cuda.Device
}

func (p *plain) Alloc(size uint64, _ cuda.Stream) (cuda.Ptr, error) {
	return p.drv.MemAlloc(p.dev, size)
}
func (p *plain) Free(ptr cuda.Ptr, _ uint64, _ cuda.Stream) error { return p.drv.MemFree(p.dev, ptr) }
