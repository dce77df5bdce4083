package engine_test

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
)

// A program whose requests are small beside what moves for them, here of 512 bytes to 8 MiB, gets new memory rather than moved
// chunks: once it has half as much again as it uses, no request of it costs a driver call. How fast the host is makes no
// difference. Requests of 16 KiB to 256 MiB are worth the moves.
func TestThrottle(t *testing.T) {
	const live, steps = 2000, 50_000
	run := func(between time.Duration, live, smallest int) (remaps int64, ratio float64) {
		e := newEngine(t, sim.Options{Capacity: 140 * gib, CallsTakeTime: true}, config.Options{}, 1)
		r := rand.New(rand.NewPCG(1, 2))
		blocks := make([]cuda.Ptr, live)
		for i := range live + 3*steps {
			if i == live+2*steps {
				e.dev.Views.ResetAccumulated()
			}
			k := i
			if i >= live {
				k = r.IntN(live)
				e.free(t, blocks[k])
			}
			e.drv.Advance(between)
			blocks[k] = e.alloc(t, uint64(math.Exp2(float64(smallest)+14*r.Float64())), e.streams[0])
		}
		s := e.dev.Views.Stats()
		return s.Remaps, float64(s.Reserved.All.Peak) / float64(s.Requested.All.Peak)
	}
	remaps, ratio := run(400*time.Nanosecond, live, 9)
	if remaps > steps/1000 || ratio > 1.6 {
		t.Errorf("small requests: %d remaps in %d requests, ratio %.3f", remaps, steps, ratio)
	}
	if later, same := run(50*time.Microsecond, live, 9); later != remaps || same != ratio {
		t.Errorf("small requests on a slow host: %d remaps, ratio %.3f; on a fast one %d, %.3f", later, same, remaps, ratio)
	}
	if remaps, ratio := run(400*time.Nanosecond, live/16, 14); remaps < steps/1000 || ratio > 1.2 {
		t.Errorf("large requests: %d remaps in %d requests, ratio %.3f", remaps, steps, ratio)
	}
}
