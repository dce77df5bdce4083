package engine_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
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
	from "github.com/cistern-gpu/cistern/resource/open"
)

// scenario is a long run of everything that makes the engine call the driver. Errors of the engine are given to tell,
// which stops the scenario by panicking if it does not like them.
type scenario struct {
	t       *testing.T
	drv     *sim.Driver
	a       *engine.Allocator
	dev     *engine.Device
	live    map[cuda.Ptr]uint64
	streams []cuda.Stream
	pool    *engine.Pool
	pools   []*engine.Pool // of segments
	single  bool           // some are of single handles: one that could be created but not mapped was never reserved
	twice   bool           // calls that undo what a failed call left may fail as well
	errs    []error
	what    string
	reg     *registry // observes all memory; nil: none does
	from    *sources  // upstreams of pools
	// seen wraps the driver as the engine sees it, alone has no other thread use the engine until the function that it returns
	// is called, and ending is called before all blocks are given back; nil: nothing.
	seen   func(cuda.Driver) cuda.Driver
	alone  func() (done func())
	ending func()
}

func (s *scenario) fail(format string, args ...any) {
	s.t.Helper()
	s.t.Fatalf("%s: %s", s.what, fmt.Sprintf(format, args...))
}

func (s *scenario) failed(op string, err error) bool {
	if err == nil {
		return false
	}
	s.errs = append(s.errs, fmt.Errorf("%s: %w", op, err))
	return true
}

func (s *scenario) alloc(p *engine.Pool, st *engine.Stream, size uint64) cuda.Ptr {
	ptr, err := p.Alloc(size, st)
	if s.failed("alloc", err) {
		if ptr != 0 {
			s.fail("a failed Alloc returned %#x", ptr)
		}
		return 0
	}
	for q, n := range s.live {
		if ptr < q+cuda.Ptr(round512(n)) && q < ptr+cuda.Ptr(round512(size)) {
			s.fail("%#x+%d overlaps %#x+%d", ptr, size, q, n)
		}
	}
	if s.reg != nil {
		if err := s.reg.covers(ptr, size); err != nil {
			s.fail("%v", err)
		}
	}
	s.live[ptr] = size
	s.drv.Use(0, st.Handle(), ptr, size) // the checker keeps the fault; a broken context does not matter here
	return ptr
}

// free must take the block back whatever the driver says.
func (s *scenario) free(ptr cuda.Ptr) {
	if ptr == 0 {
		return
	}
	delete(s.live, ptr) // first: another thread may be handed the memory before Free returns
	err := s.a.Free(ptr)
	if errors.Is(err, memory.ErrUnknownPointer) {
		s.fail("Free(%#x): %v", ptr, err)
	}
	s.failed("free", err)
}

func (s *scenario) check() {
	s.t.Helper()
	if s.alone != nil {
		defer s.alone()()
	}
	st := s.dev.Views.Stats()
	var requested, allocated int64
	for _, n := range s.live {
		requested += int64(n)
		allocated += int64(round512(n))
	}
	held, most := int64(s.from.held(s.drv)), int64(s.drv.PeakBytes(0))+s.from.peak.Load()
	if s.single && s.twice && st.Reserved.All.Current < held {
		held = st.Reserved.All.Current // a single handle that was no segment yet and could not be given back
	}
	peak := st.Reserved.All.Peak
	badPeak := peak > most || !s.single && peak != most
	if s.seen != nil { // what an upstream gives back counts until it has returned, when another thread may have got it
		badPeak = false
	}
	if st.Allocations.All.Current != int64(len(s.live)) || st.Requested.All.Current != requested ||
		st.Allocated.All.Current != allocated || st.ActiveBytes.All.Current < allocated ||
		st.Reserved.All.Current != held || st.ActiveBytes.All.Current+st.InactiveBytes.All.Current != held+st.Paused.All.Current ||
		badPeak {
		s.fail("want %d blocks, %d bytes requested, %d allocated, %d reserved (peak %d); have %+v", len(s.live), requested,
			allocated, held, most, st)
	}
	if err := s.drv.Fault(); err != nil {
		s.fail("%v", err)
	}
}

// newScenario is one over a device of its own, which reports what it finds wrong to fault, or where that is nil to check.
func newScenario(t *testing.T, what string, fault func(error)) *scenario {
	return &scenario{t: t, what: what, live: map[cuda.Ptr]uint64{},
		drv: sim.New(sim.Options{Capacity: 256 * mib, Lag: 20 * time.Millisecond, Check: sim.CheckOrder, OnFault: fault})}
}

// failing plays the scenario while the k-th driver call fails, and judges the errors. It reports whether it got as far as having a
// device.
func (s *scenario) failing(opts config.Options, k uint64, code cuda.Code) bool {
	s.t.Helper()
	name := ""
	s.drv.FailCall(func(call string, n uint64) cuda.Code {
		if n == k {
			name = call
			return code
		}
		return cuda.Success
	})
	ok := s.play(opts)
	s.what += ", " + name
	s.judge(code, name)
	return ok
}

// play reports whether it got as far as having a device.
func (s *scenario) play(opts config.Options) bool {
	var err error
	drv := cuda.Driver(s.drv)
	if s.reg != nil {
		drv = watch(s.drv, s.reg, true)
	}
	if s.seen != nil {
		drv = s.seen(drv)
	}
	s.from = &sources{drv: drv}
	if s.a, err = engine.New(drv, opts); s.failed("new", err) {
		return false
	}
	if opts.Upstream != "" {
		must(s.t, s.a.SetUpstream(func(id cuda.Device) (resource.Resource, error) { return from.Parse(drv, id, opts.Upstream) }))
	}
	if s.dev, err = s.a.Device(0); s.failed("device", err) {
		return false
	}
	if s.reg != nil {
		s.dev.OnMap(s.reg.mapped)
		s.dev.OnUnmap(s.reg.unmapped)
	}
	s.drv.ResetPeak(0)
	s.single = opts.SingleHandle || strings.HasSuffix(opts.Upstream, "virtual")
	d := s.dev
	side := s.drv.NewStreamNonBlocking(0)
	short := s.drv.NewStream(0)
	s.streams = []cuda.Stream{side, short}
	var st [3]*engine.Stream
	for i, h := range []cuda.Stream{cuda.StreamNull, side, short} {
		var o []config.StreamOption
		if i == 1 {
			o = append(o, config.StreamDurable)
		}
		if st[i], err = d.Stream(h, o...); s.failed("stream", err) {
			return true
		}
	}
	pool := d.DefaultPool()
	var ptrs []cuda.Ptr
	// Fill the device on one stream, then want it on others: growth, remapping, lending, waits.
	for range 20 {
		ptrs = append(ptrs, s.alloc(pool, st[0], 10*mib+512))
		s.check()
	}
	for i := 0; i < len(ptrs); i += 2 {
		s.free(ptrs[i])
		s.check()
	}
	for i := range 6 {
		p := s.alloc(pool, st[1+i%2], 15*mib)
		s.check()
		if i%2 == 0 && p != 0 {
			s.record(p, st[0])
			s.free(p)
			s.check()
		}
	}
	s.drv.Advance(time.Second)
	for i := 1; i < len(ptrs); i += 2 {
		s.free(ptrs[i])
		s.check()
	}
	private, err := d.NewPool(memory.PoolID{0, 1}, config.PoolOptions{})
	if err != nil {
		s.fail("NewPool: %v", err)
	}
	s.pool = private
	inPool := []cuda.Ptr{s.alloc(private, st[1], 60*mib), s.alloc(private, st[2], 3*mib), s.alloc(private, st[0], 100)}
	s.check()
	d.SetLimit(s.drv.ReservedBytes(0) + 4*mib)
	s.segments(st[1])
	s.kinds(st[1])
	s.captures(st[1])
	big := s.alloc(pool, st[0], 150*mib)
	s.check()
	s.alloc(pool, st[0], 300*mib)
	s.check()
	d.SetLimit(0)
	for _, p := range inPool[:2] {
		s.free(p)
		s.check()
	}
	s.failed("release", private.Release())
	s.check()
	s.free(inPool[2])
	s.check()
	s.free(big)
	s.failed("trim", d.Trim())
	s.check()
	for range 4 {
		s.free(s.alloc(pool, st[2], 40*mib))
		s.free(s.alloc(pool, st[1], 70*mib))
		s.check()
	}
	s.gone(pool, st[1])
	if s.ending != nil {
		s.ending()
	}
	for p := range s.live {
		s.free(p)
	}
	s.check()
	return true
}

// gone has memory whose stream is destroyed before it is given back, on another stream, which is destroyed as well.
func (s *scenario) gone(p *engine.Pool, lasting *engine.Stream) {
	for range 2 {
		var h [2]cuda.Stream
		var st [2]*engine.Stream
		known := true
		for i := range h {
			h[i] = s.drv.NewStreamNonBlocking(0)
			var err error
			st[i], err = s.dev.Stream(h[i])
			known = !s.failed("stream", err) && known
		}
		var ptrs []cuda.Ptr
		for range 6 {
			if known {
				ptrs = append(ptrs, s.alloc(p, st[0], 15*mib+512))
				s.check()
			}
		}
		// The program's own calls: again where they fail, unless the context is broken.
		again := func(f func() error) {
			for i := 0; f() != nil && i < 50; i++ {
			}
		}
		var e cuda.Event
		again(func() (err error) { e, err = s.drv.EventCreate(0); return err })
		again(func() error { return s.drv.EventRecord(0, e, h[0]) })
		again(func() error { return s.drv.StreamWaitEvent(0, h[1], e) })
		again(func() error { return s.drv.StreamWaitEvent(0, lasting.Handle(), e) })
		again(func() error { return s.drv.EventDestroy(0, e) })
		s.drv.DestroyStream(0, h[0])
		for i, ptr := range ptrs {
			on := st[1]
			if i%2 == 0 {
				on = lasting
			}
			delete(s.live, ptr)
			err := s.a.FreeOn(ptr, on)
			if errors.Is(err, memory.ErrUnknownPointer) {
				s.fail("FreeOn(%#x): %v", ptr, err)
			}
			s.failed("free", err)
			s.check()
		}
		s.drv.DestroyStream(0, h[1])
		s.free(s.alloc(p, lasting, 150*mib))
		s.check()
	}
}

// segments uses pools of segments of each kind, whose memory must go for one another's and for that of chunks.
func (s *scenario) segments(st *engine.Stream) {
	s.dev.SetLimit(0)
	kinds := []config.PoolOptions{{Kind: config.PoolSingleHandle}, {Kind: config.PoolMalloc, SegmentPerBlock: true},
		{Upstream: &upstream{Resource: resource.Device(s.a.Driver(), 0)}}}
	for i, o := range kinds {
		p, err := s.dev.NewPool(memory.PoolID{1, uint64(i)}, o)
		if s.failed("new pool", err) {
			continue
		}
		s.single = true
		s.pools = append(s.pools, p)
		a, b := s.alloc(p, st, 20*mib), s.alloc(p, st, 30*mib)
		s.check()
		s.free(a)
		s.free(b)
		s.check()
	}
	s.dev.SetLimit(s.drv.ReservedBytes(0) + 4*mib)
	for i, p := range s.pools {
		s.free(s.alloc(p, st, uint64(40+10*i)*mib))
		s.check()
	}
	s.free(s.alloc(s.dev.DefaultPool(), st, 70*mib))
	s.check()
	if len(s.pools) > 0 {
		s.free(s.alloc(s.pools[0], st, 60*mib))
		s.check()
		s.failed("release", s.pools[0].Release())
		s.check()
	}
}

// kinds uses pools of other kinds of memory, with limits and spills, and asks for labelled memory in the host's order.
func (s *scenario) kinds(st *engine.Stream) {
	s.dev.SetLimit(0)
	for i, kind := range []string{"virtual", "managed", "pinned", "host_numa"} {
		up, err := s.from.add(kind, nil)
		if s.failed("upstream", err) {
			continue
		}
		spill, err := s.from.add("pinned", nil)
		if s.failed("spill", err) {
			continue
		}
		p, err := s.dev.NewPool(memory.PoolID{3, uint64(i)}, config.PoolOptions{Upstream: up, Spill: spill, Limit: 50 * mib})
		if s.failed("new pool", err) {
			continue
		}
		s.single = true
		s.pools = append(s.pools, p)
		a := s.alloc(p, st, 30*mib)
		s.check()
		b := s.alloc(p, st, 30*mib) // which spills
		s.check()
		s.free(a)
		c, err := s.dev.AllocWith(25*mib, st, engine.AllocOptions{Pool: p, Library: 3, Tag: 4, HostOrder: true})
		if !s.failed("alloc in the host's order", err) {
			s.live[c] = 25 * mib
		}
		s.check()
		s.free(c)
		s.free(b)
		s.check()
		s.failed("trim", p.Trim())
		s.check()
	}
	c, err := s.dev.AllocWith(mib, st, engine.AllocOptions{HostOrder: true})
	if !s.failed("alloc in the host's order", err) {
		s.live[c] = mib
		s.free(c)
	}
}

// captures captures into a pool, announced before and while it is under way, and goes back to what was live between.
func (s *scenario) captures(st *engine.Stream) {
	p, err := s.dev.NewPool(memory.PoolID{2, 1}, config.PoolOptions{})
	if err != nil {
		s.fail("NewPool: %v", err)
	}
	s.pools = append(s.pools, p)
	s.free(s.alloc(p, st, 5*mib))
	s.failed("mark", s.dev.Captures.MarkFrees())
	var between []memory.Block
	for _, late := range []bool{false, true} {
		begin := func() bool { return !s.failed("begin capture", s.dev.Captures.Begin(st, p)) }
		known := late || begin()
		done := func() {}
		if late && s.alone != nil { // a capture that the engine does not know of is the program's to protect
			done = s.alone()
		}
		if err := s.drv.BeginCapture(0, st.Handle()); err != nil {
			return // the context is broken
		}
		if late {
			known = begin()
		}
		done()
		if known {
			s.free(s.alloc(p, st, 3*mib))
			s.alloc(p, st, 4*mib)
			s.check()
		}
		if _, err := s.drv.EndCapture(0, st.Handle()); err != nil && s.drv.Fault() != nil {
			s.fail("the capture was spoilt: %v", err)
		}
		if known {
			s.failed("end capture", s.dev.Captures.End(st))
		}
		if !late {
			between = p.Blocks()
		}
		s.check()
	}
	s.failed("restore", p.Restore(between))
	s.forgetGone()
	s.check()
	for _, b := range between {
		s.free(b.Base)
	}
	s.check()
	s.failed("release", p.Release())
	s.check()
}

// forgetGone removes from the books what a restored pool no longer has: blocks of the second capture. A second thread stands
// still, as it might be handed such an address again.
func (s *scenario) forgetGone() {
	if s.alone != nil {
		defer s.alone()()
	}
	for q := range s.live {
		if _, err := s.a.Base(q); err != nil {
			delete(s.live, q)
		}
	}
}

func (s *scenario) record(p cuda.Ptr, st *engine.Stream) {
	if err := s.a.RecordStream(p, st); err != nil {
		s.fail("RecordStream: %v", err)
	}
}

// end demands that a request that fits succeeds now that nothing fails any more, and that nothing is left behind.
func (s *scenario) end() {
	s.t.Helper()
	s.drv.FailCall(nil)
	for p := range s.live {
		s.free(p)
	}
	n := len(s.errs)
	st, err := s.dev.Stream(cuda.StreamNull)
	if err != nil {
		s.fail("Stream: %v", err)
	}
	s.drv.Advance(time.Minute)
	s.free(s.alloc(s.dev.DefaultPool(), st, 200*mib))
	if len(s.errs) != n {
		s.fail("a request that fits, after the failure: %v (then: %v)", s.errs[n:], s.errs[:n])
	}
	s.check()
	for _, p := range append(s.pools, s.pool) {
		if p != nil {
			p.Release() // again, if it failed; else an error
		}
	}
	if err := s.a.Trim(); err != nil {
		s.fail("Trim: %v", err)
	}
	s.check()
	if err := s.a.Close(); err != nil {
		s.fail("Close: %v", err)
	}
	if err := s.from.close(); err != nil || s.from.bytes.Load() != 0 {
		s.fail("closing upstreams: %v, %d bytes are out", err, s.from.bytes.Load())
	}
	for _, h := range s.streams {
		s.drv.DestroyStream(0, h)
	}
	if l := s.drv.Leaks(); l != (sim.Live{}) {
		s.fail("left behind in the driver: %+v", l)
	}
}

// TestFailEveryCall fails each driver call of the scenario in turn, with one error of four: over the five settings, which make
// much the same calls, with each.
func TestFailEveryCall(t *testing.T) {
	failEveryCall(t, uint64(quick(1, 31)), 4)
}

// TestSlowFailEveryCall fails each driver call with every error.
func TestSlowFailEveryCall(t *testing.T) {
	slow.Only(t)
	failEveryCall(t, 1, 1)
}

// failEveryCall fails every step-th driver call, with one of so many errors.
func failEveryCall(t *testing.T, step, oneOf uint64) {
	codes := []cuda.Code{cuda.ErrOutOfMemory, cuda.ErrInvalidValue, cuda.ErrNotSupported, cuda.ErrIllegalAddress}
	for setting, text := range []string{"", "chunk:2MiB,cross_stream:ready", "backend:malloc", "single_handle:true", "upstream:virtual"} {
		opts, err := config.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		clean := newScenario(t, "nothing fails, "+text, nil)
		clean.play(opts)
		for _, err := range clean.errs {
			if !errors.Is(err, cuda.ErrOutOfMemory) {
				t.Fatalf("%s: %v", clean.what, err)
			}
		}
		calls := clean.drv.CallNumber()
		clean.end()
		for i, code := range codes {
			for k := uint64(1); k <= calls; k += step {
				if (k+uint64(i+setting))%oneOf != 0 {
					continue
				}
				s := newScenario(t, fmt.Sprintf("call %d of %d fails with %v, %q", k, calls, code, text), nil)
				s.twice = code.Poisons()
				if !s.failing(opts, k, code) {
					continue // it said that there is no device
				}
				if code.Poisons() {
					s.broken(code)
				} else {
					s.end()
				}
			}
		}
	}
}

// judge looks at the errors that the program saw: other than out of memory must carry the injected code's name, and
// out of memory must not have been made of anything else.
func (s *scenario) judge(code cuda.Code, call string) {
	s.t.Helper()
	others := 0
	for _, err := range s.errs {
		var oom *memory.OutOfMemoryError
		switch {
		case errors.As(err, &oom):
			if oom.Cause != nil && !errors.Is(oom.Cause, cuda.ErrOutOfMemory) {
				s.fail("%v was made of %v", err, oom.Cause)
			}
		case !errors.Is(err, code):
			s.fail("%v does not carry %v", err, code)
		default:
			others++
			var e *cuda.Error
			if !errors.As(err, &e) || !code.Poisons() && e.Op != call {
				s.fail("%v does not name %s", err, call)
			}
		}
	}
	if !code.Poisons() && others > 1 {
		s.fail("one failure was reported %d times: %v", others, s.errs)
	}
}

// broken is what must hold after the context died: frees are bookkeeping, requests fail with the error that broke it.
func (s *scenario) broken(code cuda.Code) {
	s.t.Helper()
	if len(s.live) != 0 {
		s.fail("%d blocks are left", len(s.live))
	}
	st, err := s.dev.Stream(cuda.StreamNull)
	if err == nil {
		if _, err = s.dev.Alloc(mib, st); !errors.Is(err, code) {
			s.fail("Alloc on a broken context: %v", err)
		}
	} else if !errors.Is(err, code) {
		s.fail("Stream on a broken context: %v", err)
	}
	s.dev.Trim()
	s.check()
}

// Random operations while driver calls fail at random: books stay exact, and all memory can be had in the end.
func TestRandomFailures(t *testing.T) {
	seed := testkit.Seed(t)
	n := 60
	if testing.Short() {
		n = 10
	}
	for i := range n {
		rng := rand.New(rand.NewPCG(seed, uint64(i)))
		opts := []config.Options{{}, {Backend: config.BackendMalloc}, {Upstream: "device"}, {Upstream: "limiting:bytes=200MiB|virtual"}}[i%4]
		s := newScenario(t, fmt.Sprintf("seed %d, %d", seed, i), nil)
		s.twice = true
		codes := []cuda.Code{cuda.ErrOutOfMemory, cuda.ErrInvalidValue, cuda.ErrNotSupported, cuda.ErrUnknown}
		s.drv.FailCall(func(call string, n uint64) cuda.Code {
			if n > 10 && rng.IntN(10) == 0 {
				return codes[rng.IntN(len(codes))]
			}
			return cuda.Success
		})
		if s.play(opts) {
			s.end()
		}
	}
}

// A request that the device cannot meet takes nothing from it, nor does one that fails after part of its memory was got.
func TestHopelessRequest(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 8 * gib}, config.Options{}, 1)
	drv, d, st := e.drv, e.dev, e.streams[0]
	if _, err := drv.MemAlloc(0, 5*gib); err != nil { // another library's
		t.Fatal(err)
	}
	before := drv.Calls().Calls["cuMemCreate"].Count
	for _, size := range []uint64{100 * gib, 4 * gib} {
		if _, err := d.Alloc(size, st); !errors.Is(err, cuda.ErrOutOfMemory) {
			t.Fatalf("%d bytes: %v", size, err)
		}
		if n := drv.Calls().Calls["cuMemCreate"].Count - before; n != 0 {
			t.Errorf("%d bytes: %d chunks were got", size, n)
		}
	}
	creates := 0
	drv.FailCall(func(call string, _ uint64) cuda.Code {
		if call == "cuMemCreate" {
			if creates++; creates > 3 {
				return cuda.ErrOutOfMemory
			}
		}
		return cuda.Success
	})
	if _, err := d.Alloc(100*mib, st); !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Fatal(err)
	}
	if r := d.Views.Stats().Reserved.All; r.Current != 0 || r.Peak == 0 {
		t.Errorf("reserved after a request that failed half-way: %+v", r)
	}
}
