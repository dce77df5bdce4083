package replay

import (
	"fmt"
	"slices"
)

// Odds are how often a run survived in draws of one policy at one limit, and what it reserved.
type Odds struct {
	Replays    int    `json:"replays"`
	Survived   int    `json:"survived"`
	AsRecorded int    `json:"as_recorded"` // that ended as the record does: at the same failure, or without one
	PeakLeast  uint64 `json:"peak_least_bytes"`
	PeakMedian uint64 `json:"peak_median_bytes"`
	PeakMost   uint64 `json:"peak_most_bytes"`
}

// Draws of a policy: best fit of native segments depends on addresses, which differ most; other policies only see the GPU's
// lag and the times of frees.
const (
	nativeDraws = 32
	FewDraws    = 8
)

// sureShare is the part of the draws, in percent, in which a setting has to survive to be recommended, and explainedShare that
// in which the recorded outcome has to occur for the model to explain the run.
const (
	sureShare      = 95
	explainedShare = 5
)

// Draws is the number of draws of a policy that its odds are taken from.
func (p *Plan) Draws(spec Spec) int {
	conf, err := ParseTorchConf(spec.Conf)
	if !spec.HasConf {
		conf, _ = TorchConfOf(p.Trace.Settings)
	}
	if spec.Name == "torch" && err == nil && !conf.Expandable {
		return nativeDraws
	}
	return FewDraws
}

// Own reports whether a policy is PyTorch's with the settings that the run had, so that it repeats what was recorded.
func (p *Plan) Own(spec Spec) bool { return verifiable(p, spec) }

// Survived reports whether a replay met everything that the record met, and the request that failed at event fatal, within its
// limit: expandable segments of PyTorch's with large pages exceed a limit of the process by part of one, which no device allows.
func (r *Result) Survived(fatal int) bool {
	return r.Completed && (r.Capacity == 0 || r.PeakReserved <= r.Capacity) && !slices.Contains(r.FailedOOMs, fatal)
}

// nearby: a run that dies a hundredth of its events before or after the record's failure dies of the same.
const nearby = 100

// asRecorded reports whether a replay ended as the record does.
func (r *Result) asRecorded(fatal int) bool {
	if fatal < 0 {
		return r.Completed
	}
	if at := r.FailedEvent; at != nil {
		return max(*at-fatal, fatal-*at) <= fatal/nearby || slices.Contains(r.FailedOOMs, fatal)
	}
	return slices.Contains(r.FailedOOMs, fatal)
}

// OddsOf sums up replays, of which at least one is given.
func OddsOf(all []*Result, fatal int, survived func(*Result) bool) Odds {
	o := Odds{Replays: len(all)}
	peaks := make([]uint64, len(all))
	for i, r := range all {
		peaks[i] = r.PeakReserved
		if survived(r) {
			o.Survived++
		}
		if r.asRecorded(fatal) {
			o.AsRecorded++
		}
	}
	slices.Sort(peaks)
	o.PeakLeast, o.PeakMedian, o.PeakMost = peaks[0], peaks[len(peaks)/2], peaks[len(peaks)-1]
	return o
}

// Sure reports whether the run survived in as many draws as a recommendation needs.
func (o Odds) Sure() bool { return o.Replays > 0 && o.Survived*100 >= o.Replays*sureShare }

// MayFail is the number of draws of n that may fail where the odds are still sure.
func MayFail(n int) int { return n * (100 - sureShare) / 100 }

// Explained reports whether the odds of the run's own settings have the recorded outcome often enough.
func (o Odds) Explained() bool { return o.AsRecorded*100 >= o.Replays*explainedShare }

// String is the share of the draws that the run survived.
func (o Odds) String() string { return fmt.Sprintf("%d of %d", o.Survived, o.Replays) }

// Unexplained is the warning where the model does not explain a run, "" where it does. o are the odds of the run's own settings at
// the limit that it had.
func (o Odds) Unexplained(fatal int) string {
	if o.Explained() {
		return ""
	}
	outcome := "the run completed"
	if fatal >= 0 {
		outcome = fmt.Sprintf("a request failed at event %d", fatal)
	}
	return fmt.Sprintf("the model does not explain this run: %s, which %d of %d replays with its own settings repeat; nothing is recommended",
		outcome, o.AsRecorded, o.Replays)
}
