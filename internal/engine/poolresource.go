package engine

import (
	"errors"
	"fmt"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

// Resource is the pool as a resource: the caching engine over whatever the pool is over, for adaptors to stand before and
// for others, another pool among them, to get memory from. Its memory is aligned to 512 bytes, and to up to 2 MiB where
// that is asked for. A free names a stream behind whose work so far the memory is used again (Allocator.FreeOn): the one
// that it was got for may be gone. Trim and EnablePeer are the pool's and the device's.
//
// Memory that a pool gets from another pool of the device is in the statistics of both, and once under the limit.
func (p *Pool) Resource() resource.Resource { return &poolResource{p} }

type poolResource struct{ p *Pool }

// maxAlign is the largest alignment that a request may have: that of segments and chunks.
const maxAlign = segmentUnit

func (r *poolResource) Alloc(size, align uint64, h cuda.Stream) (cuda.Ptr, error) {
	if size == 0 {
		return 0, nil
	}
	p := r.p
	if align&(align-1) != 0 || align > maxAlign {
		return 0, fmt.Errorf("pool {%d, %d}: %w of %d bytes: it must be a power of two up to %d", p.id[0], p.id[1], resource.ErrAlign,
			align, maxAlign)
	}
	st, err := p.dev.Stream(h)
	if err != nil {
		return 0, err
	}
	var by origin
	if catch := p.dev.catch.Load(); catch != nil {
		by.stack = (*catch)(size)
	}
	if align <= heap.Align {
		return p.alloc(size, st, by)
	}
	n := p.round(size) + p.backing.alignSlack(align)
	ptr, _, err := p.obtain(request{n: n, size: size, align: align, by: by}, st)
	return ptr, err
}

func (r *poolResource) Free(ptr cuda.Ptr, size, _ uint64, h cuda.Stream) error {
	if ptr == 0 {
		return nil
	}
	a := r.p.dev.a
	s := a.heapOf(ptr)
	if s == nil || s.pool.owner() != r.p {
		return &memory.PointerError{Op: "free", Ptr: ptr, Detail: fmt.Sprintf("it does not belong to pool {%d, %d}", r.p.id[0], r.p.id[1])}
	}
	st := s.stream
	if h != st.Handle() && r.p.dev.health.Broken() == nil { // else it is that stream, or the next one that has its handle
		var err error
		if st, err = r.p.dev.Stream(h); err != nil {
			return err
		}
	}
	if err := a.FreeOn(ptr, st); errors.Is(err, memory.ErrUnknownPointer) {
		return err
	}
	return nil // the block was taken back; the next request returns any other error
}

func (r *poolResource) MemInfo() (free, total uint64, err error) {
	p := r.p
	if free, total, err = p.backing.memInfo(); err != nil {
		return 0, 0, err
	}
	return min(free+p.Stats().Cached, total), total, nil
}

func (r *poolResource) Equal(other resource.Resource) bool {
	o, ok := other.(*poolResource)
	return ok && o.p == r.p
}

func (r *poolResource) Traits() resource.Traits {
	t := r.p.backing.traits()
	return resource.Traits{Name: "pool", Device: r.p.dev.id, OnDevice: r.p.backing.onDevice(), DeviceAccessible: t.DeviceAccessible,
		HostAccessible: t.HostAccessible, Migrates: t.Migrates, StreamOrdered: true, Align: heap.Align, Registered: t.Registered}
}

func (r *poolResource) EnablePeer(peer cuda.Device) error { return r.p.dev.Peers.Enable(peer) }
func (r *poolResource) Trim() error                       { return r.p.Trim() }
