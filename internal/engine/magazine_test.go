package engine_test

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/internal/magazine"
	"github.com/cistern-gpu/cistern/memory"
)

// cMagazines does what cmd/libcistern/magazine.c does, in Go, where the race detector can watch: it meets requests and frees
// from the magazines of streams as long as it may, and calls the engine otherwise. A nil *cMagazines always calls the engine.
type cMagazines struct {
	a *engine.Allocator

	mu        sync.Mutex
	magazines map[*engine.Stream]*magazine.Magazine // guarded by mu
	blocks    map[cuda.Ptr]cBlock                   // guarded by mu: what may be put into a magazine

	thread    uint64 // guarded by mu: of the last call; another one each time unless alone
	alone     bool
	met, kept int // guarded by mu: requests and frees that the engine never saw
}

type cBlock struct {
	magazine.Token
	flags *magazine.Flags
	size  uint64
}

func newCMagazines(a *engine.Allocator) *cMagazines {
	return &cMagazines{a: a, magazines: map[*engine.Stream]*magazine.Magazine{}, blocks: map[cuda.Ptr]cBlock{}}
}

func (c *cMagazines) alloc(d *engine.Device, size uint64, st *engine.Stream) (cuda.Ptr, error) {
	if c == nil {
		return d.Alloc(size, st)
	}
	c.mu.Lock()
	f, thread := c.magazines[st], c.caller()
	c.mu.Unlock()
	flags := d.Magazines.Flags()
	if f != nil && st.Device() == d && size != 0 && flags.Quick.Load() && f.TryLock() {
		addr, mark, o := f.Take(size, flags.Waiting.Load(), thread)
		f.Unlock()
		if o == magazine.Taken {
			c.mu.Lock()
			c.met++
			c.blocks[cuda.Ptr(addr)] = cBlock{magazine.Token{Magazine: f, Mark: mark}, flags, size}
			c.mu.Unlock()
			return cuda.Ptr(addr), nil
		}
	}
	p, token, err := d.Magazines.Alloc(size, st)
	if token.Magazine != nil {
		c.mu.Lock()
		c.magazines[st] = token.Magazine
		c.blocks[p] = cBlock{token, flags, size}
		c.mu.Unlock()
	}
	return p, err
}

// caller is the number of the calling thread. The caller holds mu.
func (c *cMagazines) caller() uint64 {
	if !c.alone || c.thread == 0 {
		c.thread++
	}
	return c.thread
}

// forget is what C does before any call that needs the engine to see the block's free.
func (c *cMagazines) forget(p cuda.Ptr) (cBlock, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	b, ok := c.blocks[p]
	delete(c.blocks, p)
	return b, ok
}

// forgetAll is what C does when blocks are paused.
func (c *cMagazines) forgetAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.blocks)
}

func (c *cMagazines) free(a *engine.Allocator, p cuda.Ptr) error {
	if c == nil {
		return a.Free(p)
	}
	if b, ok := c.forget(p); ok && b.flags.Quick.Load() && b.Magazine.TryLock() {
		c.mu.Lock()
		thread := c.caller()
		c.mu.Unlock()
		ok := b.Magazine.Put(uint64(p), b.size, b.Mark, thread)
		b.Magazine.Unlock()
		if ok {
			c.mu.Lock()
			c.kept++
			c.mu.Unlock()
			return nil
		}
	}
	return a.Free(p)
}

// freeOn is free on a stream: the magazine is for the block's own.
func (c *cMagazines) freeOn(a *engine.Allocator, p cuda.Ptr, st *engine.Stream) error {
	if c == nil {
		return a.FreeOn(p, st)
	}
	c.mu.Lock()
	b, ok := c.blocks[p]
	own := ok && b.Magazine == c.magazines[st]
	c.mu.Unlock()
	if own {
		return c.free(a, p)
	}
	c.forget(p)
	return a.FreeOn(p, st)
}

func (c *cMagazines) recordStream(a *engine.Allocator, p cuda.Ptr, st *engine.Stream) error {
	if c != nil {
		c.forget(p)
	}
	return a.RecordStream(p, st)
}

// A pair of the same size, over and over, is none of the engine's business, nor are threads that share a stream; and the
// statistics are those that the engine alone would have.
func TestMagazinePair(t *testing.T) {
	e := newEngine(t, sim.Options{}, config.Options{}, 1)
	c := newCMagazines(e.a)
	c.alone = true
	st := e.streams[0]
	for _, size := range []uint64{512, mib, 20*mib + 1} {
		for range 10 { // until the peaks are reached
			p, err := c.alloc(e.dev, size, st)
			must(t, err)
			must(t, c.free(e.a, p))
		}
		before, met, kept := e.dev.Views.Stats(), c.met, c.kept
		// Taking the statistics has freed what was in the magazine, so the first request of these goes to the engine.
		const n = 1000
		for range n {
			p, err := c.alloc(e.dev, size, st)
			must(t, err)
			must(t, c.free(e.a, p))
		}
		if c.met-met != n-1 || c.kept-kept != n {
			t.Errorf("of %d pairs of %d bytes %d requests and %d frees needed no engine", n, size, c.met-met, c.kept-kept)
		}
		after := e.dev.Views.Stats()
		if got := after.Allocations.All.Added - before.Allocations.All.Added; got != n {
			t.Errorf("%d allocations counted, want %d", got, n)
		}
		if got := after.Requested.All.Added - before.Requested.All.Added; got != n*int64(size) {
			t.Errorf("%d bytes counted, want %d", got, n*size)
		}
		after.Allocations, after.Requested, after.Allocated, after.Active, after.ActiveBytes = before.Allocations,
			before.Requested, before.Allocated, before.Active, before.ActiveBytes
		after.Inactive, after.InactiveBytes, after.ByFit = before.Inactive, before.InactiveBytes, before.ByFit
		if after != before {
			t.Errorf("pairs changed the statistics:\n%+v\n%+v", before, after)
		}
	}
}

// The magazine holds as many blocks as it has slots, once the peak of free blocks allows it, and the engine looks at a
// request only after it has freed them all.
func TestMagazineSlots(t *testing.T) {
	e := newEngine(t, sim.Options{}, config.Options{}, 1)
	c := newCMagazines(e.a)
	st := e.streams[0]
	const n = magazine.Capacity
	var got [n]cuda.Ptr
	round := func() {
		for i := range got {
			var err error
			got[i], err = c.alloc(e.dev, mib, st)
			must(t, err)
		}
		for i := range got {
			must(t, c.free(e.a, got[i]))
		}
	}
	round()
	round()
	met, kept := c.met, c.kept
	for range 10 {
		round()
	}
	if c.met-met != 10*n || c.kept-kept != 10*n {
		t.Errorf("of %d requests %d, of as many frees %d needed no engine", 10*n, c.met-met, c.kept-kept)
	}
	// All of it is one free block to a request of another size.
	held := e.drv.ReservedBytes(0)
	p, err := c.alloc(e.dev, held, st)
	must(t, err)
	if r := e.drv.ReservedBytes(0); r != held {
		t.Errorf("%d bytes were got although %d were free", r-held, held)
	}
	must(t, c.free(e.a, p))
	for i := range got {
		if e.a.Free(got[i]) == nil {
			t.Errorf("%#x was freed twice", got[i])
		}
	}
}

// Statistics, peaks included, are at every moment those of the same operations without a magazine, but for the number of
// free blocks: in the magazine they do not merge.
func TestMagazineStatistics(t *testing.T) {
	for seed := range uint64(20) {
		with := newEngine(t, sim.Options{}, config.Options{}, 3)
		without := newEngine(t, sim.Options{}, config.Options{}, 3)
		c := newCMagazines(with.a)
		rng := rand.New(rand.NewPCG(seed, 5))
		sizes := make([]uint64, 12)
		for i := range sizes {
			sizes[i] = rng.Uint64N(1<<(10+rng.Uint64N(12))) + 1
		}
		var a, b []cuda.Ptr
		for step := range 3000 {
			switch k := rng.IntN(100); {
			case k < 50 || len(a) == 0:
				size, st := sizes[rng.IntN(len(sizes))], rng.IntN(3)
				p, err := c.alloc(with.dev, size, with.streams[st])
				must(t, err)
				a, b = append(a, p), append(b, without.alloc(t, size, without.streams[st]))
			case k < 98:
				n := min(len(a), 1+rng.IntN(4))
				for range n {
					i := rng.IntN(len(a))
					if rng.IntN(2) == 0 {
						i = len(a) - 1
					}
					must(t, c.free(with.a, a[i]))
					without.free(t, b[i])
					a[i], b[i] = a[len(a)-1], b[len(b)-1]
					a, b = a[:len(a)-1], b[:len(b)-1]
				}
			case k < 99:
				x, y := with.dev.Views.Stats(), without.dev.Views.Stats()
				for name, g := range map[string][2]memory.Grouped{"allocations": {x.Allocations, y.Allocations},
					"active": {x.Active, y.Active}, "requested": {x.Requested, y.Requested}, "allocated": {x.Allocated, y.Allocated},
					"active bytes": {x.ActiveBytes, y.ActiveBytes}} {
					if g[0] != g[1] {
						t.Fatalf("seed %d, step %d: %s are %+v, without a magazine %+v", seed, step, name, g[0], g[1])
					}
				}
			case rng.IntN(10) == 0:
				with.dev.Views.ResetPeaks()
				without.dev.Views.ResetPeaks()
			}
		}
		if c.met < 15 || c.kept < 500 {
			t.Errorf("seed %d: only %d requests and %d frees needed no engine", seed, c.met, c.kept)
		}
	}
}

// One thread's requests are given the very blocks that they would be given without a magazine, where temporaries come and go
// between blocks that stay.
func TestMagazinePlacement(t *testing.T) {
	with := newEngine(t, sim.Options{}, config.Options{}, 1)
	without := newEngine(t, sim.Options{}, config.Options{}, 1)
	c := newCMagazines(with.a)
	c.alone = true
	rng := rand.New(rand.NewPCG(3, 5))
	var stay []cuda.Ptr
	for step := range 5000 {
		size := uint64(1) << (9 + rng.Uint64N(14))
		size += rng.Uint64N(size)
		for range rng.IntN(4) {
			p, err := c.alloc(with.dev, size, with.streams[0])
			must(t, err)
			if q := without.alloc(t, size, without.streams[0]); p != q {
				t.Fatalf("step %d: %d bytes at %#x, without a magazine at %#x", step, size, p, q)
			}
			if rng.IntN(4) == 0 {
				stay = append(stay, p)
				continue
			}
			must(t, c.free(with.a, p))
			without.free(t, p)
		}
		for len(stay) > 0 && rng.IntN(100) < len(stay) {
			i := rng.IntN(len(stay))
			must(t, c.free(with.a, stay[i]))
			without.free(t, stay[i])
			stay[i] = stay[len(stay)-1]
			stay = stay[:len(stay)-1]
		}
	}
	if c.met < 500 || c.kept < 3000 {
		t.Errorf("only %d requests and %d frees needed no engine", c.met, c.kept)
	}
}

// While history is on, the engine sees everything.
func TestMagazineHistory(t *testing.T) {
	e := newEngine(t, sim.Options{}, config.Options{}, 1)
	c := newCMagazines(e.a)
	st := e.streams[0]
	pair := func() {
		p, err := c.alloc(e.dev, mib, st)
		must(t, err)
		must(t, c.free(e.a, p))
	}
	for range 3 {
		pair()
	}
	live, err := c.alloc(e.dev, 2*mib, st)
	must(t, err)
	e.dev.History.SetLimit(100)
	for range 10 {
		pair()
	}
	must(t, c.free(e.a, live))
	seen := map[event.Kind]int{}
	events, _ := e.dev.History.Read()
	for _, x := range events {
		seen[x.Kind]++
	}
	if seen[event.Alloc] != 10 || seen[event.FreeRequested] != 11 || seen[event.FreeCompleted] != 11 {
		t.Errorf("events of 10 pairs and a free: %v", seen)
	}
	e.dev.History.SetLimit(0)
	met := c.met
	for range 10 {
		pair()
	}
	if c.met-met < 8 {
		t.Errorf("after history %d of 10 requests needed no engine", c.met-met)
	}
}

// Of a stream on which an event could not be recorded only the context says when its work is over, also once it is promised to
// last and has a magazine. A free that C does after that wait is not over with it.
func TestMagazineEpochAfterWait(t *testing.T) {
	e := newEngine(t, sim.Options{Lag: time.Second, Check: sim.CheckUse}, config.Options{}, 0)
	c := newCMagazines(e.a)
	h := e.drv.NewStreamNonBlocking(0)
	st, err := e.dev.Stream(h)
	must(t, err)
	e.drv.FailCall(func(call string, _ uint64) cuda.Code {
		if call == "cuEventRecord" {
			return cuda.ErrUnknown
		}
		return cuda.Success
	})
	p, err := e.dev.Alloc(3*mib, st)
	must(t, err)
	must(t, e.a.Free(p)) // it is marked, and the event that was to close its epoch is missing
	e.drv.FailCall(nil)
	_, err = e.dev.Stream(h, config.StreamDurable)
	must(t, err)
	for range 2 {
		p, err = c.alloc(e.dev, 3*mib, st)
		must(t, err)
		must(t, e.drv.Use(0, h, p, 3*mib))
		must(t, c.free(e.a, p)) // into the magazine
		must(t, e.a.Trim())     // which the first time waits for the context
		must(t, e.drv.Fault())
	}
}

// One in some requests looks after frees that wait for other streams.
func TestMagazineCollects(t *testing.T) {
	e := newEngine(t, sim.Options{Lag: time.Millisecond}, config.Options{}, 2)
	c := newCMagazines(e.a)
	for range 5 {
		p, err := c.alloc(e.dev, mib, e.streams[0])
		must(t, err)
		q, err := c.alloc(e.dev, 3*mib, e.streams[0])
		must(t, err)
		must(t, c.free(e.a, p))
		must(t, c.free(e.a, q))
	}
	p, err := c.alloc(e.dev, mib, e.streams[0])
	must(t, err)
	must(t, e.drv.Use(0, e.streams[1].Handle(), p, mib))
	must(t, c.recordStream(e.a, p, e.streams[1]))
	must(t, c.free(e.a, p))
	e.drv.Advance(time.Second)
	met := c.met
	for i := 0; e.dev.Magazines.Flags().Waiting.Load(); i++ {
		if i > 2*magazine.PollEvery {
			t.Fatalf("after %d requests the free still waits", i)
		}
		p, err := c.alloc(e.dev, 3*mib, e.streams[0])
		must(t, err)
		must(t, c.free(e.a, p))
	}
	if c.met == met {
		t.Error("no request was met from the tray meanwhile")
	}
}

// A stream that may be destroyed, the per-thread one, another pool, and a routed stream have nothing to do with magazines.
func TestMagazineNot(t *testing.T) {
	e := newEngine(t, sim.Options{}, config.Options{}, 1)
	brief, err := e.dev.Stream(e.drv.NewStreamNonBlocking(0))
	must(t, err)
	perThread, err := e.dev.Stream(cuda.StreamPerThread, config.StreamDurable)
	must(t, err)
	for _, st := range []*engine.Stream{brief, perThread} {
		if _, f, err := e.dev.Magazines.Alloc(mib, st); f.Magazine != nil || err != nil {
			t.Errorf("a magazine for stream %v (%v)", st.ID(), err)
		}
	}
	st := e.streams[0]
	c := newCMagazines(e.a)
	p, err := c.alloc(e.dev, mib, st)
	must(t, err)
	must(t, c.free(e.a, p))
	pool, err := e.dev.NewPool(memory.PoolID{1, 1}, config.PoolOptions{})
	must(t, err)
	must(t, e.dev.Captures.Route(st, pool))
	q, f, err := e.dev.Magazines.Alloc(mib, st)
	if must(t, err); f.Magazine != nil {
		t.Error("a magazine with a block of another pool")
	}
	if q == p {
		t.Error("a routed stream was given a block of the default pool")
	}
	must(t, c.free(e.a, q))
	must(t, e.dev.Captures.Unroute(st))
	if r, err := c.alloc(e.dev, mib, st); r != p || err != nil {
		t.Errorf("%#x, want %#x again (%v)", r, p, err)
	}
}

// Setting magazine:off.
func TestMagazineOff(t *testing.T) {
	for text, want := range map[string]bool{"": true, "magazine:on": true, "magazine:off": false} {
		opts, err := config.Parse(text)
		must(t, err)
		if again, err := config.Parse(opts.String()); again != opts || err != nil {
			t.Errorf("%q is written as %q (%v)", text, opts, err)
		}
		e := newEngine(t, sim.Options{}, opts, 1)
		if _, f, err := e.dev.Magazines.Alloc(mib, e.streams[0]); (f.Magazine != nil) != want || err != nil {
			t.Errorf("%q: magazine %v (%v)", text, f.Magazine != nil, err)
		}
	}
	if _, err := config.Parse("magazine:no"); err == nil {
		t.Error("magazine:no is a setting")
	}
}

// Threads that share a stream, and others that look on. What is counted at the end is what happened, and no block was
// ever out twice.
func TestMagazineThreads(t *testing.T) {
	e := newEngine(t, sim.Options{}, config.Options{}, 2)
	c := newCMagazines(e.a)
	const goroutines, rounds = 4, 3000
	var live ranges
	var workers sync.WaitGroup
	stop := make(chan struct{})
	for g := range goroutines {
		workers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 1))
			sizes := []uint64{512, 100 * kib, mib, 3 * mib}
			var mine []cuda.Ptr
			for range rounds {
				if len(mine) < 3 && rng.IntN(2) == 0 || len(mine) == 0 {
					size := sizes[rng.IntN(len(sizes))]
					p, err := c.alloc(e.dev, size, e.streams[rng.IntN(2)])
					report(t, err)
					report(t, live.add(uint64(p), round512(size)))
					mine = append(mine, p)
					continue
				}
				p := mine[len(mine)-1]
				mine = mine[:len(mine)-1]
				live.remove(uint64(p))
				report(t, c.free(e.a, p))
			}
			for _, p := range mine {
				live.remove(uint64(p))
				report(t, c.free(e.a, p))
			}
		})
	}
	var onlooker sync.WaitGroup
	onlooker.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			switch i % 5 {
			case 0:
				s := e.dev.Views.Stats()
				if held := s.Reserved.All.Current; s.ActiveBytes.All.Current+s.InactiveBytes.All.Current != held {
					t.Errorf("%d bytes active, %d inactive, %d held", s.ActiveBytes.All.Current, s.InactiveBytes.All.Current, held)
				}
			case 1:
				e.dev.Views.Snapshot()
			case 2:
				report(t, e.dev.Trim())
			case 3:
				e.dev.History.SetLimit(10)
				e.dev.History.SetLimit(0)
			case 4:
				e.dev.Views.ResetPeaks()
			}
			time.Sleep(200 * time.Microsecond)
		}
	})
	workers.Wait()
	close(stop)
	onlooker.Wait()
	s := e.dev.Views.Stats()
	if s.Allocations.All.Current != 0 || s.ActiveBytes.All.Current != 0 || s.Requested.All.Current != 0 {
		t.Errorf("all was freed: %+v", s)
	}
	if c.met == 0 || c.kept == 0 {
		t.Errorf("the engine met all requests: %d, %d", c.met, c.kept)
	}
	must(t, e.a.Trim())
	must(t, e.a.Close())
}

// What C changes in one stream lies on cache lines of its own.
func TestMagazineLines(t *testing.T) {
	for range 100 {
		if f := magazine.New(511, 256*kib); uintptr(unsafe.Pointer(f))%64 != 0 || unsafe.Sizeof(*f)%64 != 0 {
			t.Fatalf("a magazine of %d bytes at %p", unsafe.Sizeof(*f), f)
		}
	}
	if n := unsafe.Sizeof(magazine.Flags{}); n != 128 {
		t.Errorf("flags of %d bytes", n)
	}
}

// BenchmarkMagazine is a population whose blocks are replaced one by one, as in BenchmarkChurn, through a magazine: frees go into
// the magazine, requests are the engine's.
func BenchmarkMagazine(b *testing.B) {
	for _, population := range []int{1000, 20000} {
		b.Run(fmt.Sprint(population), func(b *testing.B) {
			e := benchEngine(b, 1)
			c := newChurn(b, e, e.streams[0], population, 7)
			size := make([]uint64, population)
			for i, p := range c.blocks {
				x, err := e.a.Base(p)
				must(b, err)
				size[i] = x.Requested
			}
			_, token, err := e.dev.Magazines.Alloc(512, e.streams[0])
			must(b, err)
			f, mark := token.Magazine, make([]uint32, population)
			step := func() {
				k := (c.order[c.n&(1<<16-1)] + c.n) % population
				f.Lock()
				ok := f.Put(uint64(c.blocks[k]), size[k], mark[k], 1)
				f.Unlock()
				if !ok {
					e.free(b, c.blocks[k])
				}
				size[k] = c.sizes[(c.n*31+7)&(1<<16-1)]
				c.n++
				p, token, err := e.dev.Magazines.Alloc(size[k], e.streams[0])
				if err != nil {
					b.Fatal(err)
				}
				c.blocks[k], mark[k] = p, token.Mark
			}
			for range 4 * population {
				step()
			}
			b.ReportAllocs()
			b.ResetTimer()
			for range b.N {
				step()
			}
		})
	}
}
