package quota

import (
	"math/rand/v2"
	"testing"
	"time"
)

// Recent agrees with a list of all spans, each with the most that was active in it.
func TestRecent(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	type span struct {
		from, to int64 // windows
		most     uint64
	}
	for range 200 {
		var got Recent
		var all []span
		last := int64(0)
		for now := time.Duration(0); len(all) < 60; now += time.Duration(r.ExpFloat64() * float64(Window)) {
			s := span{last, int64(now / Window), r.Uint64N(1000)}
			got.Add(now, s.most)
			all, last = append(all, s), s.to
			var want [Windows]uint64
			for i := range want {
				for _, x := range all {
					if x.to >= s.to-1<<i {
						want[i] = max(want[i], x.most)
					}
				}
			}
			if got.Peaks() != want {
				t.Fatalf("%v after %+v, want %v", got.Peaks(), all, want)
			}
		}
	}
}

// A class knows the most that was active since it was asked last, through every way in which that rises.
func TestTakeRecent(t *testing.T) {
	var a Arena
	large := &a.Classes[Large]
	large.Alloc(100, 128, 0)
	large.Alloc(100, 128, 0)
	large.Free(100, 128, 1)
	if got := a.TakeRecent(); got != 256 {
		t.Error(got)
	}
	if got := a.TakeRecent(); got != 128 {
		t.Error(got)
	}
	large.Free(100, 128, 1)
	large.TakeOut(100, 128)
	large.Free(100, 128, 1)
	a.Classes[Small].Alloc(1, 64, 0)
	if got := a.TakeRecent(); got != 128+64 {
		t.Error(got)
	}
}
