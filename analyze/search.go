package analyze

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/replay"
)

// tune, report and replay answer with the same computation, which is here: a setting is judged by many draws of the run
// (replay.Options.Draw), with the request that failed, and what would have followed, included. It holds at a limit if the run
// survives in nearly all of them, and with a hundredth less memory too.

// margin is the part of the memory that a recommendation leaves free at least, since no two runs are the same.
const margin = 0.01

// FloorStep is how finely the smallest limit is reported: the granularity of physical memory, in bytes.
const FloorStep = 2 << 20

const (
	// mostSteps is the largest limit that is searched, in steps: 64 TiB.
	mostSteps = 1 << 46 / FloorStep
	// floorPart is how finely the smallest limit is searched, as a part of it.
	floorPart = 256
	// mostFloorTries bounds how often a limit that failed is raised.
	mostFloorTries = 40
)

// search runs replays, each setting once.
type search struct {
	ctx      context.Context
	plan     *replay.Plan
	opt      TuneOptions
	capacity uint64
	// capacityFrom says in words where it comes from.
	capacityFrom string

	device   uint64                    // replay.Options.Device
	optional bool                      // replay.Options.Search
	survived func(*replay.Result) bool // it got what the run got, and what failed there
	fatal    int                       // the event of the failure that the run died of, -1: none
	died     uint64                    // the limit at which it died, as far as is known; 0: it did not
	follows  bool                      // the plan has what would have followed the failure, which stands for the margin
	costUS   float64                   // host time that a setting may cost
	slots    chan struct{}             // one for each replay at a time

	mu          sync.Mutex         // protects what follows
	known       map[string]*Choice // PyTorch settings, by AllocConf
	drawn       map[drawKey]*replay.Result
	done, total int
	phase       phase
}

// drawKey is what a draw's result depends on.
type drawKey struct {
	spec     replay.Spec
	capacity uint64
	lag      time.Duration
	draw     int
}

// phase is a part of a search. How many replays it takes is known when it is over.
type phase struct {
	from, to    float64 // of the whole search
	about       int     // replays that it often takes
	done, total int     // replays before it
	reported    float64 // part of the whole search
}

// aftermath is what would have followed the failure that a run died of.
type aftermath struct {
	more uint64
	from string // where more comes from
}

// searchOf is a search over a run that died of the failure at event fatal, or did not (-1), with what would have followed.
func searchOf(ctx context.Context, t *recording.Trace, opt TuneOptions, capacity uint64, fatal int) (*search, aftermath) {
	s := &search{ctx: ctx, opt: opt, capacity: capacity, fatal: fatal,
		known: map[string]*Choice{}, drawn: map[drawKey]*replay.Result{}}
	s.survived = func(r *replay.Result) bool { return r.Survived(s.fatal) }
	var after aftermath
	own, from := replay.CapacityFromTrace(t)
	s.capacityFrom = capacityFrom(opt, capacity, from)
	if fatal >= 0 {
		s.died = own
		next, more, why := behind(t, fatal, capacity)
		if s.follows = next != t; s.follows {
			t, after = next, aftermath{more, why}
		}
	}
	s.plan = replay.NewPlan(t)
	s.slots = make(chan struct{}, s.plan.AtOnce())
	return s, after
}

// capacityFrom says in words where the limit of a search comes from; own is what the trace's does.
func capacityFrom(opt TuneOptions, capacity uint64, own string) string {
	switch {
	case capacity == 0:
		return "unlimited"
	case opt.Capacity > 0:
		return "given"
	}
	return own
}

// withBudget bounds the time of a search; 0 is no bound.
func withBudget(ctx context.Context, budget time.Duration) (context.Context, context.CancelFunc) {
	if budget == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, budget)
}

// behind is the trace with what would have followed a failure, and how much that is: what earlier repeats asked for, at least a
// part of the memory. The trace itself goes on where it is longer than the failure.
func behind(t *recording.Trace, failed int, capacity uint64) (next *recording.Trace, more uint64, from string) {
	more, from = stillToCome(t, failed, t.Events[failed].Size), "as much as earlier repeats asked for behind the same place"
	if least := uint64(margin * float64(capacity)); more < least {
		more, from = least, "a hundredth of the memory, as no two runs are the same"
	}
	return continued(t, failed, more), more, from
}

// unexplained is the warning where the run's own settings hardly ever end as the record does, at the limit that it had; "" where
// they do, and where the run's own are not these or the limit is not the run's.
func (s *search) unexplained(own replay.Spec, odds replay.Odds) string {
	if s.opt.Capacity > 0 || s.capacity == 0 || !s.plan.Own(own) {
		return ""
	}
	return odds.Unexplained(s.fatal)
}

// begin begins a phase of about so many replays, which takes the search on to a part of the whole.
func (s *search) begin(to float64, about int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.phase = phase{from: s.phase.to, to: to, about: about, done: s.done, total: s.total, reported: s.phase.reported}
	s.tell(0)
}

// end ends the last phase.
func (s *search) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.phase.to = 1
	s.tell(1)
}

// tell reports progress, of which a part of the phase is made. The caller holds mu.
func (s *search) tell(part float64) {
	const whole = 1 << 20
	p := &s.phase
	p.reported = max(p.reported, p.from+(p.to-p.from)*part)
	if s.opt.Progress != nil {
		s.opt.Progress(int(whole*p.reported), whole)
	}
}

// phasePart is how much of a phase is done after so many replays of about a number. It stays below 1, as a phase may take more
// than that: from nearly on it approaches 1, with the same slope at first.
func phasePart(done, about int) float64 {
	const nearly = 0.8
	x := float64(done) / float64(about)
	if x <= nearly {
		return x
	}
	return 1 - (1-nearly)*math.Exp(-(x-nearly)/(1-nearly))
}

func (s *search) expect(n int) {
	s.mu.Lock()
	s.total += n
	s.mu.Unlock()
}

// run replays the record once, with a limit of its own; 0 is none.
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
	done := s.done - s.phase.done
	s.tell(phasePart(done, max(1, s.total-s.phase.total, s.phase.about)))
	return r, err
}

// draws are the results of draws from one to another. Those that are not known are replayed, several at a time.
func (s *search) draws(spec replay.Spec, capacity uint64, from, to int) ([]*replay.Result, error) {
	keys := make([]drawKey, to-from)
	var missing []drawKey
	s.mu.Lock()
	for i := range keys {
		keys[i] = drawKey{spec, capacity, s.opt.GPULag, s.plan.SameDraw(spec, from+i)}
		if s.drawn[keys[i]] == nil && !slices.Contains(missing, keys[i]) {
			missing = append(missing, keys[i])
		}
	}
	s.mu.Unlock()
	s.expect(len(missing))
	var g errgroup.Group
	for _, k := range missing {
		g.Go(func() error { return s.draw(k) })
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	all := make([]*replay.Result, len(keys))
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, k := range keys {
		all[i] = s.drawn[k]
	}
	return all, nil
}

// draw replays one draw.
func (s *search) draw(k drawKey) error {
	r, err := s.replay(k.spec, replay.Options{Capacity: k.capacity, Unlimited: k.capacity == 0, GPULag: k.lag, Draw: k.draw})
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drawn[k] = r
	return nil
}

// odds replays all draws of a policy at a limit.
func (s *search) odds(spec replay.Spec, capacity uint64) (replay.Odds, error) {
	return s.oddsUnless(spec, capacity, func(replay.Odds) bool { return false })
}

// oddsUnless replays a few draws, and all of them unless the few are enough.
func (s *search) oddsUnless(spec replay.Spec, capacity uint64, enough func(replay.Odds) bool) (o replay.Odds, err error) {
	n := s.plan.Draws(spec)
	all, err := s.draws(spec, capacity, 1, 1+min(n, replay.FewDraws))
	if err != nil {
		return o, err
	}
	if o = replay.OddsOf(all, s.fatal, s.survived); len(all) == n || enough(o) {
		return o, nil
	}
	more, err := s.draws(spec, capacity, 1+len(all), 1+n)
	if err != nil {
		return o, err
	}
	return replay.OddsOf(append(all, more...), s.fatal, s.survived), nil
}

// sure reports whether the run survives in nearly all of n draws at a limit. It ends with the first failures that say no.
func (s *search) sure(spec replay.Spec, capacity uint64, n int) (bool, error) {
	failed := 0
	for at, batch := 1, cap(s.slots); at <= n; at += batch {
		all, err := s.draws(spec, capacity, at, min(at+batch, n+1))
		if err != nil {
			return false, err
		}
		for _, r := range all {
			if !s.survived(r) {
				failed++
			}
		}
		if failed > replay.MayFail(n) {
			return false, nil
		}
	}
	return true, nil
}

// holds takes the odds of a policy at a limit, and reports whether it may be recommended there.
func (s *search) holds(spec replay.Spec, capacity uint64) (odds replay.Odds, ok bool, err error) {
	odds, err = s.oddsUnless(spec, capacity, func(o replay.Odds) bool {
		return o.Replays-o.Survived > replay.MayFail(s.plan.Draws(spec)) // it does not hold, whatever the others say
	})
	if err == nil {
		ok, err = s.withMargin(spec, capacity, odds)
	}
	return odds, ok, err
}

// withMargin reports whether a policy with these odds may be recommended: the run survives, and with a little less memory too
// where the plan does not go on behind the failure.
func (s *search) withMargin(spec replay.Spec, capacity uint64, odds replay.Odds) (bool, error) {
	if !odds.Sure() || capacity == 0 || s.follows {
		return odds.Sure(), nil
	}
	return s.sure(spec, capacity-uint64(margin*float64(capacity)), replay.FewDraws)
}

// Floor is the smallest limit with which a run survives in nearly all draws, as it does with every higher limit that was
// tried.
type Floor struct {
	// Who is "own" for the trace's settings, "best", "least" for others of PyTorch's that need less than both, or
	// "cistern".
	Who       string      `json:"who"`
	Policy    string      `json:"policy"`
	AllocConf string      `json:"alloc_conf"`
	Capacity  uint64      `json:"capacity_bytes"` // a multiple of FloorStep
	Ratio     float64     `json:"ratio"`          // over peak live
	Odds      replay.Odds `json:"odds"`
	Below     *Below      `json:"below,omitempty"` // at a smaller limit; nil where none was tried
}

// Below is how often a run survives with less than its smallest limit: the largest that was tried and does not do.
type Below struct {
	Capacity uint64      `json:"capacity_bytes"`
	Odds     replay.Odds `json:"odds"`
}

// bisection is the search for one smallest limit, in steps of FloorStep.
type bisection struct {
	*search
	spec      replay.Spec
	low, high uint64 // high may do; low, or what is below peak live, does not
	top       uint64 // nothing above is tried
	step      uint64
	failed    uint64 // the largest limit that was tried and does not do
	few       int    // draws that lead to a limit, which all of them confirm
	odds      replay.Odds
}

// least is the smallest limit of at most top bytes with which a policy survives, above one known not to do; a Capacity of 0: there
// is none.
func (s *search) least(spec replay.Spec, above, top uint64) (Floor, error) {
	none := Floor{Policy: spec.Name, AllocConf: spec.Conf}
	s.expect(1)
	free, err := s.run(spec, 0)
	if err != nil || !free.Completed {
		return none, err // a request is for more than any device has
	}
	steps := func(bytes uint64) uint64 { return (bytes + FloorStep - 1) / FloorStep }
	b := &bisection{search: s, spec: spec, low: max(above/FloorStep, max(1, steps(s.plan.PeakLive))-1), top: min(top/FloorStep, mostSteps),
		few: max(1, s.plan.Draws(spec)/4)}
	b.high = min(b.top, max(steps(free.PeakReserved), b.low+1))
	b.step = max(1, b.high/floorPart)
	if ok, err := b.narrow(); !ok || err != nil {
		return none, err
	}
	return b.floor()
}

// fits is sure for a limit in steps.
func (b *bisection) fits(at uint64, n int) (bool, error) {
	ok, err := b.sure(b.spec, at*FloorStep, n)
	if err == nil && !ok {
		b.failed = max(b.failed, at)
	}
	return ok, err
}

// narrow finds the smallest limit; false: there is none.
func (b *bisection) narrow() (bool, error) {
	for range mostFloorTries {
		if b.high <= b.low {
			return false, nil
		}
		ok, err := b.fits(b.high, b.few)
		if err != nil {
			return false, err
		}
		if !ok {
			b.low, b.high = b.high, min(b.top, b.high+b.high/8+1)
			continue
		}
		if err := b.halve(); err != nil {
			return false, err
		}
		worse, err := b.confirm()
		if err != nil || worse == 0 {
			return err == nil, err
		}
		b.low, b.high = worse, min(b.top, worse+b.step)
	}
	return false, nil
}

// halve bisects between low and high, of which high fits.
func (b *bisection) halve() error {
	for b.high-b.low > b.step {
		mid := b.low + (b.high-b.low)/2
		ok, err := b.fits(mid, b.few)
		if err != nil {
			return err
		}
		if ok {
			b.high = mid
		} else {
			b.low = mid
		}
	}
	return nil
}

// higherLimits are limits above the one found, in percent, that are tried too: more memory can be worse, as PyTorch gives cached memory
// back when its limit is reached, which changes where all that follows lies.
var higherLimits = []uint64{1, 2, 3, 4, 6, 8, 10, 13, 16, 20, 25, 50}

// confirm tries high in all draws, and limits above it in few. It returns the largest that fails, 0 for none.
func (b *bisection) confirm() (worse uint64, err error) {
	if b.odds, err = b.search.odds(b.spec, b.high*FloorStep); err != nil {
		return 0, err
	}
	if !b.odds.Sure() {
		b.failed = max(b.failed, b.high)
		return b.high, nil
	}
	for _, percent := range slices.Backward(higherLimits) {
		at := b.high + b.high*percent/100
		if at > b.top || at == b.high {
			continue
		}
		if ok, err := b.fits(at, max(1, b.few/2)); !ok || err != nil {
			return at, err
		}
	}
	return 0, nil
}

// floor is the limit found, with its odds and those of a smaller one.
func (b *bisection) floor() (Floor, error) {
	f := Floor{Policy: b.spec.Name, AllocConf: b.spec.Conf, Capacity: b.high * FloorStep, Odds: b.odds}
	if live := b.plan.PeakLive; live > 0 {
		f.Ratio = float64(f.Capacity) / float64(live)
	}
	if b.failed == 0 {
		return f, nil
	}
	odds, err := b.search.odds(b.spec, b.failed*FloorStep)
	if err == nil {
		f.Below = &Below{b.failed * FloorStep, odds}
	}
	return f, err
}

// try replays a spec at the limit of the search, as recorded where it is the run's own, and remembers PyTorch's.
func (s *search) try(spec replay.Spec) (*Choice, error) {
	s.expect(1)
	r, err := s.run(spec, s.capacity)
	if err != nil {
		return nil, err
	}
	c := &Choice{Result: r, Verified: spec.Name != "torch-async", spec: spec}
	r.CapacityFrom = s.capacityFrom
	one := replay.OddsOf([]*replay.Result{r}, s.fatal, s.survived)
	r.Odds = &one
	switch spec.Name {
	case "torch":
		if c.AllocConf = r.Conf; r.Conf == "default" {
			c.AllocConf = ""
		}
	case "torch-async":
		c.AllocConf = asyncConf
	default:
		c.AllocConf, c.Breaks = spec.Conf, []string{}
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

// judge takes the odds of a choice, once.
func (s *search) judge(c *Choice) error {
	if c.judged {
		return nil
	}
	odds, holds, err := s.holds(c.spec, s.capacity)
	if err == nil {
		c.setOdds(odds, holds)
	}
	return err
}

// setOdds notes the odds of all draws, and whether the choice holds.
func (c *Choice) setOdds(odds replay.Odds, holds bool) {
	c.Result.Odds, c.Holds, c.judged = &odds, holds, true
}

// merit of a choice.
func (c *Choice) merit(s *search) merit {
	return merit{holds: c.survives(), verified: c.Verified, affordable: c.CostUS() <= s.costUS, peak: c.Result.Odds.PeakMost,
		settings: settingsIn(c.AllocConf), breaks: len(c.Breaks), costUS: c.CostUS(), name: c.AllocConf}
}

// step is how finely peaks are told apart: a hundredth of the memory, or of what the run needs.
func (s *search) step() uint64 {
	return max(1, uint64(margin*float64(cmp.Or(s.capacity, s.plan.PeakLive))))
}

// ranked are the settings that were tried, the best first.
func (s *search) ranked() []*Choice {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.SortedFunc(maps.Values(s.known), func(a, b *Choice) int { return a.merit(s).compare(b.merit(s), s.step()) })
}

// judgeBest takes the odds of the settings that rank first, until enough of them hold, and of those on the frontier.
func (s *search) judgeBest() error {
	for n := range mostJudged {
		holding := 0
		var next *Choice
		for _, c := range s.ranked() {
			switch {
			case !c.judged:
				next = cmp.Or(next, c)
			case c.Holds && c.Verified:
				holding++
			}
			if holding == mostHold || next != nil {
				break
			}
		}
		if next == nil || n > 0 && !next.survives() {
			break // what is left fails in the first replay already
		}
		if err := s.judge(next); err != nil {
			return err
		}
	}
	return nil
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

// merit is what choices are ranked by.
type merit struct {
	holds, verified, affordable bool
	peak                        uint64
	settings, breaks            int
	costUS                      float64
	name                        string
}

// compare sorts better choices first. Peaks within a step are the same: of two that are as good, the simpler is better.
func (m merit) compare(o merit, step uint64) int {
	return cmp.Or(btoi(o.holds)-btoi(m.holds), btoi(o.verified)-btoi(m.verified), btoi(o.affordable)-btoi(m.affordable),
		cmp.Compare(m.peak/step, o.peak/step), cmp.Compare(m.settings, o.settings), cmp.Compare(m.breaks, o.breaks),
		cmp.Compare(m.costUS, o.costUS), cmp.Compare(m.name, o.name))
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// Judge takes the odds of the results of a report that have a limit, which are of these policies in turn.
func Judge(ctx context.Context, t *recording.Trace, rep *replay.Report, specs []replay.Spec, opt TuneOptions) error {
	if len(rep.Results) == 0 || rep.Results[0].Capacity == 0 {
		return nil // all have the same limit
	}
	capacity := rep.Results[0].Capacity
	s, _ := searchOf(ctx, t, opt, capacity, fatalOf(t))
	s.optional = true
	about := 0
	for _, spec := range specs {
		about += s.plan.Draws(spec)
	}
	s.begin(1, about)
	defer s.end()
	for i, r := range rep.Results {
		odds, err := s.odds(specs[i], capacity)
		if errors.Is(err, replay.ErrWork) {
			rep.Notes = append(rep.Notes, "how often a run survives is not known: that takes more steps than a file of its size may cause")
			return nil
		}
		if err != nil {
			return err
		}
		r.Odds = &odds
		rep.Warning = cmp.Or(rep.Warning, s.unexplained(specs[i], odds))
	}
	return nil
}

// fatalOf is the event of the failure that a trace is about; -1 where no request failed, or no event is of it.
func fatalOf(t *recording.Trace) int {
	if at, ok := t.FailedAt(); ok && at >= 0 && t.Events[at].Kind == event.OOM {
		return at
	}
	return -1
}
