package client

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// Recent agrees with a list of all samples, each of which stands until the next.
func TestRecent(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	type sample struct {
		window int64
		active uint64
	}
	for range 200 {
		var got Recent
		all := []sample{{0, 0}}
		for now := time.Duration(0); len(all) < 60; now += time.Duration(r.ExpFloat64() * float64(protocol.Window)) {
			s := sample{int64(now / protocol.Window), r.Uint64N(1000)}
			got.Add(now, s.active)
			all = append(all, s)
			var want [protocol.Windows]uint64
			for i := range want {
				from := s.window - 1<<i
				for k, x := range all {
					if x.window >= from || k+1 < len(all) && all[k+1].window >= from { // it stood when the first of them began
						want[i] = max(want[i], x.active)
					}
				}
			}
			if got.Peaks() != want {
				t.Fatalf("%v after %+v, want %v", got.Peaks(), all, want)
			}
		}
	}
}
