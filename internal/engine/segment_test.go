package engine_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

// upstream is a user's upstream: it tells of each call, may do anything while it is called, and counts what is out.
type upstream struct {
	resource.Resource
	observe func(what string, size uint64)
	out     map[cuda.Ptr]uint64
	fail    error
}

func (u *upstream) Alloc(size, align uint64, st cuda.Stream) (cuda.Ptr, error) {
	if u.observe != nil {
		u.observe("alloc", size)
	}
	if u.fail != nil {
		return 0, u.fail
	}
	p, err := u.Resource.Alloc(size, align, st)
	if err == nil {
		if u.out == nil {
			u.out = map[cuda.Ptr]uint64{}
		}
		u.out[p] = size
	}
	return p, err
}

func (u *upstream) Free(p cuda.Ptr, size, align uint64, st cuda.Stream) error {
	if u.observe != nil {
		u.observe("free", size)
	}
	if u.out[p] != size {
		return errors.New("that was not handed out")
	}
	err := u.Resource.Free(p, size, align, st)
	if err == nil {
		delete(u.out, p)
	}
	return err
}

// A user's upstream is called with no lock held: it may use the allocator, even fill the device, while it is called.
func TestUpstreamMayUseTheAllocator(t *testing.T) {
	e := checked(t, config.Options{}, 128*mib, 1)
	st := e.streams[0]
	var inside []cuda.Ptr
	u := &upstream{Resource: resource.Device(e.drv, 0)}
	pool, err := e.dev.NewPool(memory.PoolID{0, 1}, config.PoolOptions{Upstream: u})
	must(t, err)
	u.observe = func(what string, size uint64) {
		e.dev.Views.Stats()
		must(t, pool.Trim())
		if what == "alloc" {
			inside = append(inside, e.alloc(t, 3*mib, st))
			return
		}
		for _, p := range inside {
			e.free(t, p)
		}
		inside = nil
	}
	p, err := pool.Alloc(mib, st)
	must(t, err)
	e.use(t, st, p, mib)
	e.free(t, p)
	must(t, pool.Release())
	if len(u.out) != 0 || len(inside) != 0 {
		t.Errorf("%d segments and %d blocks are out after the release", len(u.out), len(inside))
	}
	must(t, e.a.Trim())
	must(t, e.a.Close())
}

// What a user's upstream may answer, and what becomes of it.
func TestUpstreamAnswers(t *testing.T) {
	e := checked(t, config.Options{}, 128*mib, 1)
	st := e.streams[0]
	taken := e.alloc(t, mib, st)
	given := cuda.Ptr(0)
	var freed []cuda.Ptr
	pool, err := e.dev.NewPool(memory.PoolID{0, 1}, config.PoolOptions{Upstream: answers{p: &given, freed: &freed}})
	must(t, err)
	for _, c := range []struct {
		p    cuda.Ptr
		oom  bool
		says string
	}{
		{0, true, "out of memory"},
		{1<<40 + 100, false, "not aligned"},
		{taken, false, "is already in use"},
		{1 << 50, false, "48 bits"},
		{^cuda.Ptr(511), false, "48 bits"},
	} {
		given, freed = c.p, nil
		_, err := pool.Alloc(mib, st)
		if err == nil || errors.Is(err, cuda.ErrOutOfMemory) != c.oom || !strings.Contains(err.Error(), c.says) {
			t.Errorf("upstream returned %#x: %v", uint64(c.p), err)
		}
		if !c.oom && (len(freed) != 1 || freed[0] != c.p) {
			t.Errorf("upstream returned %#x, which was refused, and got %#x back", uint64(c.p), freed)
		}
	}
	if n := e.dev.Views.Stats().Allocations.All.Current; n != 1 {
		t.Errorf("%d allocations", n)
	}
	e.free(t, taken)
}

// answers hands out one address.
type answers struct {
	resource.Resource
	p     *cuda.Ptr
	freed *[]cuda.Ptr
}

func (a answers) Traits() resource.Traits                            { return resource.Traits{Name: "answers"} }
func (a answers) Alloc(_, _ uint64, _ cuda.Stream) (cuda.Ptr, error) { return *a.p, nil }
func (a answers) Free(p cuda.Ptr, _, _ uint64, _ cuda.Stream) error {
	*a.freed = append(*a.freed, p)
	return nil
}

// The base of a block is that of the segment in which the driver has it, whatever pools lie between; chunks have none.
func TestSegmentBase(t *testing.T) {
	e := checked(t, config.Options{}, 512*mib, 1)
	st := e.streams[0]
	legacy := e.pool(t, 1, config.PoolOptions{Kind: config.PoolMalloc})
	over := e.pool(t, 2, config.PoolOptions{Upstream: legacy.Resource()})
	chunks := e.pool(t, 3, config.PoolOptions{})
	overChunks := e.pool(t, 4, config.PoolOptions{Upstream: chunks.Resource()})
	for _, p := range []*engine.Pool{legacy, over} {
		first, second := fromPool(t, p, 3*mib, st), fromPool(t, p, 3*mib, st)
		segments := e.dev.Views.SnapshotPool(legacy.ID())
		if len(segments) != 1 {
			t.Fatalf("pool %v: %d segments, want both blocks in one", p.ID(), len(segments))
		}
		want := segments[0]
		for _, x := range []cuda.Ptr{first, second} {
			base, size, err := e.a.SegmentBase(x)
			if err != nil || uint64(base) != want.Addr || size != want.Size {
				t.Errorf("pool %v: the segment of %#x is [%#x, +%d), %v; want [%#x, +%d)", p.ID(), uint64(x), uint64(base), size, err,
					want.Addr, want.Size)
			}
		}
		e.free(t, first)
		e.free(t, second)
		if _, _, err := e.a.SegmentBase(second); !errors.Is(err, memory.ErrUnknownPointer) {
			t.Errorf("the segment of memory that was given back: %v", err)
		}
		must(t, e.dev.Trim())
	}
	for _, p := range []*engine.Pool{chunks, overChunks} {
		x := fromPool(t, p, 3*mib, st)
		if _, _, err := e.a.SegmentBase(x); !errors.Is(err, cuda.ErrNotSupported) {
			t.Errorf("pool %v: the segment of memory in chunks: %v", p.ID(), err)
		}
		e.free(t, x)
	}
}

// Trimming the default pool takes with it what released pools left, and leaves pools alone that are in use.
func TestTrimDefaultPool(t *testing.T) {
	for _, kind := range []config.PoolKind{config.PoolDefault, config.PoolMalloc} {
		e := checked(t, config.Options{}, 512*mib, 1)
		st := e.streams[0]
		kept, gone := e.pool(t, 1, config.PoolOptions{Kind: kind}), e.pool(t, 2, config.PoolOptions{Kind: kind})
		e.free(t, fromPool(t, kept, 30*mib, st))
		late, other := fromPool(t, gone, 50*mib, st), fromPool(t, e.dev.DefaultPool(), 70*mib, st)
		must(t, gone.Release())
		e.free(t, other)
		e.free(t, late)
		held := int64(kept.Stats().Reserved)
		if reserved := e.dev.Views.Stats().Reserved.All.Current; held < 30*mib || reserved < held+120*mib {
			t.Fatalf("kind %d: %d bytes reserved, %d by the pool in use", kind, reserved, held)
		}
		must(t, e.dev.DefaultPool().Trim())
		if reserved := e.dev.Views.Stats().Reserved.All.Current; reserved != held || int64(kept.Stats().Reserved) != held {
			t.Errorf("kind %d: %d bytes reserved, want the %d of the pool in use", kind, reserved, held)
		}
		must(t, e.dev.Trim())
		if reserved := e.dev.Views.Stats().Reserved.All.Current; reserved != 0 {
			t.Errorf("kind %d: %d bytes reserved after trimming all", kind, reserved)
		}
	}
}

func TestPoolOptions(t *testing.T) {
	e := checked(t, config.Options{}, 128*mib, 1)
	id := memory.PoolID{0, 1}
	for _, o := range []config.PoolOptions{
		{Kind: config.PoolMalloc, Upstream: resource.Device(e.drv, 0)},
		{Kind: 77},
	} {
		if _, err := e.dev.NewPool(id, o); err == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
	if _, ok := e.dev.Pool(id); ok {
		t.Error("a pool that could not be made is there")
	}
	if _, err := e.dev.NewPool(id, config.PoolOptions{}); err != nil {
		t.Error(err)
	}
}

// Segments of pools and the device's own chunks make room for one another, under a limit and when the driver has no more.
func TestSegmentsAndChunksMakeRoom(t *testing.T) {
	for _, limited := range []bool{false, true} {
		for _, kind := range []config.PoolKind{config.PoolMalloc, config.PoolSingleHandle, config.PoolDefault} {
			opts, capacity := config.Options{}, uint64(128*mib)
			if limited {
				opts.Limit, capacity = capacity, 4*capacity
			}
			e := checked(t, opts, capacity, 2)
			o := config.PoolOptions{Kind: kind}
			if kind == config.PoolDefault {
				o.Upstream = &upstream{Resource: resource.Device(e.drv, 0)}
			}
			pool, err := e.dev.NewPool(memory.PoolID{0, 1}, o)
			must(t, err)
			st, other := e.streams[0], e.streams[1]
			for range 3 {
				p := e.alloc(t, 120*mib, other)
				e.use(t, other, p, 120*mib)
				e.free(t, p)
				p, err = pool.Alloc(100*mib, st)
				must(t, err)
				e.use(t, st, p, 100*mib)
				if n := e.dev.Views.Stats().Reserved.All.Current; n > 128*mib {
					t.Errorf("limited %v, kind %d: %d bytes held", limited, kind, n)
				}
				e.free(t, p)
			}
			must(t, e.a.Trim())
			if n := e.drv.ReservedBytes(0); n != 0 {
				t.Errorf("limited %v, kind %d: %d bytes held at the end", limited, kind, n)
			}
			if s := e.dev.Views.Stats(); s.Retries != 6-1 || s.OOMs != 0 {
				t.Errorf("limited %v, kind %d: %d retries, %d failures", limited, kind, s.Retries, s.OOMs)
			}
			must(t, e.a.Close())
			if l := e.drv.Leaks(); l != (sim.Live{Streams: 2}) {
				t.Errorf("limited %v, kind %d: left behind in the driver: %+v", limited, kind, l)
			}
		}
	}
}

// The settings make the default pool, and those without options, of that memory.
func TestSettingsOfSegments(t *testing.T) {
	for text, call := range map[string]string{"ipc:legacy": "cuMemAlloc", "backend:malloc": "cuMemAlloc", "single_handle:true": "cuMemCreate"} {
		opts, err := config.Parse(text)
		must(t, err)
		if again, err := config.Parse(opts.String()); err != nil || again != opts {
			t.Errorf("%s is written %s, which is read %+v, %v", text, opts, again, err)
		}
		e := checked(t, opts, 128*mib, 1)
		pool, err := e.dev.NewPool(memory.PoolID{0, 1}, config.PoolOptions{})
		must(t, err)
		e.drv.ResetCalls()
		p := e.alloc(t, 30*mib, e.streams[0])
		q, err := pool.Alloc(30*mib, e.streams[0])
		must(t, err)
		if n := e.drv.Calls().Calls[call].Count; n != 2 {
			t.Errorf("%s: two segments took %d calls of %s", text, n, call)
		}
		e.free(t, p)
		e.free(t, q)
	}
	for _, text := range []string{"ipc:handles", "single_handle:false"} {
		if opts, err := config.Parse(text); err != nil || opts.String() != "" {
			t.Errorf("%s: %v, %v", text, opts, err)
		}
	}
	for _, text := range []string{"ipc:new", "single_handle:1", "ipc:legacy,backend:vmm", "ipc:legacy,single_handle:true", "single_handle:true,backend:malloc"} {
		if _, err := config.Parse(text); err == nil {
			t.Errorf("%s was accepted", text)
		} else {
			t.Log(err)
		}
	}
}
