package cistern_test

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
)

// A program that does little but allocate, in sizes from 512 bytes to 8 MiB, is given memory rather than moved about: once
// it has half as much again as it uses, no request of it costs a driver call. The same requests with time between them are
// met from little more than what they use.
func TestHaste(t *testing.T) {
	const live, steps = 2000, 50_000
	run := func(between time.Duration) (remaps int64, ratio float64) {
		drv := sim.New(sim.Options{Capacity: 140 * gib, CallsTakeTime: true})
		a, err := cistern.New(drv, cistern.Options{})
		if err != nil {
			t.Fatal(err)
		}
		d, err := a.Device(0)
		if err != nil {
			t.Fatal(err)
		}
		st, err := d.Stream(0)
		if err != nil {
			t.Fatal(err)
		}
		r := rand.New(rand.NewPCG(1, 2))
		blocks := make([]cuda.Ptr, live)
		for i := range live + 3*steps {
			if i == live+2*steps {
				d.ResetAccumulated()
			}
			k := i
			if i >= live {
				k = r.IntN(live)
				if err := a.Free(blocks[k]); err != nil {
					t.Fatal(err)
				}
			}
			drv.Advance(between)
			if blocks[k], err = d.Alloc(uint64(math.Exp2(9+14*r.Float64())), st); err != nil {
				t.Fatal(err)
			}
		}
		s := d.Stats()
		return s.Remaps, float64(s.Reserved.All.Peak) / float64(s.Requested.All.Peak)
	}
	if remaps, ratio := run(400 * time.Nanosecond); remaps > steps/1000 || ratio > 1.6 {
		t.Errorf("in haste: %d remaps in %d requests, ratio %.3f", remaps, steps, ratio)
	}
	if remaps, ratio := run(50 * time.Microsecond); remaps < steps/1000 || ratio > 1.2 {
		t.Errorf("at leisure: %d remaps in %d requests, ratio %.3f", remaps, steps, ratio)
	}
}
