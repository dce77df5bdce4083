package engine_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

// pausing is a program whose blocks have contents that it can check.
type pausing struct {
	t   *testing.T
	drv *sim.Driver
	a   *engine.Allocator
	d   *engine.Device
	st  *engine.Stream
}

func newPausing(t *testing.T, so sim.Options, o config.Options) *pausing {
	t.Helper()
	if so.Capacity == 0 {
		so.Capacity = 256 * mib
	}
	so.Check = sim.CheckOrder
	drv := sim.New(so)
	return newPausingOver(t, drv, drv, o)
}

// newPausingOver is newPausing with an engine that sees the machine through another driver.
func newPausingOver(t *testing.T, machine *sim.Driver, seen cuda.Driver, o config.Options) *pausing {
	t.Helper()
	e := newEngineOver(t, machine, seen, o, 0)
	st, err := e.dev.Stream(cuda.StreamNull)
	if err != nil {
		t.Fatal(err)
	}
	return &pausing{t, e.drv, e.a, e.dev, st}
}

func (p *pausing) alloc(pool *engine.Pool, size uint64, tag uint32) cuda.Ptr {
	p.t.Helper()
	if pool == nil {
		pool = p.d.DefaultPool()
	}
	ptr, err := pool.Device().AllocWith(size, p.st, engine.AllocOptions{Pool: pool, Tag: tag})
	if err != nil {
		p.t.Fatal(err)
	}
	return ptr
}

func pattern(seed byte, n uint64) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7) ^ byte(i>>9) ^ seed
	}
	return b
}

func (p *pausing) fill(ptr cuda.Ptr, size uint64, seed byte) {
	p.t.Helper()
	if err := p.drv.Write(0, cuda.StreamNull, ptr, pattern(seed, size)); err != nil {
		p.t.Fatal(err)
	}
}

func (p *pausing) holds(ptr cuda.Ptr, size uint64, seed byte) {
	p.t.Helper()
	b := make([]byte, size)
	if err := p.drv.ReadBack(0, cuda.StreamNull, ptr, b); err != nil {
		p.t.Fatal(err)
	}
	if want := pattern(seed, size); !bytes.Equal(b, want) {
		for i := range b {
			if b[i] != want[i] {
				p.t.Fatalf("%#x+%d: byte %d of contents %d is %#x, want %#x", ptr, size, i, seed, b[i], want[i])
			}
		}
	}
}

func (p *pausing) pause(sel engine.Selection, o config.PauseOptions) memory.PauseReport {
	p.t.Helper()
	r, err := p.d.Pause(sel, o)
	if err != nil {
		p.t.Fatal(err)
	}
	p.check()
	return r
}

func (p *pausing) resume(sel engine.Selection) memory.PauseReport {
	p.t.Helper()
	r, err := p.d.Resume(sel)
	if err != nil {
		p.t.Fatal(err)
	}
	p.check()
	return r
}

func (p *pausing) free(ptr cuda.Ptr) {
	p.t.Helper()
	if err := p.a.Free(ptr); err != nil {
		p.t.Fatal(err)
	}
	p.check()
}

// check holds the statistics against each other and against the device.
func (p *pausing) check() {
	p.t.Helper()
	if err := booksBalance(p.d, p.drv); err != nil {
		p.t.Fatal(err)
	}
}

func booksBalance(d *engine.Device, drv *sim.Driver) error {
	s := d.Views.Stats()
	held := int64(drv.ReservedBytes(d.ID()))
	if s.Reserved.All.Current != held || held+s.Paused.All.Current != s.ActiveBytes.All.Current+s.InactiveBytes.All.Current ||
		s.Reserved.All.Peak != int64(drv.PeakBytes(d.ID())) {
		return fmt.Errorf("reserved %d (peak %d) + paused %d, active %d + inactive %d; the device says %d (peak %d)", s.Reserved.All.Current,
			s.Reserved.All.Peak, s.Paused.All.Current, s.ActiveBytes.All.Current, s.InactiveBytes.All.Current, held, drv.PeakBytes(d.ID()))
	}
	var size, active, paused, chunks uint64
	for _, g := range d.Views.Snapshot() {
		size, paused = size+g.Size, paused+g.Paused
		for _, k := range g.Chunks {
			chunks += k.Size
		}
		sum := uint64(0)
		for _, b := range g.Blocks {
			sum += b.Size
			if b.State != memory.BlockFree {
				active += b.Size
			} else if b.Paused != 0 {
				return fmt.Errorf("the snapshot says that %d bytes of a free block are paused", b.Paused)
			}
		}
		if sum != g.Size {
			return fmt.Errorf("a segment of %d bytes has blocks of %d", g.Size, sum)
		}
		if g.Chunks != nil {
			sum = 0
			for _, k := range g.Chunks {
				sum += k.Size
			}
			if sum != g.Size-g.Paused {
				return fmt.Errorf("a segment of %d bytes, %d of them paused, has chunks of %d", g.Size, g.Paused, sum)
			}
		}
	}
	if size != uint64(held)+paused || paused != uint64(s.Paused.All.Current) || active != uint64(s.ActiveBytes.All.Current) {
		return fmt.Errorf("the snapshot has %d bytes, %d paused, %d active; reserved %d, paused %d, active %d", size, paused, active, held,
			s.Paused.All.Current, s.ActiveBytes.All.Current)
	}
	if err := drv.Fault(); err != nil {
		return err
	}
	return nil
}

var all = engine.Selection{}

// TestPauseKeepsContents: what was in paused blocks is there again, at the same addresses; physical memory went meanwhile.
func TestPauseKeepsContents(t *testing.T) {
	for _, conf := range []string{"", "chunk:2MiB", "single_handle:true"} {
		for _, keep := range []config.Keep{config.KeepHost, config.KeepDisk} {
			t.Run(fmt.Sprintf("%s keep %d", conf, keep), func(t *testing.T) {
				opts, err := config.Parse(conf)
				if err != nil {
					t.Fatal(err)
				}
				p := newPausing(t, sim.Options{}, opts)
				sizes := []uint64{700, 40 * kib, 300 * kib, 3 * mib, 20*mib + 512, 512}
				var ptrs []cuda.Ptr
				for i, n := range sizes {
					ptrs = append(ptrs, p.alloc(nil, n, 0))
					p.fill(ptrs[i], n, byte(i))
				}
				gap := p.alloc(nil, 1*mib, 0)
				p.free(gap)
				before := p.d.Views.Stats()
				dir := t.TempDir()
				r := p.pause(all, config.PauseOptions{Keep: keep, Dir: dir})
				if names, _ := os.ReadDir(dir); len(names) != 0 {
					t.Errorf("a file has a name: %v", names)
				}
				s := p.d.Views.Stats()
				if r.Blocks != int64(len(sizes)) || r.Bytes != uint64(before.Allocated.All.Current) || r.Kept != r.Bytes ||
					r.Physical != uint64(before.Reserved.All.Current) || s.Reserved.All.Current != 0 ||
					s.Allocated.All.Current != before.Allocated.All.Current || s.Paused.All.Current != before.Allocated.All.Current || r.Shared != 0 {
					t.Fatalf("%+v; before %+v, then %+v", r, before.Reserved.All, s.Reserved.All)
				}
				if again := p.pause(all, config.PauseOptions{}); again != (memory.PauseReport{}) {
					t.Errorf("a second pause did something: %+v", again)
				}
				other := p.alloc(nil, 30*mib, 0) // others have the memory meanwhile
				p.fill(other, 30*mib, 99)
				p.check()
				r = p.resume(all)
				if r.Blocks != int64(len(sizes)) || r.Kept != r.Bytes {
					t.Errorf("resume: %+v", r)
				}
				for i, n := range sizes {
					p.holds(ptrs[i], n, byte(i))
				}
				p.holds(other, 30*mib, 99)
				if again := p.resume(all); again != (memory.PauseReport{}) {
					t.Errorf("a second resume did something: %+v", again)
				}
				for _, ptr := range append(ptrs, other) {
					p.free(ptr)
				}
				if err := p.a.Close(); err != nil {
					t.Fatal(err)
				}
				if l := p.drv.Leaks(); l != (sim.Live{}) || p.drv.HostBytes() != 0 {
					t.Errorf("left over: %+v, %d bytes of host memory", l, p.drv.HostBytes())
				}
			})
		}
	}
}

// TestPauseByTag: what others have beside stays, and is said to.
func TestPauseByTag(t *testing.T) {
	p := newPausing(t, sim.Options{}, config.Options{})
	var mine, others []cuda.Ptr
	for i := range 8 { // chunks of 2 MiB: each block of 3 MiB shares one with its neighbour
		mine = append(mine, p.alloc(nil, 3*mib, 7))
		others = append(others, p.alloc(nil, 3*mib, 8))
		p.fill(mine[i], 3*mib, byte(i))
		p.fill(others[i], 3*mib, byte(100+i))
	}
	r := p.pause(engine.Selection{Tag: 7}, config.PauseOptions{})
	if r.Blocks != 8 || r.Shared == 0 || r.Bytes+r.Shared != 8*3*mib || r.Physical != r.Bytes {
		t.Fatalf("%+v", r)
	}
	for i := range others {
		p.holds(others[i], 3*mib, byte(100+i))
	}
	for _, u := range p.d.Views.TagUsage() {
		if want := map[uint32]uint64{7: r.Bytes}[u.Tag]; u.Paused != want {
			t.Errorf("tag %d: %d bytes paused, want %d", u.Tag, u.Paused, want)
		}
	}
	if u := p.d.DefaultPool().Stats(); u.Paused != r.Bytes || u.Allocated != 16*3*mib || u.Reserved != 16*3*mib-r.Bytes {
		t.Errorf("pool: %+v", u)
	}
	p.free(mine[0])
	p.free(mine[3])
	p.free(others[3])
	p.resume(engine.Selection{Tag: 7})
	for i := range mine {
		if i != 0 && i != 3 {
			p.holds(mine[i], 3*mib, byte(i))
		}
	}
	if s := p.d.Views.Stats(); s.Paused.All.Current != 0 {
		t.Errorf("%d bytes still paused", s.Paused.All.Current)
	}
}

// TestFreeWhilePaused: a paused block is freed at once, and its addresses serve others when all about it has gone.
func TestFreeWhilePaused(t *testing.T) {
	for _, conf := range []string{"", "single_handle:true"} {
		opts, _ := config.Parse(conf)
		p := newPausing(t, sim.Options{}, opts)
		var ptrs []cuda.Ptr
		for i := range 40 {
			ptrs = append(ptrs, p.alloc(nil, 200*kib, 0))
			p.fill(ptrs[i], 200*kib, byte(i))
		}
		p.pause(all, config.PauseOptions{})
		for i, ptr := range ptrs {
			if i%3 != 0 {
				p.free(ptr)
			}
		}
		if err := p.a.Free(ptrs[1]); !errors.Is(err, memory.ErrUnknownPointer) {
			t.Errorf("a second free: %v", err)
		}
		p.resume(all)
		for i := 0; i < len(ptrs); i += 3 {
			p.holds(ptrs[i], 200*kib, byte(i))
		}
		p.pause(all, config.PauseOptions{})
		for i := 0; i < len(ptrs); i += 3 {
			p.free(ptrs[i])
		}
		s := p.d.Views.Stats()
		if s.Paused.All.Current != 0 || s.Reserved.All.Current != 0 || s.ActiveBytes.All.Current != 0 {
			t.Errorf("%s: left over: %+v", conf, s)
		}
		if r := p.resume(all); r != (memory.PauseReport{}) {
			t.Errorf("%s: resume of nothing: %+v", conf, r)
		}
		if err := p.a.Close(); err != nil {
			t.Fatal(err)
		}
		if l := p.drv.Leaks(); l != (sim.Live{}) {
			t.Errorf("%s: left over: %+v", conf, l)
		}
	}
}

// TestResumeNeedsMemory: a resume that lacks memory changes nothing and says what it lacks; caches of others go for it.
func TestResumeNeedsMemory(t *testing.T) {
	p := newPausing(t, sim.Options{Capacity: 128 * mib}, config.Options{})
	a := p.alloc(nil, 60*mib, 1)
	p.fill(a, 60*mib, 1)
	p.pause(engine.Selection{Tag: 1}, config.PauseOptions{})
	b := p.alloc(nil, 100*mib, 2)
	p.fill(b, 100*mib, 2)
	_, err := p.d.Resume(all)
	var oom *memory.OutOfMemoryError
	if !errors.As(err, &oom) || oom.Need != 60*mib || oom.Paused != 60*mib || !strings.Contains(err.Error(), "resume") {
		t.Fatalf("%v", err)
	}
	p.check()
	p.holds(b, 100*mib, 2)
	p.free(b) // cached now
	p.resume(all)
	p.holds(a, 60*mib, 1)
	// A callback frees what is in the way.
	p.pause(all, config.PauseOptions{})
	b = p.alloc(nil, 100*mib, 2)
	asked := 0
	reg := p.d.OnOutOfMemory(func(uint64) bool {
		asked++
		if b == 0 {
			return false
		}
		p.a.Free(b)
		b = 0
		return true
	})
	p.resume(all)
	reg.Remove()
	if asked != 1 {
		t.Errorf("asked %d times", asked)
	}
	p.holds(a, 60*mib, 1)
}

// registeredMemory is a resource whose memory could go and leave its addresses, were it not registered elsewhere.
type registeredMemory struct{ resource.Resource }

func (r registeredMemory) Upstream() resource.Resource { return r.Resource }

func (r registeredMemory) Traits() resource.Traits {
	t := r.Resource.Traits()
	t.Registered = true
	return t
}

// TestPauseRefused: what cannot be paused is refused by name, and nothing is paused.
func TestPauseRefused(t *testing.T) {
	p := newPausing(t, sim.Options{Handles: cuda.HandlePosix}, config.Options{})
	a := p.alloc(nil, 3*mib, 1)
	refused := func(sel engine.Selection, what string, bytes uint64) {
		t.Helper()
		_, err := p.d.Pause(sel, config.PauseOptions{})
		var pe *memory.PauseError
		if !errors.As(err, &pe) || !strings.Contains(err.Error(), what) || pe.Bytes != bytes {
			t.Errorf("want %q and %d bytes: %v", what, bytes, err)
		}
		p.check()
		if s := p.d.Views.Stats(); s.Paused.All.Current != 0 {
			t.Errorf("%d bytes are paused", s.Paused.All.Current)
		}
	}
	if _, err := p.a.Sharing.Export(a); err != nil {
		t.Fatal(err)
	}
	refused(all, "shared with other processes", 3*mib)
	p.free(a)
	malloc, err := p.d.NewPool(memory.PoolID{1, 0}, config.PoolOptions{Kind: config.PoolMalloc})
	if err != nil {
		t.Fatal(err)
	}
	b := p.alloc(malloc, 3*mib, 0)
	c := p.alloc(nil, 3*mib, 0)
	refused(all, `{1, 0} has memory of "device"`, 3*mib)
	p.pause(engine.Selection{Pool: p.d.DefaultPool()}, config.PauseOptions{})
	if _, err := p.a.Sharing.Export(c); err == nil || !strings.Contains(err.Error(), "paused") {
		t.Errorf("export of a paused block: %v", err)
	}
	p.resume(all)
	p.free(b)
	p.free(c)
	segments, err := resource.Segments(p.drv, 0)
	if err != nil {
		t.Fatal(err)
	}
	pool, err := p.d.NewPool(memory.PoolID{3, 0}, config.PoolOptions{Upstream: registeredMemory{segments}})
	if err != nil {
		t.Fatal(err)
	}
	b = p.alloc(pool, 3*mib, 0)
	refused(all, "{3, 0} (virtual) is registered for communication", 3*mib)
	p.free(b)
	pool, err = p.d.NewPool(memory.PoolID{2, 0}, config.PoolOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.d.Captures.Begin(p.st, pool); err != nil {
		t.Fatal(err)
	}
	e, err := p.d.Alloc(3*mib, p.st)
	if err != nil {
		t.Fatal(err)
	}
	f, err := p.d.Alloc(5*mib, p.st)
	if err != nil {
		t.Fatal(err)
	}
	refused(all, "is being captured", 0)
	if err := p.d.Captures.End(p.st); err != nil {
		t.Fatal(err)
	}
	refused(all, "captured graphs use", 8*mib)
	p.free(f)
	p.fill(e, 3*mib, 4)
	held := pool.Stats().Reserved
	p.pause(all, config.PauseOptions{Captured: true})
	if s := p.d.Views.Stats(); s.Reserved.All.Current != 0 {
		t.Errorf("%d bytes of a captured pool stay", s.Reserved.All.Current)
	}
	p.resume(all)
	p.holds(e, 3*mib, 4)
	// What is free comes back too: the graph uses it.
	if n := pool.Stats().Reserved; n != held {
		t.Errorf("%d bytes are back, %d went", n, held)
	}
	p.fill(f, 5*mib, 1)
	p.pause(all, config.PauseOptions{Captured: true})
	p.free(e)
	if err := pool.Release(); err != nil {
		t.Fatal(err)
	}
	if s := p.d.Views.Stats(); s.Paused.All.Current != 0 || s.Reserved.All.Current != 0 {
		t.Errorf("left: %+v", s)
	}
	if err := p.a.Close(); err != nil {
		t.Fatal(err)
	}
}
