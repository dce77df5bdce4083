package cistern

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/resource"
)

// Pools over a resource that they were given: what it is decides how the pool's memory is counted, what makes room for
// it, and what it is asked besides memory.

// as finds what a resource can do, itself or what it wraps.
func as[T any](r resource.Resource) (T, bool) {
	for r != nil {
		if t, ok := r.(T); ok {
			return t, true
		}
		w, ok := r.(resource.Wrapper)
		if !ok {
			break
		}
		r = w.Upstream()
	}
	var none T
	return none, false
}

// upstream is a resource that was given to a pool, and what it said of itself.
type upstream struct {
	from   resource.Resource // nil: there is none
	traits resource.Traits
}

// newUpstream asks a resource, which may be nil, what it is. No lock is held.
func newUpstream(r resource.Resource) (upstream, error) {
	if r == nil {
		return upstream{}, nil
	}
	u := upstream{r, r.Traits()}
	if a := u.traits.Align; a&(a-1) != 0 {
		return upstream{}, fmt.Errorf("upstream %s aligns memory to %d bytes, which is no power of two", u.traits.Name, a)
	}
	return u, nil
}

// setUpstream makes the pool one of segments of the resource.
func (p *Pool) setUpstream(u upstream) {
	d := p.dev
	p.segments, p.foreign, p.traits = u.from, true, u.traits
	p.unit = max(segmentUnit, p.traits.Align)
	p.onDevice = p.traits.OnDevice && p.traits.Device == d.id
	p.counted = p.onDevice
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
func (p *Pool) openToPeers() error {
	if p.spill != nil {
		if err := p.spill.openToPeers(); err != nil {
			return err
		}
	}
	r, ok := as[resource.Peers](p.segments)
	if !ok || !p.foreign {
		return nil
	}
	d := p.dev
	for {
		i := slices.IndexFunc(d.access()[1:], func(x cuda.Device) bool { return !slices.Contains(p.opened, x) })
		if i < 0 {
			return nil
		}
		if err := p.openTo(r, d.access()[1+i]); err != nil {
			return err
		}
	}
}

// openTo opens the upstream of the pool to one peer, likewise. That the peer is broken is no reason to do without memory
// here.
func (p *Pool) openTo(r resource.Peers, peer cuda.Device) error {
	d := p.dev
	if slices.Contains(p.opened, peer) {
		return nil
	}
	d.mu.Unlock()
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
func (d *Device) eachUpstream(f func(*Pool) error) (first error) {
	var pools []*Pool
	add := func(p *Pool) {
		if p.foreign && !slices.Contains(pools, p) {
			pools = append(pools, p)
		}
	}
	for _, p := range d.pools {
		add(p)
		if p.spill != nil {
			add(p.spill)
		}
	}
	for _, s := range d.spaces {
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
func (d *Device) trimUpstreams(chosen func(*Pool) bool) (any bool, err error) {
	if !d.segmented {
		return false, nil
	}
	err = d.eachUpstream(func(p *Pool) error {
		r, ok := as[resource.Trimmer](p.segments)
		if !ok || !chosen(p) {
			return nil
		}
		any = true
		d.mu.Unlock()
		defer d.mu.Lock()
		return r.Trim()
	})
	return any, err
}

// upstreamFailed keeps an error of a user's upstream that breaks the device's context.
func (d *Device) upstreamFailed(err error) {
	var e *cuda.Error
	if errors.As(err, &e) && e.Device == d.id {
		d.failed(err)
	}
}

// segment gets a segment and claims its addresses. A user's upstream is called with all locks let go.
func (c *climb) segment(size uint64) (cuda.Ptr, error) {
	d, s := c.d, c.s
	p := s.pool
	if p.foreign {
		if p.counted {
			d.inFlight += size
		}
		p.inFlight += size
		s.mu.Unlock()
		d.mu.Unlock()
		defer func() {
			d.mu.Lock()
			s.mu.Lock()
			p.inFlight -= size
			if p.counted {
				d.inFlight -= size
			}
		}()
	}
	ptr, err := p.segments.Alloc(size, heap.Align, s.stream.handle)
	if err != nil {
		if p.foreign {
			d.upstreamFailed(err)
		} else {
			d.failed(err)
		}
		return 0, err
	}
	switch {
	case ptr == 0:
		return 0, cuda.ErrOutOfMemory
	case ptr%heap.Align != 0:
		err = fmt.Errorf("pool {%d, %d}: its upstream returned %#x, which is not aligned to %d bytes", p.id[0], p.id[1],
			uint64(ptr), heap.Align)
	default:
		err = d.a.claim(uint64(ptr), size, s)
	}
	if err != nil {
		return 0, errors.Join(err, p.segments.Free(ptr, size, heap.Align, s.stream.handle))
	}
	return ptr, nil
}

// freeSegment gives a segment back; Device.mu is let go while a user's upstream is called.
func (d *Device) freeSegment(s *space, base, size uint64) error {
	p := s.pool
	if !p.foreign {
		if err := p.segments.Free(cuda.Ptr(base), size, heap.Align, s.stream.handle); err != nil {
			return d.failed(err)
		}
		return nil
	}
	d.mu.Unlock()
	defer d.mu.Lock()
	err := p.segments.Free(cuda.Ptr(base), size, heap.Align, s.stream.handle)
	if err != nil {
		d.upstreamFailed(err)
	}
	return err
}
