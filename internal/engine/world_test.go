package engine_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sort"
	"sync"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

const (
	kib = 1 << 10
	mib = 1 << 20
	gib = 1 << 30
)

// ranges is what is handed out now, by address, over all devices: it knows nothing but that blocks do not overlap.
type ranges struct {
	mu   sync.Mutex
	list []span // guarded by mu, in address order
}

type span struct{ lo, hi uint64 }

func (r *ranges) add(lo, size uint64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := sort.Search(len(r.list), func(i int) bool { return r.list[i].hi > lo })
	if i < len(r.list) && r.list[i].lo < lo+size {
		return fmt.Errorf("block %#x+%d overlaps the live block %#x+%d", lo, size, r.list[i].lo, r.list[i].hi-r.list[i].lo)
	}
	r.list = slices.Insert(r.list, i, span{lo, lo + size})
	return nil
}

func (r *ranges) remove(lo uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := sort.Search(len(r.list), func(i int) bool { return r.list[i].hi > lo })
	r.list = slices.Delete(r.list, i, i+1)
}

func (r *ranges) has(lo uint64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := sort.Search(len(r.list), func(i int) bool { return r.list[i].hi > lo })
	return i < len(r.list) && r.list[i].lo == lo
}

// world is a program that uses the allocator, and what it knows must be true of it: the rules of DESIGN's "What never
// bends" and the program's own books. It asks nothing of how the engine works.
type world struct {
	t    testing.TB
	what string // how to run it again
	cfg  setup
	drv  *sim.Driver
	a    *engine.Allocator
	c    *cMagazines
	rng  *rand.Rand
	step int
	kept bool // blocks remember stacks
	// ending is true once no request is to fail any more.
	ending bool
	// freed is the size of the block that was freed last.
	freed uint64
	devs  []*worldDevice
	live  ranges
	// upstreams are those of all pools that have one of their own.
	upstreams []*upstream
	seen      map[string]int // how often each kind of thing happened, so that a test can say that it tests anything
	reg       *registry      // with observed
}

// setup is what a sequence of operations is run under.
type setup struct {
	opts      config.Options
	devices   int
	capacity  uint64
	lag       time.Duration
	magazines bool // requests and frees come through the C library's magazines
	observed  bool // an observer is notified of all memory that is mapped and unmapped
	stacks    bool // requests name stacks
	tight     bool // the limits of pools and devices meet large chunks
	kinds     bool // pools are of every kind of memory, have limits and spill; requests have labels
	sharing   bool // RecordStream and FreeOn are used; the moment at which such a free completes is then the engine's to choose
}

type worldDevice struct {
	id       cuda.Device
	dev      *engine.Device
	streams  []*worldStream
	pools    []*worldPool
	blocks   []*worldBlock
	poolIDs  uint64
	limit    uint64
	sources  *sources
	most     uint64 // peak of what is held at the end of any operation
	now      books
	peak     books
	inactive uint64 // peak of reserved - allocated at the end of any operation
	failed   bool   // a request failed since: it may have got memory and given it back
	allocs   int64  // ever
	bytes    int64  // ever asked for
	ooms     int64
}

// books are the program's own sums over its live blocks.
type books struct{ blocks, requested, allocated int64 }

func (k *books) add(size, rounded uint64) {
	k.blocks++
	k.requested += int64(size)
	k.allocated += int64(rounded)
}

func (k *books) remove(size, rounded uint64) {
	k.blocks--
	k.requested -= int64(size)
	k.allocated -= int64(rounded)
}

// uses are books by tag, library or stack.
type uses[K comparable] map[K]books

func (u uses[K]) add(key K, b *worldBlock) {
	k := u[key]
	k.add(b.size, b.rounded)
	u[key] = k
}

// check compares what the engine says of a key with the books, and removes the key: those that it is silent about stay.
func (u uses[K]) check(w *world, d *worldDevice, key K, have memory.Use) {
	w.t.Helper()
	k := u[key]
	if want := (memory.Use{Blocks: k.blocks, Requested: uint64(k.requested), Allocated: uint64(k.allocated)}); have != want {
		w.fail("device %d: %T %v has %+v, want %+v", d.id, key, key, have, want)
	}
	delete(u, key)
}

type worldStream struct {
	handle   cuda.Stream
	st       *engine.Stream
	blocking bool
	durable  bool
	capture  *worldPool // it is captured into this pool
	routed   *worldPool
	uses     int // live blocks that are its own or that were recorded on it
}

type worldPool struct {
	id       memory.PoolID
	pool     *engine.Pool
	graphs   []*sim.Graph
	launches *worldStream // on which its graphs run
	users    int
	captured bool // its memory is for captures only
	whole    bool // its blocks are segments
	upstream *upstream
	spill    *source
	limit    uint64
	before   uint64         // what it held when its limit was set
	noted    []memory.Block // what was live at some time
}

type worldBlock struct {
	p         cuda.Ptr
	size      uint64
	rounded   uint64
	stream    *worldStream
	pool      *worldPool
	shared    bool           // used by another stream: the program's own stream must not use it again
	recorded  []*worldStream // by RecordStream
	used      bool           // work was queued that uses it
	given     *worldStream   // it is freed on that stream (FreeOn): its own may be gone
	inCapture bool
	tag       uint32
	library   uint8
	stack     uint32
}

func round512(n uint64) uint64 { return (n + 511) &^ 511 }

// round is the size of the block that a request of the pool (nil is the default one) gets.
func (p *worldPool) round(n uint64) uint64 {
	if p != nil && p.whole {
		return (n + 2*mib - 1) &^ (2*mib - 1)
	}
	return round512(n)
}

func newWorld(t testing.TB, cfg setup, what string) *world {
	w := &world{t: t, what: what, cfg: cfg, seen: map[string]int{}, rng: rand.New(rand.NewPCG(1, 2))}
	w.drv = sim.New(sim.Options{Devices: cfg.devices, Capacity: cfg.capacity, HostCapacity: cfg.capacity, Lag: cfg.lag, Check: sim.CheckOrder,
		OnFault: func(err error) { w.fail("%v", err) }})
	drv := cuda.Driver(w.drv)
	if cfg.observed {
		w.reg = newRegistry(w.fail)
		drv = watch(w.drv, w.reg, true)
	}
	a, err := engine.New(drv, cfg.opts)
	if err != nil {
		w.fail("New: %v", err)
	}
	w.a = a
	if cfg.magazines {
		w.c = newCMagazines(a)
	}
	for i := range cfg.devices {
		d := &worldDevice{id: cuda.Device(i), limit: cfg.opts.Limit, sources: &sources{drv: drv, dev: cuda.Device(i)}}
		w.devs = append(w.devs, d)
	}
	if cfg.opts.Upstream != "" {
		must(t, a.SetUpstream(func(id cuda.Device) (resource.Resource, error) {
			return w.devs[id].sources.addFailing(w, cfg.opts.Upstream)
		}))
	}
	for _, d := range w.devs {
		if d.dev, err = a.Device(d.id); err != nil {
			w.fail("Device: %v", err)
		}
		d.dev.History.SetClock(func() int64 { return w.drv.Now().Microseconds() })
		if cfg.observed {
			d.dev.OnMap(w.reg.mapped)
			d.dev.OnUnmap(w.reg.unmapped)
		}
		w.drv.ResetPeak(d.id) // of what finding out about handles took
		w.know(d, cuda.StreamNull, true, true)
		for range 2 {
			w.newStream(d)
		}
	}
	return w
}

func (w *world) fail(format string, args ...any) {
	w.t.Helper()
	w.t.Fatalf("%s, step %d: %s", w.what, w.step, fmt.Sprintf(format, args...))
}

func (w *world) chance(percent int) bool { return w.rng.IntN(100) < percent }

func pick[T any](w *world, list []T) T { return list[w.rng.IntN(len(list))] }

// know makes a stream of the driver known to the engine.
func (w *world) know(d *worldDevice, h cuda.Stream, blocking, durable bool) *worldStream {
	var opts []config.StreamOption
	if durable && h != cuda.StreamNull {
		opts = append(opts, config.StreamDurable)
	}
	st, err := d.dev.Stream(h, opts...)
	if err != nil {
		w.fail("Stream: %v", err)
	}
	s := &worldStream{handle: h, st: st, blocking: blocking, durable: durable}
	d.streams = append(d.streams, s)
	return s
}

func (w *world) newStream(d *worldDevice) {
	blocking, durable := w.chance(50), w.chance(50)
	h := w.drv.NewStreamNonBlocking(d.id)
	if blocking {
		w.drv.DestroyStream(d.id, h)
		h = w.drv.NewStream(d.id)
	}
	w.know(d, h, blocking, durable)
}

// destroyStream destroys a stream that no live block needs any more. What it still has queued goes on.
func (w *world) destroyStream(d *worldDevice, s *worldStream) {
	if s.durable || s.uses > 0 || s.capture != nil || s.routed != nil || slices.ContainsFunc(d.pools, func(p *worldPool) bool { return p.launches == s }) {
		return
	}
	if err := w.drv.DestroyStream(d.id, s.handle); err != nil {
		w.fail("DestroyStream: %v", err)
	}
	d.streams = slices.DeleteFunc(d.streams, func(o *worldStream) bool { return o == s })
	w.seen["stream destroyed"]++
}

// forgetStreams has the engine forget what streams it can, and looks some up again that the program still has.
func (w *world) forgetStreams(d *worldDevice) {
	forgotten, inherited := engine.ForgetStreams(d.dev)
	w.seen["stream forgotten"] += forgotten
	w.seen["arena inherited"] += inherited
	if s := pick(w, d.streams); s.capture == nil && w.chance(50) {
		if st, err := d.dev.Stream(s.handle); err != nil || st != s.st {
			w.fail("stream %d was %p and is %p, %v", s.st.ID(), s.st, st, err)
		}
	}
	known := d.dev.Views.Streams()
	for _, g := range d.dev.Views.Snapshot() {
		if g.Stream >= 0 && known[g.Stream].Handle() != g.Handle {
			w.fail("segment %+v: stream %d is %+v", g, g.Stream, known[g.Stream].ID())
		}
	}
}

// mayQueue reports whether the program may queue work on the stream: not on the legacy stream while a stream that
// blocks with it is captured.
func (d *worldDevice) mayQueue(s *worldStream) bool {
	return s.handle != cuda.StreamNull || !slices.ContainsFunc(d.streams, func(o *worldStream) bool { return o.blocking && o.capture != nil })
}

func (d *worldDevice) capturing() bool {
	return slices.ContainsFunc(d.streams, func(o *worldStream) bool { return o.capture != nil })
}

// size is the size of a request: anything from a byte to an eighth of the device, small ones most often.
func (w *world) size() uint64 {
	top := 0.0
	switch n := w.rng.IntN(100); {
	case n < 60:
		top = 20
	case n < 90:
		top = 24
	default:
		top = 27
	}
	n := uint64(1)
	for range int(w.rng.Float64() * top) {
		n *= 2
	}
	return n + w.rng.Uint64N(n)
}

func (w *world) alloc(d *worldDevice, size uint64, s *worldStream) *worldBlock {
	var pool *worldPool
	var p cuda.Ptr
	var o engine.AllocOptions
	var err error
	switch {
	case w.cfg.stacks && w.chance(40):
		if pool = s.capture; pool == nil {
			pool = s.routed
		}
		p, o, err = w.allocStack(d, size, s, pool)
	case s.capture != nil:
		pool = s.capture
		p, err = w.c.alloc(d.dev, size, s.st)
	case s.routed != nil:
		pool = s.routed
		p, err = w.c.alloc(d.dev, size, s.st)
	default:
		if len(d.pools) > 0 && (w.chance(30) || w.cfg.kinds && w.chance(30)) {
			if o := pick(w, d.pools); !o.captured {
				pool = o
			}
		}
		if w.cfg.kinds && w.chance(40) {
			p, o, err = w.allocWith(d, size, s, pool)
		} else if pool != nil {
			p, err = pool.pool.Alloc(size, s.st)
		} else {
			p, err = w.c.alloc(d.dev, size, s.st)
		}
	}
	if err != nil {
		var oom *memory.OutOfMemoryError
		if !errors.As(err, &oom) || !errors.Is(err, cuda.ErrOutOfMemory) {
			w.fail("Alloc(%d): %v", size, err)
		}
		if oom.Requested != size || oom.Device != d.id {
			w.fail("Alloc(%d) on device %d: the error is about %d bytes on device %d", size, d.id, oom.Requested, oom.Device)
		}
		w.raise(d) // what was got or moved for it stays
		d.ooms++
		d.failed = true
		w.seen["oom"]++
		return nil
	}
	if p == 0 || p%512 != 0 {
		w.fail("Alloc(%d) = %#x", size, p)
	}
	b := w.have(d, p, size, s, pool)
	b.tag, b.library = o.Tag, o.Library
	if w.kept {
		b.stack = o.Stack
	}
	w.raise(d)
	if w.chance(90) {
		w.use(d, b)
	}
	w.seen["alloc"]++
	return b
}

// have enters a block that was handed out into the books.
func (w *world) have(d *worldDevice, p cuda.Ptr, size uint64, s *worldStream, pool *worldPool) *worldBlock {
	rounded := pool.round(size)
	if err := w.live.add(uint64(p), rounded); err != nil {
		w.fail("%v", err)
	}
	if w.reg != nil {
		if err := w.reg.covers(p, rounded); err != nil {
			w.fail("%v", err)
		}
		w.seen["registered"]++
	}
	b := &worldBlock{p: p, size: size, rounded: rounded, stream: s, pool: pool, inCapture: s.capture != nil}
	s.uses++
	d.blocks = append(d.blocks, b)
	d.allocs++
	d.bytes += int64(size)
	d.now.add(size, rounded)
	return b
}

// raise notes peaks at the end of an operation.
func (w *world) raise(d *worldDevice) {
	d.peak.blocks = max(d.peak.blocks, d.now.blocks)
	d.peak.requested = max(d.peak.requested, d.now.requested)
	d.peak.allocated = max(d.peak.allocated, d.now.allocated)
	r := d.sources.held(w.drv)
	d.most = max(d.most, r)
	if r >= uint64(d.now.allocated) {
		d.inactive = max(d.inactive, r-uint64(d.now.allocated))
	} else {
		w.fail("device %d: %d bytes handed out, %d held", d.id, d.now.allocated, r)
	}
}

// use queues work on the block's own stream.
func (w *world) use(d *worldDevice, b *worldBlock) {
	if b.shared || !d.mayQueue(b.stream) || b.inCapture != (b.stream.capture != nil) {
		return
	}
	if b.inCapture && b.pool != b.stream.capture {
		return // graphs of two pools run on different streams: the program would have to order them
	}
	if err := w.drv.Use(d.id, b.stream.handle, b.p, b.size); err != nil {
		w.fail("use of %#x+%d: %v", b.p, b.size, err)
	}
	b.used = true
}

// share has another stream use the block, ordered after its own stream by the program, and says so to the engine.
func (w *world) share(d *worldDevice, b *worldBlock, s *worldStream) {
	if !w.cfg.sharing || s == b.stream || b.inCapture || s.capture != nil || b.stream.capture != nil ||
		!d.mayQueue(s) || !d.mayQueue(b.stream) || b.pool != nil && b.pool.captured || b.given != nil {
		return
	}
	before := b.lastUser()
	if before.capture != nil || !d.mayQueue(before) {
		return
	}
	err := w.order(d, before, d, s)
	if err == nil {
		err = w.drv.Use(d.id, s.handle, b.p, b.size)
	}
	if err == nil {
		err = w.c.recordStream(w.a, b.p, s.st)
	}
	if err != nil {
		w.fail("sharing: %v", err)
	}
	b.shared, b.used = true, true
	b.recorded = append(b.recorded, s)
	s.uses++
	w.seen["share"]++
}

// lastUser is the stream behind whose work all use of the block lies.
func (b *worldBlock) lastUser() *worldStream {
	if n := len(b.recorded); n > 0 {
		return b.recorded[n-1]
	}
	return b.stream
}

// order has a stream, perhaps of another device, wait for what another one has queued.
func (w *world) order(d *worldDevice, before *worldStream, o *worldDevice, after *worldStream) error {
	e, err := w.drv.EventCreate(d.id)
	if err == nil {
		err = w.drv.EventRecord(d.id, e, before.handle)
	}
	if err == nil {
		err = w.drv.StreamWaitEvent(o.id, after.handle, e)
	}
	if err == nil {
		err = w.drv.EventDestroy(d.id, e)
	}
	return err
}

// give has the program free the block on another stream, perhaps another device's, which it orders behind all use of the
// block. Its own stream may be destroyed from now on.
func (w *world) give(d *worldDevice, b *worldBlock, o *worldDevice, s *worldStream) {
	if !w.cfg.sharing || b.given != nil || b.inCapture || s.capture != nil || !o.mayQueue(s) ||
		b.pool != nil && (b.pool.captured || w.chance(80)) {
		return
	}
	before := b.lastUser()
	if before.capture != nil || !d.mayQueue(before) {
		return
	}
	if b.used || w.chance(50) { // nothing lies between a block that was not used and what its memory was used for before
		if err := w.order(d, before, o, s); err != nil {
			w.fail("giving: %v", err)
		}
		if o == d && w.chance(50) {
			if err := w.drv.Use(d.id, s.handle, b.p, b.size); err != nil {
				w.fail("use of %#x+%d: %v", b.p, b.size, err)
			}
		}
	}
	b.shared, b.given = true, s
	b.stream.uses--
	s.uses++
	w.seen["given"]++
}

func (w *world) free(d *worldDevice, i int) {
	b := d.blocks[i]
	if w.chance(50) {
		w.use(d, b)
	}
	d.blocks[i] = d.blocks[len(d.blocks)-1]
	d.blocks = d.blocks[:len(d.blocks)-1]
	w.forget(d, b)
	w.freed = b.size
	free := func() error { return w.c.free(w.a, b.p) }
	if b.given != nil {
		free = func() error { return w.c.freeOn(w.a, b.p, b.given.st) }
	}
	if err := free(); err != nil {
		w.fail("Free(%#x): %v", b.p, err)
	}
	if b.given != nil && !slices.Contains(d.streams, b.stream) {
		w.seen["freed without its stream"]++
	}
	w.raise(d)
	if w.chance(10) && !w.live.has(uint64(b.p)) {
		if err := free(); !errors.Is(err, memory.ErrUnknownPointer) {
			w.fail("second Free(%#x): %v", b.p, err)
		}
		w.seen["double free"]++
	}
}

func (w *world) forget(d *worldDevice, b *worldBlock) {
	w.live.remove(uint64(b.p))
	if b.given != nil {
		b.given.uses--
	} else {
		b.stream.uses--
	}
	for _, s := range b.recorded {
		s.uses--
	}
	d.now.remove(b.size, b.rounded)
}

// check compares the statistics with the books.
func (w *world) check(d *worldDevice) {
	w.t.Helper()
	var g memory.Gauges
	d.dev.Views.Gauges(&g) // before Stats, which empties magazines
	s := d.dev.Views.Stats()
	is := func(name string, got, want int64) {
		w.t.Helper()
		if got != want {
			w.fail("device %d: %s is %d, want %d\n%+v", d.id, name, got, want, s)
		}
	}
	same := memory.Gauges{Reserved: uint64(s.Reserved.All.Current), Allocated: uint64(s.Allocated.All.Current), Active: uint64(s.ActiveBytes.All.Current),
		Cached: uint64(s.InactiveBytes.All.Current), Paused: uint64(s.Paused.All.Current), PeakReserved: uint64(s.Reserved.All.Peak),
		PeakAllocated: uint64(s.Allocated.All.Peak), PeakActive: uint64(s.ActiveBytes.All.Peak), PeakCached: uint64(s.InactiveBytes.All.Peak),
		PeakPaused: uint64(s.Paused.All.Peak), Limit: d.dev.Limit(), DriverCalls: g.DriverCalls, Retries: uint64(s.Retries), OOMs: uint64(s.OOMs),
		Pinned: g.Pinned, Recent: g.Recent}
	active := g.Active - min(g.Active, g.Paused)
	for i, most := range g.Recent { // each at least, of longer spans from one to the next
		if most < active || i > 0 && most < g.Recent[i-1] || g.Pinned > g.Cached {
			w.fail("device %d: the most active lately is %d of %d now, %d of %d cached bytes are pinned", d.id, g.Recent, active, g.Pinned, g.Cached)
		}
	}
	if g != same {
		w.fail("device %d: %+v, want %+v", d.id, g, same)
	}
	held := int64(d.sources.held(w.drv))
	is("allocations", s.Allocations.All.Current, d.now.blocks)
	is("requested", s.Requested.All.Current, d.now.requested)
	is("allocated", s.Allocated.All.Current, d.now.allocated)
	is("reserved", s.Reserved.All.Current, held)
	is("active + inactive bytes", s.ActiveBytes.All.Current+s.InactiveBytes.All.Current, held)
	is("reserved small + large", s.Reserved.Small.Current+s.Reserved.Large.Current, held)
	is("segments small + large", s.Segments.Small.Current+s.Segments.Large.Current, s.Segments.All.Current)
	for name, g := range map[string]memory.Grouped{"reserved": s.Reserved, "segments": s.Segments} {
		is(name+" ever got, small + large", g.Small.Added+g.Large.Added, g.All.Added)
		is(name+" given back, small + large", g.Small.Removed+g.Large.Removed, g.All.Removed)
		for _, v := range []memory.Value{g.All, g.Small, g.Large} {
			is(name+" ever got less given back", v.Added-v.Removed, v.Current)
			if v.Peak < v.Current || v == g.All && v.Peak > v.Added {
				w.fail("device %d: %s: %+v", d.id, name, v)
			}
		}
	}
	is("allocations ever", s.Allocations.All.Added, d.allocs)
	is("frees ever", s.Allocations.All.Removed, d.allocs-d.now.blocks)
	is("bytes ever", s.Requested.All.Added, d.bytes)
	is("failures", s.OOMs, d.ooms)
	is("peak of allocations", s.Allocations.All.Peak, d.peak.blocks)
	is("peak of requested", s.Requested.All.Peak, d.peak.requested)
	is("peak of allocated", s.Allocated.All.Peak, d.peak.allocated)
	if most := int64(w.drv.PeakBytes(d.id)) + d.sources.peak.Load(); !w.cfg.kinds {
		is("peak of reserved", s.Reserved.All.Peak, most)
	} else if n := s.Reserved.All.Peak; n < int64(d.most) || n > most {
		w.fail("device %d: the peak of reserved is %d, %d were seen, %d at most", d.id, n, d.most, most)
	}
	w.checkPools(d)
	w.checkStacks(d)
	is("segments got - given back", s.DeviceAllocs-s.DeviceFrees, s.Segments.All.Current)
	for name, g := range map[string]memory.Grouped{"allocations": s.Allocations, "active": s.Active, "inactive": s.Inactive,
		"requested": s.Requested, "allocated": s.Allocated, "active bytes": s.ActiveBytes, "inactive bytes": s.InactiveBytes} {
		is(name+": small + large", g.Small.Current+g.Large.Current, g.All.Current)
		is(name+": added - removed", g.All.Added-g.All.Removed, g.All.Current)
		for _, v := range []memory.Value{g.All, g.Small, g.Large} {
			if v.Peak < v.Current || v.Current < 0 {
				w.fail("device %d: %s: %+v", d.id, name, v)
			}
		}
	}
	w.checkSnapshot(d, held)
	if s.Borrows > 0 {
		w.seen["borrowed"]++
	}
	if w.cfg.sharing || s.Borrows > 0 { // what was borrowed goes back when the engine sees that it can
		if s.Active.All.Current < d.now.blocks || s.ActiveBytes.All.Current < d.now.allocated {
			w.fail("device %d: fewer active (%d, %d bytes) than allocated", d.id, s.Active.All.Current, s.ActiveBytes.All.Current)
		}
		return
	}
	is("active", s.Active.All.Current, d.now.blocks)
	is("active bytes", s.ActiveBytes.All.Current, d.now.allocated)
	is("peak of active bytes", s.ActiveBytes.All.Peak, d.peak.allocated)
	if w.cfg.observed || w.cfg.kinds || d.failed || w.cfg.opts.CacheLimit > 0 { // memory is free before it is released; others see the moment at which an observer learns of memory that is not handed out yet
		if s.InactiveBytes.All.Peak < int64(d.inactive) || s.InactiveBytes.All.Peak > s.Reserved.All.Peak {
			w.fail("the peak of inactive bytes is %d, %d were seen", s.InactiveBytes.All.Peak, d.inactive)
		}
		return
	}
	is("peak of inactive bytes", s.InactiveBytes.All.Peak, int64(d.inactive))
}

// checkSnapshot compares the snapshot's sums and blocks with the books.
func (w *world) checkSnapshot(d *worldDevice, held int64) {
	w.t.Helper()
	var size, used, requested, rest int64
	blocks := 0
	for _, seg := range d.dev.Views.Snapshot() {
		size += int64(seg.Size)
		if seg.Addr == 0 {
			rest += int64(seg.Size)
			continue
		}
		at, chunks := seg.Addr, uint64(0)
		for _, b := range seg.Blocks {
			if b.Addr != at {
				w.fail("device %d: the blocks of the segment at %#x do not tile it: %#x, want %#x", d.id, seg.Addr, b.Addr, at)
			}
			at += b.Size
			if b.State != memory.BlockUsed {
				rest += int64(b.Size)
				continue
			}
			if !w.live.has(b.Addr) {
				w.fail("device %d: the snapshot has a block at %#x that is not out", d.id, b.Addr)
			}
			blocks++
			used += int64(b.Size)
			requested += int64(b.Requested)
		}
		for _, c := range seg.Chunks {
			chunks += c.Size
		}
		if at != seg.Addr+seg.Size || seg.Chunks != nil && chunks != seg.Size {
			w.fail("device %d: segment of %d bytes: its blocks have %d, its chunks %d", d.id, seg.Size, at-seg.Addr, chunks)
		}
	}
	if size != held || used != d.now.allocated || requested != d.now.requested || int64(blocks) != d.now.blocks || used+rest != held {
		w.fail("device %d: the snapshot has %d bytes in segments, %d used (%d requested) in %d blocks, %d not; want %d held, %+v",
			d.id, size, used, requested, blocks, rest, held, d.now)
	}
}
