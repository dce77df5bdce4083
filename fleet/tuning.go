package fleet

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
)

// TuningVersion is the version of a Tuning as a file.
const TuningVersion = 1

// Tuning is what settings would do for all ranks, by replaying the recordings of one rank of each group and of each outlier; or
// one shard of that work.
type Tuning struct {
	Format int          `json:"cistern_fleet_tuning"` // TuningVersion
	Job    string       `json:"job"`
	Shard  int          `json:"shard"` // 1 to Shards
	Shards int          `json:"shards"`
	Ranks  []RankTuning `json:"ranks"`

	// Settings are those of PyTorch's that were tried on all of these ranks, and Cistern; the best first. They are known when all
	// shards are together.
	Settings []Setting `json:"settings,omitempty"`
	// Unrecorded are ranks that were to be replayed and have no recording that can be.
	Unrecorded []int `json:"without_recording,omitempty"`
}

// RankTuning is what one rank's recording says.
type RankTuning struct {
	Rank      int           `json:"rank"`
	Stands    int           `json:"stands_for"` // ranks of its group
	Recording string        `json:"recording"`
	Capacity  uint64        `json:"capacity_bytes"`
	Error     string        `json:"error,omitempty"`
	Tried     []RankSetting `json:"tried,omitempty"`
}

// RankSetting is a setting on one rank. For Cistern, Policy is "cistern".
type RankSetting struct {
	Policy    string `json:"policy"`
	AllocConf string `json:"alloc_conf"`
	Own       bool   `json:"own,omitempty"`
	Holds     bool   `json:"holds"`
	Peak      uint64 `json:"peak_reserved_bytes"`
	Floor     uint64 `json:"smallest_limit_bytes,omitempty"` // 0 unknown
}

// Setting is one setting on all ranks that were replayed.
type Setting struct {
	Policy    string `json:"policy"`
	AllocConf string `json:"alloc_conf"`
	Own       bool   `json:"own,omitempty"`
	Holds     int    `json:"holds"` // on so many of Of
	Of        int    `json:"of"`
	Peak      uint64 `json:"peak_reserved_bytes"`            // of the rank that needs most
	Floor     uint64 `json:"smallest_limit_bytes,omitempty"` // of the rank that needs most; 0 where it is not known of all
}

// representative is a rank to be replayed, and how many it stands for.
type representative struct {
	rank   *Rank
	stands int
}

// representatives are the rank with least headroom of each group, and each rank that a finding is about, by rank.
func (a *Answer) representatives() []representative {
	stands := map[*Rank]int{}
	for _, g := range a.groups {
		stands[g.Ranks[0]] = len(g.Ranks)
	}
	outliers := map[int]bool{}
	for _, f := range a.Findings {
		if slices.Contains([]string{CauseFragmentation, KindTwin, KindOutOfMemory, CauseGrowth, CauseOutside}, f.Kind) && len(f.Ranks) <= mostOutliers {
			for _, n := range f.Ranks {
				outliers[n] = true
			}
		}
	}
	for _, r := range a.ranks {
		if stands[r] == 0 && outliers[r.ID.Rank] {
			stands[r] = 1
		}
	}
	var list []representative
	for r, n := range stands {
		list = append(list, representative{r, n})
	}
	slices.SortFunc(list, func(x, y representative) int {
		return cmp.Or(cmp.Compare(x.rank.ID.Rank, y.rank.ID.Rank), cmp.Compare(x.rank.Summary.Path, y.rank.Summary.Path))
	})
	return list
}

// mostOutliers is how many ranks a finding may be about for each to be replayed.
const mostOutliers = 8

// Tune replays the representatives of a shard, from 1. Budget bounds the time for each recording, 0 does not. Progress is called as
// they end.
func (a *Answer) Tune(ctx context.Context, shard, shards int, budget time.Duration, progress func(done, total int)) (*Tuning, error) {
	t := &Tuning{Format: TuningVersion, Job: a.Job, Shard: shard, Shards: shards, Ranks: []RankTuning{}}
	var mine []representative
	for i, r := range a.representatives() {
		if i%shards == shard-1 {
			mine = append(mine, r)
		}
	}
	for i, r := range mine {
		file := r.rank.recordingFile()
		if file == "" {
			t.Unrecorded = append(t.Unrecorded, r.rank.ID.Rank)
		} else {
			x, err := r.rank.tune(ctx, file, budget)
			if err != nil {
				return nil, err
			}
			x.Stands = r.stands
			t.Ranks = append(t.Ranks, x)
		}
		progress(i+1, len(mine))
	}
	return t, nil
}

// recordingFile is the recording that says most: that of the last failure, else the newest that is there. "" is none.
func (r *Rank) recordingFile() string {
	names := slices.Clone(r.Summary.Recordings)
	for i := range r.Device.Failures {
		names = append(names, r.Device.Failures[i].Recording)
	}
	dir := filepath.Dir(r.Summary.Path)
	for _, name := range slices.Backward(names) {
		if name == "" {
			continue
		}
		if st, err := os.Stat(filepath.Join(dir, name)); err == nil && st.Mode().IsRegular() {
			return filepath.Join(dir, name)
		}
	}
	return ""
}

// tune replays one recording. What is wrong with it is no failure of the whole.
func (r *Rank) tune(ctx context.Context, file string, budget time.Duration) (RankTuning, error) {
	x := RankTuning{Rank: r.ID.Rank, Recording: file}
	f, err := open.File(file)
	if err != nil {
		x.Error = err.Error()
		return x, nil
	}
	var t *recording.Trace
	for _, one := range f.Traces {
		if one.Device == r.Device.Ordinal || t == nil {
			t = one
		}
	}
	if t == nil || len(t.Events) == 0 {
		x.Error = "the recording has no events"
		return x, nil
	}
	opt := analyze.TuneOptions{Budget: budget}
	if _, failed := t.FailedAt(); !failed && r.Device.Total > 0 {
		opt.Capacity = less(r.Device.Total, r.Device.PeakOutside.Bytes)
	}
	found, err := analyze.Tune(ctx, t, opt)
	if ctx.Err() != nil {
		return x, ctx.Err()
	}
	if err != nil {
		x.Error = err.Error()
		return x, nil
	}
	x.take(found)
	return x, nil
}

// take keeps what is needed of a rank's tuning.
func (x *RankTuning) take(found *analyze.Tuning) {
	x.Capacity = found.Capacity
	if found.Warning != "" {
		x.Error = found.Warning
	}
	floors := map[string]uint64{}
	for _, f := range found.Floors {
		key := f.AllocConf
		if f.Who == AllocatorCistern {
			key = AllocatorCistern
		}
		floors[key] = f.Capacity
	}
	for i := range found.Choices {
		c := &found.Choices[i]
		x.Tried = append(x.Tried, RankSetting{Policy: "torch", AllocConf: c.AllocConf, Own: c.AllocConf == found.Own.AllocConf, Holds: c.Holds,
			Peak: c.Result.PeakReserved, Floor: floors[c.AllocConf]})
	}
	if c := found.Cistern; c != nil {
		x.Tried = append(x.Tried, RankSetting{Policy: AllocatorCistern, Holds: c.Holds, Peak: c.Result.PeakReserved, Floor: floors[AllocatorCistern]})
	}
}

// ReadTuning reads a shard.
func ReadTuning(path string) (*Tuning, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	t := &Tuning{}
	switch err := json.Unmarshal(data, t); {
	case err != nil:
		return nil, fmt.Errorf("%s: not a shard of cistern fleet --tune: %w", path, err)
	case t.Format != TuningVersion:
		return nil, fmt.Errorf("%s: format %d of a shard; expected %d", path, t.Format, TuningVersion)
	case t.Shards < 1 || t.Shard < 1 || t.Shard > t.Shards:
		return nil, fmt.Errorf("%s: shard %d of %d", path, t.Shard, t.Shards)
	}
	return t, nil
}

// Merge puts all shards of a tuning together, in any order.
func Merge(shards []*Tuning) (*Tuning, error) {
	if len(shards) == 0 {
		return nil, errors.New("no shard")
	}
	first := shards[0]
	seen := map[int]bool{}
	out := &Tuning{Format: TuningVersion, Job: first.Job, Shard: 1, Shards: 1, Ranks: []RankTuning{}}
	for _, s := range shards {
		switch {
		case s.Job != first.Job:
			return nil, fmt.Errorf("shards of two jobs, %q and %q", first.Job, s.Job)
		case s.Shards != first.Shards:
			return nil, fmt.Errorf("one shard of %d and one of %d", first.Shards, s.Shards)
		case seen[s.Shard]:
			return nil, fmt.Errorf("shard %d/%d twice", s.Shard, s.Shards)
		}
		seen[s.Shard] = true
		out.Ranks = append(out.Ranks, s.Ranks...)
		out.Unrecorded = append(out.Unrecorded, s.Unrecorded...)
	}
	for n := 1; n <= first.Shards; n++ {
		if !seen[n] {
			return nil, fmt.Errorf("shard %d/%d is missing", n, first.Shards)
		}
	}
	slices.SortFunc(out.Ranks, func(x, y RankTuning) int {
		return cmp.Or(cmp.Compare(x.Rank, y.Rank), cmp.Compare(x.Recording, y.Recording))
	})
	slices.Sort(out.Unrecorded)
	out.settings()
	return out, nil
}

// settings compares what was tried on all ranks.
func (t *Tuning) settings() {
	type key struct{ policy, conf string }
	by := map[key]*Setting{}
	floorless := map[key]bool{}
	replayed := 0
	for _, r := range t.Ranks {
		if len(r.Tried) == 0 {
			continue
		}
		replayed++
		for _, x := range r.Tried {
			k := key{x.Policy, x.AllocConf}
			s := by[k]
			if s == nil {
				s = &Setting{Policy: x.Policy, AllocConf: x.AllocConf}
				by[k] = s
			}
			s.Of++
			s.Own = s.Own || x.Own
			if x.Holds {
				s.Holds++
			}
			s.Peak, s.Floor = max(s.Peak, x.Peak), max(s.Floor, x.Floor)
			floorless[k] = floorless[k] || x.Floor == 0
		}
	}
	for k, s := range by {
		if s.Of < replayed {
			delete(by, k) // not of all ranks
		} else if floorless[k] {
			s.Floor = 0
		}
	}
	for _, s := range by {
		t.Settings = append(t.Settings, *s)
	}
	slices.SortFunc(t.Settings, func(x, y Setting) int {
		return cmp.Or(-cmp.Compare(x.Holds, y.Holds), cmp.Compare(x.Peak, y.Peak), cmp.Compare(x.Policy, y.Policy), cmp.Compare(len(x.AllocConf), len(y.AllocConf)),
			cmp.Compare(x.AllocConf, y.AllocConf))
	})
}

// Best is the first setting of a policy that lets all replayed ranks through; nil: none does.
func (t *Tuning) Best(policy string) *Setting {
	for i := range t.Settings {
		if s := &t.Settings[i]; s.Policy == policy && s.Holds == s.Of {
			return s
		}
	}
	return nil
}
