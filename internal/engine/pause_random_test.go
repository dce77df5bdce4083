package engine_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

// Random pauses and resumes among requests and frees, from several pools and streams, with contents that are checked. The
// oracle knows what was written where, and which blocks the snapshot says are paused. CISTERN_SEED runs one seed again.

type pauseWorld struct {
	*pausing
	what      string
	rng       *rand.Rand
	streams   []*engine.Stream
	pools     []*engine.Pool
	blocks    []*pausedLive
	magazines *cMagazines
	reg       *registry
	dir       string
	seen      map[string]int
}

type pausedLive struct {
	p       cuda.Ptr
	size    uint64
	pool    int
	tag     uint32
	st      *engine.Stream
	version byte
	lost    bool // it may have other contents: they were dropped
}

func (w *pauseWorld) fail(format string, args ...any) {
	w.t.Helper()
	w.t.Fatalf("%s: %s", w.what, fmt.Sprintf(format, args...))
}

func (b *pausedLive) contents() []byte {
	out := make([]byte, b.size)
	x := uint64(b.p) ^ uint64(b.version)<<56
	for i := range out {
		if i%61 == 0 {
			x = x*6364136223846793005 + 1442695040888963407
		}
		out[i] = byte(x >> 33)
	}
	return out
}

func (w *pauseWorld) write(b *pausedLive) {
	b.version++
	b.lost = false
	if err := w.drv.Write(0, b.st.Handle(), b.p, b.contents()); err != nil {
		w.fail("%v", err)
	}
}

func (w *pauseWorld) verify(b *pausedLive) {
	if b.lost {
		w.write(b)
		return
	}
	got := make([]byte, b.size)
	if err := w.drv.ReadBack(0, b.st.Handle(), b.p, got); err != nil {
		w.fail("%v", err)
	}
	if want := b.contents(); !bytes.Equal(got, want) {
		i := slices.IndexFunc(got, func(byte) bool { return true })
		for i = range got {
			if got[i] != want[i] {
				break
			}
		}
		w.fail("block %#x+%d of pool %d, tag %d: byte %d is %#x, want %#x", b.p, b.size, b.pool, b.tag, i, got[i], want[i])
	}
	if w.reg != nil {
		if err := w.reg.covers(b.p, b.size); err != nil {
			w.fail("%v", err)
		}
	}
}

// paused is the blocks that lack memory, by address.
func (w *pauseWorld) paused() map[cuda.Ptr]uint64 {
	out := map[cuda.Ptr]uint64{}
	for _, g := range w.d.Views.Snapshot() {
		for _, b := range g.Blocks {
			if b.Paused > 0 {
				out[cuda.Ptr(b.Addr)] = b.Paused
			}
		}
	}
	return out
}

func (w *pauseWorld) pick() (engine.Selection, string) {
	sel, name := engine.Selection{}, "all"
	if w.rng.IntN(2) == 0 {
		i := w.rng.IntN(len(w.pools))
		sel.Pool, name = w.pools[i], fmt.Sprintf("pool %d", i)
	}
	if w.rng.IntN(2) == 0 {
		sel.Tag = 1 + uint32(w.rng.IntN(3))
		name += fmt.Sprintf(", tag %d", sel.Tag)
	}
	return sel, name
}

func (w *pauseWorld) has(sel engine.Selection, b *pausedLive) bool {
	return (sel.Pool == nil || w.pools[b.pool] == sel.Pool) && (sel.Tag == 0 || b.tag == sel.Tag)
}

func (w *pauseWorld) step() {
	switch n := w.rng.IntN(100); {
	case n < 40:
		b := &pausedLive{pool: w.rng.IntN(len(w.pools)), tag: uint32(w.rng.IntN(4)), st: w.streams[w.rng.IntN(len(w.streams))]}
		switch w.rng.IntN(4) {
		case 0:
			b.size = 8 * (1 + w.rng.Uint64N(4000))
		case 1:
			b.size = 8 * (1 + w.rng.Uint64N(60000))
		default:
			b.size = 8 * (1 + w.rng.Uint64N(200000))
		}
		var err error
		if b.pool == 0 && b.tag == 0 && w.magazines != nil {
			b.p, err = w.magazines.alloc(w.d, b.size, b.st)
		} else {
			b.p, err = w.pools[b.pool].Device().AllocWith(b.size, b.st, engine.AllocOptions{Pool: w.pools[b.pool], Tag: b.tag})
		}
		if errors.Is(err, cuda.ErrOutOfMemory) {
			w.seen["oom"]++
			return
		}
		if err != nil {
			w.fail("alloc: %v", err)
		}
		w.blocks = append(w.blocks, b)
		w.write(b)
	case n < 62:
		if len(w.blocks) > 0 {
			w.freeBlock(w.rng.IntN(len(w.blocks)))
		}
	case n < 66:
		if len(w.blocks) > 0 {
			b := w.blocks[w.rng.IntN(len(w.blocks))]
			t := w.streams[w.rng.IntN(len(w.streams))]
			if err := w.magazines.recordStream(w.a, b.p, t); err != nil {
				w.fail("record stream: %v", err)
			}
		}
	case n < 80:
		sel, _ := w.pick()
		o := config.PauseOptions{Keep: config.Keep(w.rng.IntN(3)), Dir: w.dir}
		before := w.paused()
		r, err := w.d.Pause(sel, o)
		if err != nil {
			w.fail("pause: %v", err)
		}
		after := w.paused()
		lost := uint64(0)
		for _, b := range w.blocks {
			more := after[b.p] - before[b.p]
			if more > 0 && !w.has(sel, b) {
				w.fail("block %#x lost %d bytes and was not selected", b.p, more)
			}
			lost += more
			b.lost = b.lost || more > 0 && o.Keep == config.KeepNone
		}
		if lost != r.Bytes || o.Keep != config.KeepNone && r.Kept != r.Bytes || o.Keep == config.KeepNone && r.Kept != 0 || r.Physical < r.Bytes {
			w.fail("pause: %d bytes were lost: %+v", lost, r)
		}
		w.seen[fmt.Sprintf("pause %d", o.Keep)]++
		if r.Shared > 0 {
			w.seen["shared"]++
		}
	case n < 92:
		sel, name := w.pick()
		before := w.paused()
		r, err := w.d.Resume(sel)
		after := w.paused()
		if errors.Is(err, cuda.ErrOutOfMemory) {
			w.seen["resume failed"]++
			for _, b := range w.blocks {
				if before[b.p] != after[b.p] {
					w.fail("a resume failed; of block %#x %d bytes were paused, then %d", b.p, before[b.p], after[b.p])
				}
			}
			break
		}
		if err != nil {
			w.fail("resume: %v", err)
		}
		back := uint64(0)
		for _, b := range w.blocks {
			if w.has(sel, b) && after[b.p] != 0 {
				w.fail("after a resume of %s block %#x lacks %d bytes", name, b.p, after[b.p])
			}
			back += before[b.p] - after[b.p]
		}
		// Blocks that were given back and wait for other streams count with the blocks in use.
		if back > r.Bytes || r.Physical < r.Bytes || r.Kept > r.Bytes {
			w.fail("resume: %d bytes are back: %+v", back, r)
		}
		w.seen["resume"]++
	case n < 94:
		if err := w.d.Trim(); err != nil {
			w.fail("trim: %v", err)
		}
	case n < 96:
		if err := w.d.PauseBuffers(w.rng.Uint64N(20) * mib); err != nil {
			w.fail("buffers: %v", err)
		}
	case n < 98:
		w.drv.SetOutside(0, w.rng.Uint64N(220)*mib)
	default:
		w.drv.SetOutside(0, 0)
		w.d.History.SetLimit(w.rng.IntN(2) * 10)
	}
}

func (w *pauseWorld) freeBlock(i int) {
	b := w.blocks[i]
	w.blocks = slices.Delete(w.blocks, i, i+1)
	if w.paused()[b.p] > 0 {
		w.seen["freed while paused"]++
	}
	if err := w.magazines.free(w.a, b.p); err != nil {
		w.fail("free: %v", err)
	}
}

// look checks statistics, and the contents of some blocks that have their memory.
func (w *pauseWorld) look(every bool) {
	s := w.d.Views.Stats()
	held := int64(w.drv.ReservedBytes(0))
	var allocated int64
	for _, b := range w.blocks {
		allocated += int64(round512(b.size))
	}
	if s.Reserved.All.Current != held || held+s.Paused.All.Current != s.ActiveBytes.All.Current+s.InactiveBytes.All.Current ||
		s.Allocated.All.Current != allocated || s.Allocations.All.Current != int64(len(w.blocks)) ||
		s.Paused.All.Current != s.Paused.Small.Current+s.Paused.Large.Current {
		w.fail("reserved %d (the device says %d) + paused %d, active %d + inactive %d; allocated %d, want %d", s.Reserved.All.Current, held,
			s.Paused.All.Current, s.ActiveBytes.All.Current, s.InactiveBytes.All.Current, s.Allocated.All.Current, allocated)
	}
	paused := w.paused()
	sum, pools := uint64(0), uint64(0)
	for _, n := range paused {
		sum += n
	}
	for _, p := range w.pools {
		pools += p.Stats().Paused
	}
	if pending := s.ActiveBytes.All.Current - allocated; sum != uint64(s.Paused.All.Current) || pools != sum || pending < 0 {
		w.fail("the snapshot says that %d bytes are paused, the pools %d, the statistics %d", sum, pools, s.Paused.All.Current)
	}
	for _, b := range w.blocks {
		if paused[b.p] == 0 && (every || w.rng.IntN(16) == 0) {
			w.verify(b)
		}
	}
	if err := w.drv.Fault(); err != nil {
		w.fail("%v", err)
	}
}

func (w *pauseWorld) end() {
	w.drv.SetOutside(0, 0)
	for len(w.blocks) > 0 {
		if w.rng.IntN(10) == 0 {
			if _, err := w.d.Resume(all); err == nil {
				w.look(true)
			} else if !errors.Is(err, cuda.ErrOutOfMemory) {
				w.fail("resume: %v", err)
			}
		}
		w.freeBlock(w.rng.IntN(len(w.blocks)))
	}
	w.drv.Advance(time.Minute)
	if err := w.a.Trim(); err != nil {
		w.fail("%v", err)
	}
	w.look(true)
	if s := w.d.Views.Stats(); s.Paused.All.Current != 0 || s.Reserved.All.Current != 0 {
		w.fail("left over: %+v", s)
	}
	for _, p := range w.pools[1:] {
		if err := p.Release(); err != nil {
			w.fail("%v", err)
		}
	}
	w.d.OnMap(nil)
	w.d.OnUnmap(nil)
	if err := w.a.Close(); err != nil {
		w.fail("%v", err)
	}
	for _, t := range w.streams[1:] {
		w.drv.DestroyStream(0, t.Handle())
	}
	if l := w.drv.Leaks(); l != (sim.Live{}) {
		w.fail("left in the driver: %+v", l)
	}
}

func newPauseWorld(t *testing.T, seed uint64, seen map[string]int) *pauseWorld {
	rng := rand.New(rand.NewPCG(seed, 7))
	confs := []string{"", "chunk:2MiB", "single_handle:true", "cross_stream:ready"}
	conf := confs[rng.IntN(len(confs))]
	opts, err := config.Parse(conf)
	if err != nil {
		t.Fatal(err)
	}
	engine.SetStretch([]uint64{2 * mib, 6 * mib, 128 * mib}[seed%3])
	w := &pauseWorld{what: fmt.Sprintf("CISTERN_SEED=%d (%s)", seed, conf), rng: rng, dir: t.TempDir(), seen: seen}
	so := sim.Options{Capacity: 240 * mib, Check: sim.CheckOrder, Lag: []time.Duration{0, 5 * time.Millisecond}[rng.IntN(2)]}
	simulated := sim.New(so)
	var drv cuda.Driver = simulated
	if rng.IntN(3) == 0 {
		w.reg = newRegistry(func(format string, args ...any) { w.fail(format, args...) })
		drv = watch(simulated, w.reg, false)
	}
	w.pausing = newPausingOver(t, simulated, drv, opts)
	a, d := w.a, w.d
	if w.reg != nil {
		d.OnMap(w.reg.mapped)
		d.OnUnmap(w.reg.unmapped)
	}
	for i, h := range []cuda.Stream{cuda.StreamNull, simulated.NewStreamNonBlocking(0), simulated.NewStream(0)} {
		var o []config.StreamOption
		if i == 1 {
			o = append(o, config.StreamDurable)
		}
		st, err := d.Stream(h, o...)
		if err != nil {
			t.Fatal(err)
		}
		w.streams = append(w.streams, st)
	}
	own, err := resource.Segments(simulated, 0)
	if err != nil {
		t.Fatal(err)
	}
	w.pools = []*engine.Pool{d.DefaultPool()}
	for i, o := range []config.PoolOptions{{}, {Kind: config.PoolSingleHandle}, {Upstream: own}, {Upstream: own, Limit: 30 * mib}} {
		if i == 2 && w.reg != nil {
			break // what a user's resource unmaps is its own
		}
		p, err := d.NewPool(memory.PoolID{1, uint64(i)}, o)
		if err != nil {
			t.Fatal(err)
		}
		w.pools = append(w.pools, p)
	}
	if rng.IntN(2) == 0 {
		w.magazines = newCMagazines(a)
		d.Magazines.OnTokensEnd(w.magazines.forgetAll)
	}
	return w
}

func TestPauseRandom(t *testing.T) {
	defer engine.SetStretch(128 * mib)()
	seen := map[string]int{}
	want := []string{"pause 0", "pause 1", "pause 2", "resume", "resume failed", "shared", "freed while paused", "oom"}
	for seed := range seeds(t, quick(12, 2), seen, want) {
		w := newPauseWorld(t, seed, seen)
		for range 200 {
			w.step()
			w.look(false)
		}
		w.end()
		seen["sequences"]++
	}
	t.Log(seen)
}
