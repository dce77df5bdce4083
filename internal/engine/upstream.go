package engine

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/internal/lockrank"
	"github.com/cistern-gpu/cistern/resource"
)

// Pools over a resource that they were given: what it is decides how the pool's memory is counted, what makes room for
// it, and what it is asked besides memory.

// upstream is a resource that was given to a pool, and what it said of itself.
type upstream struct {
	from   resource.Resource // nil: there is none
	traits resource.Traits
	under  *Pool           // the pool of the same allocator that it is, nil: it is none
	own    resource.Closer // what was made to use it; nil: nothing
}

// newUpstream asks a resource, which may be nil, what it is. A stream-ordered one is used in the host's order: so no
// capture and no stream that was destroyed ever reaches it, and its memory may go to any stream. No lock is held.
func (d *Device) newUpstream(r resource.Resource) (upstream, error) {
	if r == nil {
		return upstream{}, nil
	}
	u := upstream{from: r, traits: r.Traits()}
	if a := u.traits.Align; a&(a-1) != 0 {
		return upstream{}, fmt.Errorf("upstream %s aligns memory to %d bytes, which is no power of two", u.traits.Name, a)
	}
	if x, ok := resource.As[*poolResource](r); ok {
		if x.p.dev.a == d.a {
			u.under = x.p
		}
	}
	switch {
	case u.under != nil:
		st, err := u.under.dev.privateStream()
		if err != nil {
			return upstream{}, fmt.Errorf("upstream %s: %w", u.traits.Name, err)
		}
		u.from = &nested{r, st}
	case u.traits.StreamOrdered:
		var err error
		if u.from, err = resource.HostOrdered(d.drv, r); err != nil {
			return upstream{}, fmt.Errorf("upstream %s: %w", u.traits.Name, err)
		}
		u.own, _ = u.from.(resource.Closer)
	}
	return u, nil
}

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
	if err := n.st.dev.drv.StreamSynchronize(n.st.dev.id, n.st.Handle()); err != nil {
		return 0, errors.Join(err, n.Resource.Free(p, size, align, n.st.Handle()))
	}
	return p, nil
}

func (n *nested) Free(p cuda.Ptr, size, align uint64, _ cuda.Stream) error {
	return n.Resource.Free(p, size, align, n.st.Handle())
}

// privateStream is the stream that pools use others of the device on.
func (d *Device) privateStream() (*Stream, error) {
	d.privateMu.Lock()
	defer d.privateMu.Unlock()
	if d.private != nil {
		return d.private, nil
	}
	h, err := d.drv.StreamCreate(d.id, false)
	if err != nil {
		return nil, d.health.Failed(err)
	}
	if d.private, err = d.Stream(h, config.StreamDurable); err != nil {
		return nil, errors.Join(err, d.drv.StreamDestroy(d.id, h))
	}
	return d.private, nil
}

// dropPrivate destroys it. Nothing is held on any stream.
func (d *Device) dropPrivate() error {
	d.privateMu.Lock()
	defer d.privateMu.Unlock()
	if d.private == nil {
		return nil
	}
	d.private.timeline.SetDurable(false)
	d.private.timeline.SetEager()
	if err := d.drv.StreamDestroy(d.id, d.private.Handle()); err != nil {
		return d.health.Failed(err)
	}
	d.private = nil
	return nil
}

// drop undoes newUpstream. No lock is held.
func (u upstream) drop(d *Device) {
	if u.own != nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.unused = append(d.unused, u.own)
		d.closeUnused()
	}
}

// setUpstream makes the pool one of segments of the resource.
//
// +checklocks:p.dev.mu
func (p *Pool) setUpstream(u upstream) {
	d := p.dev
	p.segments, p.userUpstream, p.traits = u.from, true, u.traits
	p.unit = max(segmentUnit, p.traits.Align)
	p.onDevice = p.traits.OnDevice && p.traits.Device == d.id
	p.under, p.own = u.under, u.own
	nested := u.under != nil && u.under.dev == d // where its memory is counted
	p.counted = p.onDevice && !nested
	d.nested = d.nested || nested
}

// align is what the pool asks its upstream to align segments to: what blocks have, as far as the upstream promises it.
func (p *Pool) align(want uint64) uint64 {
	if want <= heap.Align && p.traits.Align < heap.Align {
		return 0 // it may give more than it promises
	}
	return max(heap.Align, want)
}

// sameMemory reports whether memory that one pool gives back may be what the other lacks: both are of the device's own
// memory, or neither is.
func (p *Pool) sameMemory(o *Pool) bool { return p.onDevice == o.onDevice }

// upstreamName says what the pool's memory is, "" where it is what the device's options say.
func (p *Pool) upstreamName() string {
	if p.segments == p.dev.pool0.segments {
		return ""
	}
	return p.traits.Name
}

// openToPeers opens the upstream of the pool to the peers that the device has, and reports whether that is all of them by
// now. The caller holds Device.mu and nothing else; it is let go while the upstream is called.
//
// +checklocks:p.dev.mu
func (p *Pool) openToPeers() error {
	if p.spill != nil {
		if err := p.spill.openToPeers(); err != nil {
			return err
		}
	}
	r := p.peers()
	if r == nil {
		return nil
	}
	d := p.dev
	for {
		i := slices.IndexFunc(d.mem.Access.Devices()[1:], func(x cuda.Device) bool { return !slices.Contains(p.opened, x) })
		if i < 0 {
			return nil
		}
		if err := p.openTo(r, d.mem.Access.Devices()[1+i]); err != nil {
			return err
		}
	}
}

// peers is the upstream as something that can be opened to other devices; nil where there is nothing to open, or where the
// upstream is a pool of the device, whose memory is opened as all of the device's.
func (p *Pool) peers() resource.Peers {
	r, ok := resource.As[resource.Peers](p.segments)
	if !ok || !p.userUpstream || p.under != nil && p.under.dev == p.dev {
		return nil
	}
	return r
}

// openTo opens the upstream of the pool to one peer, likewise. That the peer is broken is no reason to do without memory
// here.
//
// +checklocks:p.dev.mu
func (p *Pool) openTo(r resource.Peers, peer cuda.Device) error {
	d := p.dev
	if slices.Contains(p.opened, peer) {
		return nil
	}
	d.mu.Unlock()
	lockrank.MayCall()
	err := r.EnablePeer(peer)
	d.mu.Lock()
	if code, ok := codeOf(err); ok && (code.Poisons() || code == cuda.ErrPeerAccessAlreadyEnabled) {
		err = nil
	}
	if err == nil && !slices.Contains(p.opened, peer) {
		p.opened = append(p.opened, peer)
	}
	return err
}

// eachUpstream calls f for every pool of the device that has an upstream and is in use, with Device.mu held, which f may
// let go.
//
// +checklocks:d.mu
func (d *Device) eachUpstream(f func(*Pool) error) (first error) {
	var pools []*Pool
	add := func(p *Pool) {
		if p.userUpstream && !slices.Contains(pools, p) {
			pools = append(pools, p)
		}
	}
	for _, p := range d.pools {
		add(p)
		if p.spill != nil {
			add(p.spill)
		}
	}
	for _, s := range d.heaps {
		if s != nil {
			add(s.pool) // perhaps a pool that was released and has blocks out
		}
	}
	slices.SortFunc(pools, func(a, b *Pool) int { return cmp.Compare(a.number, b.number) })
	for _, p := range pools {
		first = cmp.Or(first, f(p))
	}
	return first
}

// trimUpstreams asks the upstreams of the pools chosen to give back what they keep, and reports whether any was asked. The
// caller holds Device.mu and nothing else; it is let go meanwhile.
//
// +checklocks:d.mu
func (d *Device) trimUpstreams(chosen func(*Pool) bool) (any bool, err error) {
	if !d.segmented {
		return false, nil
	}
	err = d.eachUpstream(func(p *Pool) error {
		r, ok := resource.As[resource.Trimmer](p.segments)
		if !ok || !chosen(p) {
			return nil
		}
		any = true
		d.mu.Unlock()
		defer d.mu.Lock()
		lockrank.MayCall()
		return r.Trim()
	})
	return any, err
}

// upstreamFailed keeps an error of a user's upstream that breaks the device's context.
func (d *Device) upstreamFailed(err error) {
	var e *cuda.Error
	if errors.As(err, &e) && e.Device == d.id {
		d.health.Failed(err)
	}
}

// segment gets a segment and claims its addresses. A user's upstream is called with all locks let go.
//
// +checklocksignore: both locks are let go where the upstream is a user's
func (c *request) segment(size uint64) (cuda.Ptr, error) {
	d, s := c.d, c.s
	p := s.pool
	if p.userUpstream {
		if p.counted {
			d.quota.InFlight += size
		}
		p.inFlight += size
		s.arena.Unlock()
		d.mu.Unlock()
		defer func() {
			d.mu.Lock()
			s.arena.Lock()
			p.inFlight -= size
			if p.counted {
				d.quota.InFlight -= size
			}
		}()
		lockrank.MayCall()
	}
	align := p.align(c.align)
	ptr, err := p.segments.Alloc(size, align, s.stream.Handle())
	if err != nil {
		if p.userUpstream {
			d.upstreamFailed(err)
		} else {
			d.health.Failed(err)
		}
		return 0, err
	}
	switch {
	case ptr == 0:
		return 0, cuda.ErrOutOfMemory
	case uint64(ptr)%max(heap.Align, align) != 0:
		err = fmt.Errorf("pool {%d, %d}: its upstream returned %#x, which is not aligned to %d bytes", p.id[0], p.id[1],
			uint64(ptr), max(heap.Align, align))
	default:
		err = d.a.claim(uint64(ptr), size, s)
	}
	if err != nil {
		return 0, errors.Join(err, p.segments.Free(ptr, size, align, s.stream.Handle()))
	}
	return ptr, nil
}

// freeSegment gives a segment back; Device.mu is let go while a user's upstream is called.
//
// +checklocks:d.mu
func (d *Device) freeSegment(s *streamHeap, base, size uint64) error {
	p := s.pool
	if !p.userUpstream {
		if err := p.segments.Free(cuda.Ptr(base), size, heap.Align, s.stream.Handle()); err != nil {
			return d.health.Failed(err)
		}
		return nil
	}
	align := d.mem.Ranges.Of(s.index, base).Align
	d.mu.Unlock()
	defer d.mu.Lock()
	lockrank.MayCall()
	err := p.segments.Free(cuda.Ptr(base), size, align, s.stream.Handle())
	if err != nil {
		d.upstreamFailed(err)
	}
	return err
}
