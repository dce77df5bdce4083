// Package resource says where the engine gets memory from. An upstream is one of two kinds: Chunks hands out physical
// handles, which the engine maps where it likes; Resource hands out ranges of addresses with their memory. Nothing here
// caches.
//
// The upstreams of this package are called with engine locks held: they do not call the engine back and do not wait for
// the GPU. A Resource that a user brings, or that a pool was given as its upstream, is called with none held, and may do
// either.
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

// Resource is memory to be had by size: an upstream, an adaptor over another resource, or a pool of the engine's. All
// methods may be called from any goroutine.
type Resource interface {
	// Alloc gets size bytes, aligned to align bytes (a power of two; 0 is the resource's own alignment, 256 at least),
	// that work queued on the stream from now on may use. Size 0 is a valid request and returns null. Out of memory is an
	// error for which errors.Is(err, cuda.ErrOutOfMemory) holds; anything larger than can exist is out of memory too.
	Alloc(size, align uint64, st cuda.Stream) (cuda.Ptr, error)
	// Free gives memory back, with the size and alignment that it was asked for with; null is nothing to free. A
	// resource that is StreamOrdered may reuse it once the work queued on the stream so far is done; with any other the
	// caller knows that the GPU is done with it. After an error the memory is as it was and is given back again later.
	Free(p cuda.Ptr, size, align uint64, st cuda.Stream) error
	// MemInfo is the free and total memory, in bytes, of where the memory comes from.
	MemInfo() (free, total uint64, err error)
	// Equal reports whether memory from one may be given back to the other.
	Equal(other Resource) bool
	// Traits say what the memory is.
	Traits() Traits
}

// Traits say what the memory of a resource is and can do.
type Traits struct {
	Name             string      // "device", "virtual", "async", "managed", "pinned", "host_numa", "nccl", "external", "pool"
	Device           cuda.Device // the device it is for
	OnDevice         bool        // it takes the device's own memory
	DeviceAccessible bool
	HostAccessible   bool
	StreamOrdered    bool            // Free may come before the GPU is done
	Align            uint64          // what align 0 gives, in bytes
	Handles          cuda.HandleType // in what ways it can be exported to another process
}

// Peers is a resource whose memory, got before or later, can be opened to other devices.
type Peers interface {
	EnablePeer(peer cuda.Device) error
}

// Trimmer is a resource that keeps memory which it could give back. Trim gives it back, all that is not in use.
type Trimmer interface {
	Trim() error
}

// Wrapper is an adaptor: Upstream is what it gets memory from.
type Wrapper interface {
	Upstream() Resource
}

// Backing is a resource whose memory can go while its addresses stay: Unback drops the physical memory of the whole
// allocation at p, Back gives it new memory, with undefined contents. The caller knows that the GPU is done with it. A
// call that fails changes nothing.
type Backing interface {
	Unback(p cuda.Ptr, size uint64) error
	Back(p cuda.Ptr, size uint64) error
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

// Plain is the device's own memory as cuMemAlloc makes it, which legacy IPC handles and RDMA registration accept.
func Plain(drv cuda.Driver, dev cuda.Device) Resource { return &plain{drv, dev} }

type plain struct {
	drv cuda.Driver
	dev cuda.Device
}

func (p *plain) Alloc(size, align uint64, _ cuda.Stream) (cuda.Ptr, error) {
	return p.drv.MemAlloc(p.dev, size)
}
func (p *plain) Free(ptr cuda.Ptr, _, _ uint64, _ cuda.Stream) error {
	return p.drv.MemFree(p.dev, ptr)
}
func (p *plain) MemInfo() (free, total uint64, err error) { return p.drv.MemInfo(p.dev) }
func (p *plain) Equal(other Resource) bool {
	o, ok := other.(*plain)
	return ok && *o == *p
}
func (p *plain) Traits() Traits {
	return Traits{Name: "device", Device: p.dev, OnDevice: true, DeviceAccessible: true, Align: 512}
}
