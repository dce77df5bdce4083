package engine_test

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

// others are the other processes on one device of a simulated machine: what they hold, and what they may release of it.
type others struct {
	t        *testing.T
	e        *fixture
	dev      cuda.Device
	mu       sync.Mutex
	holds    uint64
	cached   uint64
	late     int    // so many refusals later what was released is free
	coming   uint64 // was released and is not free yet
	reserved uint64 // of what the driver has free: granted to others
	asked    []uint64
	done     []uint64
	granted  []uint64
	onAsk    func(n int)
	grown    int
}

func newOthers(t *testing.T, e *fixture, dev cuda.Device, holds, cached uint64) *others {
	o := &others{t: t, e: e, dev: dev, holds: holds, cached: cached}
	e.drv.SetOutside(dev, holds)
	e.a.SetNode(o)
	return o
}

// Admit is called once for each chunk; memory that was released becomes free after so many of them as late says.
func (o *others) Admit(dev cuda.Device, size uint64) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if dev != o.dev {
		return true
	}
	if o.coming > 0 {
		if o.late--; o.late <= 0 {
			o.holds -= o.coming
			o.coming = 0
			o.e.drv.SetOutside(dev, o.holds)
		}
	}
	free, _, err := o.e.drv.MemInfo(dev)
	if err != nil {
		o.t.Error(err)
	}
	return free >= size+o.reserved || o.reserved == 0
}

// Ask and Done look at the statistics, which take all of the engine's locks.
func (o *others) Ask(dev cuda.Device, need uint64, _ time.Duration) (uint64, string) {
	o.look(dev)
	o.mu.Lock()
	o.asked = append(o.asked, need)
	n := len(o.asked)
	gives := min(need, o.cached)
	o.cached -= gives
	o.coming += gives
	if gives > 0 {
		o.granted = append(o.granted, gives)
	}
	if o.late == 0 {
		o.holds -= o.coming
		o.coming = 0
		o.e.drv.SetOutside(dev, o.holds)
	}
	o.reserved = 0
	o.mu.Unlock()
	if o.onAsk != nil {
		o.onAsk(n)
	}
	return gives, "2 processes\nwere asked"
}

func (o *others) Done(dev cuda.Device, granted uint64) {
	o.look(dev)
	o.mu.Lock()
	defer o.mu.Unlock()
	o.done = append(o.done, granted)
}

// Grown takes all of the engine's locks as well.
func (o *others) Grown(dev cuda.Device) {
	if dev != o.dev {
		return
	}
	o.look(dev)
	o.mu.Lock()
	o.grown++
	o.mu.Unlock()
}

func (o *others) look(dev cuda.Device) {
	if dev != o.dev {
		o.t.Errorf("device %d, want %d", dev, o.dev)
	}
	d, err := o.e.a.Device(dev)
	if err != nil {
		o.t.Error(err)
		return
	}
	d.Views.Stats()
}

// check demands so many questions, and that each grant was ended once.
func (o *others) check(t *testing.T, asked int) {
	t.Helper()
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.asked) != asked || !slices.Equal(o.granted, o.done) {
		t.Errorf("asked for %v, want %d times; granted %v, ended %v", o.asked, asked, o.granted, o.done)
	}
}

// Memory that other processes do not use meets a request of every kind of pool that the driver has no memory for.
func TestNode(t *testing.T) {
	for name, kind := range map[string]config.PoolKind{"chunks": config.PoolDefault, "malloc": config.PoolMalloc, "single": config.PoolSingleHandle} {
		for _, late := range []int{0, 3} {
			t.Run(fmt.Sprintf("%s/%d", name, late), func(t *testing.T) {
				e := newEngine(t, sim.Options{Capacity: 256 * mib}, config.Options{History: 100}, 1)
				o := newOthers(t, e, 0, 200*mib, 150*mib)
				o.late = late
				pool := e.pool(t, 1, config.PoolOptions{Kind: kind})
				own := e.alloc(t, 16*mib, e.streams[0])
				if o.grown != 1 {
					t.Errorf("told %d times that memory was got of the driver, want once", o.grown)
				}
				p := fromPool(t, pool, 100*mib, e.streams[0])
				o.check(t, 1)
				if o.grown != 2 {
					t.Errorf("told %d times that memory was got of the driver, want twice", o.grown)
				}
				// 40 MiB are free. What they lack of 100 MiB was asked for, or a chunk more.
				if n := o.asked[0]; n < 60*mib || n > 100*mib {
					t.Errorf("asked for %d MiB", n/mib)
				}
				c := e.dev.Views.Stats().Counters
				if c.ByNode != 1 || c.Retries != 1 || c.OOMs != 0 {
					t.Errorf("%+v", c)
				}
				events, _ := e.dev.History.Read()
				if !slices.ContainsFunc(events, func(x event.Event) bool { return x.Kind == event.Retry && memory.Stages(x.Flags) == memory.StageNode }) {
					t.Errorf("the history does not name the stage: %+v", events)
				}
				e.free(t, p)
				p = fromPool(t, pool, 100*mib, e.streams[0])
				if o.grown != 2 {
					t.Errorf("told %d times, after a request that the cache met", o.grown)
				}
				e.free(t, p)
				e.free(t, own)
				e.a.SetNode(nil)
				outOfMemory(t, pool, 250*mib, e.streams[0])
				o.check(t, 1)
			})
		}
	}
}

// A request that other processes cannot meet asks twice at most, says what they released and what was said, and ends what it
// was granted.
func TestNodeHasTooLittle(t *testing.T) {
	for _, cached := range []uint64{0, 10 * mib} {
		e := newEngine(t, sim.Options{Capacity: 256 * mib, CallsTakeTime: true}, config.Options{}, 1)
		o := newOthers(t, e, 0, 200*mib, cached)
		s := stepsOf(t, outOfMemory(t, e.dev.DefaultPool(), 150*mib, e.streams[0]))
		asked := 1
		if cached > 0 {
			asked = 2
		}
		o.check(t, asked)
		if x := s[memory.StageNode]; x.Gained != cached || x.Tries != asked || x.Note != fmt.Sprintf("other processes released %s; 2 processes; were asked", map[uint64]string{0: "0 bytes", 10 * mib: "10.00 MiB"}[cached]) {
			t.Errorf("%+v", x)
		}
		if e.drv.ReservedBytes(0) != 0 {
			t.Errorf("%d bytes stay reserved", e.drv.ReservedBytes(0))
		}
	}
}

// Other processes are not asked where that would not help, and the failure says why.
func TestNodeIsNotAsked(t *testing.T) {
	pinned := func(e *fixture) config.PoolOptions {
		return config.PoolOptions{Upstream: resource.Limiting(resource.Pinned(e.drv, 0), 32*mib)}
	}
	for name, c := range map[string]struct {
		opts config.Options
		pool func(e *fixture) config.PoolOptions
		size uint64
		why  string
	}{
		"limit":           {opts: config.Options{Limit: 50 * mib}, size: 60 * mib, why: "a limit is in the way"},
		"limit, segments": {opts: config.Options{Limit: 50 * mib, Backend: config.BackendMalloc}, size: 60 * mib, why: "a limit is in the way"},
		"pool's limit":    {pool: func(*fixture) config.PoolOptions { return config.PoolOptions{Kind: config.PoolMalloc, Limit: 50 * mib} }, size: 60 * mib, why: "a limit is in the way"},
		"other memory":    {pool: pinned, size: 60 * mib, why: "the memory is not the device's own"},
		"small device":    {size: 257 * mib, why: "the device is not large enough"},
		"no device":       {size: 1 << 50, why: "no device has that much memory"},
		"stage off":       {opts: config.Options{Stages: memory.AllStages &^ memory.StageNode}, size: 100 * mib, why: "off by the settings"},
		"no new memory":   {opts: config.Options{Stages: memory.AllStages &^ memory.StageGrow}, size: 60 * mib, why: "no new memory was lacking"},
		"upstream's limit": {pool: func(e *fixture) config.PoolOptions {
			return config.PoolOptions{Upstream: resource.Limiting(resource.Device(e.drv, 0), 32*mib)}
		}, size: 40 * mib, why: "no new memory was lacking"},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEngine(t, sim.Options{Capacity: 256 * mib}, c.opts, 1)
			o := newOthers(t, e, 0, 200*mib, 200*mib)
			pool := e.dev.DefaultPool()
			if c.pool != nil {
				pool = e.pool(t, 1, c.pool(e))
			}
			noted(t, stepsOf(t, outOfMemory(t, pool, c.size, e.streams[0]))[memory.StageNode], 0, c.why)
			o.check(t, 0)
		})
	}
}

// The node comes before the spill, which is not asked for again.
func TestNodeBeforeSpill(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 256 * mib}, config.Options{}, 1)
	o := newOthers(t, e, 0, 200*mib, 10*mib)
	pool := e.pool(t, 1, config.PoolOptions{Spill: resource.Pinned(e.drv, 0)})
	fromPool(t, pool, 100*mib, e.streams[0])
	o.check(t, 2)
	if c := e.dev.Views.Stats().Counters; c.BySpill != 1 || c.ByNode != 0 {
		t.Errorf("%+v", c)
	}
	o.cached = 100 * mib
	fromPool(t, pool, 100*mib, e.streams[0])
	o.check(t, 3)
	if c := e.dev.Views.Stats().Counters; c.BySpill != 1 || c.ByNode != 1 {
		t.Errorf("%+v", c)
	}
}

// A request or a resume that ends by another error, or by a panic, ends what it was granted, and leaves no lock held.
func TestNodeGrantsEnd(t *testing.T) {
	for name, onAsk := range map[string]func(e *fixture, n int){
		"error": func(e *fixture, n int) {
			e.drv.FailCall(func(call string, _ uint64) cuda.Code {
				if call == "cuMemCreate" {
					return cuda.ErrInvalidValue
				}
				return cuda.Success
			})
		},
		"panic": func(_ *fixture, n int) {
			if n == 2 {
				panic("asked too often")
			}
		},
	} {
		for _, resumes := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, resume %v", name, resumes), func(t *testing.T) {
				e := newEngine(t, sim.Options{Capacity: 256 * mib}, config.Options{}, 1)
				if resumes {
					e.alloc(t, 100*mib, e.streams[0])
					_, err := e.dev.Pause(engine.Selection{}, config.PauseOptions{})
					must(t, err)
				}
				o := newOthers(t, e, 0, 200*mib, 10*mib)
				o.onAsk = func(n int) { onAsk(e, n) }
				func() {
					defer func() {
						if x := recover(); x != nil != (name == "panic") {
							t.Errorf("panic: %v", x)
						}
					}()
					var err error
					if resumes {
						_, err = e.dev.Resume(engine.Selection{})
					} else {
						_, err = e.dev.Alloc(100*mib, e.streams[0])
					}
					if !errors.Is(err, cuda.ErrInvalidValue) {
						t.Errorf("the error is %v", err)
					}
				}()
				e.drv.FailCall(nil)
				if len(o.granted) != 1 || !slices.Equal(o.granted, o.done) {
					t.Errorf("granted %v, ended %v", o.granted, o.done)
				}
				o.onAsk = nil
				o.cached = 190 * mib
				if resumes {
					_, err := e.dev.Resume(engine.Selection{})
					must(t, err)
				}
				e.alloc(t, 100*mib, e.streams[0])
			})
		}
	}
}

// A resume asks as a request does, with the lock for pauses let go.
func TestNodeMeetsResume(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 256 * mib}, config.Options{}, 1)
	e.alloc(t, 100*mib, e.streams[0])
	_, err := e.dev.Pause(engine.Selection{}, config.PauseOptions{})
	must(t, err)
	o := newOthers(t, e, 0, 200*mib, 10*mib)
	_, err = e.dev.Resume(engine.Selection{})
	var oom *memory.OutOfMemoryError
	if !errors.As(err, &oom) {
		t.Fatal(err)
	}
	noted(t, stepsOf(t, oom)[memory.StageNode], 2, "other processes released 10.00 MiB")
	o.check(t, 2)
	o.cached, o.late = 150*mib, 3
	o.onAsk = func(int) {
		if _, err := e.dev.Pause(engine.Selection{}, config.PauseOptions{}); err != nil {
			t.Error(err)
		}
	}
	_, err = e.dev.Resume(engine.Selection{})
	must(t, err)
	o.check(t, 3)
	e.dev.SetLimit(50 * mib)
	_, err = e.dev.Pause(engine.Selection{}, config.PauseOptions{})
	must(t, err)
	_, err = e.dev.Resume(engine.Selection{})
	if !errors.As(err, &oom) {
		t.Fatal(err)
	}
	noted(t, stepsOf(t, oom)[memory.StageNode], 0, "a limit is in the way")
	o.check(t, 3)
}

// What the driver has free and others were granted is not taken: the driver is not asked for it, and the request asks the node
// for all that it needs.
func TestAdmission(t *testing.T) {
	for name, kind := range map[string]config.PoolKind{"chunks": config.PoolDefault, "malloc": config.PoolMalloc} {
		t.Run(name, func(t *testing.T) {
			e := newEngine(t, sim.Options{Capacity: 512 * mib}, config.Options{}, 1)
			pool := e.pool(t, 1, config.PoolOptions{Kind: kind})
			fromPool(t, pool, 20*mib, e.streams[0])
			o := newOthers(t, e, 0, 312*mib, 312*mib)
			o.reserved = 180 * mib // all that is free
			e.drv.ResetCalls()
			calls := uint64(1 << 62)
			o.onAsk = func(int) {
				c := e.drv.Calls().Calls
				calls = c["cuMemCreate"].Count + c["cuMemAlloc"].Count
			}
			fromPool(t, pool, 100*mib, e.streams[0])
			o.check(t, 1)
			if calls != 0 || o.asked[0] != 100*mib {
				t.Errorf("%d calls before the node was asked for %d MiB", calls, o.asked[0]/mib)
			}
		})
	}
}

// Each device asks for its own memory, also one that starts after the node was set.
func TestNodeOfTwoDevices(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 256 * mib, Devices: 2}, config.Options{}, 1)
	o := newOthers(t, e, 1, 200*mib, 150*mib)
	e.alloc(t, 200*mib, e.streams[0])
	d, err := e.a.Device(1)
	must(t, err)
	st, err := d.Stream(e.drv.NewStreamNonBlocking(1), config.StreamDurable)
	must(t, err)
	_, err = d.Alloc(100*mib, st)
	must(t, err)
	o.check(t, 1)
}

// While one request waits for other processes, others are met from the cache, and the node may be taken away.
func TestNodeWhileRequestsGoOn(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 256 * mib}, config.Options{}, 2)
	p := e.alloc(t, 16*mib, e.streams[1])
	o := newOthers(t, e, 0, 200*mib, 150*mib)
	inside, leave := make(chan bool), make(chan bool)
	o.onAsk = func(int) { close(inside); <-leave }
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := e.dev.Alloc(100*mib, e.streams[0]); err != nil {
			t.Error(err)
		}
	})
	<-inside
	for range 100 {
		e.free(t, p)
		p = e.alloc(t, 16*mib, e.streams[1])
	}
	if _, err := e.dev.Pause(engine.Selection{Tag: 1}, config.PauseOptions{}); err != nil {
		t.Error(err)
	}
	e.a.SetNode(nil)
	close(leave)
	wg.Wait()
	o.check(t, 1)
}

// Many threads ask, are granted and fail at once: each grant is ended once, and nothing is lost.
func TestNodeOfManyThreads(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 256 * mib}, config.Options{}, 4)
	o := newOthers(t, e, 0, 200*mib, 100*mib)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for range 5 {
				p, err := e.dev.Alloc(48*mib, e.streams[i])
				if err != nil && !errors.Is(err, cuda.ErrOutOfMemory) {
					t.Error(err)
				}
				if _, err := e.dev.GiveBack(8*mib, 16*mib); err != nil {
					t.Error(err)
				}
				if p != 0 {
					e.free(t, p)
				}
			}
		})
	}
	wg.Wait()
	slices.Sort(o.granted)
	slices.Sort(o.done)
	o.check(t, len(o.asked))
	must(t, e.a.Trim())
	if n := e.drv.ReservedBytes(0); n != 0 {
		t.Errorf("%d bytes stay reserved", n)
	}
}
