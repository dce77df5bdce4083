package cistern_test

import (
	"errors"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/event"
	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
	"github.com/cistern-gpu/cistern/internal/testkit"
	"github.com/cistern-gpu/cistern/resource"
)

const mib = 1 << 20

var must = testkit.Must

// machine is an allocator over a simulated machine that checks its caller.
type machine struct {
	drv *sim.Driver
	a   *cistern.Allocator
	dev cistern.Device
}

func newMachine(t testing.TB, o sim.Options, opts cistern.Options) *machine {
	t.Helper()
	o.Check, o.OnFault = sim.CheckOrder, func(err error) { t.Error(err) }
	m := &machine{drv: sim.New(o)}
	var err error
	m.a, err = cistern.New(m.drv, opts)
	must(t, err)
	m.dev, err = m.a.Device(0)
	must(t, err)
	return m
}

// stream is a durable stream of device 0 that does not block.
func (m *machine) stream(t testing.TB) cistern.Stream {
	t.Helper()
	st, err := m.dev.Stream(m.drv.NewStreamNonBlocking(0), cistern.StreamDurable)
	must(t, err)
	return st
}

func (m *machine) pool(t testing.TB, n uint64, o cistern.PoolOptions) cistern.Pool {
	t.Helper()
	p, err := m.dev.NewPoolWith(cistern.PoolID{0, n}, o)
	must(t, err)
	return p
}

// got is the result of a request that must succeed.
func got(t testing.TB) func(p cuda.Ptr, err error) cuda.Ptr {
	return func(p cuda.Ptr, err error) cuda.Ptr {
		t.Helper()
		must(t, err)
		return p
	}
}

// Handles of one thing are equal, whichever call returned them, and those of two things are not.
func TestHandles(t *testing.T) {
	m := newMachine(t, sim.Options{Devices: 2}, cistern.Options{})
	if n := m.a.DeviceCount(); n != 2 || m.a.Driver() != cuda.Driver(m.drv) || m.a.Options().ChunkMax == 0 {
		t.Errorf("%d devices, options %+v", n, m.a.Options())
	}
	if d, ok := m.a.Started(0); !ok || d != m.dev || d.ID() != 0 || d.Info().Name == "" {
		t.Errorf("Started(0): %v, %v", d, ok)
	}
	if d, ok := m.a.Started(1); ok || d != (cistern.Device{}) {
		t.Errorf("device 1 is in use: %v", d)
	}
	if d, err := m.a.Device(2); !errors.Is(err, cuda.ErrInvalidDevice) || d != (cistern.Device{}) {
		t.Errorf("device 2: %v, %v", d, err)
	}
	other, err := m.a.Device(1)
	must(t, err)
	if other == m.dev {
		t.Error("two devices are equal")
	}

	st := m.stream(t)
	again, err := m.dev.Stream(st.Handle())
	must(t, err)
	if again != st || again.ID() != st.ID() || st.Device() != m.dev || st == m.stream(t) {
		t.Error("handles of streams")
	}
	if list := m.dev.Streams(); !slices.Contains(list, st) {
		t.Errorf("the device knows %v, not %v", list, st)
	}

	pool := m.pool(t, 1, cistern.PoolOptions{})
	if p, ok := m.dev.Pool(cistern.PoolID{0, 1}); !ok || p != pool || p.ID() != (cistern.PoolID{0, 1}) || p.Device() != m.dev {
		t.Errorf("Pool: %v, %v", p, ok)
	}
	if p, ok := m.dev.Pool(cistern.PoolID{0, 2}); ok || p != (cistern.Pool{}) {
		t.Errorf("a pool that does not exist: %v", p)
	}
	if p, err := m.dev.NewPool(cistern.PoolID{0, 1}); err == nil || p != (cistern.Pool{}) {
		t.Errorf("a second pool of the name: %v, %v", p, err)
	}
	if p, _ := m.dev.Pool(cistern.PoolID{}); p != m.dev.DefaultPool() || p == pool {
		t.Error("handles of pools")
	}
	if _, err := cistern.New(m.drv, cistern.Options{ChunkMax: 1}); err == nil {
		t.Error("options that make no sense were accepted")
	}
}

// Requests that cached memory meets, and their frees, make no driver call and allocate no Go memory, by any function.
func TestSteadyState(t *testing.T) {
	for _, opts := range []cistern.Options{{}, {Stacks: cistern.StacksNative}} {
		m := newMachine(t, sim.Options{}, opts)
		st, pool := m.stream(t), m.pool(t, 1, cistern.PoolOptions{})
		for name, round := range map[string]func() (cuda.Ptr, error){
			"Device.Alloc":       func() (cuda.Ptr, error) { return m.dev.Alloc(5000, st) },
			"Device.AllocTagged": func() (cuda.Ptr, error) { return m.dev.AllocTagged(5000, st, 7) },
			"Device.AllocWith": func() (cuda.Ptr, error) {
				return m.dev.AllocWith(5000, st, cistern.AllocOptions{Pool: pool, Tag: 3, Library: 2})
			},
			"Pool.Alloc":       func() (cuda.Ptr, error) { return pool.Alloc(5000, st) },
			"Pool.AllocTagged": func() (cuda.Ptr, error) { return pool.AllocTagged(5000, st, 7) },
		} {
			for which, free := range map[string]func(cuda.Ptr) error{
				"Free":     m.a.Free,
				"FreeOn":   func(p cuda.Ptr) error { return m.a.FreeOn(p, st) },
				"FreeWith": func(p cuda.Ptr) error { return m.a.FreeWith(p, cistern.FreeOptions{Stream: st}) },
			} {
				both := func() {
					p, err := round()
					if err = errors.Join(err, free(p)); err != nil {
						t.Fatal(err)
					}
				}
				both()
				m.drv.ResetCalls()
				if n := testing.AllocsPerRun(100, both); n != 0 || m.drv.Calls().Count != 0 {
					t.Errorf("%v: %s, %s: %v Go allocations, %d driver calls", opts, name, which, n, m.drv.Calls().Count)
				}
			}
		}
	}
}

// With stacks:native the first frame is the function of the program that made the request, whichever function it called and
// whatever the compiler inlines.
func TestGoStacks(t *testing.T) {
	m := newMachine(t, sim.Options{}, cistern.Options{Stacks: cistern.StacksNative})
	st, pool := m.stream(t), m.pool(t, 1, cistern.PoolOptions{})
	var line int
	here := func(p cuda.Ptr, err error) cuda.Ptr { // called on the line of the request
		must(t, err)
		_, _, line, _ = runtime.Caller(1)
		return p
	}
	check := func(p cuda.Ptr) {
		t.Helper()
		b, err := m.a.Base(p)
		must(t, err)
		f := m.a.GoFrames(b.Stack)
		if len(f) < 2 || !strings.HasSuffix(f[0].Function, ".TestGoStacks") || f[0].Line != line ||
			!strings.HasSuffix(f[1].Function, "testing.tRunner") {
			t.Errorf("requested on line %d: stack %d is %+v", line, b.Stack, f)
		}
	}
	check(here(m.dev.Alloc(5000, st)))
	check(here(m.dev.AllocTagged(5000, st, 7)))
	check(here(m.dev.AllocWith(5000, st, cistern.AllocOptions{Library: 3})))
	check(here(m.dev.AllocWith(5000, st, cistern.AllocOptions{HostOrder: true})))
	check(here(pool.Alloc(5000, st)))
	check(here(pool.AllocTagged(5000, st, 7)))
	check(here(pool.Resource().Alloc(5000, 512, st.Handle())))
	alloc := m.dev.Alloc // a method value, which the compiler wraps
	check(here(alloc(5000, st)))
	var any interface {
		Alloc(size uint64, st cistern.Stream) (cuda.Ptr, error)
	} = pool
	check(here(any.Alloc(5000, st)))
	if u := m.dev.StackUsage(); len(u) != 9 {
		t.Errorf("%d stacks of 9 requests", len(u))
	}

	named := m.a.StackOf([]uint64{1, 2, 3})
	b, err := m.a.Base(got(t)(m.dev.AllocWith(5000, st, cistern.AllocOptions{Stack: named})))
	if err != nil || b.Stack != named || !slices.Equal(m.a.StackFrames(named), []uint64{1, 2, 3}) {
		t.Errorf("%+v, %v; want stack %d", b, err, named)
	}
	m.a.CatchStacks(nil)
	if b, err := m.a.Base(got(t)(m.dev.Alloc(5000, st))); err != nil || b.Stack != 0 || m.a.StackTable().Stacks == 0 {
		t.Errorf("%+v, %v; want no stack", b, err)
	}
	m.a.KeepStacks(false)
	if u := m.dev.StackUsage(); u != nil {
		t.Errorf("stacks that are not kept: %v", u)
	}
}

// The parts of the options reach the request: pool, tag, library; and a route does where they name no pool.
func TestRequests(t *testing.T) {
	m := newMachine(t, sim.Options{}, cistern.Options{})
	st, pool := m.stream(t), m.pool(t, 1, cistern.PoolOptions{Limit: 64 * mib})
	p := got(t)(m.dev.AllocWith(5000, st, cistern.AllocOptions{Pool: pool, Tag: 3, Library: 2}))
	blocks := pool.Blocks()
	if len(blocks) != 1 || blocks[0].Base != p || blocks[0].Tag != 3 || blocks[0].Library != 2 || blocks[0].Requested != 5000 {
		t.Fatalf("the pool has %+v", blocks)
	}
	if tags := m.dev.TagUsage(); len(tags) != 1 || tags[0].Tag != 3 {
		t.Errorf("tags %+v", tags)
	}
	if libraries := m.dev.LibraryUsage(); len(libraries) != 1 || libraries[0].Library != 2 {
		t.Errorf("libraries %+v", libraries)
	}
	must(t, m.dev.Route(st, pool))
	q := got(t)(m.dev.Alloc(6000, st))
	must(t, m.dev.Unroute(st))
	got(t)(m.dev.Alloc(7000, st))
	if s := pool.Stats(); len(pool.Blocks()) != 2 || s.Limit != 64*mib {
		t.Errorf("the pool has %+v, %+v", pool.Blocks(), s)
	}
	must(t, m.a.Free(q))
	must(t, pool.Restore(append(blocks, cistern.Block{Base: q, Size: 6144, Requested: 6000, Stream: st.ID()})))
	if len(pool.Blocks()) != 2 {
		t.Errorf("restored: %+v", pool.Blocks())
	}
	if p, err := m.dev.AllocWith(64*mib, st, cistern.AllocOptions{Cached: true}); p != 0 || err != nil {
		t.Errorf("a request for cached memory: %#x, %v", p, err)
	}
	pool.SetLimit(2 * mib)
	if _, err := pool.Alloc(64*mib, st); !errors.As(err, new(*cistern.OutOfMemoryError)) {
		t.Errorf("beyond the limit of a pool: %v", err)
	}
	m.dev.SetLimit(4 * mib)
	if _, err := m.dev.Alloc(64*mib, st); m.dev.Limit() != 4*mib || !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Errorf("beyond the limit of the device: %v", err)
	}
	if err := m.a.Free(12345); !errors.Is(err, cistern.ErrUnknownPointer) {
		t.Errorf("an address that was never handed out: %v", err)
	}
	if _, _, err := m.a.SegmentBase(p); !errors.Is(err, cuda.ErrNotSupported) {
		t.Errorf("the segment of a block in chunks: %v", err)
	}
	for _, b := range append(pool.Blocks(), m.dev.DefaultPool().Blocks()...) {
		must(t, m.a.Free(b.Base))
	}
	if n := m.dev.LargestFree(st); n == 0 || n != m.dev.DefaultPool().LargestFree(st) {
		t.Errorf("the largest free block has %d bytes", n)
	}
	must(t, pool.Trim())
	if s := pool.Stats(); s.Reserved != 0 {
		t.Errorf("the pool has %+v after a trim", s)
	}
	must(t, pool.Release())
	must(t, m.a.Trim())
	if _, reserved := m.dev.Usage(); reserved != 0 {
		t.Errorf("%d bytes are reserved after a trim", reserved)
	}
	must(t, m.a.Close())
}

// Memory that another stream uses is reused behind that use: the simulated device checks the order.
func TestOrderOfStreams(t *testing.T) {
	m := newMachine(t, sim.Options{Lag: time.Millisecond}, cistern.Options{})
	first, second := m.stream(t), m.stream(t)
	done, err := m.drv.EventCreate(0)
	must(t, err)
	for i := range 20 {
		p := got(t)(m.dev.Alloc(8*mib, first))
		must(t, m.drv.Use(0, first.Handle(), p, 8*mib))
		must(t, m.drv.EventRecord(0, done, first.Handle()))
		must(t, m.drv.StreamWaitEvent(0, second.Handle(), done))
		must(t, m.drv.Use(0, second.Handle(), p, 8*mib))
		switch i % 3 {
		case 0:
			must(t, m.a.RecordStream(p, second))
			must(t, m.a.Free(p))
		case 1:
			must(t, m.a.FreeOn(p, second))
		case 2:
			must(t, m.a.FreeWith(p, cistern.FreeOptions{Stream: second}))
		}
	}
	if n := m.dev.Stats().Allocations.All.Current; n != 0 {
		t.Errorf("%d allocations are live", n)
	}
}

// A graph's memory stays where it is until its pool is released.
func TestCapture(t *testing.T) {
	m := newMachine(t, sim.Options{}, cistern.Options{})
	st, pool := m.stream(t), m.pool(t, 1, cistern.PoolOptions{})
	must(t, m.dev.BeginCapture(st, pool))
	must(t, m.drv.BeginCapture(0, st.Handle()))
	p := got(t)(pool.Alloc(8*mib, st))
	must(t, m.drv.Use(0, st.Handle(), p, 8*mib))
	must(t, m.a.Free(p))
	g, err := m.drv.EndCapture(0, st.Handle())
	must(t, err)
	must(t, m.dev.EndCapture(st))
	must(t, m.a.Trim())
	must(t, g.Launch(0, st.Handle()))
	if u := m.dev.PoolUsage(); len(u) == 0 || u[0].Pool != pool.ID() || !u[0].Pinned || pool.LargestFree(st) < 8*mib {
		t.Errorf("pools %+v", u)
	}
	must(t, pool.Release())
	must(t, m.a.Trim())
	if list := m.dev.Snapshot(); len(list) != 0 {
		t.Errorf("left: %+v", list)
	}
}

// Pause and Resume take what is selected, by pool, by tag, or all.
func TestPause(t *testing.T) {
	m := newMachine(t, sim.Options{}, cistern.Options{})
	st, pool := m.stream(t), m.pool(t, 1, cistern.PoolOptions{})
	got(t)(pool.Alloc(64*mib, st))
	got(t)(m.dev.AllocTagged(32*mib, st, 5))
	must(t, m.dev.PauseBuffers(64*mib))
	for _, c := range []struct {
		selection cistern.Selection
		bytes     uint64
	}{{cistern.Selection{Pool: pool}, 64 * mib}, {cistern.Selection{Tag: 5}, 32 * mib}, {cistern.Selection{Pool: pool, Tag: 5}, 0},
		{cistern.Selection{}, 96 * mib}} {
		r, err := m.dev.Pause(c.selection, cistern.PauseOptions{Keep: cistern.KeepHost})
		must(t, err)
		back, err := m.dev.Resume(c.selection)
		must(t, err)
		if r.Bytes != c.bytes || back.Bytes != c.bytes {
			t.Errorf("%+v: paused %v, resumed %v, want %d bytes", c.selection, r, back, c.bytes)
		}
	}
	must(t, m.dev.PauseBuffers(0))
}

// Another process opens an export through its own allocator.
func TestExport(t *testing.T) {
	if sim.Exportable == cuda.HandleNone {
		t.Skip("descriptors are passed on Linux")
	}
	m := newMachine(t, sim.Options{Handles: sim.Exportable}, cistern.Options{})
	other := newMachine(t, sim.Options{Handles: sim.Exportable}, cistern.Options{})
	p := got(t)(m.dev.Alloc(4*mib, m.stream(t)))
	e, err := m.a.Export(p)
	must(t, err)
	if again, err := m.a.Exported(e.ID()); err != nil || again != e {
		t.Errorf("%v, %v, want %v", again, err, e)
	}
	if e.Ptr() != p || e.Device() != 0 || e.Shared().Size != 4*mib || e.Live() != nil {
		t.Errorf("%#x on device %d, %+v, %v", e.Ptr(), e.Device(), e.Shared(), e.Live())
	}
	last := -1
	q := got(t)(other.a.Open(0, "the first process", e.Shared(), func(i int) (fd int, err error) {
		if last >= 0 {
			must(t, os.NewFile(uintptr(last), "").Close())
		}
		last, err = e.Descriptor(i)
		return last, err
	}))
	must(t, os.NewFile(uintptr(last), "").Close())
	must(t, other.a.CloseShared(q))
	must(t, m.a.CloseShared(got(t)(m.a.OpenOwn(e))))
	must(t, m.a.Free(p))
	if _, err := m.a.Exported(e.ID()); !errors.Is(err, cistern.ErrNotExported) || e.Live() == nil {
		t.Errorf("after the free: %v", err)
	}
}

// The functions of a program are called, and no longer when they were taken back.
func TestCallbacks(t *testing.T) {
	m := newMachine(t, sim.Options{Capacity: 64 * mib}, cistern.Options{})
	st := m.stream(t)
	var need, mapped, unmapped uint64
	m.dev.OnMap(func(_ cuda.Ptr, size uint64) { mapped += size })
	m.dev.OnUnmap(func(_ cuda.Ptr, size uint64) { unmapped += size })
	r := m.dev.OnOutOfMemory(func(bytes uint64) bool { need = bytes; return false })
	p := got(t)(m.dev.Alloc(16*mib, st))
	if _, err := m.dev.Alloc(96*mib, st); !errors.Is(err, cuda.ErrOutOfMemory) || need == 0 {
		t.Errorf("%v; the callback was asked for %d bytes", err, need)
	}
	r.Remove()
	need = 0
	if _, err := m.dev.Alloc(96*mib, st); err == nil || need != 0 {
		t.Errorf("%v; the callback was asked for %d bytes after Remove", err, need)
	}
	must(t, m.a.Free(p))
	must(t, m.dev.Trim())
	if mapped < 16*mib || unmapped != mapped {
		t.Errorf("%d bytes were mapped, %d unmapped", mapped, unmapped)
	}
}

// Statistics, the history and the record of a device are one account of the same requests.
func TestViews(t *testing.T) {
	m := newMachine(t, sim.Options{Devices: 2}, cistern.Options{History: 100})
	now := int64(0)
	m.dev.SetHistoryClock(func() int64 { now++; return now })
	st, pool := m.stream(t), m.pool(t, 1, cistern.PoolOptions{Upstream: resource.Pinned(m.drv, 0)})
	p := got(t)(m.dev.AllocWith(5000, st, cistern.AllocOptions{Tag: 3, Thread: 9}))
	got(t)(pool.Alloc(6000, st))

	events, lost := m.dev.History()
	i := slices.IndexFunc(events, func(e event.Event) bool { return e.Kind == event.Alloc && e.Addr == uint64(p) })
	if lost != 0 || i < 0 || events[i].Tag != 3 || events[i].Thread != 9 {
		t.Fatalf("history %+v", events)
	}
	if m.dev.Streams()[events[i].Stream] != st || m.dev.Pools()[events[i].Pool] != (cistern.PoolID{}) {
		t.Errorf("%+v is on stream %v, pool %v", events[i], m.dev.Streams()[events[i].Stream], m.dev.Pools()[events[i].Pool])
	}
	r, ok := m.a.Record(0, 10)
	if !ok || !slices.Equal(r.Events, events) || len(r.Segments) != len(m.dev.Snapshot()) {
		t.Errorf("record %+v, history %+v", r, events)
	}
	if _, ok := m.a.Record(1, 10); ok {
		t.Error("a record of a device that is not in use")
	}
	var g cistern.Gauges
	m.dev.Gauges(&g)
	s := m.dev.Stats()
	allocated, reserved := m.dev.Usage()
	if allocated != 5120+6144 || s.Allocated.All.Current != int64(allocated) || s.Reserved.All.Current != int64(reserved) ||
		g.Reserved != reserved {
		t.Errorf("allocated %d, reserved %d; statistics %+v; gauges %+v", allocated, reserved, s, g)
	}
	if list := m.dev.SnapshotPool(pool.ID()); len(list) != 1 || list[0].Size != pool.Stats().Reserved {
		t.Errorf("segments %+v, pool %+v", list, pool.Stats())
	}
	must(t, m.a.Free(p))
	m.dev.ResetPeaks()
	m.dev.ResetAccumulated()
	if s := m.dev.Stats(); s.Allocated.All.Peak != 6144 || s.Allocations.All.Added != 0 {
		t.Errorf("after the resets: %+v", s)
	}
	if n := len(m.dev.DrainHistory(nil)); n <= len(events) || len(m.dev.DrainHistory(nil)) != 0 {
		t.Errorf("drained %d events", n)
	}
	m.a.SetHistory(0)
	got(t)(m.dev.Alloc(5000, st))
	if events, _ := m.dev.History(); len(events) != 0 {
		t.Errorf("a history that is off has %+v", events)
	}
	m.dev.SetHistory(1)
	got(t)(m.dev.Alloc(5000, st))
	got(t)(m.dev.Alloc(5000, st))
	if events, lost := m.dev.History(); len(events) != 1 || lost == 0 {
		t.Errorf("the last event: %+v after %d others", events, lost)
	}

	must(t, m.dev.EnablePeer(1))
	if list := m.dev.Peers(); !slices.Equal(list, []cuda.Device{1}) {
		t.Errorf("peers %v", list)
	}
	if r, err := cistern.ParseStages("remap+grow"); err != nil || r != cistern.StageFit|cistern.StageRemap|cistern.StageGrow {
		t.Errorf("stages %v, %v", r, err)
	}
}

// TestUpstream: Options.Upstream is where all memory comes from, also that of pools without one of their own.
func TestUpstream(t *testing.T) {
	opts, err := cistern.ParseOptions("upstream:statistics|limiting:bytes=100MiB|managed")
	must(t, err)
	m := newMachine(t, sim.Options{}, opts)
	st, pool := m.stream(t), m.pool(t, 1, cistern.PoolOptions{})
	must(t, m.a.Free(got(t)(m.dev.Alloc(60*mib, st))))
	p := got(t)(pool.Alloc(70*mib, st)) // which fits once the default pool has given its memory back
	var oom *cistern.OutOfMemoryError
	if _, err := m.dev.Alloc(40*mib, st); !errors.As(err, &oom) || oom.Upstream != "managed" {
		t.Errorf("%v", err)
	}
	if l := m.drv.Leaks(); l.Managed == 0 {
		t.Errorf("the memory is not managed: %+v", l)
	}
	must(t, m.a.Free(p))
	must(t, pool.Release())
	must(t, m.a.Close())
	if l := m.drv.Leaks(); l.Managed != 0 {
		t.Errorf("left: %+v", l)
	}
	for words, want := range map[string]string{"teapot": `upstream "teapot": "teapot" is not an upstream`,
		"external:library=/nowhere.so,alloc=a,free=b": "external: /nowhere.so: cannot open shared object file"} {
		if _, err := cistern.New(m.drv, cistern.Options{Upstream: words}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", words, err)
		}
	}
}
