package quota_test

import (
	"math/rand/v2"
	"testing"

	"github.com/cistern-gpu/cistern/internal/engine/quota"
)

// block is a block that is handed out, or waits for other streams.
type block struct {
	arena, class int
	requested, n uint64
	parked       bool
}

// Whatever arenas do within their allowances, the device's peaks are those that an observer of every moment sees.
func TestPeaksAreExact(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var d quota.Device
		arenas := make([]quota.Arena, 1+rng.IntN(5))
		free := make([][quota.NumClasses]int, len(arenas))
		for i := range arenas {
			d.AddArena(&arenas[i])
		}
		var now, peak quota.Gauges
		var blocks []block
		rebalanced := 0
		// done is called after a change of an arena's class, as the engine does where it was made with the device's lock.
		done := func(b block) {
			for i := range now {
				now[i] = 0
				for k := range arenas {
					for c := range arenas[k].Classes {
						now[i] += arenas[k].Classes[c].Now()[i]
					}
				}
				peak[i] = max(peak[i], now[i])
			}
			if !arenas[b.arena].Within(b.class) {
				d.Rebalance(&arenas[b.arena], 0)
				rebalanced++
			}
		}
		for range 2000 {
			b := block{arena: rng.IntN(len(arenas)), class: rng.IntN(quota.NumClasses), requested: 1 + rng.Uint64N(1000)}
			b.n = (b.requested + 511) &^ 511
			if len(blocks) > 0 && rng.IntN(20) < 9+len(blocks)/20 {
				i := rng.IntN(len(blocks))
				b = blocks[i]
				c := &arenas[b.arena].Classes[b.class]
				if !b.parked && rng.IntN(4) == 0 {
					blocks[i].parked = true
					c.Park(b.requested, b.n)
					done(b)
					continue
				}
				blocks[i] = blocks[len(blocks)-1]
				blocks = blocks[:len(blocks)-1]
				free[b.arena][b.class]++
				if b.parked {
					c.Unpark(b.n, b.n, free[b.arena][b.class])
				} else {
					c.Free(b.requested, b.n, free[b.arena][b.class])
				}
			} else {
				c := &arenas[b.arena].Classes[b.class]
				if c.Now()[quota.FreeBytes] < int64(b.n) { // memory comes first
					d.Got(1<<12, true)
					free[b.arena][b.class]++
					c.SetFree(free[b.arena][b.class], 1<<12)
					done(b)
				}
				free[b.arena][b.class] = max(0, free[b.arena][b.class]-rng.IntN(2))
				c.Alloc(b.requested, b.n, free[b.arena][b.class])
				blocks = append(blocks, b)
			}
			done(b)
		}
		d.Rebalance(nil, 0)
		all := d.Statistics()
		for i := range now {
			v := all[quota.GroupAll][i]
			if v.Current != now[i] || v.Peak != peak[i] || v.Added-v.Removed != v.Current {
				t.Fatalf("seed %d, gauge %d: %+v; want %d now, peak %d", seed, i, v, now[i], peak[i])
			}
			small, large := all[quota.GroupSmall][i], all[quota.GroupLarge][i]
			if small.Current+large.Current != v.Current || small.Added+large.Added != v.Added {
				t.Fatalf("seed %d, gauge %d: %+v and %+v do not add up to %+v", seed, i, small, large, v)
			}
		}
		if rebalanced == 0 || rebalanced > 3500 {
			t.Errorf("seed %d: %d of some 2,500 changes took the device's lock", seed, rebalanced)
		}
	}
}

// A program that repeats what it did exceeds no allowance.
func TestRepetitionNeedsNoRebalance(t *testing.T) {
	var d quota.Device
	arenas := make([]quota.Arena, 4)
	for i := range arenas {
		d.AddArena(&arenas[i])
		arenas[i].Classes[quota.Large].SetFree(1, 1<<20)
	}
	exceeded := 0
	for round := range 10 {
		for _, step := range []int{1, -1} {
			for i := range arenas {
				a := &arenas[i]
				c := &a.Classes[quota.Large]
				if step > 0 {
					if round > 1 && !a.RoomForAlloc(quota.Large, 500, 512) {
						exceeded++
					}
					c.Alloc(500, 512, 1)
				} else {
					if round > 1 && !a.RoomForFree(quota.Large, 512, 1) {
						exceeded++
					}
					c.Free(500, 512, 1)
				}
				if !a.Within(quota.Large) {
					d.Rebalance(a, 0)
				}
			}
		}
	}
	if exceeded != 0 {
		t.Errorf("%d operations exceeded an allowance after the first rounds", exceeded)
	}
}

// Reserved memory counts once, in all and in one group, wherever it moves, and under the limit where it belongs there.
func TestPhysical(t *testing.T) {
	d := quota.Device{Limit: 100}
	if !d.MayHold(100) || d.MayHold(101) {
		t.Error("the limit is not 100")
	}
	d.Got(60, true)
	d.AddSpare(60)
	d.Got(1000, false)
	d.Physical[quota.GroupSmall].Add(1000)
	d.InFlight = 30
	if d.Total() != 1060 || d.MayHold(11) || !d.MayHold(10) {
		t.Errorf("total %d; may hold 11: %v, 10: %v", d.Total(), d.MayHold(11), d.MayHold(10))
	}
	d.TakeSpare(60)
	d.Physical[quota.GroupSmall].Join(60)
	d.Rebalance(nil, 0)
	p := &d.Physical
	if all, small, large := p[quota.GroupAll].Bytes, p[quota.GroupSmall].Bytes, p[quota.GroupLarge].Bytes; all.Current != 1060 ||
		small.Current != 1060 || large.Current != 0 || small.Added+large.Added != all.Added || small.Peak != 1060 {
		t.Errorf("all %+v, small %+v, large %+v", all, small, large)
	}
	p[quota.GroupSmall].Remove(60)
	d.GaveBack(60, true)
	if d.Total() != 1000 || d.Returned != 60 || p[quota.GroupAll].Bytes.Peak != 1060 || p[quota.GroupAll].Handles.Removed != 1 {
		t.Errorf("total %d, returned %d, %+v", d.Total(), d.Returned, p[quota.GroupAll])
	}
}
