package engine_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/internal/slow"
	"github.com/cistern-gpu/cistern/internal/testkit"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

// registry is what somebody knows who registers memory elsewhere: the chunks and segments it was told of.
type registry struct {
	fail func(format string, args ...any)

	mu     sync.Mutex
	sizes  map[uint64]uint64 // guarded by mu: by address
	order  ranges            // the same; it has its own lock
	maps   int               // guarded by mu: how often it was told of new memory
	unmaps int               // guarded by mu: and of memory that goes
	slow   func()            // called in every call, with no lock
}

func newRegistry(fail func(format string, args ...any)) *registry {
	return &registry{fail: fail, sizes: map[uint64]uint64{}}
}

func (r *registry) enter(n *int) {
	r.mu.Lock()
	*n++
	r.mu.Unlock()
	if r.slow != nil {
		r.slow()
	}
}

func (r *registry) mapped(p cuda.Ptr, size uint64) {
	r.enter(&r.maps)
	r.add(uint64(p), size)
}

func (r *registry) add(addr, size uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.order.add(addr, size); err != nil {
		r.fail("observers of new memory: %v", err)
	}
	r.sizes[addr] = size
}

func (r *registry) unmapped(p cuda.Ptr, size uint64) {
	r.enter(&r.unmaps)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sizes[uint64(p)] != size {
		r.fail("told that %#x+%d goes, where %d bytes are registered", uint64(p), size, r.sizes[uint64(p)])
		return
	}
	delete(r.sizes, uint64(p))
	r.order.remove(uint64(p))
}

// covers says what of a block is not registered.
func (r *registry) covers(p cuda.Ptr, size uint64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for at, end := uint64(p), uint64(p)+size; at < end; {
		s, ok := r.order.holding(at)
		if !ok {
			return fmt.Errorf("%#x of the block %#x+%d is not registered", at, uint64(p), size)
		}
		at = s.hi
	}
	return nil
}

func (r *registry) touches(p cuda.Ptr, size uint64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for addr, n := range r.sizes {
		if addr < uint64(p)+size && uint64(p) < addr+n {
			return true
		}
	}
	return false
}

// holding finds the range that an address lies in.
func (r *ranges) holding(at uint64) (span, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.list {
		if s.lo <= at && at < s.hi {
			return s, true
		}
	}
	return span{}, false
}

// watched is a driver that looks whether what goes is registered still, and whether memory moves.
type watched struct {
	*sim.Driver
	reg *registry

	mu     sync.Mutex
	at     map[cuda.Ptr]cuda.Handle // guarded by mu: what is mapped
	stay   bool                     // nothing may be mapped twice
	mapped map[cuda.Handle]int      // guarded by mu
}

func watch(drv *sim.Driver, reg *registry, stay bool) *watched {
	return &watched{Driver: drv, reg: reg, stay: stay, at: map[cuda.Ptr]cuda.Handle{}, mapped: map[cuda.Handle]int{}}
}

func (w *watched) MemMap(p cuda.Ptr, size uint64, h cuda.Handle) error {
	err := w.Driver.MemMap(p, size, h)
	w.mu.Lock()
	defer w.mu.Unlock()
	if err == nil {
		w.at[p] = h
		if w.mapped[h]++; w.mapped[h] > 1 && w.stay {
			w.reg.fail("%#x+%d is mapped elsewhere as well", uint64(p), size)
		}
	}
	return err
}

func (w *watched) MemUnmap(p cuda.Ptr, size uint64) error {
	if w.reg.touches(p, size) {
		w.reg.fail("%#x+%d is unmapped while it is registered", uint64(p), size)
	}
	err := w.Driver.MemUnmap(p, size)
	w.mu.Lock()
	defer w.mu.Unlock()
	for at, h := range w.at {
		if err == nil && p <= at && at < p+cuda.Ptr(size) {
			w.mapped[h]--
			delete(w.at, at)
		}
	}
	return err
}

func (w *watched) MemFree(dev cuda.Device, p cuda.Ptr) error {
	if w.reg.touches(p, 1) {
		w.reg.fail("%#x is freed while it is registered", uint64(p))
	}
	return w.Driver.MemFree(dev, p)
}

// registered is an engine over a watched driver whose registry is told of everything from the start.
func registered(t *testing.T, o sim.Options, opts config.Options, streams int) (*fixture, *registry) {
	t.Helper()
	reg := newRegistry(t.Errorf)
	o.Check, o.OnFault = sim.CheckOrder, func(err error) { t.Error(err) }
	e := &fixture{drv: sim.New(o)}
	var err error
	if e.a, err = engine.New(watch(e.drv, reg, true), opts); err != nil {
		t.Fatal(err)
	}
	e.dev, err = e.a.Device(0)
	must(t, err)
	e.dev.OnMap(reg.mapped)
	e.dev.OnUnmap(reg.unmapped)
	for range streams {
		st, err := e.dev.Stream(e.drv.NewStreamNonBlocking(0), config.StreamDurable)
		must(t, err)
		e.streams = append(e.streams, st)
	}
	return e, reg
}

// While somebody is told of unmapping, memory stays where it is: what another stream and another pool have free is told
// of, unmapped and mapped where it is wanted only when there is no other memory, and then no more than is needed.
func TestOnUnmap(t *testing.T) {
	for _, text := range []string{"", "backend:malloc", "single_handle:true"} {
		t.Run(text, func(t *testing.T) {
			opts, err := config.Parse(text)
			must(t, err)
			e, reg := registered(t, sim.Options{Capacity: 256 * mib, Lag: 20 * time.Millisecond}, opts, 2)
			pool, err := e.dev.NewPool(memory.PoolID{1, 1}, config.PoolOptions{})
			must(t, err)
			use := func(st *engine.Stream, p cuda.Ptr, err error, size uint64) cuda.Ptr {
				t.Helper()
				must(t, err)
				must(t, reg.covers(p, size))
				must(t, e.drv.Use(0, st.Handle(), p, size))
				return p
			}
			var cached []cuda.Ptr
			for range 3 {
				p, err := pool.Alloc(40*mib, e.streams[0])
				cached = append(cached, use(e.streams[0], p, err, 40*mib))
			}
			for _, p := range cached {
				e.free(t, p)
			}
			maps := reg.maps
			p, err := pool.Alloc(30*mib, e.streams[0])
			e.free(t, use(e.streams[0], p, err, 30*mib))
			if maps == 0 || reg.maps != maps || reg.unmaps != 0 {
				t.Errorf("observers of new memory %d times, then %d; of memory that goes %d times", maps, reg.maps, reg.unmaps)
			}
			p, err = e.dev.Alloc(120*mib, e.streams[1]) // of 136 MiB that are free
			q := use(e.streams[1], p, err, 120*mib)
			if reg.unmaps != 0 {
				t.Error("memory goes while there is other memory")
			}
			p, err = e.dev.Alloc(30*mib, e.streams[1])
			r := use(e.streams[1], p, err, 30*mib)
			s := e.dev.Views.Stats()
			if reg.unmaps == 0 || s.Remaps != 0 || s.ByLend != 1 || s.Retries != 1 {
				t.Errorf("observers of %d that go; %+v", reg.unmaps, s.Counters)
			}
			if opts.Backend == config.BackendVMM && !opts.SingleHandle && s.Reserved.All.Current < 240*mib {
				t.Errorf("only %d bytes are held: more went than was needed", s.Reserved.All.Current)
			}
			e.free(t, q)
			e.free(t, r)
			must(t, e.dev.Trim())
			if len(reg.sizes) != 0 || e.drv.ReservedBytes(0) != 0 {
				t.Errorf("after Trim %d ranges are registered, %d bytes held", len(reg.sizes), e.drv.ReservedBytes(0))
			}
			must(t, pool.Release())
			must(t, e.a.Close())
		})
	}
}

// A request that fails has tried to take what is free, and tells so.
func TestOnUnmapOutOfMemory(t *testing.T) {
	e, reg := registered(t, sim.Options{Capacity: 64 * mib}, config.Options{}, 2)
	e.free(t, e.alloc(t, 10*mib, e.streams[0]))
	held := e.alloc(t, 30*mib, e.streams[0])
	var oom *memory.OutOfMemoryError
	if _, err := e.dev.Alloc(40*mib, e.streams[1]); !errors.As(err, &oom) || oom.Tried&memory.StageLend == 0 {
		t.Errorf("%v", err)
	}
	must(t, reg.covers(held, 30*mib))
	e.free(t, e.alloc(t, 30*mib, e.streams[1]))
	e.free(t, held)
}

// Old mappings from before anybody wanted to know are told of before they go, when the GPU is done with them; when
// nobody wants to know any more, memory moves again.
func TestOnUnmapFindsOldMappings(t *testing.T) {
	reg := newRegistry(t.Errorf)
	drv := sim.New(sim.Options{Capacity: 128 * mib, Lag: 20 * time.Millisecond, Check: sim.CheckOrder, OnFault: func(err error) { t.Error(err) }})
	a, err := engine.New(watch(drv, reg, false), config.Options{})
	must(t, err)
	e := &fixture{drv: drv, a: a}
	e.dev, err = a.Device(0)
	must(t, err)
	for range 2 {
		st, err := e.dev.Stream(drv.NewStreamNonBlocking(0), config.StreamDurable)
		must(t, err)
		e.streams = append(e.streams, st)
	}
	e.dev.OnMap(reg.add2)
	p := e.alloc(t, 100*mib, e.streams[0])
	must(t, drv.Use(0, e.streams[0].Handle(), p, 100*mib))
	e.free(t, p)
	p = e.alloc(t, 120*mib, e.streams[1]) // takes all of it, behind an event
	must(t, drv.Use(0, e.streams[1].Handle(), p, 120*mib))
	old := e.dev.Views.Stats().StaleMappings
	if old == 0 || e.dev.Views.Stats().Remaps == 0 {
		t.Fatalf("%d old mappings, %d moves: nothing to test", old, e.dev.Views.Stats().Remaps)
	}
	e.dev.OnUnmap(reg.unmapped)
	e.free(t, e.alloc(t, 2*mib, e.streams[0]))
	if reg.unmaps != 0 || e.dev.Views.Stats().StaleMappings != old {
		t.Errorf("%d old mappings were told of while the GPU uses them", reg.unmaps)
	}
	drv.Advance(time.Second)
	e.free(t, e.alloc(t, 4*mib, e.streams[0]))
	if reg.unmaps != old || e.dev.Views.Stats().StaleMappings != 0 {
		t.Errorf("%d of %d old mappings were told of, %d are left", reg.unmaps, old, e.dev.Views.Stats().StaleMappings)
	}
	must(t, reg.covers(p, 120*mib))
	e.free(t, p)
	must(t, e.dev.Trim())
	if len(reg.sizes) != 0 {
		t.Errorf("%d ranges are registered after Trim", len(reg.sizes))
	}

	e.dev.OnUnmap(nil)
	reg.sizes, reg.order.list = map[uint64]uint64{}, nil
	e.dev.OnMap(nil)
	moved := e.dev.Views.Stats().Remaps
	e.free(t, e.alloc(t, 100*mib, e.streams[0]))
	e.free(t, e.alloc(t, 120*mib, e.streams[1]))
	if e.dev.Views.Stats().Remaps == moved {
		t.Error("nobody is told any more, and still nothing moves")
	}
}

func (r *registry) add2(p cuda.Ptr, size uint64) { r.add(uint64(p), size) }

// The memory of a pool that ended is taken by others when the GPU is done with it and it is unmapped, not before.
func TestOnUnmapEndOfPool(t *testing.T) {
	e, reg := registered(t, sim.Options{Capacity: 128 * mib, Lag: 20 * time.Millisecond}, config.Options{}, 2)
	pool, err := e.dev.NewPool(memory.PoolID{1, 1}, config.PoolOptions{})
	must(t, err)
	p, err := pool.Alloc(60*mib, e.streams[0])
	must(t, err)
	must(t, e.drv.Use(0, e.streams[0].Handle(), p, 60*mib))
	e.free(t, p)
	must(t, pool.Release())
	if s := e.dev.Views.Stats(); s.SpareBytes != 60*mib || s.StaleMappings == 0 {
		t.Fatalf("nothing to test: %+v", s)
	}
	e.free(t, e.alloc(t, 20*mib, e.streams[1]))
	if reg.unmaps != 0 || e.drv.ReservedBytes(0) != 80*mib {
		t.Errorf("%d chunks of a busy GPU were told of, %d bytes are held", reg.unmaps, e.drv.ReservedBytes(0))
	}
	e.drv.Advance(time.Second)
	e.free(t, e.alloc(t, 40*mib, e.streams[1]))
	if reg.unmaps == 0 || e.drv.ReservedBytes(0) != 80*mib {
		t.Errorf("%d chunks were told of, %d bytes are held", reg.unmaps, e.drv.ReservedBytes(0))
	}
}

// asksMeanwhile has one thread give memory back, of which a function is told that takes as long as held does, and another one
// ask for it: it needs what is given back.
func asksMeanwhile(t *testing.T, o config.Options, held func()) (e *fixture, trimmed, failed chan error) {
	t.Helper()
	e = newEngine(t, sim.Options{Capacity: 64 * mib}, o, 2)
	entered := make(chan struct{})
	var once sync.Once
	e.dev.OnUnmap(func(cuda.Ptr, uint64) {
		once.Do(func() {
			close(entered)
			held()
		})
	})
	e.free(t, e.alloc(t, 50*mib, e.streams[0]))
	trimmed, failed = make(chan error), make(chan error)
	go func() { trimmed <- e.dev.Trim() }()
	<-entered
	go func() {
		_, err := e.dev.Alloc(60*mib, e.streams[1])
		failed <- err
	}()
	return e, trimmed, failed
}

// A request that needs what another thread is giving back waits for it rather than fail.
func TestOnUnmapIsWaitedFor(t *testing.T) {
	for _, backend := range []config.Backend{config.BackendVMM, config.BackendMalloc} {
		leave := make(chan struct{})
		_, trimmed, failed := asksMeanwhile(t, config.Options{Backend: backend}, func() { <-leave })
		select {
		case err := <-failed:
			t.Fatalf("%s: the request did not wait: %v", backend, err)
		case <-time.After(20 * time.Millisecond):
		}
		close(leave)
		must(t, <-trimmed)
		if err := <-failed; err != nil {
			t.Errorf("%s: %v", backend, err)
		}
	}
}

// A function that waits for a lock which a thread holds while it allocates costs that thread's request, at worst, and
// never hangs it.
func TestOnUnmapWaitsForAnAllocatingThread(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 64 * mib}, config.Options{}, 2)
	var theirs sync.Mutex
	entered := make(chan struct{})
	var once sync.Once
	e.dev.OnUnmap(func(cuda.Ptr, uint64) {
		once.Do(func() { close(entered) })
		theirs.Lock()
		defer theirs.Unlock()
	})
	e.free(t, e.alloc(t, 50*mib, e.streams[0]))
	theirs.Lock()
	trimmed := make(chan error)
	go func() { trimmed <- e.dev.Trim() }()
	<-entered
	if p, err := e.dev.Alloc(60*mib, e.streams[1]); !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Errorf("%#x, %v", p, err)
	}
	theirs.Unlock()
	must(t, <-trimmed)
	e.free(t, e.alloc(t, 60*mib, e.streams[1]))
}

// OnUnmap and OnMap return only when the former function is no longer called, whatever that does, which may be to use
// the allocator.
func TestOnUnmapReplaced(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 256 * mib}, config.Options{}, 2)
	entered, leave := make(chan struct{}), make(chan struct{})
	var once sync.Once
	other := e.alloc(t, 1000, e.streams[1])
	e.dev.OnUnmap(func(cuda.Ptr, uint64) {
		once.Do(func() {
			e.dev.Views.Stats()
			e.dev.Views.Snapshot()
			e.free(t, other)
			close(entered)
			<-leave
		})
	})
	e.free(t, e.alloc(t, 20*mib, e.streams[0]))
	trimmed, replaced := make(chan error), make(chan struct{})
	go func() { trimmed <- e.dev.Trim() }()
	<-entered
	e.free(t, e.alloc(t, 30*mib, e.streams[1])) // others go on meanwhile
	go func() {
		e.dev.OnUnmap(nil)
		close(replaced)
	}()
	select {
	case <-replaced:
		t.Error("OnUnmap returned while the former function runs")
	case <-time.After(20 * time.Millisecond):
	}
	close(leave)
	must(t, <-trimmed)
	<-replaced
}

// Threads allocate, free, trim and end pools over too little memory while a slow registry is told; then they stop telling
// and start again. Each does some hundred things, however little a busy machine does in the time.
func TestOnUnmapConcurrently(t *testing.T) {
	seed := testkit.Seed(t)
	budget := time.Second
	if testing.Short() {
		budget = 300 * time.Millisecond
	}
	for i, text := range []string{"", "chunk:2MiB,cross_stream:ready", "backend:malloc", "single_handle:true"} {
		t.Run(text, func(t *testing.T) {
			opts, err := config.Parse(text)
			must(t, err)
			const threads = 4
			what := fmt.Sprintf("seed %d, %q", seed, text)
			e, reg := registered(t, sim.Options{Capacity: 256 * mib, Lag: time.Millisecond}, opts, threads)
			reg.fail = func(format string, args ...any) { t.Errorf("%s: %s", what, fmt.Sprintf(format, args...)) }
			var done sync.WaitGroup
			leftovers := make(chan cuda.Ptr, 1024)
			reg.slow = func() { // which may free, and ask
				time.Sleep(50 * time.Microsecond)
				select {
				case p := <-leftovers:
					if err := e.a.Free(p); err != nil {
						t.Errorf("%s: %v", what, err)
					}
				default:
					e.dev.Views.Stats()
				}
			}
			stop := time.Now().Add(budget)
			for n := range threads {
				done.Add(1)
				go func() {
					defer done.Done()
					rng := rand.New(rand.NewPCG(seed+uint64(i), uint64(n)))
					st := e.streams[n]
					var live []cuda.Ptr
					pools := uint64(0)
					pool := e.dev.DefaultPool()
					for turn := 0; turn < 300 || time.Now().Before(stop); turn++ {
						switch k := rng.IntN(100); {
						case k < 45:
							size := 1 + rng.Uint64N(uint64(1)<<(10+rng.IntN(17)))
							p, err := pool.Alloc(size, st)
							if errors.Is(err, cuda.ErrOutOfMemory) {
								for _, p := range live {
									e.a.Free(p)
								}
								live = nil
								break
							}
							if err == nil {
								err = errors.Join(reg.covers(p, size), e.drv.Use(0, st.Handle(), p, size))
							}
							if err != nil {
								t.Errorf("%s: %v", what, err)
								return
							}
							live = append(live, p)
						case k < 92 && len(live) > 0:
							j := rng.IntN(len(live))
							p := live[j]
							live[j] = live[len(live)-1]
							live = live[:len(live)-1]
							if rng.IntN(4) == 0 {
								if err := e.a.RecordStream(p, e.streams[rng.IntN(threads)]); err != nil {
									t.Errorf("%s: %v", what, err)
								}
							}
							if rng.IntN(8) == 0 && len(leftovers) < cap(leftovers)/2 {
								leftovers <- p
							} else if err := e.a.Free(p); err != nil {
								t.Errorf("%s: %v", what, err)
							}
						case k == 98:
							if err := e.dev.Trim(); err != nil {
								t.Errorf("%s: %v", what, err)
							}
						case k == 99:
							if pool != e.dev.DefaultPool() {
								if err := pool.Release(); err != nil {
									t.Errorf("%s: %v", what, err)
								}
							}
							pools++
							o := config.PoolOptions{}
							if rng.IntN(3) == 0 {
								o.Upstream = resource.Device(e.a.Driver(), 0)
							}
							var err error
							if pool, err = e.dev.NewPool(memory.PoolID{uint64(n + 1), pools}, o); err != nil {
								t.Errorf("%s: %v", what, err)
								return
							}
						}
					}
					for _, p := range live {
						e.a.Free(p)
					}
					if pool != e.dev.DefaultPool() {
						pool.Release()
					}
				}()
			}
			done.Wait()
			for len(leftovers) > 0 {
				e.free(t, <-leftovers)
			}
			if s := e.dev.Views.Stats(); s.Remaps != 0 || s.Reserved.All.Current != int64(e.drv.ReservedBytes(0)) ||
				s.Reserved.All.Current != s.ActiveBytes.All.Current+s.InactiveBytes.All.Current {
				t.Errorf("%s: the driver has given %d bytes; %+v", what, e.drv.ReservedBytes(0), s)
			}
			must(t, e.dev.Trim())
			if len(reg.sizes) != 0 || reg.unmaps == 0 || e.drv.ReservedBytes(0) != 0 {
				t.Errorf("%s: %d ranges are registered after Trim, %d bytes held; %d unmapped", what, len(reg.sizes), e.drv.ReservedBytes(0), reg.unmaps)
			}
			must(t, e.a.Close())
		})
	}
}

// Whatever driver call fails, what is handed out is registered and what goes is not. Each call fails with one error of two.
func TestOnUnmapFailEveryCall(t *testing.T) {
	onUnmapFailEveryCall(t, uint64(quick(1, 31)), 2)
}

func TestSlowOnUnmapFailEveryCall(t *testing.T) {
	slow.Only(t)
	onUnmapFailEveryCall(t, 1, 1)
}

// onUnmapFailEveryCall fails every step-th driver call, with one of so many errors.
func onUnmapFailEveryCall(t *testing.T, step, oneOf uint64) {
	for i, text := range []string{"", "backend:malloc", "single_handle:true"} {
		opts, err := config.Parse(text)
		must(t, err)
		clean := newScenario(t, "nothing fails, "+text, nil)
		clean.reg = newRegistry(clean.fail)
		clean.play(opts)
		calls := clean.drv.CallNumber()
		clean.end()
		for j, code := range []cuda.Code{cuda.ErrOutOfMemory, cuda.ErrNotSupported} {
			for k := uint64(1 + i); k <= calls; k += step {
				if (k+uint64(i+j))%oneOf != 0 {
					continue
				}
				s := newScenario(t, fmt.Sprintf("call %d of %d fails with %v, %q", k, calls, code, text), nil)
				s.reg = newRegistry(s.fail)
				if !s.failing(opts, k, code) {
					continue
				}
				s.end()
				if len(s.reg.sizes) != 0 {
					s.fail("%d ranges are registered in the end", len(s.reg.sizes))
				}
			}
		}
	}
}

// A peer that is enabled while new memory is told of may use that too.
func TestPeerDuringOnMap(t *testing.T) {
	drv := sim.New(sim.Options{Devices: 2, Check: sim.CheckOrder})
	p := newPair(t, drv, drv, config.Options{})
	entered, leave := make(chan struct{}), make(chan struct{})
	var once sync.Once
	p.dev[0].OnMap(func(cuda.Ptr, uint64) {
		once.Do(func() {
			close(entered)
			<-leave
		})
	})
	got := make(chan cuda.Ptr)
	go func() {
		x, err := p.dev[0].Alloc(20*mib, p.st[0])
		if err != nil {
			t.Error(err)
		}
		got <- x
	}()
	<-entered
	must(t, p.dev[0].Peers.Enable(1))
	close(leave)
	must(t, p.use(1, <-got, 20*mib))
}

// A request waits a second for one call that does not come back, longer for calls that do and for threads that wait for a lock of
// the engine's, and not for ever for anything.
func TestOnUnmapTimeout(t *testing.T) {
	for _, c := range []struct {
		what   string
		oldest func(n int) engine.Publication
		want   int // turns of 50 ms
	}{
		{"one call that does not return", func(int) engine.Publication { return engine.Publication{} }, 20},
		{"three threads whose calls return and one whose does not", func(n int) engine.Publication { return engine.Publication{Thread: min(n/15, 3)} }, 45 + 20},
		{"three calls of one thread that return and one that does not", func(n int) engine.Publication { return engine.Publication{Returned: min(n/15, 3)} }, 45 + 20},
		{"a thread that waits for the engine's lock, then another call", func(n int) engine.Publication {
			return engine.Publication{Thread: n / 100, Ended: n < 100}
		}, 100 + 20},
		{"threads without end", func(n int) engine.Publication { return engine.Publication{Thread: n} }, 19 + 20},
		{"calls of one thread without end", func(n int) engine.Publication { return engine.Publication{Returned: n} }, 400},
		{"a thread that waits for the engine's lock for ever", func(n int) engine.Publication { return engine.Publication{Ended: true} }, 400},
	} {
		if n := engine.Waits(2000, c.oldest); n != c.want {
			t.Errorf("%s: it waits %d turns, want %d", c.what, n, c.want)
		}
	}
}

// What a request waits for is seen: each call that returns, and that the thread has called for all ranges and waits for the lock
// that another thread has for a slow driver call.
func TestOnUnmapProgress(t *testing.T) {
	drv := sim.New(sim.Options{Capacity: 64 * mib})
	e := newEngineOver(t, drv, drv, config.Options{ChunkMax: 4 * mib}, 1)
	entered, leave := make(chan int), make(chan struct{})
	calls := 0
	e.dev.OnUnmap(func(cuda.Ptr, uint64) {
		calls++
		entered <- calls
		<-leave
	})
	e.free(t, e.alloc(t, 12*mib, e.streams[0]))
	chunks := int(e.dev.Views.Stats().DeviceAllocs)
	trimmed := make(chan error)
	go func() { trimmed <- e.dev.Trim() }()
	for n := 1; n <= chunks; n++ {
		if call := <-entered; call != n {
			t.Fatalf("call %d, want %d", call, n)
		}
		if p := engine.OldestPublication(e.dev); p.Returned != n-1 || p.Ended {
			t.Errorf("in call %d: %+v", n, p)
		}
		if n < chunks {
			leave <- struct{}{}
		}
	}
	letGo := engine.HoldDevice(e.dev)
	leave <- struct{}{}
	for !engine.OldestPublication(e.dev).Ended {
		time.Sleep(time.Millisecond)
	}
	if p := engine.OldestPublication(e.dev); p.Returned != chunks || chunks < 3 {
		t.Errorf("after the calls for %d chunks: %+v", chunks, p)
	}
	letGo()
	must(t, <-trimmed)
}
