// Package resource says where memory comes from. An upstream is one of two kinds: Chunks hands out physical handles,
// which the engine maps where it likes; Resource hands out ranges of addresses with their memory. Adaptors are resources
// over another resource and may be stacked in any order. Nothing here caches.
//
// # What there is
//
// Upstreams: Device (cuMemAlloc), Segments (one physical handle for each range), Async (a pool of the driver's), Managed,
// Pinned, HostNUMA, External (functions of the user's), and ncclMemAlloc in package resource/nccl. Adaptors: Statistics,
// Limiting, Logging, Tracking, OnFailure, Alignment, Prefetch, Fallback, HostOrdered. Their behaviour is that of RMM's
// adaptors of the same name, as its documentation has it, where RMM has one; the comments say where they go further.
// Package resource/open makes a stack from its name, resource/resourcetest holds a resource to what is promised here.
//
// # What every resource keeps to
//
//   - 0 bytes are a request that is met, with null; freeing null does nothing. Neither is counted by any adaptor.
//   - A request that can never be met (1 PiB) is out of memory, as one that cannot be met now.
//   - Traits().Align is what memory is aligned to at least. A request may ask for up to as much; for more it fails with
//     ErrAlign, and Alignment is what makes more possible.
//   - A call that fails changes nothing.
//   - Every resource may be used from any goroutine, and is equal to another only if memory may cross between them.
//
// # Locks
//
// The upstreams Device and Single are called with engine locks held: they do not call the engine back and do not wait for
// the GPU. Any other Resource is called with none held, and may do either. No lock of an adaptor is held while it calls
// what it wraps or a function of the user's.
package resource

import (
	"errors"
	"fmt"
	"reflect"

	"github.com/cistern-gpu/cistern/cuda"
)

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

// Resource is memory by size: an upstream, an adaptor over another resource, or a pool of the engine's. All
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
	Migrates         bool            // it moves between host and device on demand: managed memory
	Align            uint64          // what align 0 gives, in bytes
	Handles          cuda.HandleType // in what ways it can be exported to another process
	Registered       bool            // libraries register it for communication, so it is not paused
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

// Closer is a resource that holds something beside the memory that is out: a pool of the driver's, a stream, a file.
// Its maker closes it when all its memory was given back. Close (the function) closes a whole stack.
type Closer interface {
	Close() error
}

// Backing is a resource whose memory can go while its addresses stay: Unback drops the physical memory of the whole
// allocation at p, Back gives it new memory, with undefined contents. The caller knows that the GPU is done with it. A
// call that fails changes nothing.
type Backing interface {
	Unback(p cuda.Ptr, size uint64) error
	Back(p cuda.Ptr, size uint64) error
}

// As finds an interface in a stack of resources (Peers, Trimmer, Backing, or a concrete type), the outermost that has it.
func As[T any](r Resource) (t T, ok bool) {
	for r != nil {
		if t, ok = r.(T); ok {
			f, some := r.(forwarder)
			if some && reflect.TypeFor[T]().Kind() == reflect.Interface && !f.forwards(has[T]) {
				break
			}
			return t, true
		}
		w, wraps := r.(Wrapper)
		if !wraps {
			break
		}
		r = w.Upstream()
	}
	var none T
	return none, false
}

// forwarder is an adaptor with methods beside Resource's that only forward: they count only if what it wraps has them,
// about which it asks the function. Its own type is always found.
type forwarder interface {
	forwards(has func(Resource) bool) bool
}

func has[T any](r Resource) bool {
	_, ok := As[T](r)
	return ok
}

// Close closes every resource of a stack that is a Closer, from the outside in, and returns what failed.
func Close(r Resource) error {
	var err error
	for r != nil {
		if c, ok := r.(Closer); ok {
			err = both(err, c.Close())
		}
		if f, ok := r.(*FallbackAdaptor); ok {
			err = both(err, Close(f.other))
		}
		w, ok := r.(Wrapper)
		if !ok {
			break
		}
		r = w.Upstream()
	}
	return err
}

// both is two errors in one line.
func both(err, then error) error {
	switch {
	case then == nil:
		return err
	case err == nil:
		return then
	}
	return fmt.Errorf("%w; and then: %w", err, then)
}

// ErrAlign is what a request fails with whose alignment is not a power of two or larger than the resource can do.
var ErrAlign = errors.New("alignment")

// everything is what no address space has: a request of more is out of memory, whatever the driver would call it.
const everything = 1 << 47

// Check says what is wrong with a request that is not for 0 bytes, for a resource whose memory is aligned to natural.
func Check(name string, dev cuda.Device, size, align, natural uint64) error {
	switch {
	case align&(align-1) != 0:
		return fmt.Errorf("%s memory: %w of %d bytes is not a power of two", name, ErrAlign, align)
	case align > natural:
		return fmt.Errorf("%s memory is aligned to %d bytes; for an %w of %d put the adaptor alignment before it",
			name, natural, ErrAlign, align)
	case size > everything:
		return fmt.Errorf("%s memory of %d bytes on device %d: %w", name, size, dev, cuda.ErrOutOfMemory)
	}
	return nil
}

func roundUp(n, unit uint64) uint64 { return (n + unit - 1) / unit * unit }
