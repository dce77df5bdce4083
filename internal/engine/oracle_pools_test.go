package engine_test

import (
	"cmp"
	"errors"
	"sync/atomic"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/resource"
)

// Pools of every kind of memory, limits, spills and labelled requests in the random sequences.

// source is an upstream of some kind over the simulated device, which counts what is out of it.
type source struct {
	resource.Resource
	name   string
	called func()       // called in every request
	fails  func() bool  // whether a request is out of memory for no reason; nil: none is
	bytes  atomic.Int64 // out
	all    *sources     // of the device
}

// sources are the upstreams of a device.
type sources struct {
	drv    cuda.Driver
	dev    cuda.Device
	list   []*source
	bytes  atomic.Int64 // out of those whose memory the simulated device does not count as its own: host memory, and async
	peak   atomic.Int64
	closed int
}

var sourceKinds = []string{"device", "virtual", "managed", "pinned", "host_numa", "async"}

// add makes an upstream.
func (a *sources) add(kind string, called func()) (*source, error) {
	s := &source{name: kind, called: called, all: a}
	var err error
	switch kind {
	case "device":
		s.Resource = resource.Device(a.drv, a.dev)
	case "virtual":
		s.Resource, err = orNil(resource.Segments(a.drv, a.dev))
	case "managed":
		s.Resource = resource.Managed(a.drv, a.dev)
	case "pinned":
		s.Resource = resource.Pinned(a.drv, a.dev)
	case "host_numa":
		s.Resource, err = orNil(resource.HostNUMA(a.drv, a.dev, -1))
	case "async":
		s.Resource, err = orNil(resource.Async(a.drv, a.dev, resource.AsyncOptions{}))
	}
	if err != nil {
		return nil, err
	}
	a.list = append(a.list, s)
	return s, nil
}

// addFailing makes an upstream that has no memory at some requests until the world ends.
func (a *sources) addFailing(w *world, kind string) (resource.Resource, error) {
	s, err := a.add(kind, nil)
	if err != nil {
		return nil, err
	}
	s.fails = func() bool {
		fails := !w.ending && w.chance(10)
		if fails {
			w.seen["upstream fails"]++
		}
		return fails
	}
	return s, nil
}

// orNil keeps a nil pointer from becoming a resource.
func orNil[T resource.Resource](r T, err error) (resource.Resource, error) {
	if err != nil {
		return nil, err
	}
	return r, nil
}

// apart reports whether the simulated device does not count this memory in segments, as its own.
func (s *source) apart() bool { return s.name != "device" && s.name != "virtual" }

func (s *source) note(bytes int64) {
	s.bytes.Add(bytes)
	if s.apart() {
		n := s.all.bytes.Add(bytes)
		for p := s.all.peak.Load(); n > p && !s.all.peak.CompareAndSwap(p, n); p = s.all.peak.Load() {
		}
	}
}

func (s *source) Alloc(size, align uint64, st cuda.Stream) (cuda.Ptr, error) {
	if s.called != nil {
		s.called()
	}
	if s.fails != nil && s.fails() {
		return 0, cuda.ErrOutOfMemory
	}
	p, err := s.Resource.Alloc(size, align, st)
	if err == nil {
		s.note(int64(size))
	}
	return p, err
}

func (s *source) Free(p cuda.Ptr, size, align uint64, st cuda.Stream) error {
	if s.called != nil {
		s.called()
	}
	err := s.Resource.Free(p, size, align, st)
	if err == nil {
		s.note(-int64(size))
	}
	return err
}

func (s *source) Trim() error {
	if t, ok := resource.As[resource.Trimmer](s.Resource); ok {
		return t.Trim()
	}
	return nil
}

// own is what the simulated device has given out in ways that it counts segment by segment.
func (a *sources) own(drv *sim.Driver) uint64 {
	n := drv.ReservedBytes(a.dev)
	for _, s := range a.list[a.closed:] {
		if p, ok := s.Resource.(*resource.AsyncPool); ok {
			reserved, _, err := p.Usage()
			if err != nil {
				panic(err)
			}
			n -= reserved
		}
	}
	return n
}

// held is what the engine holds: that, and what is out of the others.
func (a *sources) held(drv *sim.Driver) uint64 { return a.own(drv) + uint64(a.bytes.Load()) }

// close ends them; nothing is out of any.
func (a *sources) close() (first error) {
	for ; a.closed < len(a.list); a.closed++ {
		s := a.list[a.closed]
		first = cmp.Or(first, s.Trim(), resource.Close(s.Resource))
	}
	return first
}

// kindOf gives a pool to come an upstream of some kind, a limit and a spill.
func (w *world) kindOf(d *worldDevice, p *worldPool, o *config.PoolOptions) {
	called := func() {
		d.dev.Views.Stats() // which looks at the peaks
		w.raise(d)
		w.seen["upstream"]++
	}
	add := func() *source {
		s, err := d.sources.add(pick(w, sourceKinds), called)
		if errors.Is(err, cuda.ErrOutOfMemory) { // it finds out what the device can do by making some memory
			return nil
		} else if err != nil {
			w.fail("%v", err)
		}
		w.seen["upstream "+s.name]++
		return s
	}
	if o.Kind == config.PoolDefault && o.Upstream == nil && w.chance(60) {
		if s := add(); s != nil {
			o.Upstream = s
		}
	}
	if w.chance(30) {
		if p.spill = add(); p.spill != nil {
			o.Spill = p.spill
		}
	}
	if w.chance(50) {
		o.Limit = uint64(1+w.rng.IntN(30)) * mib
		p.limit = o.Limit
	}
	if w.chance(30) {
		o.OnOutOfMemory = func(uint64) bool { return w.callback(d) }
	}
}

func (w *world) setPoolLimit(p *worldPool, limit uint64) {
	p.before, p.limit = w.poolHolds(p), limit
	p.pool.SetLimit(limit)
	w.seen["pool limit"]++
}

// poolHolds is what the pool's limit counts.
func (w *world) poolHolds(p *worldPool) uint64 {
	n := p.pool.Stats().Reserved
	if p.spill != nil {
		n -= uint64(p.spill.bytes.Load())
	}
	return n
}

// allocWith asks for labelled memory, perhaps in the host's order: then any stream may use it at once.
func (w *world) allocWith(d *worldDevice, size uint64, s *worldStream, p *worldPool) (cuda.Ptr, engine.AllocOptions, error) {
	o := engine.AllocOptions{Tag: uint32(w.rng.IntN(3)), Library: uint8(w.rng.IntN(3)), HostOrder: w.chance(50)}
	if p != nil {
		o.Pool = p.pool
	}
	x, err := d.dev.AllocWith(size, s.st, o)
	if err != nil || !o.HostOrder {
		return x, o, err
	}
	w.seen["host order"]++
	for _, other := range d.streams {
		if other.capture != nil || !d.mayQueue(other) {
			continue
		}
		if err := w.drv.Use(d.id, other.handle, x, size); err != nil {
			w.fail("use of %#x+%d in the host's order: %v", x, size, err)
		}
		if err := w.drv.StreamSynchronize(d.id, other.handle); err != nil {
			w.fail("StreamSynchronize: %v", err)
		}
	}
	return x, o, nil
}

// checkPools compares what pools and labels say with the books.
func (w *world) checkPools(d *worldDevice) {
	w.t.Helper()
	sums, tags, libraries := uses[*worldPool]{}, uses[uint32]{}, uses[uint8]{}
	for _, b := range d.blocks {
		sums.add(b.pool, b)
		tags.add(b.tag, b)
		libraries.add(b.library, b)
	}
	for _, p := range d.pools {
		s, k := p.pool.Stats(), sums[p]
		size := uint64(0)
		for _, g := range d.dev.Views.SnapshotPool(p.id) {
			size += g.Size
		}
		if s.Blocks != k.blocks || s.Requested != uint64(k.requested) || s.Allocated != uint64(k.allocated) || s.Limit != p.limit ||
			s.PeakReserved < s.Reserved || s.Allocated+s.Cached > s.Reserved || s.Reserved != size || s.Spilled > s.Allocated {
			w.fail("device %d, pool %v: %+v, want %+v, limit %d, %d bytes in the snapshot", d.id, p.id, s, k, p.limit, size)
		}
		if n := w.poolHolds(p); p.limit != 0 && n > max(p.limit, p.before) {
			w.fail("device %d: pool %v holds %d bytes over its limit of %d (%d when that was set)", d.id, p.id, n, p.limit, p.before)
		}
		if s.Spilled > 0 {
			w.seen["spilled"]++
		}
	}
	for _, u := range d.dev.Views.TagUsage() {
		tags.check(w, d, u.Tag, u.Use)
	}
	for _, u := range d.dev.Views.LibraryUsage() {
		libraries.check(w, d, u.Library, u.Use)
	}
	if len(tags)+len(libraries) != 0 {
		w.fail("device %d: %v and %v are not told of", d.id, tags, libraries)
	}
}
