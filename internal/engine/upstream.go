package engine

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/resource"
)

// Pools over a resource that they were given. The kind of the resource decides how the pool's memory is counted, what makes
// room for it, and what it is asked besides memory.

// upstream is a resource that was given to a pool, and what it reports of itself.
type upstream struct {
	from   resource.Resource // nil: there is none
	traits resource.Traits
	under  *Pool           // the pool of the same allocator that it is, nil: it is none
	own    resource.Closer // what was made to use it; nil: nothing
}

// make asks a resource, which may be nil, for its kind. A stream-ordered one is used host-ordered: so no capture and no stream
// that was destroyed ever reaches it, and its memory may go to any stream. No lock is held.
func (up *upstreams) make(r resource.Resource) (upstream, error) {
	if r == nil {
		return upstream{}, nil
	}
	u := upstream{from: r, traits: r.Traits()}
	if a := u.traits.Align; a&(a-1) != 0 {
		return upstream{}, fmt.Errorf("upstream %s aligns memory to %d bytes, which is not a power of two", u.traits.Name, a)
	}
	if x, ok := resource.As[*poolResource](r); ok {
		if x.p.dev.a == up.gpu.a {
			u.under = x.p
		}
	}
	switch {
	case u.under != nil:
		st, err := u.under.dev.state.upstreams.privateStream()
		if err != nil {
			return upstream{}, fmt.Errorf("upstream %s: %w", u.traits.Name, err)
		}
		u.from = &nested{r, st}
	case u.traits.StreamOrdered:
		var err error
		if u.from, err = resource.HostOrdered(up.gpu.drv, r); err != nil {
			return upstream{}, fmt.Errorf("upstream %s: %w", u.traits.Name, err)
		}
		u.own, _ = u.from.(resource.Closer)
	}
	return u, nil
}

// openCommon makes the upstream of the pools that name none. The default pool closes what it returns, the others share it.
func (up *upstreams) openCommon(open func(cuda.Device) (resource.Resource, error)) (upstream, error) {
	r, err := open(up.gpu.id)
	if err != nil {
		return upstream{}, err
	}
	u, err := up.make(r)
	if err != nil {
		return upstream{}, errors.Join(err, resource.Close(r))
	}
	up.common = u
	up.common.own = nil
	u.own = stack{u.from}
	return u, nil
}

// stack is a resource with all below it, to be closed.
type stack struct{ resource.Resource }

func (s stack) Close() error { return resource.Close(s.Resource) }

// nested is a resource over a pool of the allocator's as another pool uses it: in the order of a stream that lasts, because
// the free blocks that come back to the pool bear its epochs, and done when a request returns.
type nested struct {
	resource.Resource
	st *Stream
}

func (n *nested) Upstream() resource.Resource { return n.Resource }

func (n *nested) Alloc(size, align uint64, _ cuda.Stream) (cuda.Ptr, error) {
	p, err := n.Resource.Alloc(size, align, n.st.Handle())
	if err != nil || p == 0 {
		return p, err
	}
	if err := n.st.gpu.drv.StreamSynchronize(n.st.gpu.id, n.st.Handle()); err != nil {
		return 0, errors.Join(err, n.Resource.Free(p, size, align, n.st.Handle()))
	}
	return p, nil
}

func (n *nested) Free(p cuda.Ptr, size, align uint64, _ cuda.Stream) error {
	return n.Resource.Free(p, size, align, n.st.Handle())
}

// privateStream is the stream that pools use others of the device on.
func (up *upstreams) privateStream() (*Stream, error) {
	up.mu.Lock()
	defer up.mu.Unlock()
	if up.private != nil {
		return up.private, nil
	}
	h, err := up.gpu.drv.StreamCreate(up.gpu.id, false)
	if err != nil {
		return nil, up.gpu.health.Failed(err)
	}
	if up.private, err = up.lookup.stream(h, config.StreamDurable); err != nil {
		return nil, errors.Join(err, up.gpu.drv.StreamDestroy(up.gpu.id, h))
	}
	return up.private, nil
}

// dropPrivate destroys the private stream. Nothing is held on any stream.
func (up *upstreams) dropPrivate() error {
	up.mu.Lock()
	defer up.mu.Unlock()
	if up.private == nil {
		return nil
	}
	up.private.timeline.Queue.SetDurable(false)
	up.private.timeline.Queue.SetEager()
	if err := up.gpu.drv.StreamDestroy(up.gpu.id, up.private.Handle()); err != nil {
		return up.gpu.health.Failed(err)
	}
	up.private = nil
	return nil
}

// drop undoes upstreams.make. No lock is held.
func (u upstream) drop(d *Device) {
	if u.own != nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.state.pools.unused = append(d.state.pools.unused, u.own)
		d.state.pools.closeUnused()
	}
}

// trimUpstreams asks the upstreams of the pools chosen to give back what they keep, and reports whether any was asked. The
// caller holds Device.mu and nothing else; it is let go meanwhile.
//
// +checklocks:sg.gpu.mu
func (sg *segments) trimUpstreams(chosen func(*Pool) bool) (any bool, first error) {
	for _, w := range sg.pools.userSegments() {
		r, ok := resource.As[resource.Trimmer](w.from)
		if !ok || !chosen(w.pool) {
			continue
		}
		any = true
		first = cmp.Or(first, w.unlocked(r.Trim))
	}
	return any, first
}
