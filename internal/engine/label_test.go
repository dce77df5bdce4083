package engine_test

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
)

// Who asked stays with a block, beside its tag, and is told apart wherever blocks are listed.
func TestLibraries(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 256 * mib}, config.Options{}, 2)
	pool := e.pool(t, 1, config.PoolOptions{})
	type block struct {
		engine.AllocOptions
		size uint64
	}
	live := map[cuda.Ptr]block{}
	rng := rand.New(rand.NewPCG(7, 8))
	for range 3000 {
		if len(live) > 0 && rng.IntN(100) < 45 {
			for p := range live {
				e.free(t, p)
				delete(live, p)
				break
			}
			continue
		}
		o := engine.AllocOptions{Tag: []uint32{0, 5, memory.MaxTag}[rng.IntN(3)], Library: []uint8{0, 1, 2, memory.MaxLibrary}[rng.IntN(4)], HostOrder: rng.IntN(3) == 0}
		if rng.IntN(2) == 0 {
			o.Pool = pool
		}
		b := block{o, 1 + rng.Uint64N(1<<(9+rng.IntN(9)))}
		p, err := e.dev.AllocWith(b.size, e.streams[rng.IntN(2)], o)
		must(t, err)
		live[p] = b
	}
	tags, libraries := map[uint32]memory.TagUse{}, map[uint8]memory.LibraryUse{}
	for p, b := range live {
		got, err := e.a.Base(p)
		if err != nil || got.Tag != b.Tag || got.Library != b.Library || got.Requested != b.size || (got.Pool == pool.ID()) != (b.Pool != nil) {
			t.Fatalf("%+v, %v; want %+v", got, err, b)
		}
		u, l := tags[b.Tag], libraries[b.Library]
		tags[b.Tag] = memory.TagUse{Tag: b.Tag, Use: memory.Use{Blocks: u.Blocks + 1, Requested: u.Requested + b.size, Allocated: u.Allocated + round512(b.size)}}
		libraries[b.Library] = memory.LibraryUse{Library: b.Library, Use: memory.Use{Blocks: l.Blocks + 1, Requested: l.Requested + b.size, Allocated: l.Allocated + round512(b.size)}}
	}
	for _, u := range e.dev.Views.TagUsage() {
		if u != tags[u.Tag] {
			t.Errorf("%+v, want %+v", u, tags[u.Tag])
		}
	}
	use := e.dev.Views.LibraryUsage()
	for i, u := range use {
		if u != libraries[u.Library] || i > 0 && u.Allocated > use[i-1].Allocated {
			t.Errorf("%+v at %d, want %+v", u, i, libraries[u.Library])
		}
	}
	if len(use) != len(libraries) || len(e.dev.Views.TagUsage()) != len(tags) {
		t.Errorf("%d libraries, %d tags", len(use), len(e.dev.Views.TagUsage()))
	}
	for _, g := range e.dev.Views.Snapshot() {
		for _, b := range g.Blocks {
			if x := live[cuda.Ptr(b.Addr)]; b.State == memory.BlockUsed && (b.Library != x.Library || b.Tag != x.Tag) || b.State == memory.BlockFree && (b.Library != 0 || b.Tag != 0) {
				t.Errorf("%+v in the snapshot, want %+v", b, x)
			}
		}
	}
	oom := outOfMemory(t, e.dev.DefaultPool(), 300*mib, e.streams[0])
	if !slices.Equal(oom.Libraries, use) {
		t.Errorf("%+v, want %+v", oom.Libraries, use)
	}
	name := func(l uint8) string { return map[uint8]string{1: "torch"}[l] }
	s := oom.Findings(memory.Names{Library: name})[0]
	s = s[max(0, strings.Index(s, "by library ")):]
	for _, u := range use[:3] { // those that hold most, in their order
		called := map[uint8]string{0: " others", 1: " torch", 2: " library 2", 255: " library 255"}[u.Library]
		i := strings.Index(s, called)
		if i < 0 {
			t.Fatalf("no%s behind the others in %q", called, s)
		}
		s = s[i:]
	}
	blocks := pool.Blocks()
	for _, b := range blocks {
		e.free(t, b.Base)
	}
	must(t, pool.Restore(blocks))
	if !slices.Equal(pool.Blocks(), blocks) {
		t.Error("a restored pool has lost labels")
	}
	for _, o := range []engine.AllocOptions{{Tag: memory.MaxTag + 1}, {Pool: mustPool(t)}} {
		if _, err := e.dev.AllocWith(1000, e.streams[0], o); err == nil {
			t.Errorf("%+v was taken", o)
		}
	}
	if p, err := e.dev.AllocWith(0, e.streams[0], engine.AllocOptions{HostOrder: true}); p != 0 || err != nil {
		t.Errorf("%#x, %v", p, err)
	}
}

// What a request in the host's order was going to be met with, and was not, is not waited for: here memory of the legacy
// stream, which cannot be asked while a stream that blocks with it is captured.
func TestHostOrderForgetsWhatItDidNotGet(t *testing.T) {
	e := checked(t, config.Options{Limit: 4 * mib}, 64*mib, 1)
	st := e.streams[0]
	legacy, err := e.dev.Stream(cuda.StreamNull)
	must(t, err)
	keeps := e.alloc(t, 1000, st) // a chunk for small blocks, which it keeps from moving
	e.free(t, e.alloc(t, mib, legacy))
	blocking := e.drv.NewStream(0)
	must(t, e.drv.BeginCapture(0, blocking))
	p, err := e.dev.AllocWith(mib, st, engine.AllocOptions{HostOrder: true})
	must(t, err)
	if b, err := e.a.Base(p); err != nil || b.Stream != st.ID() || b.Base-keeps > 2*mib {
		t.Errorf("%+v, %v: not from the chunk of %#x", b, err, uint64(keeps))
	}
}

// Memory in the host's order that is mapped behind a free block of the same stream merges with it, and begins in it, although
// it needs as much new memory with it as without: the stream's work on that block is waited for. The checker of the
// simulated device sees if not.
func TestHostOrderOfWhatIsMerged(t *testing.T) {
	e := checked(t, config.Options{}, 1<<30, 2)
	st, other := e.streams[0], e.streams[1]
	first := e.alloc(t, mib+512, st)
	behind := e.alloc(t, 800<<10, st) // to the end of the chunk nearly
	e.use(t, st, behind, 800<<10)
	e.free(t, behind)
	size := uint64(6*mib - 1000)
	p, err := e.dev.AllocWith(size, st, engine.AllocOptions{HostOrder: true})
	must(t, err)
	e.use(t, other, p, size)
	if p != behind {
		t.Errorf("%#x, not behind %#x at %#x: nothing was merged", uint64(p), uint64(first), uint64(behind))
	}
}

// mustPool is a pool of another device.
func mustPool(t *testing.T) *engine.Pool {
	return newEngine(t, sim.Options{}, config.Options{}, 1).dev.DefaultPool()
}

// Labels cost nothing where requests are met from the cache.
func TestSteadyStateOfLabels(t *testing.T) {
	e := newEngine(t, sim.Options{}, config.Options{}, 1)
	o := engine.AllocOptions{Tag: 7, Library: 3}
	round := func() {
		p, err := e.dev.AllocWith(5000, e.streams[0], o)
		must(t, err)
		e.free(t, p)
	}
	round()
	e.drv.ResetCalls()
	if n := testing.AllocsPerRun(1000, round); n != 0 || e.drv.Calls().Count != 0 {
		t.Errorf("%v Go allocations, %d driver calls", n, e.drv.Calls().Count)
	}
}

// hostOrdered is a request in the host's order, whose memory any stream of the device may use at once.
func hostOrdered(t *testing.T, e *fixture, p *engine.Pool, size uint64, st *engine.Stream) cuda.Ptr {
	t.Helper()
	x, err := e.dev.AllocWith(size, st, engine.AllocOptions{Pool: p, HostOrder: true})
	must(t, err)
	for _, s := range e.streams {
		if err := e.drv.Use(0, s.Handle(), x, size); err != nil {
			t.Errorf("%d bytes at %#x: %v", size, uint64(x), err)
		}
		must(t, e.drv.StreamSynchronize(0, s.Handle())) // the program orders its own uses
	}
	return x
}

// What is handed out in the host's order is done with, wherever it comes from: its own stream's cache, another's, pending
// frees, segments, other pools.
func TestHostOrder(t *testing.T) {
	for _, opts := range []config.Options{{}, {Backend: config.BackendMalloc}, {SingleHandle: true}, {ChunkMax: 2 * mib, CrossStream: config.CrossStreamReady}} {
		e := checked(t, opts, 64*mib, 3)
		st, other, third := e.streams[0], e.streams[1], e.streams[2]
		private := e.pool(t, 1, config.PoolOptions{})
		busy := func(p *engine.Pool, size uint64, s *engine.Stream) cuda.Ptr {
			x := fromPool(t, p, size, s)
			e.use(t, s, x, size)
			return x
		}
		d0 := e.dev.DefaultPool()
		for range 3 {
			e.free(t, busy(d0, 30*mib, st))
			e.free(t, hostOrdered(t, e, nil, 30*mib, st)) // the stream's own
			e.free(t, busy(d0, 50*mib, other))
			e.free(t, hostOrdered(t, e, nil, 50*mib, st)) // another stream's
			x := busy(d0, 50*mib, other)
			must(t, e.a.RecordStream(x, third))
			e.free(t, x)
			e.free(t, hostOrdered(t, e, nil, 60*mib, other)) // waiting for a third
			e.free(t, busy(private, 60*mib, third))
			e.free(t, hostOrdered(t, e, nil, 20*mib, st)) // another pool's
			small := busy(d0, 1000, st)
			e.free(t, small)
			e.free(t, hostOrdered(t, e, nil, 900, st))
		}
		if s := e.dev.Views.Stats(); s.OOMs != 0 || s.StreamSyncs == 0 {
			t.Errorf("%s: %+v", opts, s.Counters)
		}
	}
}

// What is done goes before what has to be waited for, what an event was recorded behind before what nothing was, and no
// more is waited for than the last use of the memory that is handed out.
func TestHostOrderWaitsForLittle(t *testing.T) {
	e := checked(t, config.Options{}, 512*mib, 1)
	st := e.streams[0]
	var p [4]cuda.Ptr
	var guard [3]cuda.Ptr
	for i := range p {
		p[i] = e.alloc(t, 10*mib, st)
		if i < len(guard) {
			guard[i] = e.alloc(t, 2*mib, st) // so that they do not merge
		}
	}
	host := func() cuda.Ptr {
		t.Helper()
		x, err := e.dev.AllocWith(10*mib, st, engine.AllocOptions{HostOrder: true})
		must(t, err)
		return x
	}
	must(t, e.drv.Use(0, st.Handle(), p[0], 10*mib))
	e.free(t, p[0])
	must(t, e.dev.Captures.MarkFrees())
	must(t, e.drv.StreamSynchronize(0, st.Handle()))
	must(t, e.drv.Use(0, st.Handle(), p[1], 10*mib))
	e.free(t, p[1])
	must(t, e.dev.Captures.MarkFrees())
	must(t, e.drv.Use(0, st.Handle(), p[2], 10*mib))
	e.free(t, p[2])
	e.drv.ResetCalls()
	if x := host(); x != p[0] || e.drv.Calls().Calls["cuEventSynchronize"].Count != 0 || e.drv.Calls().Calls["cuEventRecord"].Count != 0 {
		t.Errorf("%#x, want what is done, %#x; calls %v", x, p[0], e.drv.Calls().Calls)
	}
	if x := host(); x != p[1] || e.drv.Calls().Calls["cuEventRecord"].Count != 0 || e.drv.Calls().Calls["cuEventSynchronize"].Count != 1 {
		t.Errorf("%#x, want what is marked, %#x; calls %v", x, p[1], e.drv.Calls().Calls)
	}
	if x := host(); x != p[2] || e.drv.Calls().Calls["cuEventRecord"].Count != 1 {
		t.Errorf("%#x, want what is left, %#x; calls %v", x, p[2], e.drv.Calls().Calls)
	}
	// From now on frees are marked, so that later work is not waited for.
	before := e.drv.Now()
	must(t, e.drv.Use(0, st.Handle(), p[2], 10*mib))
	e.free(t, p[2])
	e.drv.ResetCalls()
	e.drv.Advance(15 * time.Millisecond)
	must(t, e.drv.Use(0, st.Handle(), p[3], 10*mib)) // unrelated work, 20 ms of it
	if x := host(); x != p[2] || e.drv.Calls().Calls["cuEventRecord"].Count != 0 {
		t.Errorf("%#x, want %#x; calls %v", x, p[2], e.drv.Calls().Calls)
	}
	if w := e.drv.Now() - before; w < 20*time.Millisecond || w > 25*time.Millisecond {
		t.Errorf("waited %v", w)
	}
	for _, x := range guard {
		e.free(t, x)
	}
}

// Nothing waits for a stream that is being captured, or records on it: of a captured stream memory in the host's order is
// an error, and where a capture stands in the way, that nobody announced, other memory is used.
func TestHostOrderAndCaptures(t *testing.T) {
	e := checked(t, config.Options{}, 128*mib, 2)
	st := e.streams[0]
	pool := e.pool(t, 1, config.PoolOptions{})
	x := fromPool(t, pool, 10*mib, st)
	e.use(t, st, x, 10*mib)
	e.free(t, x)
	must(t, e.drv.BeginCapture(0, st.Handle()))
	y, err := e.dev.AllocWith(10*mib, st, engine.AllocOptions{Pool: pool, HostOrder: true})
	must(t, err)
	if y == x {
		t.Errorf("%#x was handed out though the GPU may use it", x)
	}
	if _, err := e.drv.EndCapture(0, st.Handle()); err != nil {
		t.Errorf("the capture was spoilt: %v", err)
	}
	if z := fromPool(t, pool, 10*mib, st); z != x {
		t.Errorf("%#x; what was held back did not come again, which is at %#x", z, x)
	} else {
		e.free(t, z)
	}
	e.free(t, y)
	must(t, e.dev.Captures.Begin(st, pool))
	must(t, e.drv.BeginCapture(0, st.Handle()))
	if _, err := e.dev.AllocWith(mib, st, engine.AllocOptions{HostOrder: true}); err == nil || !strings.Contains(err.Error(), "captured") || errors.Is(err, cuda.ErrOutOfMemory) {
		t.Errorf("on a captured stream: %v", err)
	}
	if _, err := e.drv.EndCapture(0, st.Handle()); err != nil {
		t.Errorf("the capture was spoilt: %v", err)
	}
	must(t, e.dev.Captures.End(st))
	if s := pool.Stats(); s.Blocks != 0 {
		t.Errorf("%+v", s)
	}
}

// What is cached can be asked for alone: no driver call, no trace of what could not be met, and what another thread is busy
// with is not waited for.
func TestCached(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 256 * mib}, config.Options{}, 2)
	cached := engine.AllocOptions{Library: 3, Cached: true}
	ask := func(size uint64, st *engine.Stream, want bool) cuda.Ptr {
		t.Helper()
		p, err := e.dev.AllocWith(size, st, cached)
		if err != nil || (p != 0) != want {
			t.Fatalf("%#x, %v; want some: %v", p, err, want)
		}
		return p
	}
	before := e.dev.Views.Stats()
	ask(mib, e.streams[0], false)
	ask(0, e.streams[0], false)
	ask(1<<62, e.streams[0], false)
	ask(^uint64(0), e.streams[0], false)
	if after := e.dev.Views.Stats(); after != before {
		t.Errorf("%+v after asking for what is not cached, %+v before", after, before)
	}
	p, err := e.dev.Alloc(mib, e.streams[0])
	must(t, err)
	ask(4*mib, e.streams[0], false)
	e.free(t, p)
	if q := ask(mib, e.streams[0], true); q != p {
		t.Errorf("%#x, want %#x, which is cached", q, p)
	}
	if b, err := e.a.Base(p); err != nil || b.Library != 3 {
		t.Errorf("%+v, %v; want library 3", b, err)
	}
	e.free(t, p)
	ask(mib, e.streams[1], false) // another stream's order
	if _, err := e.dev.AllocWith(mib, e.streams[0], engine.AllocOptions{Cached: true, HostOrder: true}); err == nil {
		t.Error("memory in the host's order from the cache alone")
	}

	// While somebody goes through the reclaim stages and waits for the program's function, others are not kept waiting.
	asked, leave := make(chan struct{}), make(chan struct{})
	once := e.dev.OnOutOfMemory(func(uint64) bool { close(asked); <-leave; return false })
	done := make(chan error)
	go func() {
		_, err := e.dev.Alloc(1<<30, e.streams[0])
		done <- err
	}()
	<-asked
	e.free(t, ask(mib, e.streams[0], true))
	close(leave)
	if err := <-done; !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Errorf("%v, want out of memory", err)
	}
	once.Remove()
	if n := testing.AllocsPerRun(100, func() { e.free(t, ask(mib, e.streams[0], true)) }); n != 0 {
		t.Errorf("%v Go allocations a pair", n)
	}
}
