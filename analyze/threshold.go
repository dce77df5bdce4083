package analyze

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cistern-gpu/cistern/replay"
)

// How much free memory an allocator should keep: a search over the release threshold of stream-ordered pools and over Cistern's
// limit of free memory. What a threshold saves shows in the mean of reserved memory over time; what it costs is driver time.

// Thresholds is what a search over one allocator's thresholds found.
type Thresholds struct {
	Policy string `json:"policy"`
	// Best is the one to set: of Tried, nil where none is worth its cost.
	Best *Threshold `json:"recommended"`
	// Why says by which rule Best was chosen.
	Why string `json:"why"`
	// Tried are all that were replayed, the one without a threshold too, the least memory first.
	Tried []Threshold `json:"tried"`
}

// Threshold is one threshold and what it did.
type Threshold struct {
	Conf  string `json:"conf"` // settings of the policy; "" is no threshold
	Bytes uint64 `json:"threshold_bytes"`
	// DecayUS is for how long memory above the threshold stays when it is not needed; 0 for pools of the driver's.
	DecayUS int64 `json:"decay_us"`
	// Frontier: no other one reserves less in the mean for as little time.
	Frontier bool           `json:"frontier"`
	Result   *replay.Result `json:"result"`
}

// CostUS is as Choice.CostUS.
func (x *Threshold) CostUS() float64 { return x.Result.DriverTimeUS + x.Result.SyncWaitUS }

const (
	// worthSaving is the part of the mean that a threshold must save to be recommended.
	worthSaving = 0.01
	// thresholdStep is how finely thresholds are tried: the growth of the driver's pools, in bytes.
	thresholdStep = 32 << 20
	// smallRun is the peak below which no threshold is searched.
	smallRun = 16 * thresholdStep
	// refinements is how often values between the best threshold and its neighbours are tried.
	refinements = 2
)

// decays are the times that are tried for Cistern, of those that are shorter than the run.
var decays = []time.Duration{0, 100 * time.Millisecond, time.Second, 10 * time.Second}

// thresholds searches the thresholds of both allocators.
func (tn *Tuning) thresholds(s *search) error {
	if tn.Warning != "" {
		return nil
	}
	longest := time.Duration(tn.DurationUS) * time.Microsecond
	for _, x := range []struct {
		policy string
		decays []time.Duration
		conf   func(bytes uint64, decay time.Duration) string
	}{
		{"torch-async", decays[:1], func(bytes uint64, _ time.Duration) string {
			return fmt.Sprintf("release_threshold:%dMiB", bytes>>20)
		}},
		{"cistern", slices.DeleteFunc(slices.Clone(decays), func(d time.Duration) bool { return d >= longest && d > 0 }),
			func(bytes uint64, decay time.Duration) string {
				return fmt.Sprintf("cache_limit:%dMiB,cache_decay:%v", bytes>>20, decay)
			}},
	} {
		t := &thresholdSearch{search: s, policy: x.policy, decays: x.decays, conf: x.conf, mayCostUS: costShare * float64(tn.DurationUS)}
		found, err := t.find()
		if err != nil {
			return err
		}
		if found != nil {
			tn.Thresholds = append(tn.Thresholds, *found)
		}
	}
	return nil
}

// thresholdSearch is the search over one allocator's thresholds.
type thresholdSearch struct {
	*search
	policy    string
	decays    []time.Duration
	conf      func(bytes uint64, decay time.Duration) string
	mayCostUS float64 // beyond what the run costs without a threshold
	none      Threshold
	tried     []Threshold
}

// find is nil where the allocator cannot be replayed, the run does not survive under it, or needs little.
func (t *thresholdSearch) find() (*Thresholds, error) {
	spec, err := replay.ParseSpec(t.policy)
	if err != nil {
		return nil, nil //nolint:nilerr // this binary lacks the policy
	}
	t.expect(1)
	r, err := t.run(spec, t.capacity)
	if err != nil {
		return nil, err
	}
	if !t.survived(r) || r.PeakReserved < smallRun {
		return nil, nil
	}
	t.none = Threshold{Result: r}
	t.tried = []Threshold{t.none}
	peak := r.PeakReserved
	least, parts := uint64(0), []uint64{1, 4, 8, 16, 32, 48} // of 64
	if t.policy == "cistern" {
		least, parts = thresholdStep, []uint64{1, 8} // 0 is no limit; the engine itself is replayed, which takes long
	}
	sizes := []uint64{least}
	for _, part := range parts {
		sizes = append(sizes, max(least, peak/64*part/thresholdStep*thresholdStep))
	}
	for _, decay := range t.decays {
		if err := t.try(sizes, decay); err != nil {
			return nil, err
		}
	}
	for range refinements {
		best := t.best()
		if best == nil {
			break
		}
		if err := t.try(t.between(best), time.Duration(best.DecayUS)*time.Microsecond); err != nil {
			return nil, err
		}
	}
	return t.result(), nil
}

// try replays thresholds that were not tried, several at a time.
func (t *thresholdSearch) try(sizes []uint64, decay time.Duration) error {
	slices.Sort(sizes)
	sizes = slices.DeleteFunc(slices.Compact(sizes), func(n uint64) bool {
		return slices.ContainsFunc(t.tried, func(x Threshold) bool { return x.Conf == t.conf(n, decay) })
	})
	found := make([]Threshold, len(sizes))
	t.expect(len(sizes))
	var g errgroup.Group
	for i, n := range sizes {
		g.Go(func() error {
			conf := t.conf(n, decay)
			r, err := t.run(replay.Spec{Name: t.policy, Conf: conf, HasConf: true}, t.capacity)
			found[i] = Threshold{Conf: conf, Bytes: n, DecayUS: decay.Microseconds(), Result: r}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for _, x := range found {
		if t.survived(x.Result) {
			t.tried = append(t.tried, x)
		}
	}
	return nil
}

// between are the thresholds half-way from the best to those next to it, of the same time.
func (t *thresholdSearch) between(best *Threshold) (sizes []uint64) {
	below, above := uint64(0), uint64(0)
	for i := range t.tried {
		x := &t.tried[i]
		if x.Conf == "" || x.DecayUS != best.DecayUS {
			continue
		}
		if x.Bytes < best.Bytes {
			below = max(below, x.Bytes)
		}
		if x.Bytes > best.Bytes && (above == 0 || x.Bytes < above) {
			above = x.Bytes
		}
	}
	for _, n := range []uint64{(below + best.Bytes) / 2, (above + best.Bytes) / 2} {
		if n = n / thresholdStep * thresholdStep; n > below && n != best.Bytes && n < above {
			sizes = append(sizes, n)
		}
	}
	return sizes
}

// best is the threshold with the least mean of those that cost little more than none, and do not raise the peak; of those within
// a hundredth of it, the one that costs least. nil: none saves enough.
func (t *thresholdSearch) best() *Threshold {
	none := t.none.Result
	may := func(x *Threshold) bool {
		return x.Conf != "" && x.CostUS() <= t.none.CostUS()+t.mayCostUS &&
			float64(x.Result.PeakReserved) <= (1+margin)*float64(none.PeakReserved) &&
			float64(x.Result.MeanReserved) <= (1-worthSaving)*float64(none.MeanReserved)
	}
	least := uint64(0)
	for i := range t.tried {
		if x := &t.tried[i]; may(x) && (least == 0 || x.Result.MeanReserved < least) {
			least = x.Result.MeanReserved
		}
	}
	var best *Threshold
	for i := range t.tried {
		x := &t.tried[i]
		if !may(x) || float64(x.Result.MeanReserved) > (1+margin)*float64(least) {
			continue
		}
		if best == nil || cmp.Or(cmp.Compare(x.CostUS(), best.CostUS()), cmp.Compare(best.Bytes, x.Bytes)) < 0 {
			best = x
		}
	}
	return best
}

// result sorts what was tried.
func (t *thresholdSearch) result() *Thresholds {
	slices.SortStableFunc(t.tried, func(a, b Threshold) int {
		return cmp.Or(cmp.Compare(a.Result.MeanReserved, b.Result.MeanReserved), cmp.Compare(a.CostUS(), b.CostUS()), cmp.Compare(a.Bytes, b.Bytes))
	})
	for i := range t.tried {
		x := &t.tried[i]
		x.Frontier = !slices.ContainsFunc(t.tried[:i], func(o Threshold) bool { return o.CostUS() <= x.CostUS() })
	}
	found := &Thresholds{Policy: t.policy, Tried: t.tried, Best: t.best()}
	if may := fmt.Sprintf("%.1f ms", t.mayCostUS/1e3); found.Best != nil {
		found.Why = fmt.Sprintf("of the thresholds that cost the host at most %s more, the one that reserves least in the mean; within 1 %% of it, "+
			"the cheapest", may)
	} else {
		found.Why = fmt.Sprintf("no threshold saves 1 %% of the mean for at most %s more of the host's time", may)
	}
	return found
}
