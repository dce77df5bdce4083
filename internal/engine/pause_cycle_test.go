package engine_test

import (
	"errors"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
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
)

// What thousands of cycles leave, and what threads do to each other while memory is paused.

// TestPauseCycles: thousands of cycles leave device memory, host memory, Go's own memory and descriptors where they were.
func TestPauseCycles(t *testing.T) {
	pauseCycles(t, quick(2000, 1000))
}

func TestSlowPauseCycles(t *testing.T) {
	slow.Only(t)
	pauseCycles(t, 10000)
}

func pauseCycles(t *testing.T, cycles int) {
	p := newPausing(t, sim.Options{Capacity: 128 * mib}, config.Options{})
	pool, err := p.d.NewPool(memory.PoolID{1, 0}, config.PoolOptions{})
	if err != nil {
		t.Fatal(err)
	}
	single, err := p.d.NewPool(memory.PoolID{2, 0}, config.PoolOptions{Kind: config.PoolSingleHandle})
	if err != nil {
		t.Fatal(err)
	}
	sizes := []uint64{700, 30 * kib, 300 * kib, 600*kib + 512}
	var ptrs []cuda.Ptr
	for i, n := range sizes {
		ptrs = append(ptrs, p.alloc(pool, n, 3))
		p.fill(ptrs[i], n, byte(i))
	}
	other := p.alloc(single, 64*kib, 3)
	p.fill(other, 64*kib, 77)
	sel, dir := engine.Selection{Tag: 3}, t.TempDir()
	type state struct {
		leaks    sim.Live
		device   uint64
		host     uint64
		files    int
		heap     uint64
		addressB uint64
	}
	look := func() (s state) {
		s.leaks, s.device, s.host = p.drv.Leaks(), p.drv.ReservedBytes(0), p.drv.HostBytes()
		s.files = testkit.Descriptors(t)
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		s.heap, s.addressB = m.HeapAlloc, p.d.Views.Stats().AddressBytes
		return s
	}
	var before state
	for i := range cycles + 200 {
		if i == 200 {
			before = look()
		}
		o := config.PauseOptions{Dir: dir}
		if i%40 == 39 {
			o.Keep = config.KeepDisk
		} else if i%4 == 3 {
			o.Keep = config.KeepNone
		}
		if _, err := p.d.Pause(sel, o); err != nil {
			t.Fatal(err)
		}
		if i%100 == 7 { // one goes and comes while it is paused
			p.free(ptrs[1])
			ptrs[1] = p.alloc(pool, sizes[1], 3)
			p.fill(ptrs[1], sizes[1], 1)
		}
		if _, err := p.d.Resume(sel); err != nil {
			t.Fatal(err)
		}
		if o.Keep == config.KeepNone {
			for i, n := range sizes {
				p.fill(ptrs[i], n, byte(i))
			}
			p.fill(other, 64*kib, 77)
		}
		if i%500 == 0 {
			for i, n := range sizes {
				p.holds(ptrs[i], n, byte(i))
			}
			p.holds(other, 64*kib, 77)
			p.check2()
		}
	}
	after := look()
	// Events are kept for later: as many as there ever were at a time, by how far the GPU was behind.
	if e := after.leaks.Events - before.leaks.Events; e > 0 && e < 16 {
		after.leaks.Events = before.leaks.Events
	}
	if after.leaks != before.leaks || after.device != before.device || after.host != before.host || after.files != before.files ||
		after.addressB != before.addressB || after.heap > before.heap+2*mib {
		t.Errorf("before %+v, after %d cycles %+v", before, cycles, after)
	}
}

// check2 is check without the device's own peak, which single handles are made beside.
func (p *pausing) check2() {
	p.t.Helper()
	s := p.d.Views.Stats()
	if held := int64(p.drv.ReservedBytes(0)); s.Reserved.All.Current != held || held+s.Paused.All.Current != s.ActiveBytes.All.Current+s.InactiveBytes.All.Current {
		p.t.Fatalf("reserved %d, paused %d, active %d, inactive %d; the device says %d", s.Reserved.All.Current, s.Paused.All.Current,
			s.ActiveBytes.All.Current, s.InactiveBytes.All.Current, held)
	}
	if err := p.drv.Fault(); err != nil {
		p.t.Fatal(err)
	}
}

// TestPauseThreads: threads allocate and free, through magazines and without, and pause and resume their own tag, while the
// books are looked at. Each does some hundred things, however little a busy machine does in the time.
func TestPauseThreads(t *testing.T) {
	p := newPausing(t, sim.Options{Capacity: 600 * mib, Devices: 1}, config.Options{})
	c := newCMagazines(p.a)
	p.d.Magazines.OnTokensEnd(c.forgetAll)
	stop := time.Now().Add(3 * time.Second)
	if testing.Short() {
		stop = time.Now().Add(time.Second)
	}
	var wg sync.WaitGroup
	var pauses, resumes, frees int64
	var mu sync.Mutex
	for g := range 4 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 5))
			st, err := p.d.Stream(p.drv.NewStreamNonBlocking(0), config.StreamDurable)
			if err != nil {
				t.Error(err)
				return
			}
			tag := uint32(g) // 0 has none, and uses the magazine
			var mine []cuda.Ptr
			for turn := 0; (turn < 300 || time.Now().Before(stop)) && !t.Failed(); turn++ {
				switch n := rng.IntN(20); {
				case n < 9:
					size := uint64(1 + rng.IntN(400*kib))
					var q cuda.Ptr
					if tag == 0 {
						q, err = c.alloc(p.d, size, st)
					} else {
						q, err = p.d.AllocWith(size, st, engine.AllocOptions{Tag: tag})
					}
					if errors.Is(err, cuda.ErrOutOfMemory) { // the faster the machine, the more is held by then, maybe all of it by the others
						for _, q := range mine[len(mine)/2:] {
							if err := c.free(p.a, q); err != nil {
								t.Error(err)
							}
						}
						mine = mine[:len(mine)/2]
						continue
					}
					if err != nil {
						t.Error(err)
						return
					}
					mine = append(mine, q)
				case n < 17 && len(mine) > 0:
					i := rng.IntN(len(mine))
					if err := c.free(p.a, mine[i]); err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					frees++
					mu.Unlock()
					mine[i] = mine[len(mine)-1]
					mine = mine[:len(mine)-1]
				case n == 17: // also what other threads have out: it is as if they had paused it
					sel := engine.Selection{Tag: tag}
					if _, err := p.d.Pause(sel, config.PauseOptions{Keep: config.Keep(rng.IntN(3)), Dir: os.TempDir()}); err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					pauses++
					mu.Unlock()
				case n == 18:
					if _, err := p.d.Resume(engine.Selection{Tag: tag}); err != nil && !errors.Is(err, cuda.ErrOutOfMemory) {
						t.Error(err)
						return
					}
					mu.Lock()
					resumes++
					mu.Unlock()
				case n == 19:
					s := p.d.Views.Stats()
					if s.Reserved.All.Current+s.Paused.All.Current != s.ActiveBytes.All.Current+s.InactiveBytes.All.Current {
						t.Errorf("reserved %d, paused %d, active %d, inactive %d", s.Reserved.All.Current, s.Paused.All.Current,
							s.ActiveBytes.All.Current, s.InactiveBytes.All.Current)
					}
					if rng.IntN(4) == 0 {
						if err := p.d.Trim(); err != nil {
							t.Error(err)
						}
						p.d.Views.Snapshot()
						p.d.Views.TagUsage()
					}
				}
			}
			for _, q := range mine {
				if err := c.free(p.a, q); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	for p.d.Views.Stats().Allocations.All.Current != 0 { // of a free that was under way in a magazine
		time.Sleep(time.Millisecond)
	}
	if err := p.a.Trim(); err != nil {
		t.Fatal(err)
	}
	if s := p.d.Views.Stats(); s.Reserved.All.Current != 0 || s.Paused.All.Current != 0 {
		t.Errorf("left: %+v", s)
	}
	if err := errors.Join(p.a.Close(), p.drv.Fault()); err != nil {
		t.Error(err)
	}
	if pauses == 0 || resumes == 0 || frees == 0 {
		t.Errorf("%d pauses, %d resumes, %d frees", pauses, resumes, frees)
	}
}

// TestPauseUnderRegistration: those who register memory are told of all that goes and comes, chunk by chunk.
func TestPauseUnderRegistration(t *testing.T) {
	e, reg := registered(t, sim.Options{Capacity: 128 * mib}, config.Options{}, 1)
	d := e.dev
	var ptrs []cuda.Ptr
	for range 4 {
		q, err := d.Alloc(3*mib, e.streams[0])
		if err != nil {
			t.Fatal(err)
		}
		ptrs = append(ptrs, q)
	}
	unmaps, maps := reg.unmaps, reg.maps
	if _, err := d.Pause(all, config.PauseOptions{}); err != nil {
		t.Fatal(err)
	}
	if reg.unmaps == unmaps || len(reg.sizes) != 0 {
		t.Errorf("told %d times; registered still: %v", reg.unmaps-unmaps, reg.sizes)
	}
	if _, err := d.Resume(all); err != nil {
		t.Fatal(err)
	}
	if reg.maps == maps {
		t.Error("the observer was not called for the memory that came back")
	}
	for _, q := range ptrs {
		if err := reg.covers(q, 3*mib); err != nil {
			t.Error(err)
		}
		if err := e.a.Free(q); err != nil {
			t.Error(err)
		}
	}
}

// TestPauseRegistersMemory: over a real driver the process maps and registers page-locked memory itself. Where it may not,
// the driver allocates it.
func TestPauseRegistersMemory(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("only on Linux")
	}
	for _, refused := range []bool{false, true} {
		drv := sim.New(sim.Options{Capacity: 128 * mib, Check: sim.CheckOrder})
		p := newPausingOver(t, drv, eager{drv}, config.Options{})
		drv.FailCall(func(call string, _ uint64) cuda.Code {
			if refused && strings.HasPrefix(call, "cuMemHostRegister") {
				return cuda.ErrNotPermitted
			}
			return cuda.Success
		})
		ptr := p.alloc(nil, 5*mib, 0)
		p.fill(ptr, 5*mib, 9)
		p.pause(all, config.PauseOptions{})
		if l := drv.Leaks(); refused != (l.Registered == 0) || refused != (l.Hosts > 0) {
			t.Errorf("refused %v: %+v", refused, l)
		}
		p.resume(all)
		p.holds(ptr, 5*mib, 9)
		if err := p.d.PauseBuffers(40 * mib); err != nil {
			t.Error(err)
		}
		if n := drv.HostBytes(); n < 40*mib {
			t.Errorf("%d bytes of buffers", n)
		}
		if err := p.d.PauseBuffers(0); err != nil {
			t.Error(err)
		}
		if n := drv.HostBytes(); n != 0 {
			t.Errorf("%d bytes of buffers stay", n)
		}
		p.free(ptr)
		if err := p.a.Close(); err != nil {
			t.Error(err)
		}
		if l := drv.Leaks(); l != (sim.Live{}) {
			t.Errorf("left: %+v", l)
		}
	}
}

// eager is the simulated driver as one that finds the pages of host memory when it allocates it.
type eager struct{ *sim.Driver }

func (d eager) DeviceInfo(dev cuda.Device) (cuda.DeviceInfo, error) {
	info, err := d.Driver.DeviceInfo(dev)
	info.LazyHost = false
	return info, err
}
