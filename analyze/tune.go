package analyze

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/replay"
)

// TuneOptions are the circumstances of a search.
type TuneOptions struct {
	Capacity  uint64        // bytes; 0 is the trace's own (replay.CapacityFromTrace)
	Unlimited bool          // a Capacity of 0 is none
	GPULag    time.Duration // as in replay.Options
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
	Own          *Choice          `json:"own"` // the trace's own settings
	// Best is what to set of PyTorch's: one of Choices, or where none of them survives the best without a limit.
	Best *Choice `json:"best"`
	// Why says by which rule Best was chosen.
	Why     string   `json:"why"`
	Cistern *Choice  `json:"cistern"` // the engine, nil where it could not be replayed
	Choices []Choice `json:"choices"` // everything tried for PyTorch, least reserved first
	Floors  []Floor  `json:"floors"`
	Notes   []string `json:"notes"`
}

// Choice is one setting and what it did.
type Choice struct {
	// AllocConf is the value for PYTORCH_ALLOC_CONF; "" is PyTorch's defaults. For Cistern, CISTERN_CONF.
	AllocConf string `json:"alloc_conf"`
	// Frontier: no other choice that survives is at least as good in peak reserved, driver time and synchronisations
	// and better in one, or as good in all with fewer settings.
	Frontier bool `json:"frontier"`
	// Breaks says what stops working, or is to be known, with this setting.
	Breaks []string `json:"breaks"`
	// Verified: the model behind it was held against real recordings.
	Verified bool           `json:"verified"`
	Result   *replay.Result `json:"result"`
}

// Syncs is the number of times the host waited for the GPU.
func (c *Choice) Syncs() int64 { return c.Result.StreamSyncs + c.Result.DeviceSyncs }

// CostUS is the host time that the setting cost: calls to the driver, and the waits they imply.
func (c *Choice) CostUS() float64 { return c.Result.DriverTimeUS + c.Result.SyncWaitUS }

func (c *Choice) survives() bool { return c.Result.Completed && c.Result.OOMs == 0 }

// Floor is the smallest capacity that completes without an out-of-memory.
type Floor struct {
	// Who is "own" for the trace's settings, "best", "least" for others of PyTorch's that need less than both, or
	// "cistern".
	Who       string  `json:"who"`
	Policy    string  `json:"policy"`
	AllocConf string  `json:"alloc_conf"`
	Capacity  uint64  `json:"capacity_bytes"` // to within FloorStep
	Ratio     float64 `json:"ratio"`          // over peak live
}

// FloorStep is how finely the smallest capacity is searched: the granularity of physical memory, in bytes.
const FloorStep = 2 << 20

// mostSteps is the largest capacity that is searched, in steps: 64 TiB.
const mostSteps = 1 << 46 / FloorStep

// Tune tries PyTorch's settings on a trace and finds the smallest capacities that complete.
func Tune(ctx context.Context, t *recording.Trace, opt TuneOptions) (*Tuning, error) {
	s := &search{ctx: ctx, plan: replay.NewPlan(t), opt: opt, slots: make(chan struct{}, runtime.GOMAXPROCS(0)),
		known: map[string]*Choice{}}
	tn := &Tuning{Path: t.Path, Device: t.Device, Owner: t.Owner, Format: t.Format, Events: len(t.Events), DurationUS: t.Duration(),
		Floors: []Floor{}, Notes: slices.Clone(t.Notes)}
	tn.PeakLive, _ = t.PeakLive()
	tn.Capacity, tn.CapacityFrom = opt.Capacity, "given"
	switch {
	case opt.Capacity == 0 && opt.Unlimited:
		tn.CapacityFrom = "unlimited"
	case opt.Capacity == 0:
		tn.Capacity, tn.CapacityFrom = replay.CapacityFromTrace(t)
	}
	s.capacity = tn.Capacity

	own, err := s.try(replay.Spec{Name: "torch"})
	if err != nil {
		return nil, err
	}
	tn.Own, s.optional = own, true
	if err := tn.within(s.settings()); err != nil {
		return nil, err
	}
	for _, c := range s.known {
		tn.Choices = append(tn.Choices, *c)
	}
	slices.SortFunc(tn.Choices, func(a, b Choice) int {
		return cmp.Or(survivors(&a, &b), cmp.Compare(a.Result.PeakReserved, b.Result.PeakReserved),
			cmp.Compare(a.CostUS(), b.CostUS()), cmp.Compare(a.AllocConf, b.AllocConf))
	})
	markFrontier(tn.Choices)
	tn.Best, tn.Why = best(tn.Choices, own, tn.DurationUS)
	if tn.Best == nil && tn.Capacity > 0 {
		if err := tn.within(s.bestWithout(tn)); err != nil {
			return nil, err
		}
	}
	for i := range tn.Choices {
		if tn.Choices[i].AllocConf == own.AllocConf {
			own.Frontier = tn.Choices[i].Frontier
		}
	}
	if spec, err := replay.ParseSpec("cistern"); err != nil {
		tn.Notes = append(tn.Notes, "cistern: the engine cannot be replayed by this binary")
	} else if tn.Cistern, err = s.try(spec); tn.within(err) != nil {
		return nil, err
	}
	if err := tn.within(s.floors(tn)); err != nil {
		return nil, err
	}
	for _, c := range tn.Choices {
		for _, n := range c.Result.Notes {
			if !slices.Contains(tn.Notes, n) {
				tn.Notes = append(tn.Notes, n)
			}
		}
	}
	return tn, nil
}

// within takes an error of a search: a file that would have too much done gets a note, and what was found until then.
func (tn *Tuning) within(err error) error {
	const note = "the search was cut short: replays of this file take more steps than a file of its size may cause"
	if !errors.Is(err, replay.ErrWork) {
		return err
	}
	if !slices.Contains(tn.Notes, note) {
		tn.Notes = append(tn.Notes, note)
	}
	return nil
}

// survivors sorts choices that survive before those that do not, and fewer failures before more.
func survivors(a, b *Choice) int {
	rank := func(c *Choice) int64 {
		switch {
		case c.survives():
			return 0
		case c.Result.Completed:
			return c.Result.OOMs
		}
		return 1 << 40
	}
	return cmp.Compare(rank(a), rank(b))
}

// markFrontier marks the choices that no other beats, of those that do the same only the simplest.
func markFrontier(choices []Choice) {
	for i := range choices {
		c := &choices[i]
		c.Frontier = c.survives() && !slices.ContainsFunc(choices, func(o Choice) bool {
			if !o.survives() {
				return false
			}
			dp := cmp.Compare(o.Result.PeakReserved, c.Result.PeakReserved)
			dt := cmp.Compare(o.Result.DriverTimeUS, c.Result.DriverTimeUS)
			ds := cmp.Compare(o.Syncs(), c.Syncs())
			if dp == 0 && dt == 0 && ds == 0 { // the simpler of two that do the same
				return cmp.Or(cmp.Compare(settingsIn(o.AllocConf), settingsIn(c.AllocConf)),
					cmp.Compare(o.AllocConf, c.AllocConf)) < 0
			}
			return dp <= 0 && dt <= 0 && ds <= 0
		})
	}
}

// Limits of best: what host time may be spent, as a part of the run, and how much more memory a simpler setting may
// take.
const (
	costShare = 0.015
	nearly    = 1.01
)

// best picks the setting to recommend, and says by which rule.
func best(choices []Choice, own *Choice, durationUS int64) (*Choice, string) {
	limit := max(costShare*float64(durationUS), own.CostUS())
	pick := func(ok func(*Choice) bool) *Choice {
		var least uint64
		for i := range choices {
			if c := &choices[i]; ok(c) && (least == 0 || c.Result.PeakReserved < least) {
				least = c.Result.PeakReserved
			}
		}
		var b *Choice
		for i := range choices {
			c := &choices[i]
			if !ok(c) || float64(c.Result.PeakReserved) > nearly*float64(least) {
				continue
			}
			if b == nil || cmp.Or(cmp.Compare(settingsIn(c.AllocConf), settingsIn(b.AllocConf)),
				cmp.Compare(c.Result.PeakReserved, b.Result.PeakReserved), cmp.Compare(c.CostUS(), b.CostUS())) < 0 {
				b = c
			}
		}
		return b
	}
	trusted := func(c *Choice) bool { return c.survives() && c.Verified }
	if b := pick(func(c *Choice) bool { return trusted(c) && c.CostUS() <= limit }); b != nil {
		return b, fmt.Sprintf("least reserved among the settings that complete and cost the host at most %.1f ms; of "+
			"those within 1 %% of it, the one with fewest settings", limit/1e3)
	}
	if b := pick(trusted); b != nil {
		return b, fmt.Sprintf("least reserved among the settings that complete; each costs the host more than %.1f ms",
			limit/1e3)
	}
	return nil, "no setting of PyTorch completes within this limit"
}

// bestWithout recommends what does best without the limit, where nothing completes within it: a machine with a little
// more would do, and floors say how little.
func (s *search) bestWithout(tn *Tuning) error {
	free := &search{ctx: s.ctx, plan: s.plan, opt: s.opt, slots: s.slots, known: map[string]*Choice{}, done: s.done,
		total: s.total, optional: true}
	own, err := free.try(replay.Spec{Name: "torch"})
	if err != nil {
		return err
	}
	if err := free.settings(); err != nil {
		return err
	}
	s.done, s.total = free.done, free.total
	var choices []Choice
	for _, c := range free.known {
		choices = append(choices, *c)
	}
	slices.SortFunc(choices, func(a, b Choice) int { return cmp.Compare(a.AllocConf, b.AllocConf) })
	if tn.Best, tn.Why = best(choices, own, tn.DurationUS); tn.Best != nil {
		tn.Why = "no setting of PyTorch completes within this limit; without one: " + tn.Why
	}
	return nil
}

// search runs replays, each setting once.
type search struct {
	ctx      context.Context
	plan     *replay.Plan
	opt      TuneOptions
	capacity uint64
	device   uint64        // replay.Options.Device
	optional bool          // replay.Options.Search
	slots    chan struct{} // one for each replay at a time

	mu          sync.Mutex         // protects what follows
	known       map[string]*Choice // PyTorch settings, by AllocConf
	done, total int
}

func (s *search) expect(n int) {
	s.mu.Lock()
	s.total += n
	s.mu.Unlock()
}

// run replays once, with a capacity of its own; 0 is unlimited.
func (s *search) run(spec replay.Spec, capacity uint64) (*replay.Result, error) {
	return s.replay(spec, replay.Options{Capacity: capacity, Unlimited: capacity == 0, GPULag: s.opt.GPULag})
}

// replay is one run when its turn has come.
func (s *search) replay(spec replay.Spec, opt replay.Options) (*replay.Result, error) {
	select {
	case s.slots <- struct{}{}:
	case <-s.ctx.Done():
		return nil, s.ctx.Err()
	}
	if err := s.ctx.Err(); err != nil { // as likely as the slot, once both are there
		<-s.slots
		return nil, err
	}
	opt.Done, opt.Device, opt.Work, opt.Search = s.ctx.Done(), s.device, s.opt.Work, s.optional
	r, err := s.plan.Run(spec, opt)
	<-s.slots
	if errors.Is(err, replay.ErrStopped) {
		return nil, s.ctx.Err()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.done++
	if s.opt.Progress != nil {
		s.opt.Progress(s.done, max(s.done, s.total))
	}
	return r, err
}

// try replays a spec at the capacity of the search and remembers PyTorch's.
func (s *search) try(spec replay.Spec) (*Choice, error) {
	s.expect(1)
	r, err := s.run(spec, s.capacity)
	if err != nil {
		return nil, err
	}
	if s.capacity == 0 {
		r.CapacityFrom = "unlimited"
	} else if s.opt.Capacity == 0 {
		_, r.CapacityFrom = replay.CapacityFromTrace(s.plan.Trace)
	} else {
		r.CapacityFrom = "given"
	}
	c := &Choice{Result: r, Verified: spec.Name != "torch-async"}
	switch spec.Name {
	case "torch":
		if c.AllocConf = r.Conf; r.Conf == "default" {
			c.AllocConf = ""
		}
	case "torch-async":
		c.AllocConf = asyncConf
	default:
		c.AllocConf = spec.Conf
		c.Breaks = []string{}
		return c, nil
	}
	c.Breaks = Breaks(c.AllocConf)
	s.mu.Lock()
	defer s.mu.Unlock()
	if old, ok := s.known[c.AllocConf]; ok {
		return old, nil
	}
	s.known[c.AllocConf] = c
	return c, nil
}

// all tries several specs at once.
func (s *search) all(specs []replay.Spec) error {
	var g errgroup.Group
	for _, spec := range specs {
		g.Go(func() error {
			_, err := s.try(spec)
			return err
		})
	}
	return g.Wait()
}

// floors finds the smallest capacity that completes: for the trace's own settings, the best ones, Cistern, and for
// whichever setting on the frontier needs least where that is none of these. Little reserved without a limit and a
// small limit are not the same: near its limit PyTorch gives cached memory back.
func (s *search) floors(tn *Tuning) error {
	type job struct {
		who, conf string
		spec      replay.Spec
	}
	jobs := []job{{"own", tn.Own.AllocConf, replay.Spec{Name: "torch"}}}
	if tn.Best != nil && tn.Best.AllocConf != tn.Own.AllocConf {
		jobs = append(jobs, job{"best", tn.Best.AllocConf, torchSpec(tn.Best.AllocConf)})
	}
	if tn.Cistern != nil {
		jobs = append(jobs, job{"cistern", tn.Cistern.AllocConf, replay.Spec{Name: "cistern"}})
	}
	for i := range tn.Choices {
		c := &tn.Choices[i]
		if c.Frontier && c.Verified && !slices.ContainsFunc(jobs, func(j job) bool {
			return j.who != "cistern" && j.conf == c.AllocConf
		}) {
			jobs = append(jobs, job{"least", c.AllocConf, torchSpec(c.AllocConf)})
		}
	}
	found := make([]Floor, len(jobs))
	var g errgroup.Group
	for i, j := range jobs {
		g.Go(func() error {
			capacity, err := s.smallest(j.spec, tn.PeakLive)
			found[i] = Floor{Who: j.who, Policy: j.spec.Name, AllocConf: j.conf, Capacity: capacity}
			if tn.PeakLive > 0 {
				found[i].Ratio = float64(capacity) / float64(tn.PeakLive)
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	tn.Floors = keepFloors(slices.DeleteFunc(found, func(f Floor) bool { return f.Capacity == 0 }))
	return nil
}

// keepFloors drops the settings that were only tried for their floor, but for one that needs less than the others of
// PyTorch's.
func keepFloors(found []Floor) []Floor {
	var kept []Floor
	var least *Floor
	for i := range found {
		f := &found[i]
		if f.Who != "least" {
			kept = append(kept, *f)
		}
		if f.Who != "cistern" && (least == nil || f.Capacity < least.Capacity) {
			least = f
		}
	}
	if least != nil && least.Who == "least" {
		at := slices.IndexFunc(kept, func(f Floor) bool { return f.Who == "cistern" })
		if at < 0 {
			at = len(kept)
		}
		kept = slices.Insert(kept, at, *least)
	}
	return kept
}

// smallest bisects for the least capacity, a multiple of FloorStep, that completes without an out-of-memory; 0: there is none. More
// memory is taken to be never worse, which holds but for settings that are fractions of the capacity.
func (s *search) smallest(spec replay.Spec, peakLive uint64) (uint64, error) {
	steps := func(bytes uint64) uint64 { return (bytes + FloorStep - 1) / FloorStep }
	s.expect(1)
	free, err := s.run(spec, 0)
	if err != nil {
		return 0, err
	}
	if !free.Completed || free.OOMs > 0 {
		return 0, nil // a request is for more than any device has
	}
	low, high := steps(peakLive), max(steps(free.PeakReserved), steps(peakLive), 1)
	fits := func(at uint64) (bool, error) {
		r, err := s.run(spec, at*FloorStep)
		return err == nil && r.Completed && r.OOMs == 0, err
	}
	s.expect(1 + bitsOf(high-low))
	// A setting relative to the capacity may fail at what it reserved without one.
	for ; ; high += high/8 + 1 {
		if high > mostSteps {
			return 0, nil
		}
		ok, err := fits(high)
		if err != nil {
			return 0, err
		}
		if ok {
			break
		}
		low = high + 1
	}
	for low < high {
		mid := low + (high-low)/2
		ok, err := fits(mid)
		if err != nil {
			return 0, err
		}
		if ok {
			high = mid
		} else {
			low = mid + 1
		}
	}
	return high * FloorStep, nil
}

func bitsOf(n uint64) int {
	bits := 0
	for ; n > 0; n >>= 1 {
		bits++
	}
	return bits
}
