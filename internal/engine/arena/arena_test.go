package arena_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine/arena"
	"github.com/cistern-gpu/cistern/internal/engine/health"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/heap"
	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
	"github.com/cistern-gpu/cistern/internal/magazine"
)

const (
	kib, mib = 1 << 10, 1 << 20
	smallMax = 256 * kib
	base     = 1 << 40
)

// world is one arena with a stream heap of each class, and what an engine does with the device's lock.
type world struct {
	t      testing.TB
	drv    *sim.Driver
	health *health.State
	time   *timeline.Device
	stream *timeline.Stream
	turns  timeline.Turns
	late   arena.Late
	quota  quota.Device
	arena  *arena.Arena
	heaps  [quota.NumClasses]*arena.Heap
	blocks [quota.NumClasses]*heap.Heap
	slow   int // operations that needed the device
}

func newWorld(t testing.TB) *world {
	drv := sim.New(sim.Options{Busy: true, Lag: time.Second})
	w := &world{t: t, drv: drv, health: health.New(drv, 0)}
	w.must(drv.RetainContext(0))
	w.time = timeline.New(w.health, timeline.NewGates(1), &w.turns)
	w.stream = w.newStream()
	w.arena = arena.New(w.health, &w.late)
	w.quota.AddArena(&w.arena.Quota)
	for class := range w.heaps {
		w.blocks[class] = heap.New()
		w.heaps[class] = w.arena.Add(class, w.stream, w.blocks[class])
	}
	return w
}

func (w *world) newStream() *timeline.Stream {
	h := w.drv.NewStreamNonBlocking(0)
	id, err := w.drv.StreamID(0, h)
	w.must(err)
	st := &timeline.Stream{}
	st.Init(w.time, id, h)
	st.Queue.SetDurable(true)
	return st
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) want(got, want arena.Outcome) {
	w.t.Helper()
	if got != want {
		w.t.Fatalf("outcome %d, want %d", got, want)
	}
}

// rebalance raises the peaks to what is now.
func (w *world) rebalance() { w.quota.Rebalance(&w.arena.Quota, 0) }

// grow gives a class a range of free memory.
func (w *world) grow(class int, addr, size uint64) {
	w.arena.Lock()
	defer w.arena.Unlock()
	h := w.blocks[class]
	h.Map(h.AddRange(addr, size), addr, size, 0)
	w.arena.Quota.Classes[class].SetFree(h.FreeBlocks, int64(size))
	w.rebalance()
}

// raise lets the class hand out so much in so many blocks, and take it back, without the device's lock: it was done before.
func (w *world) raise(class, blocks int, size uint64) {
	var out []cuda.Ptr
	for range blocks {
		p := w.allocSlow(class, size)
		if p == 0 {
			w.t.Fatal("no memory")
		}
		out = append(out, p)
	}
	for i := 0; i < len(out); i += 2 {
		w.freeSlow(class, out[i])
	}
	for i := 1; i < len(out); i += 2 {
		w.freeSlow(class, out[i])
	}
	w.slow = 0
}

func round(n uint64) uint64 { return (n + 511) &^ 511 }

// classOf is the size class of a request.
func classOf(n uint64) int {
	if n <= smallMax {
		return quota.Small
	}
	return quota.Large
}

func (w *world) allocSlow(class int, size uint64) cuda.Ptr {
	w.slow++
	w.arena.Lock()
	defer w.arena.Unlock()
	h := w.blocks[class]
	id := h.Take(round(size), size)
	if id == 0 {
		return 0
	}
	w.arena.Quota.Classes[class].Alloc(size, round(size), h.FreeBlocks)
	w.rebalance()
	return cuda.Ptr(h.At(id).Addr)
}

func (w *world) freeSlow(class int, p cuda.Ptr) {
	w.slow++
	w.arena.Lock()
	defer w.arena.Unlock()
	h := w.blocks[class]
	id, _, ok := h.Lookup(uint64(p))
	if !ok {
		w.t.Fatalf("%#x is not in use", p)
	}
	n, requested := h.At(id).Size, h.At(id).Requested
	h.Free(id, w.stream.Epoch())
	w.arena.Quota.Classes[class].Free(requested, n, h.FreeBlocks)
	w.rebalance()
}

func (w *world) alloc(size uint64) cuda.Ptr {
	class := classOf(size)
	if p := w.heaps[class].Alloc(size, round(size), 0, 0); p != 0 {
		return p
	}
	return w.allocSlow(class, size)
}

// gauges are those of a class, the magazine being empty.
func (w *world) gauges(class int) quota.Gauges {
	w.arena.Lock()
	defer w.arena.Unlock()
	return *w.arena.Quota.Classes[class].Now()
}

// model is the memory of a class as intervals.
type model struct {
	used map[uint64][2]uint64 // size and bytes asked for, by address
	size uint64
}

// free are the gaps between used blocks.
func (m *model) free() (gaps [][2]uint64) {
	var addrs []uint64
	for a := range m.used {
		addrs = append(addrs, a)
	}
	slices.Sort(addrs)
	at := uint64(base)
	for _, a := range append(addrs, base+m.size) {
		if a > at {
			gaps = append(gaps, [2]uint64{at, a - at})
		}
		at = a + m.used[a][0]
	}
	return gaps
}

// take notes that a block was handed out, which must lie in a gap. first: at its start.
func (m *model) take(p, n, size uint64, first bool) error {
	for _, g := range m.free() {
		if p >= g[0] && p+n <= g[0]+g[1] && (p == g[0] || !first) {
			m.used[p] = [2]uint64{n, size}
			return nil
		}
	}
	return fmt.Errorf("%#x, %d bytes, lies in no gap, or not at its start", p, n)
}

func (m *model) gauges() (g quota.Gauges) {
	for _, b := range m.used {
		g[quota.Allocs]++
		g[quota.Active]++
		g[quota.Requested] += int64(b[1])
		g[quota.Allocated] += int64(b[0])
		g[quota.ActiveBytes] += int64(b[0])
	}
	for _, gap := range m.free() {
		g[quota.Free]++
		g[quota.FreeBytes] += int64(gap[1])
	}
	return g
}

// A random program agrees with a naive model of intervals, with and without a magazine, whose blocks count as free ones of
// their own until the arena is locked. What was done before is not done with the device's lock again.
func TestRandom(t *testing.T) {
	for _, withMagazine := range []bool{false, true} {
		for seed := range uint64(8) {
			w := newWorld(t)
			w.grow(quota.Small, base, 4*mib)
			m := &model{used: map[uint64][2]uint64{}, size: 4 * mib}
			var f *magazine.Magazine
			if withMagazine {
				f = magazine.New(511, smallMax)
				w.arena.SetMagazine(f, w.stream)
			}
			rng := rand.New(rand.NewPCG(seed, 1))
			var out []uint64
			for step := range 3000 {
				if len(out) == 0 || rng.IntN(100) < 52 {
					size := 1 + rng.Uint64N(64*kib)
					if f != nil {
						size = size>>14<<14 + 5*kib // few sizes, so that they are met in the magazine
					}
					var p cuda.Ptr
					if f != nil {
						p, _ = w.heaps[quota.Small].AllocMagazine(f, size)
					}
					if p == 0 {
						p = w.alloc(size)
					}
					if p == 0 {
						if slices.ContainsFunc(m.free(), func(g [2]uint64) bool { return g[1] >= round(size) }) {
							t.Fatalf("seed %d, step %d: no memory for %d bytes", seed, step, size)
						}
						continue
					}
					if err := m.take(uint64(p), round(size), size, f == nil); err != nil {
						t.Fatalf("seed %d, step %d: %v", seed, step, err)
					}
					out = append(out, uint64(p))
				} else {
					i := rng.IntN(len(out))
					p := cuda.Ptr(out[i])
					out[i] = out[len(out)-1]
					out = out[:len(out)-1]
					delete(m.used, uint64(p))
					switch o := w.heaps[quota.Small].Free(p); o {
					case arena.Done:
					case arena.NeedsQuota:
						w.arena.Enter()
						w.want(w.heaps[quota.Small].PutBeyond(p), arena.Done)
						w.rebalance()
						w.arena.Unlock()
						w.slow++
					case arena.NeedsDevice:
						w.freeSlow(quota.Small, p)
					default:
						t.Fatalf("seed %d, step %d: free: %d", seed, step, o)
					}
				}
				if f == nil || step%16 == 0 {
					if got, want := w.gauges(quota.Small), m.gauges(); got != want {
						t.Fatalf("seed %d, step %d: gauges %v, want %v", seed, step, got, want)
					}
				}
			}
			if w.slow > 1000 {
				t.Errorf("seed %d: %d of 3000 operations needed the device", seed, w.slow)
			}
		}
	}
}

// Where the hot path does not suffice nothing is changed, and the outcome says what is needed.
func TestRefusals(t *testing.T) {
	cases := []struct {
		name        string
		do          func(w *world, id heap.ID) (undo func())
		alloc, free bool // that they are refused
	}{
		{"a capture began", func(w *world, _ heap.ID) func() { w.stream.SetCapture(7); return func() { w.stream.SetCapture(0) } }, true, false},
		{"sorted for a capture", func(w *world, _ heap.ID) func() {
			w.heaps[0].Capture = 7
			return func() { w.heaps[0].Capture = 0 }
		}, true, true},
		{"recording", func(w *world, _ heap.ID) func() {
			w.health.SetRecording(true)
			return func() { w.health.SetRecording(false) }
		}, true, true},
		{"used by others", func(w *world, id heap.ID) func() {
			w.blocks[0].At(id).Uses = 3
			return func() { w.blocks[0].At(id).Uses = 0 }
		}, false, true},
		{"no allowances", func(w *world, _ heap.ID) func() {
			w.quota.ResetPeaks()
			w.rebalance()
			return func() { w.raise(0, 6, 4*kib) }
		}, true, true},
		{"broken", func(w *world, _ heap.ID) func() { w.health.Failed(cuda.ErrIllegalAddress); return nil }, true, true},
	}
	w := newWorld(t)
	w.grow(quota.Small, base, mib)
	w.raise(quota.Small, 6, 4*kib)
	h := w.heaps[quota.Small]
	a, b := w.alloc(4*kib), w.alloc(4*kib) // of which b has a used block before it, and free memory after it
	for _, c := range cases {
		id, _, _ := w.blocks[0].Lookup(uint64(a))
		undo := c.do(w, id)
		before := w.gauges(quota.Small)
		if c.alloc && (h.Alloc(4*kib, 4*kib, 0, 0) != 0 || h.TryAlloc(4*kib, 4*kib, 0, 0) != 0) {
			t.Fatalf("%s: a block was handed out", c.name)
		}
		if c.free {
			w.want(h.Free(a), arena.NeedsDevice)
		}
		if after := w.gauges(quota.Small); after != before {
			t.Fatalf("%s: %v became %v", c.name, before, after)
		}
		if undo != nil {
			undo()
			p := h.Alloc(4*kib, 4*kib, 0, 0)
			if p == 0 {
				t.Fatalf("%s, undone: no block", c.name)
			}
			w.want(h.Free(p), arena.Done)
		}
	}
	w.want(h.Free(b+512), arena.Unknown)
	w.want(h.UsedAlone(b+512), arena.Unknown)
	w.want(h.UsedAlone(b), arena.Done)
	id, _, _ := w.blocks[0].Lookup(uint64(b))
	w.blocks[0].At(id).Uses = 1
	w.want(h.UsedAlone(b), arena.NeedsDevice)
	w.blocks[0].Park(id)
	w.want(h.Free(b), arena.Pending)
	w.want(h.UsedAlone(b), arena.Unknown)
}

// While frees wait for other streams one request in PollEvery is left to the engine, which collects them.
func TestPolls(t *testing.T) {
	w := newWorld(t)
	w.grow(quota.Small, base, mib)
	w.raise(quota.Small, 2, 4*kib)
	w.health.SetWaiting(true)
	refused := 0
	for range 10 * magazine.PollEvery {
		if p := w.heaps[0].Alloc(4*kib, 4*kib, 0, 0); p == 0 {
			refused++
		} else {
			w.want(w.heaps[0].Free(p), arena.Done)
		}
	}
	if refused != 10 {
		t.Errorf("%d of %d requests", refused, 10*magazine.PollEvery)
	}
}

// A block is handed out with its tag and its stack.
func TestTagAndStack(t *testing.T) {
	w := newWorld(t)
	w.grow(quota.Large, base, 8*mib)
	w.raise(quota.Large, 2, mib)
	w.blocks[1].Stacks.Keep(true)
	p := w.heaps[1].Alloc(mib-1, mib, 5, 6)
	id, _, _ := w.blocks[1].Lookup(uint64(p))
	if b := w.blocks[1].At(id); p == 0 || b.Tag != 5 || w.blocks[1].Stacks.Of(id) != 6 || b.Requested != mib-1 {
		t.Errorf("%#x: %+v, stack %d", p, b, w.blocks[1].Stacks.Of(id))
	}
}

// An epoch is closed after every CloseBytes once another stream has allocated, and at every free where it must be at once.
func TestEpochs(t *testing.T) {
	w := newWorld(t)
	w.grow(quota.Large, base, 256*mib)
	w.raise(quota.Large, 2, 16*mib)
	records := func() int64 { return int64(w.drv.Calls().Calls["cuEventRecord"].Count) }
	pair := func() {
		p := w.heaps[1].Alloc(16*mib, 16*mib, 0, 0)
		if p == 0 {
			t.Fatal("no block")
		}
		w.want(w.heaps[1].Free(p), arena.Done)
	}
	for range 8 {
		pair()
	}
	if n := records(); n != 0 {
		t.Errorf("%d events while the stream is alone", n)
	}
	w.time.SetShared()
	for range 8 {
		pair()
	}
	if n, want := records(), int64(8*16*mib/timeline.CloseBytes); n != want {
		t.Errorf("%d events, want %d", n, want)
	}
	before := records()
	w.stream.Queue.SetEager()
	for range 8 {
		pair()
	}
	if n := records() - before; n != 8 {
		t.Errorf("%d events for 8 frees", n)
	}
}

// A stream heap that another stream succeeds is empty, and what was free there may be used at once.
func TestSucceed(t *testing.T) {
	w := newWorld(t)
	w.grow(quota.Small, base, mib)
	w.raise(quota.Small, 2, 4*kib)
	old, st := w.heaps[0], w.newStream()
	w.arena.Lock()
	next := old.Succeed(st, heap.New())
	w.arena.Unlock()
	if p := old.Alloc(4*kib, 4*kib, 0, 0); p != 0 {
		t.Errorf("%#x from the heap that was succeeded", p)
	}
	p := next.Alloc(4*kib, 4*kib, 0, 0)
	id, _, ok := w.blocks[0].Lookup(uint64(p))
	if !ok {
		t.Fatal("the memory is gone")
	}
	w.want(old.Free(p), arena.Unknown)
	w.want(next.Free(p), arena.Done)
	w.blocks[0].FreeBins.Each(heap.Align, func(i heap.ID, b *heap.Block) bool {
		if b.Stamp > st.Epoch() {
			t.Errorf("block %d has a mark of the other stream: %d", id, b.Stamp)
		}
		return true
	})
	w.arena.Lock()
	w.arena.Remove(quota.Small)
	if w.arena.Quota.Gone {
		t.Error("gone with one of two heaps")
	}
	w.arena.Remove(quota.Large)
	if !w.arena.Quota.Gone {
		t.Error("not gone without heaps")
	}
	w.arena.Unlock()
}

// The hot path allocates no Go memory and makes no driver call.
func TestSteady(t *testing.T) {
	w := newWorld(t)
	w.grow(quota.Small, base, mib)
	w.raise(quota.Small, 4, 4*kib)
	h := w.heaps[0]
	f := magazine.New(511, smallMax)
	pairs := map[string]func(){
		"heap": func() { h.Free(h.Alloc(4*kib, 4*kib, 0, 0)) },
		"try":  func() { h.Free(h.TryAlloc(4*kib, 4*kib, 0, 0)) },
		"magazine": func() {
			p, _ := h.AllocMagazine(f, 4*kib)
			h.Free(p)
		},
	}
	for _, name := range []string{"heap", "try", "magazine"} {
		if name == "magazine" {
			w.arena.SetMagazine(f, w.stream)
		}
		w.drv.ResetCalls()
		before := w.gauges(quota.Small)
		if n := testing.AllocsPerRun(1000, pairs[name]); n != 0 {
			t.Errorf("%s: %v allocations of Go memory", name, n)
		}
		if n := w.drv.Calls().Count; n != 0 {
			t.Errorf("%s: %d driver calls", name, n)
		}
		if after := w.gauges(quota.Small); after != before {
			t.Errorf("%s: %v became %v", name, before, after)
		}
	}
}

func BenchmarkPair(b *testing.B) {
	w := newWorld(b)
	w.grow(quota.Small, base, mib)
	w.raise(quota.Small, 4, 4*kib)
	h := w.heaps[0]
	b.ReportAllocs()
	for b.Loop() {
		h.Free(h.Alloc(4*kib, 4*kib, 0, 0))
	}
}
