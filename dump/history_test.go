package dump

import (
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/recording/open"
)

// What a history has mapped is what is held, whatever moved just before and however much of it the ring still has: the
// events lead from the start, back and forth, to the segments that the file ends with.
func TestHistoryLeadsToWhatIsHeld(t *testing.T) {
	for _, conf := range []string{"limit:1GiB,history:100000", "limit:1GiB,history:500"} {
		for seed := range uint64(4) {
			a, dev, st := engine(t, conf)
			streams := []cistern.Stream{st}
			for range 2 {
				h, err := a.Driver().StreamCreate(0, false)
				if err != nil {
					t.Fatal(err)
				}
				s, err := dev.Stream(h, cistern.StreamDurable)
				if err != nil {
					t.Fatal(err)
				}
				streams = append(streams, s)
			}
			pool, err := dev.NewPool(cistern.PoolID{0, 1})
			if err != nil {
				t.Fatal(err)
			}
			moved := churn(t, a, dev, streams, []cistern.Pool{{}, pool}, seed, 1200)
			if moved == 0 {
				t.Fatalf("%s, seed %d: nothing moved", conf, seed)
			}
			if seed%2 == 1 {
				if err := dev.Trim(); err != nil {
					t.Fatal(err)
				}
			}
			path := filepath.Join(t.TempDir(), "now.cistern")
			if err := Write(path, a, Names{}); err != nil {
				t.Fatal(err)
			}
			f, err := open.File(path)
			if err != nil {
				t.Fatal(err)
			}
			tr := f.Traces[0]
			for _, n := range tr.Notes {
				if strings.Contains(n, "disagree") {
					t.Errorf("%s, seed %d: %s", conf, seed, n)
				}
			}
			if whole := conf == "limit:1GiB,history:100000"; tr.FromStart != whole {
				t.Errorf("%s, seed %d: %d blocks and %d segments are held before the first event", conf, seed, len(tr.Initial), len(tr.InitialSegments))
			}
			if held := dev.Stats().Reserved.All.Current; tr.FromStart {
				mapped := int64(0)
				for _, s := range tr.Final {
					mapped += int64(s.Size)
				}
				if mapped != held {
					t.Errorf("%s, seed %d: the file ends with %d bytes, %d are held", conf, seed, mapped, held)
				}
			}
		}
	}
}

// churn allocates and frees at random, on all streams and in all pools, and says how many chunks moved.
func churn(t *testing.T, a *cistern.Allocator, dev cistern.Device, streams []cistern.Stream, pools []cistern.Pool, seed uint64, n int) int64 {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 7))
	var live []cuda.Ptr
	for range n {
		if len(live) > 60 || len(live) > 0 && r.IntN(100) < 45 {
			k := r.IntN(len(live))
			if r.IntN(4) == 0 {
				if err := a.RecordStream(live[k], streams[r.IntN(len(streams))]); err != nil {
					t.Fatal(err)
				}
			}
			if err := a.Free(live[k]); err != nil {
				t.Fatal(err)
			}
			live[k] = live[len(live)-1]
			live = live[:len(live)-1]
			continue
		}
		size := uint64(512) << r.IntN(18)
		p, err := dev.AllocWith(size+r.Uint64N(size), streams[r.IntN(len(streams))], cistern.AllocOptions{Pool: pools[r.IntN(len(pools))]})
		if err == nil {
			live = append(live, p)
		}
	}
	return int64(dev.Stats().Counters.Remaps)
}
