package engine_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

// shelf is memory of a kind of its own: addresses that nobody else has, as many bytes as it was made with.
type shelf struct {
	traits resource.Traits
	total  uint64

	mu     sync.Mutex
	next   cuda.Ptr            // guarded by mu
	out    map[cuda.Ptr]uint64 // guarded by mu
	kept   uint64              // guarded by mu: bytes that it keeps until Trim
	asked  []uint64            // guarded by mu: sizes, in order
	peers  []cuda.Device       // guarded by mu
	broken error               // guarded by mu
}

var shelves struct {
	sync.Mutex
	n cuda.Ptr
}

// newShelf makes a shelf of so many bytes, which are the host's unless traits say more.
func newShelf(total uint64, traits resource.Traits) *shelf {
	shelves.Lock()
	defer shelves.Unlock()
	shelves.n++
	traits.DeviceAccessible = true
	return &shelf{traits: traits, total: total, next: 0x6000_0000_0000 + shelves.n<<38, out: map[cuda.Ptr]uint64{}}
}

func (s *shelf) Alloc(size, _ uint64, _ cuda.Stream) (cuda.Ptr, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = append(s.asked, size)
	if s.broken != nil {
		return 0, s.broken
	}
	used := s.kept
	for _, n := range s.out {
		used += n
	}
	if used+size > s.total {
		return 0, fmt.Errorf("the shelf is full: %w", cuda.ErrOutOfMemory)
	}
	p := s.next
	s.next += cuda.Ptr(size)
	s.out[p] = size
	return p, nil
}

func (s *shelf) Free(p cuda.Ptr, size, _ uint64, _ cuda.Stream) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.out[p] != size {
		return fmt.Errorf("%#x+%d was not handed out", uint64(p), size)
	}
	delete(s.out, p)
	return nil
}

func (s *shelf) Trim() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kept = 0
	return nil
}

func (s *shelf) EnablePeer(peer cuda.Device) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.broken != nil {
		return s.broken
	}
	s.peers = append(s.peers, peer)
	return nil
}

func (s *shelf) held() (n uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, x := range s.out {
		n += x
	}
	return n
}

func (s *shelf) MemInfo() (free, total uint64, err error) { return s.total - s.held(), s.total, nil }
func (s *shelf) Equal(o resource.Resource) bool           { return resource.Resource(s) == o }
func (s *shelf) Traits() resource.Traits                  { return s.traits }

var hostMemory = resource.Traits{Name: "shelf", HostAccessible: true, Align: 4096}

func (e *fixture) pool(t testing.TB, n uint64, o config.PoolOptions) *engine.Pool {
	t.Helper()
	p, err := e.dev.NewPool(memory.PoolID{9, n}, o)
	must(t, err)
	return p
}

func fromPool(t testing.TB, p *engine.Pool, size uint64, st *engine.Stream) cuda.Ptr {
	t.Helper()
	x, err := p.Alloc(size, st)
	must(t, err)
	return x
}

// outOfMemory is the error of a request that must fail.
func outOfMemory(t testing.TB, p *engine.Pool, size uint64, st *engine.Stream) *memory.OutOfMemoryError {
	t.Helper()
	x, err := p.Alloc(size, st)
	var oom *memory.OutOfMemoryError
	if !errors.As(err, &oom) || !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Fatalf("Alloc(%d) = %#x, %v; want out of memory", size, x, err)
	}
	return oom
}

// Memory that is not the device's is in the statistics and not under the device's limit, and neither kind goes for the
// other.
func TestHostMemoryIsNotUnderTheLimit(t *testing.T) {
	e := checked(t, config.Options{Limit: 64 * mib}, 256*mib, 1)
	st := e.streams[0]
	host := newShelf(200*mib, hostMemory)
	pool := e.pool(t, 1, config.PoolOptions{Upstream: host})
	a, b := fromPool(t, pool, 120*mib, st), e.alloc(t, 60*mib, st)
	if s := e.dev.Views.Stats(); s.Reserved.All.Current != 180*mib || e.drv.ReservedBytes(0) != 60*mib {
		t.Errorf("%d bytes reserved, %d of the device", s.Reserved.All.Current, e.drv.ReservedBytes(0))
	}
	if ps := pool.Stats(); ps != (memory.PoolStats{Reserved: 120 * mib, PeakReserved: 120 * mib, Requested: 120 * mib, Allocated: 120 * mib, Blocks: 1}) {
		t.Errorf("%+v", ps)
	}
	e.free(t, a)
	oom := outOfMemory(t, e.dev.DefaultPool(), 10*mib, st)
	if oom.Reserved != 180*mib || oom.Elsewhere != 120*mib || oom.Other != 120*mib || oom.Pinned != 0 || host.held() != 120*mib {
		t.Errorf("host memory went for the device's, or was not told apart: %+v", oom)
	}
	if s := strings.Join(oom.Findings(memory.Names{}), "\n"); !strings.Contains(s, "0 bytes pool {9, 1} (shelf, 120.00 MiB more cached)") || !strings.Contains(s, "at least 6.00 MiB less in use") {
		t.Error(s)
	}
	e.free(t, b)
	a = fromPool(t, pool, 120*mib, st)
	oom = outOfMemory(t, pool, 100*mib, st)
	if oom.Upstream != "shelf" || !strings.Contains(oom.Error(), "100.00 MiB of shelf memory") || !strings.Contains(fmt.Sprint(oom.Unwrap()), "the shelf is full") {
		t.Errorf("%v, because %v", oom, oom.Cause)
	}
	if e.drv.ReservedBytes(0) != 60*mib {
		t.Error("the device's cached memory went for the host's")
	}
	e.free(t, a)
	c := fromPool(t, pool, 100*mib, st) // in what is cached
	e.free(t, c)
	fromPool(t, pool, 190*mib, st) // which has to go first
	if host.held() != 190*mib {
		t.Errorf("%d bytes held", host.held())
	}
}

// The limit of a pool holds whatever the pool is made of; what the pool has free, on any stream, is used or given back
// first, and nobody else's.
func TestPoolLimit(t *testing.T) {
	for name, o := range map[string]config.PoolOptions{"chunks": {}, "malloc": {Kind: config.PoolMalloc}, "single": {Kind: config.PoolSingleHandle},
		"upstream": {Upstream: newShelf(1<<30, hostMemory)}, "whole": {SegmentPerBlock: true}} {
		for _, observed := range []bool{false, true} {
			t.Run(fmt.Sprint(name, observed), func(t *testing.T) {
				e := checked(t, config.Options{}, 512*mib, 2)
				st, other := e.streams[0], e.streams[1]
				if observed {
					e.dev.OnUnmap(func(cuda.Ptr, uint64) {})
				}
				asked := 0
				e.dev.OnOutOfMemory(func(uint64) bool { asked++; return false })
				o.Limit = 100 * mib
				pool := e.pool(t, 1, o)
				cached := e.alloc(t, 50*mib, st)
				e.free(t, cached)
				check := func() {
					t.Helper()
					s, sum := pool.Stats(), uint64(0)
					for _, g := range e.dev.Views.SnapshotPool(pool.ID()) {
						sum += g.Size
					}
					if s.Reserved != sum || s.Reserved > s.Limit || s.PeakReserved > s.Limit || s.PeakReserved < s.Reserved || s.Allocated+s.Cached > s.Reserved {
						t.Errorf("%+v, in segments %d", s, sum)
					}
				}
				var blocks []cuda.Ptr
				for range 5 {
					blocks = append(blocks, fromPool(t, pool, 20*mib, st))
					check()
				}
				oom := outOfMemory(t, pool, 3*mib, st)
				if oom.PoolLimit != 100*mib || oom.PoolReserved != 100*mib || !strings.Contains(oom.Error(), "whose limit is 100.00 MiB") {
					t.Errorf("%v", oom)
				}
				if s := strings.Join(oom.Findings(memory.Names{}), "\n"); !strings.Contains(s, "a limit of 104.00 MiB for pool {9, 1} (now 100.00 MiB), or at least 4.00 MiB less in use there") {
					t.Error(s)
				}
				if n := e.dev.Views.Stats().Reserved.All.Current; n < 150*mib || asked > 0 {
					t.Errorf("the pool's limit made the device give back (%d held), or ask others (%d times)", n, asked)
				}
				for _, p := range blocks[:3] {
					e.free(t, p)
				}
				for _, size := range []uint64{60, 30, 45, 60} { // where the other stream has to give way
					x := fromPool(t, pool, size*mib, other)
					check()
					e.free(t, x)
					x = fromPool(t, pool, size*mib, st)
					check()
					e.free(t, x)
				}
				outOfMemory(t, pool, 61*mib, other)
				outOfMemory(t, pool, 101*mib, other)
				check()
				pool.SetLimit(0)
				fromPool(t, pool, 150*mib, other)
				pool.SetLimit(100 * mib)
				if s := pool.Stats(); s.Limit != 100*mib || s.Reserved < 150*mib {
					t.Errorf("%+v", s)
				}
				outOfMemory(t, pool, 10*mib, st)
			})
		}
	}
}

// An upstream without memory has the pool, and others, give back what they cache; its other errors come through as they are.
func TestUpstreamFails(t *testing.T) {
	e := checked(t, config.Options{}, 256*mib, 2)
	st := e.streams[0]
	a, b := newShelf(100*mib, hostMemory), newShelf(100*mib, hostMemory)
	pool, other := e.pool(t, 1, config.PoolOptions{Upstream: a}), e.pool(t, 2, config.PoolOptions{Upstream: b})
	e.free(t, fromPool(t, pool, 30*mib, st))
	e.free(t, fromPool(t, pool, 60*mib, e.streams[1]))
	e.free(t, fromPool(t, other, 60*mib, st))
	b.kept = 40 * mib
	x := fromPool(t, pool, 80*mib, st)
	if a.held() != 80*mib || b.held() != 0 || b.kept != 0 {
		t.Errorf("%d and %d bytes are held, %d kept", a.held(), b.held(), b.kept)
	}
	if s := e.dev.Views.Stats(); s.Retries != 1 || s.OOMs != 0 {
		t.Errorf("%+v", s.Counters)
	}
	own := errors.New("the network is down")
	a.broken = own
	before := pool.Stats()
	if _, err := pool.Alloc(10*mib, st); !errors.Is(err, own) || errors.Is(err, cuda.ErrOutOfMemory) || pool.Stats() != before {
		t.Errorf("%v, %+v", err, pool.Stats())
	}
	e.free(t, x)
	fromPool(t, pool, 70*mib, st) // from cache
}

// Segments are whole units of what the upstream makes.
func TestUpstreamGranularity(t *testing.T) {
	for _, whole := range []bool{false, true} {
		e := checked(t, config.Options{}, 256*mib, 1)
		traits := hostMemory
		traits.Align = 16 * mib
		s := newShelf(1<<30, traits)
		pool := e.pool(t, 1, config.PoolOptions{Upstream: s, SegmentPerBlock: whole})
		for _, size := range []uint64{1, mib, 3 * mib, 17 * mib, 32 * mib} {
			fromPool(t, pool, size, e.streams[0])
		}
		for _, n := range s.asked {
			if n%(16*mib) != 0 {
				t.Errorf("a segment of %d bytes", n)
			}
		}
		traits.Align = 3 * mib
		if _, err := e.dev.NewPool(memory.PoolID{9, 2}, config.PoolOptions{Upstream: newShelf(1, traits)}); err == nil {
			t.Error("an alignment of 3 MiB was taken")
		}
	}
}

// Upstreams are opened to the peers of the device, whichever came first.
func TestUpstreamPeers(t *testing.T) {
	drv := newPair(t, nil, nil, config.Options{})
	d, st := drv.dev[0], drv.st[0]
	before, after, released := newShelf(1<<30, hostMemory), newShelf(1<<30, hostMemory), newShelf(1<<30, hostMemory)
	p, err := d.NewPool(memory.PoolID{9, 1}, config.PoolOptions{Upstream: wrapped{before}})
	must(t, err)
	fromPool(t, p, mib, st)
	q, err := d.NewPool(memory.PoolID{9, 2}, config.PoolOptions{Upstream: released})
	must(t, err)
	x := fromPool(t, q, mib, st)
	must(t, q.Release())
	before.broken = errors.New("no way there")
	if err := d.Peers.Enable(1); !errors.Is(err, before.broken) || len(d.Peers.List()) != 0 {
		t.Errorf("%v, peers %v", err, d.Peers.List())
	}
	before.broken = nil
	must(t, d.Peers.Enable(1))
	must(t, d.Peers.Enable(1))
	after.broken = errors.New("nor there")
	if _, err := d.NewPool(memory.PoolID{9, 3}, config.PoolOptions{Upstream: after}); !errors.Is(err, after.broken) {
		t.Errorf("%v", err)
	}
	after.broken = &cuda.Error{Op: "cuMemPoolSetAccess", Device: 1, Code: cuda.ErrIllegalAddress} // the peer is
	if _, err = d.NewPool(memory.PoolID{9, 3}, config.PoolOptions{Upstream: after}); err != nil {
		t.Error(err)
	}
	after.broken = nil
	_, err = d.NewPool(memory.PoolID{9, 4}, config.PoolOptions{Upstream: after})
	must(t, err)
	for i, s := range []*shelf{before, released, after} {
		if !slices.Equal(s.peers, []cuda.Device{1}) {
			t.Errorf("shelf %d was opened to %v", i, s.peers)
		}
	}
	must(t, drv.a.Free(x))
}

// wrapped is an adaptor that can nothing itself.
type wrapped struct{ r resource.Resource }

func (w wrapped) Alloc(size, align uint64, st cuda.Stream) (cuda.Ptr, error) {
	return w.r.Alloc(size, align, st)
}
func (w wrapped) Free(p cuda.Ptr, size, align uint64, st cuda.Stream) error {
	return w.r.Free(p, size, align, st)
}
func (w wrapped) MemInfo() (free, total uint64, err error) { return w.r.MemInfo() }
func (w wrapped) Equal(o resource.Resource) bool           { return resource.Resource(w) == o }
func (w wrapped) Traits() resource.Traits                  { return w.r.Traits() }
func (w wrapped) Upstream() resource.Resource              { return w.r }

// TestSetUpstream: what excludes an upstream of all pools, and that one which cannot be made leaves no device.
func TestSetUpstream(t *testing.T) {
	drv := sim.New(sim.Options{})
	shelf := newShelf(1<<30, hostMemory)
	for _, o := range []config.Options{{Backend: config.BackendMalloc}, {SingleHandle: true}} {
		a, err := engine.New(drv, o)
		must(t, err)
		if err := a.SetUpstream(nil); err == nil {
			t.Errorf("%+v: not refused", o)
		}
	}
	a, err := engine.New(drv, config.Options{})
	must(t, err)
	fails := errors.New("not yet")
	must(t, a.SetUpstream(func(cuda.Device) (resource.Resource, error) {
		if fails != nil {
			return nil, fails
		}
		return shelf, nil
	}))
	if _, err := a.Device(0); !errors.Is(err, fails) {
		t.Errorf("%v", err)
	}
	fails = nil
	d, err := a.Device(0)
	must(t, err)
	if err := a.SetUpstream(nil); err == nil || !strings.Contains(err.Error(), "device 0 is in use already") {
		t.Errorf("%v", err)
	}
	st, err := d.Stream(cuda.StreamNull)
	must(t, err)
	p, err := d.Alloc(mib, st)
	must(t, err)
	if n := d.Views.PoolUsage(); len(n) != 1 || n[0].Upstream != "shelf" {
		t.Errorf("%+v", n)
	}
	must(t, a.Free(p))
	must(t, a.Close())
}
