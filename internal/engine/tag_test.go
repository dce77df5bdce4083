package engine_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
)

// A tag stays with its block through whatever happens to the blocks around it, and goes with it.
func TestTags(t *testing.T) {
	e := newEngine(t, sim.Options{}, config.Options{History: 1 << 16}, 2)
	pool, err := e.dev.NewPool(memory.PoolID{7, 7}, config.PoolOptions{})
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(5, 6))
	type block struct {
		size uint64
		tag  uint32
		pool memory.PoolID
	}
	live := map[cuda.Ptr]block{}
	var order []cuda.Ptr
	tags := []uint32{0, 1, 2, 77, memory.MaxTag}
	for range 4000 {
		if len(order) > 0 && rng.IntN(100) < 48 {
			i := rng.IntN(len(order))
			e.free(t, order[i])
			delete(live, order[i])
			order = slices.Delete(order, i, i+1)
			continue
		}
		b := block{size: 1 + rng.Uint64N(1<<(9+rng.IntN(14))), tag: tags[rng.IntN(len(tags))]}
		st := e.streams[rng.IntN(2)]
		var p cuda.Ptr
		switch rng.IntN(3) {
		case 0:
			b.tag = 0
			p, err = e.dev.Alloc(b.size, st)
		case 1:
			p, err = e.dev.AllocWith(b.size, st, engine.AllocOptions{Tag: b.tag})
		default:
			b.pool = pool.ID()
			p, err = pool.Device().AllocWith(b.size, st, engine.AllocOptions{Pool: pool, Tag: b.tag})
		}
		if err != nil {
			t.Fatal(err)
		}
		live[p] = b
		order = append(order, p)
	}
	want := map[uint32]memory.TagUse{}
	for p, b := range live {
		got, err := e.a.Base(p)
		if err != nil || got.Tag != b.tag || got.Requested != b.size || got.Pool != b.pool {
			t.Fatalf("Base(%#x) = %+v, %v; want %+v", p, got, err, b)
		}
		if st := e.streams[0]; got.Stream == st.ID() && got.Handle != st.Handle() {
			t.Fatalf("Base(%#x) has stream handle %#x, want %#x", p, got.Handle, st.Handle())
		}
		u := want[b.tag]
		want[b.tag] = memory.TagUse{Tag: b.tag, Use: memory.Use{Blocks: u.Blocks + 1, Requested: u.Requested + b.size, Allocated: u.Allocated + round512(b.size)}}
	}
	usage := e.dev.Views.TagUsage()
	for i, u := range usage {
		if u != want[u.Tag] {
			t.Errorf("tag %d: %+v, want %+v", u.Tag, u, want[u.Tag])
		}
		if i > 0 && u.Allocated > usage[i-1].Allocated {
			t.Errorf("tag %d comes after tag %d with fewer bytes", u.Tag, usage[i-1].Tag)
		}
	}
	if len(usage) != len(want) {
		t.Errorf("%d tags in use, want %d", len(usage), len(want))
	}
	seen, inPool := 0, 0
	for _, id := range []*memory.PoolID{nil, {7, 7}} {
		segments := e.dev.Views.Snapshot()
		if id != nil {
			segments = e.dev.Views.SnapshotPool(*id)
		}
		for _, s := range segments {
			if id != nil && s.Pool != *id {
				t.Errorf("a segment of pool %v in the snapshot of pool %v", s.Pool, *id)
			}
			for _, b := range s.Blocks {
				x := live[cuda.Ptr(b.Addr)]
				if b.Tag != x.tag || b.State == memory.BlockFree && b.Tag != 0 {
					t.Errorf("block %#x: tag %d in the snapshot, want %d", b.Addr, b.Tag, x.tag)
				}
				if b.State == memory.BlockUsed && id == nil {
					seen++
				} else if b.State == memory.BlockUsed {
					inPool++
				}
			}
		}
	}
	inPoolWant := 0
	for _, b := range live {
		if b.pool == pool.ID() {
			inPoolWant++
		}
	}
	if seen != len(live) || inPool != inPoolWant || inPool == 0 {
		t.Errorf("the snapshots show %d blocks and %d of the pool, want %d and %d", seen, inPool, len(live), inPoolWant)
	}

	e.dev.History.Drain(nil)
	p, err := e.dev.AllocWith(1000, e.streams[0], engine.AllocOptions{Tag: 77})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.a.RecordStream(p, e.streams[1]); err != nil {
		t.Fatal(err)
	}
	e.free(t, p)
	if err := e.dev.Trim(); err != nil {
		t.Fatal(err)
	}
	kinds := map[event.Kind]bool{}
	for _, x := range e.dev.History.Drain(nil) {
		if x.Kind == event.Alloc || x.Kind == event.FreeRequested || x.Kind == event.FreeCompleted {
			kinds[x.Kind] = true
			if x.Tag != 77 || x.Addr != uint64(p) {
				t.Errorf("%v of %#x with tag %d, want %#x and 77", x.Kind, x.Addr, x.Tag, p)
			}
		}
	}
	if len(kinds) != 3 {
		t.Errorf("the history has %v of a block's life", kinds)
	}
	if _, err := e.dev.AllocWith(1000, e.streams[0], engine.AllocOptions{Tag: memory.MaxTag + 1}); err == nil {
		t.Error("a tag beyond the largest was taken")
	}
}
