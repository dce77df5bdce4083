package analyze

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/replay"
)

// TuneOptions are the circumstances of a search.
type TuneOptions struct {
	Capacity  uint64        // bytes; 0 is the trace's own (replay.CapacityFromTrace)
	Unlimited bool          // a Capacity of 0 is none
	GPULag    time.Duration // as in replay.Options
	Budget    time.Duration // for all replays of one trace; 0 is no bound
	Work      *replay.Work  // of the file, where several traces of it are tuned; nil is the trace's own
	// Progress is called as replays end, with the number done and the number known to be needed; from any goroutine,
	// one call at a time.
	Progress func(done, total int)
}

// Tuning is what a search found. Its JSON is what `cistern tune --json` prints.
type Tuning struct {
	Path         string           `json:"path"`
	Device       int              `json:"device"`
	Owner        *recording.Owner `json:"process,omitempty"` // of a driver trace with several processes on the device
	Format       string           `json:"format"`
	Events       int              `json:"events"`
	DurationUS   int64            `json:"duration_us"`
	PeakLive     uint64           `json:"peak_live_bytes"`
	Capacity     uint64           `json:"capacity_bytes"` // 0 is unlimited
	CapacityFrom string           `json:"capacity_from"`
	// More is what was replayed behind the request that the run died of, as a run goes on; 0 where the record goes on itself.
	More uint64  `json:"more_bytes"`
	Own  *Choice `json:"own"` // the trace's own settings
	// Best is what to set of PyTorch's: one of Choices, nil where none survives, or the model does not explain the run.
	Best *Choice `json:"best"`
	// Why says by which rule Best was chosen.
	Why     string   `json:"why"`
	Warning string   `json:"warning"` // why nothing is recommended, "" where something may be
	Cistern *Choice  `json:"cistern"` // the engine, nil where it could not be replayed
	Choices []Choice `json:"choices"` // everything tried for PyTorch, the best first
	Floors  []Floor  `json:"floors"`
	// Thresholds is how much free memory to keep, by allocator.
	Thresholds []Thresholds `json:"thresholds"`
	Notes      []string     `json:"notes"`
	// Environment is what the run was recorded with.
	Environment recording.Environment `json:"environment,omitzero"`
	// Conf is the settings of the run, as its user wrote them.
	Conf string `json:"conf"`
}

// Choice is one setting and what it did. Its Result is of one replay, its odds of many.
type Choice struct {
	// AllocConf is the value for PyTorch's variable (variable.go); "" is PyTorch's defaults. For Cistern, CISTERN_CONF.
	AllocConf string `json:"alloc_conf"`
	// Frontier: no other choice that survives is at least as good in peak reserved, driver time and synchronisations
	// and better in one, or as good in all with fewer settings.
	Frontier bool `json:"frontier"`
	// Holds: the run survives in nearly all draws within the limit, and with a hundredth less.
	Holds bool `json:"holds"`
	// Breaks says what stops working, or is to be known, with this setting.
	Breaks []string `json:"breaks"`
	// Verified: the model behind it was held against real recordings.
	Verified bool           `json:"verified"`
	Result   *replay.Result `json:"result"`

	spec   replay.Spec
	judged bool // its odds are of all draws
}

// Syncs is the number of times the host waited for the GPU.
func (c *Choice) Syncs() int64 { return c.Result.StreamSyncs + c.Result.DeviceSyncs }

// CostUS is the host time that the setting cost: calls to the driver, and the waits they imply.
func (c *Choice) CostUS() float64 { return c.Result.DriverTimeUS + c.Result.SyncWaitUS }

// survives: as far as was tried.
func (c *Choice) survives() bool {
	if c.judged {
		return c.Holds
	}
	return c.Result.Odds.Sure()
}

// Tune tries PyTorch's settings on a trace and finds the smallest limits that suffice.
func Tune(ctx context.Context, t *recording.Trace, opt TuneOptions) (*Tuning, error) {
	tn := newTuning(t, opt)
	within, cancel := withBudget(ctx, opt.Budget)
	defer cancel()
	s, after := searchOf(ctx, t, opt, tn.Capacity, fatalOf(t))
	tn.More, tn.CapacityFrom = after.more, s.capacityFrom
	var err error
	if tn.Own, err = s.try(replay.Spec{Name: "torch"}); err != nil { // whatever the budget: without it there is no answer
		return nil, err
	}
	s.ctx, s.optional = within, true
	s.costUS = max(costShare*float64(tn.DurationUS), tn.Own.CostUS())
	for _, step := range []struct {
		do    func(*search) error
		to    float64
		about int
	}{{tn.explain, 0.05, 32}, {tn.choose, 0.35, 200}, {tn.engine, 0.45, 9}, {tn.findFloors, 0.7, (1 + mostFloors) * 80},
		{tn.engineFloor, 0.9, 48}, {tn.thresholds, 1, 44}} {
		s.begin(step.to, step.about)
		err := step.do(s)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err != nil && !outOfTime(err) {
			return nil, err
		}
		if err != nil {
			tn.cutShort(err, opt.Budget)
			break
		}
	}
	if tn.Best == nil && tn.Why == "" {
		tn.Why = "the search ended before a setting was found that can be recommended"
	}
	s.end()
	tn.noteResults()
	return tn, nil
}

func newTuning(t *recording.Trace, opt TuneOptions) *Tuning {
	tn := &Tuning{Path: t.Path, Device: t.Device, Owner: t.Owner, Format: t.Format, Events: len(t.Events), DurationUS: t.Duration(),
		Floors: []Floor{}, Thresholds: []Thresholds{}, Notes: slices.Clone(t.Notes), Environment: t.Environment, Conf: t.Settings.Conf}
	tn.PeakLive, _ = t.PeakLive()
	if tn.Capacity = opt.Capacity; opt.Capacity == 0 && !opt.Unlimited {
		tn.Capacity, _ = replay.CapacityFromTrace(t)
	}
	return tn
}

// explain takes the odds of the run's own settings, which say whether the model explains the run.
func (tn *Tuning) explain(s *search) error {
	odds, err := s.odds(tn.Own.spec, s.capacity)
	if err != nil {
		return err
	}
	holds, err := s.withMargin(tn.Own.spec, s.capacity, odds)
	if err != nil {
		return err
	}
	tn.Own.setOdds(odds, holds)
	tn.Warning = s.unexplained(replay.Spec{Name: "torch"}, *tn.Own.Result.Odds)
	return nil
}

// Bounds of what is replayed many times.
const (
	mostJudged = 12 // settings
	mostHold   = 4  // of them that hold
	mostFloors = 3  // settings whose smallest limits are searched, beside the run's own
)

// choose tries PyTorch's settings, and those that did best in many draws.
func (tn *Tuning) choose(s *search) error {
	err := s.settings()
	if err == nil {
		err = s.judgeBest()
	}
	for err == nil && s.unjudged() != nil {
		err = s.judge(s.unjudged())
	}
	all := s.ranked()
	markFrontier(all)
	for _, c := range all {
		tn.Choices = append(tn.Choices, *c)
	}
	for i := range tn.Choices {
		if c := &tn.Choices[i]; c.AllocConf == tn.Own.AllocConf {
			tn.Own.Frontier = c.Frontier
		}
	}
	return err
}

// unjudged is a setting on the frontier whose odds are not known, nil where all are: one that does not hold makes place for
// others.
func (s *search) unjudged() *Choice {
	all := s.ranked()
	markFrontier(all)
	i := slices.IndexFunc(all, func(c *Choice) bool { return c.Frontier && !c.judged })
	if i < 0 {
		return nil
	}
	return all[i]
}

// engine replays Cistern.
func (tn *Tuning) engine(s *search) error {
	spec, err := replay.ParseSpec("cistern")
	if err != nil {
		tn.Notes = append(tn.Notes, "cistern: the engine cannot be replayed by this binary")
		return nil
	}
	if tn.Cistern, err = s.try(spec); err != nil {
		return err
	}
	return s.judge(tn.Cistern)
}

// cutShort notes why a search ended before it had tried everything.
func (tn *Tuning) cutShort(err error, budget time.Duration) {
	note := fmt.Sprintf("the search was cut short: the time for replays (--budget %s) was used up", budget)
	if errors.Is(err, replay.ErrWork) {
		note = "the search was cut short: replays of this file take more steps than a file of its size may cause"
	}
	tn.Notes = append(tn.Notes, note)
}

// noteResults collects the notes of all replays.
func (tn *Tuning) noteResults() {
	for _, c := range tn.Choices {
		for _, n := range c.Result.Notes {
			if !slices.Contains(tn.Notes, n) {
				tn.Notes = append(tn.Notes, n)
			}
		}
	}
}

// markFrontier marks the choices that no other beats, of those that do the same only the simplest.
func markFrontier(choices []*Choice) {
	for _, c := range choices {
		c.Frontier = c.survives() && !slices.ContainsFunc(choices, func(o *Choice) bool { return o.survives() && o.beats(c) })
	}
}

// beats reports whether a choice is at least as good in everything and better in something, or simpler and as good.
func (c *Choice) beats(o *Choice) bool {
	dp := cmp.Compare(c.Result.PeakReserved, o.Result.PeakReserved)
	dt := cmp.Compare(c.Result.DriverTimeUS, o.Result.DriverTimeUS)
	ds := cmp.Compare(c.Syncs(), o.Syncs())
	if dp == 0 && dt == 0 && ds == 0 { // the simpler of two that do the same
		return cmp.Or(cmp.Compare(settingsIn(c.AllocConf), settingsIn(o.AllocConf)), cmp.Compare(c.AllocConf, o.AllocConf)) < 0
	}
	return dp <= 0 && dt <= 0 && ds <= 0
}

// costShare is what host time a setting may cost, as a part of the run.
const costShare = 0.015

// findFloors finds the smallest limits of the trace's own settings and of those that may be the best, and with them the best.
func (tn *Tuning) findFloors(s *search) error {
	if tn.Warning != "" {
		tn.Why = tn.Warning
		return nil
	}
	rivals := tn.rivals()
	jobs := append([]*Choice{tn.Own}, rivals...)
	found := make([]Floor, len(jobs))
	var g errgroup.Group
	for i, c := range jobs {
		above := uint64(0)
		if c == tn.Own {
			above = s.died
		}
		g.Go(func() (err error) {
			found[i], err = s.least(c.spec, above, mostSteps*FloorStep)
			found[i].AllocConf = c.AllocConf
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	tn.pick(s, rivals, found)
	return nil
}

// engineFloor finds the smallest limit of Cistern.
func (tn *Tuning) engineFloor(s *search) error {
	if tn.Cistern == nil || tn.Warning != "" {
		return nil
	}
	f, err := s.least(tn.Cistern.spec, 0, mostSteps*FloorStep)
	if err == nil {
		tn.keepFloor("cistern", f)
	}
	return err
}

// rivals are the settings whose smallest limits are compared with that of the run's own: those that rank first, or where none
// holds, with the one that most often needs least.
func (tn *Tuning) rivals() (all []*Choice) {
	add := func(ok func(*Choice) bool) {
		for i := range tn.Choices {
			c := &tn.Choices[i]
			if len(all) < mostFloors && c.AllocConf != tn.Own.AllocConf && c.Verified && !slices.Contains(all, c) && ok(c) {
				all = append(all, c)
			}
		}
	}
	add(func(c *Choice) bool { return c.Holds })
	if len(all) == 0 {
		add(func(c *Choice) bool { return c.AllocConf == "expandable_segments:True" })
	}
	add(func(*Choice) bool { return true })
	return all
}

// pick chooses the best setting: what ranks first of those that hold and that need a smaller limit than the run's own.
func (tn *Tuning) pick(s *search, rivals []*Choice, found []Floor) {
	own := found[0].Capacity
	tn.keepFloor("own", found[0])
	best := 0 // place in found
	for i, c := range rivals {
		if best == 0 && c.Holds && (!tn.Own.Holds || found[i+1].Capacity < own) && c.merit(s).compare(tn.Own.merit(s), s.step()) < 0 {
			best, tn.Best = i+1, c
		}
	}
	if best == 0 && tn.Own.Holds {
		tn.Best = tn.Own
	}
	if best > 0 {
		tn.keepFloor("best", found[best])
	}
	least := 0
	for i := range rivals {
		if f := found[i+1].Capacity; f > 0 && i+1 != best && (least == 0 || f < found[least].Capacity) {
			least = i + 1
		}
	}
	if least > 0 && found[least].Capacity < min(nonzero(own), nonzero(found[best].Capacity)) {
		tn.keepFloor("least", found[least])
	}
	tn.Why = tn.reason(s)
}

// nonzero is a limit, or more than any where there is none.
func nonzero(limit uint64) uint64 {
	if limit == 0 {
		return math.MaxUint64
	}
	return limit
}

func (tn *Tuning) keepFloor(who string, f Floor) {
	if f.Capacity > 0 {
		f.Who = who
		tn.Floors = append(tn.Floors, f)
	}
}

// reason says by which rule the best setting was chosen.
func (tn *Tuning) reason(s *search) string {
	switch b := tn.Best; {
	case b == nil && tn.Capacity > 0:
		return fmt.Sprintf("no setting of PyTorch survives within %s", units.FormatBytes(tn.Capacity))
	case b == nil:
		return "a request of this run is for more than any device has"
	case b.AllocConf == tn.Own.AllocConf:
		return fmt.Sprintf("no other setting was found that reserves at least 1 %% less, survives within a smaller limit, and costs the host "+
			"at most %.1f ms", s.costUS/1e3)
	case b.CostUS() <= s.costUS:
		return fmt.Sprintf("of the settings that survive and cost the host at most %.1f ms, the one that reserves least; "+
			"within 1 %% of it, the one with the fewest settings", s.costUS/1e3)
	default:
		return fmt.Sprintf("of the settings that survive, the one that reserves least; each costs the host more than %.1f ms", s.costUS/1e3)
	}
}
