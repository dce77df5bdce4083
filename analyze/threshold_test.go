package analyze

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/replay"
)

// The recommended threshold saves memory in the mean for the time that it may cost, in a replay of its own too, and nothing on the
// frontier is beaten by anything that was tried.
func TestThresholds(t *testing.T) {
	f, err := open.File(filepath.Join("..", "recording", "testdata", "multistream_prefetch.pickle.gz"))
	if err != nil {
		t.Fatal(err)
	}
	tr := f.Traces[0]
	opt := TuneOptions{GPULag: 20 * time.Millisecond}
	tn := newTuning(tr, opt)
	s, _ := searchOf(context.Background(), tr, opt, tn.Capacity, fatalOf(tr))
	if err := tn.thresholds(s); err != nil {
		t.Fatal(err)
	}
	if len(tn.Thresholds) != 2 {
		t.Fatalf("%d allocators, want torch-async and cistern", len(tn.Thresholds))
	}
	mayCostUS := costShare * float64(tn.DurationUS)
	for _, x := range tn.Thresholds {
		var none *Threshold
		frontier := 0
		for i := range x.Tried {
			a := &x.Tried[i]
			if a.Conf == "" {
				none = a
			}
			beaten := false
			for j := range x.Tried {
				b := &x.Tried[j]
				beaten = beaten || b.Result.MeanReserved <= a.Result.MeanReserved && b.CostUS() <= a.CostUS() &&
					(b.Result.MeanReserved < a.Result.MeanReserved || b.CostUS() < a.CostUS())
			}
			if a.Frontier && beaten {
				t.Errorf("%s: %q is beaten", x.Policy, a.Conf)
			}
			if a.Frontier {
				frontier++
			}
		}
		if none == nil || frontier < 2 {
			t.Errorf("%s: no threshold was tried: %v; %d on the frontier", x.Policy, none != nil, frontier)
			continue
		}
		best := x.Best
		if best == nil {
			if x.Policy == "torch-async" {
				t.Error("torch-async: nothing is recommended")
			}
			continue
		}
		r, err := replay.Run(tr, replay.Spec{Name: x.Policy, Conf: best.Conf, HasConf: true}, replay.Options{GPULag: opt.GPULag})
		if err != nil {
			t.Fatal(err)
		}
		if r.MeanReserved != best.Result.MeanReserved || r.DriverTimeUS != best.Result.DriverTimeUS {
			t.Errorf("%s %s: a replay has other figures", x.Policy, best.Conf)
		}
		if float64(r.MeanReserved) > 0.99*float64(none.Result.MeanReserved) || best.CostUS() > none.CostUS()+mayCostUS {
			t.Errorf("%s %s is recommended: mean %d of %d, %.0f us instead of %.0f", x.Policy, best.Conf, r.MeanReserved, none.Result.MeanReserved,
				best.CostUS(), none.CostUS())
		}
	}
}

// A threshold that saves nothing is not recommended.
func TestNoThresholdWorthIt(t *testing.T) {
	result := func(mean uint64, us float64) *replay.Result {
		return &replay.Result{MeanReserved: mean, PeakReserved: 2000, DriverTimeUS: us}
	}
	s := &thresholdSearch{policy: "cistern", mayCostUS: 100, none: Threshold{Result: result(1000, 10)}}
	s.tried = []Threshold{s.none, {Conf: "a", Result: result(995, 20)}, {Conf: "b", Result: result(500, 200)}}
	if x := s.result(); x.Best != nil || x.Why != "no threshold saves 1 % of the mean for at most 0.1 ms more of the host's time" {
		t.Errorf("%+v", x)
	}
	s.tried = append(s.tried, Threshold{Conf: "c", Result: result(903, 60)}, Threshold{Conf: "d", Result: result(900, 100)})
	if x := s.result(); x.Best == nil || x.Best.Conf != "c" {
		t.Errorf("%+v", x.Best)
	}
}
