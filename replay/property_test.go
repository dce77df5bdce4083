package replay

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/recording"
)

// modelled are the policies of this package, in settings that reach all of their code.
var modelled = []string{"torch:default", "torch:expandable_segments:True", "torch:max_split_size_mb:40",
	"torch:garbage_collection_threshold:0.6", "torch:garbage_collection_threshold:0.6,expandable_segments:True",
	"torch:roundup_power2_divisions:4,large_segment_size_mb:12", "torch-async", "rmm-pool",
	"rmm-pool:initial_pool_size:64MiB", "direct"}

// TestModelsKeepTheRules plays random requests: blocks never overlap, they lie at multiples of 256 bytes, memory in use
// is never more than memory held, the limit holds, and what the policy says of its segments adds up.
func TestModelsKeepTheRules(t *testing.T) {
	for _, s := range modelled {
		for seed := range uint64(8) {
			t.Run(fmt.Sprintf("%s/seed=%d", s, seed), func(t *testing.T) { playRandom(t, s, seed) })
		}
	}
}

func playRandom(t *testing.T, policy string, seed uint64) {
	const steps = 3000
	rnd := rand.New(rand.NewPCG(seed, 1))
	spec, err := ParseSpec(policy)
	if err != nil {
		t.Fatal(err)
	}
	p := NewPlan(&recording.Trace{Streams: []uint64{0, 0x300, 0x200}, Pools: []recording.PoolID{{}, {0, 1}}})
	p.Blocks = steps
	capacity := uint64(0)
	if seed%2 == 1 {
		capacity = 400 * mib
	}
	pol, _, err := factories[spec.Name](&Env{Plan: p, Spec: spec, Capacity: capacity, GPULag: time.Millisecond, Note: func(string) {}})
	if err != nil {
		t.Fatal(err)
	}
	type block struct {
		n          int
		addr, size uint64
		requested  bool
	}
	var live []block // in address order
	var bytes uint64
	ooms := int64(0)
	for n := range steps {
		pol.Advance(int64(n))
		if rnd.IntN(100) < 52 || len(live) == 0 {
			size := uint64(1) << rnd.IntN(25)
			size += rnd.Uint64N(size)
			if rnd.IntN(50) == 0 {
				size += 50 * mib
			}
			addr, err := pol.Alloc(n, size, uint32(rnd.IntN(3)), uint32(rnd.IntN(2)))
			if errors.Is(err, cuda.ErrOutOfMemory) && capacity > 0 {
				ooms++
				continue
			}
			if err != nil {
				t.Fatalf("step %d: %v", n, err)
			}
			at, _ := slices.BinarySearchFunc(live, addr, func(b block, a uint64) int {
				if b.addr < a {
					return -1
				}
				return 1
			})
			if addr%256 != 0 || at < len(live) && addr+size > live[at].addr || at > 0 && live[at-1].addr+live[at-1].size > addr {
				t.Fatalf("step %d: a block of %d bytes at %#x overlaps another", n, size, addr)
			}
			live = slices.Insert(live, at, block{n: n, addr: addr, size: size})
			bytes += size
		} else {
			at := rnd.IntN(len(live))
			b := &live[at]
			if !b.requested {
				pol.FreeRequested(b.n)
				b.requested = true
				if rnd.IntN(4) == 0 {
					continue // another stream uses it
				}
			}
			if err := pol.Free(b.n); err != nil {
				t.Fatalf("step %d: %v", n, err)
			}
			bytes -= b.size
			live = slices.Delete(live, at, at+1)
		}
		if rnd.IntN(400) == 0 {
			if r, ok := pol.(Releaser); ok {
				if err := r.EmptyCache(); err != nil {
					t.Fatal(err)
				}
			}
		}
		allocated, reserved := pol.Usage()
		if allocated < bytes || reserved < allocated {
			t.Fatalf("step %d: %d bytes live, %d allocated, %d reserved", n, bytes, allocated, reserved)
		}
		// An expandable segment may pass the limit by less than a page: PyTorch asks before it rounds to pages.
		if capacity > 0 && reserved >= capacity+20*mib {
			t.Fatalf("step %d: %d bytes reserved, capacity %d", n, reserved, capacity)
		}
		if n%100 == 0 {
			checkSegments(t, pol, allocated, reserved)
		}
	}
	for _, b := range live {
		if err := pol.Free(b.n); err != nil {
			t.Fatal(err)
		}
		if err := pol.Free(b.n); err == nil {
			t.Fatalf("block %d was freed twice without an error", b.n)
		}
	}
	if allocated, _ := pol.Usage(); allocated != 0 {
		t.Errorf("%d bytes are allocated after everything was freed", allocated)
	}
	if s := pol.Stats(); s.OOMs != ooms {
		t.Errorf("%d requests failed, the statistics say %d", ooms, s.OOMs)
	}
	if r, ok := pol.(Releaser); ok {
		if err := errors.Join(r.EmptyCache(), r.ReleasePool(1)); err != nil {
			t.Fatal(err)
		}
		if _, reserved := pol.Usage(); reserved != 0 {
			t.Errorf("%d bytes are reserved after everything was freed and given back", reserved)
		}
	}
}

// checkSegments compares what a policy says of its segments with its sums, and looks for neighbours that should have
// been merged.
func checkSegments(t *testing.T, pol Policy, allocated, reserved uint64) {
	t.Helper()
	s, ok := pol.(Snapshotter)
	if !ok {
		return
	}
	var inUse, held, end uint64
	for _, g := range s.Segments() {
		if g.Addr < end {
			t.Fatalf("segment at %#x overlaps the one before", g.Addr)
		}
		end = g.Addr + g.Size
		held += g.Size
		at := g.Addr
		for i, b := range g.Blocks {
			if b.Addr != at {
				t.Fatalf("block at %#x, want %#x", b.Addr, at)
			}
			at += b.Size
			if b.State == recording.Active {
				inUse += b.Size
			} else if i > 0 && g.Blocks[i-1].State == recording.Inactive {
				t.Fatalf("free blocks at %#x and before it were not merged", b.Addr)
			}
		}
		if at != end {
			t.Fatalf("blocks of the segment at %#x end at %#x, want %#x", g.Addr, at, end)
		}
	}
	if inUse != allocated || held != reserved {
		t.Fatalf("segments hold %d bytes, %d in use; the sums say %d and %d", held, inUse, reserved, allocated)
	}
}

// TestFreeSet compares the set with a sorted slice.
func TestFreeSet(t *testing.T) {
	rnd := rand.New(rand.NewPCG(7, 7))
	var s freeSet
	var want []freeEntry
	cmp := func(a, b freeEntry) int {
		if a.less(b.size, b.addr, b.block) {
			return -1
		}
		return 1
	}
	for n := range 60000 {
		grow := n/20000%2 == 0
		if rnd.IntN(10) < 7 == grow || len(want) == 0 {
			e := freeEntry{size: 1 + rnd.Uint64N(100), addr: 1 + rnd.Uint64N(20), block: int32(n)}
			s.insert(e.size, e.addr, e.block)
			at, _ := slices.BinarySearchFunc(want, e, cmp)
			want = slices.Insert(want, at, e)
		} else {
			at := rnd.IntN(len(want))
			s.remove(want[at].size, want[at].addr, want[at].block)
			want = slices.Delete(want, at, at+1)
		}
		size := rnd.Uint64N(110)
		i, _ := slices.BinarySearchFunc(want, freeEntry{size: size}, cmp)
		p := s.seek(size, 0, 0)
		if s.len() != len(want) || s.end(p) != (i == len(want)) || !s.end(p) && *s.at(p) != want[i] {
			t.Fatalf("step %d: a search for %d bytes among %d entries is wrong", n, size, len(want))
		}
		if !s.end(p) && i > 0 && *s.at(s.prev(p)) != want[i-1] {
			t.Fatalf("step %d: the entry before is wrong", n)
		}
	}
	for i, b := range s.blocks() {
		if b != want[i].block {
			t.Fatalf("entry %d is block %d, want %d", i, b, want[i].block)
		}
	}
}
