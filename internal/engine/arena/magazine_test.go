package arena_test

import (
	"sync"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/arena"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/magazine"
)

// newMagazine is a world whose arena has a magazine, and has handed out blocks of 4 KiB before.
func newMagazine(t *testing.T, blocks int) (*world, *magazine.Magazine) {
	w := newWorld(t)
	w.grow(quota.Small, base, mib)
	w.raise(quota.Small, blocks, 4*kib)
	f := magazine.New(511, smallMax)
	w.arena.SetMagazine(f, w.stream)
	return w, f
}

func (w *world) allocMagazine(f *magazine.Magazine) (cuda.Ptr, uint32) {
	p, mark := w.heaps[0].AllocMagazine(f, 4*kib)
	if p == 0 {
		w.t.Fatal("no block")
	}
	return p, mark
}

// What was freed last is met again in the magazine, and whoever locks the arena finds it free.
func TestMagazine(t *testing.T) {
	w, f := newMagazine(t, 8)
	p, _ := w.allocMagazine(f)
	w.want(w.heaps[0].Free(p), arena.Done)
	if !f.Has(uint64(p)) {
		t.Fatal("the block is not in the magazine")
	}
	w.want(w.heaps[0].Free(p), arena.Unknown) // a second time
	if again, _ := w.allocMagazine(f); again != p {
		t.Errorf("%#x was handed out, not %#x", again, p)
	}
	w.want(w.heaps[0].Free(p), arena.Done)
	if g := w.gauges(quota.Small); g[quota.Allocs] != 0 || g[quota.Free] != 1 || g[quota.FreeBytes] != mib {
		t.Errorf("after the arena was locked: %v", g)
	}
	if f.Has(uint64(p)) {
		t.Error("the arena was locked and the magazine is not empty")
	}
	// The gauges can be read with the blocks left there.
	p, _ = w.allocMagazine(f)
	w.want(w.heaps[0].Free(p), arena.Done)
	w.arena.LookIn()
	g := *w.arena.Quota.Classes[quota.Small].Now()
	w.arena.Unlock()
	if !f.Has(uint64(p)) || g[quota.Allocs] != 0 || g[quota.FreeBytes] != mib || g[quota.Free] != 2 {
		t.Errorf("%v", g)
	}
}

// Requests and frees that are not for the magazine go on to the heap, or to the engine.
func TestMagazineRefuses(t *testing.T) {
	w, f := newMagazine(t, 8)
	h := w.heaps[quota.Small]
	tagged := h.Alloc(4*kib, 4*kib, 9, 0)
	w.want(h.Free(tagged), arena.Done)
	if f.Has(uint64(tagged)) {
		t.Error("a block with a tag is in the magazine")
	}
	p, _ := w.allocMagazine(f)
	w.health.SetRecording(true)
	if q, _ := h.AllocMagazine(f, 4*kib); q != 0 {
		t.Errorf("%#x while requests are recorded", q)
	}
	w.want(h.Free(p), arena.NeedsDevice)
	w.health.SetRecording(false)
	w.stream.SetCapture(3)
	if q, _ := h.AllocMagazine(f, 4*kib); q != 0 {
		t.Errorf("%#x in a capture", q)
	}
	w.stream.SetCapture(0)
	w.want(h.Free(p), arena.Done)
	w.health.SetWaiting(true)
	for met, n := 0, 0; n < 10*magazine.PollEvery; n++ {
		q, _ := h.AllocMagazine(f, 4*kib)
		if met++; q == 0 {
			met = 0
			continue
		}
		w.want(h.Free(q), arena.Done)
		if met > magazine.PollEvery { // one from the heap first
			t.Fatalf("request %d: %d in a row were met while frees wait", n, met)
		}
	}
}

// A free beyond an allowance is the engine's to allow; the block gets into the magazine all the same.
func TestPutBeyond(t *testing.T) {
	w, f := newMagazine(t, 4)
	h := w.heaps[quota.Small]
	var out []cuda.Ptr
	for range 4 {
		p, _ := w.allocMagazine(f)
		out = append(out, p)
	}
	w.quota.ResetPeaks()
	w.rebalance()
	w.gauges(quota.Small) // which locks the arena, so that C has the new limits
	w.want(h.Free(out[0]), arena.NeedsQuota)
	w.arena.Enter()
	w.want(h.PutBeyond(out[0]), arena.Done)
	w.want(h.PutBeyond(out[0]), arena.Unknown)
	w.rebalance()
	w.arena.Unlock()
	if !f.Has(uint64(out[0])) {
		t.Error("the block is not in the magazine")
	}
	if got := w.quota.Peak(quota.Free); got != 2 {
		t.Errorf("the peak of free blocks is %d, want 2", got)
	}
}

// A full magazine is emptied for the next block.
func TestMagazineFull(t *testing.T) {
	const n = magazine.Capacity + 4
	w, f := newMagazine(t, 2*n)
	var out []cuda.Ptr
	for range n {
		p, _ := w.allocMagazine(f)
		out = append(out, p)
	}
	for i, p := range out {
		w.want(w.heaps[0].Free(p), arena.Done)
		if !f.Has(uint64(p)) {
			t.Fatalf("free %d is not in the magazine", i)
		}
	}
	if g := w.gauges(quota.Small); g[quota.Allocs] != 0 || g[quota.Free] != 1 {
		t.Errorf("%v", g)
	}
}

// A block that C was putting into the magazine while it was paused is left to the engine, and counts as in use until then.
func TestLate(t *testing.T) {
	w, f := newMagazine(t, 4)
	p, mark := w.allocMagazine(f)
	id, _, _ := w.blocks[0].Lookup(uint64(p))
	w.arena.Lock()
	w.blocks[0].At(id).Uses = 1 // as a pause does
	w.arena.Outdate()
	w.arena.Unlock()
	f.Lock()
	if !f.Put(uint64(p), 4*kib, mark, 1) {
		t.Fatal("C could not put it")
	}
	if q, _, o := f.Take(4*kib, false, 1); o == magazine.Taken {
		t.Errorf("C took %#x", q)
	}
	f.Unlock()
	if w.late.Any() {
		t.Error("late before the arena was locked")
	}
	if g := w.gauges(quota.Small); g[quota.Allocs] != 1 || g[quota.Allocated] != 4*kib {
		t.Errorf("%v", g)
	}
	if !w.late.Any() || !w.health.Waiting() {
		t.Error("the engine is not told of it")
	}
	if l := w.late.Take(); len(l) != 1 || l[0] != p || w.late.Any() {
		t.Errorf("%v", l)
	}
}

// C code and Go code use one arena at once.
func TestMagazineConcurrently(t *testing.T) {
	w, f := newMagazine(t, 64)
	h := w.heaps[quota.Small]
	var wg sync.WaitGroup
	for thread := range uint64(2) {
		wg.Go(func() { // as cmd/libcistern does in C
			for range 2000 {
				p, mark := h.AllocMagazine(f, 4*kib)
				if p == 0 {
					t.Error("no block")
					return
				}
				f.Lock()
				ok := f.Put(uint64(p), 4*kib, mark, thread+1)
				f.Unlock()
				if !ok && h.Free(p) != arena.Done {
					t.Error("a block could not be freed")
					return
				}
			}
		})
	}
	wg.Go(func() {
		for range 2000 {
			p := h.Alloc(4*kib, 4*kib, 0, 0)
			if p == 0 || h.Free(p) != arena.Done {
				t.Error("no block, or it could not be freed")
				return
			}
		}
	})
	wg.Wait()
	if g := w.gauges(quota.Small); g[quota.Allocs] != 0 || g[quota.Free] != 1 || g[quota.FreeBytes] != mib {
		t.Errorf("%v", g)
	}
}
