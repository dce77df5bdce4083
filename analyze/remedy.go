package analyze

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/replay"
)

// RemedyOptions are the circumstances of a search for what would have met a request.
type RemedyOptions struct {
	Capacity uint64        // bytes; 0 is what was in force
	GPULag   time.Duration // as in replay.Options
	Device   uint64        // as in replay.Options; 0 is what the process said
	Budget   time.Duration // for all replays of one failure; 0 is none
	Work     *replay.Work  // as in TuneOptions
	// Progress is as in TuneOptions.
	Progress func(done, total int)
}

// Search is what was found by replaying the run with the request included.
type Search struct {
	// Searched: this is the failure that remedies were searched for. Why not stands in Unsearched.
	Searched   bool   `json:"searched"`
	Unsearched string `json:"unsearched"`
	// Advice is what follows from the figures alone, a sentence or more, where that is exact and nothing is to be replayed.
	Advice string `json:"advice"`
	// Own is the run's own settings, replayed: nil where that could not be. Reproduced: this request fails there too, and
	// nothing else does that the run got.
	Own        *Remedy `json:"own"`
	Reproduced bool    `json:"reproduced"`
	// Warning says why nothing is recommended, "" where something may be: the model does not explain the run.
	Warning string `json:"warning"`
	// Caveat says in a sentence why the remedies may not hold, "" where nothing speaks against them.
	Caveat string `json:"caveat"`
	// More is what remedies had to have room for behind the request: what the run's repeats before asked for after the same
	// point, at least a part of the capacity. 0 where the record goes on itself.
	More     uint64 `json:"more_bytes"`
	MoreFrom string `json:"more_from"`
	// Remedies met the request, and all others of the run, in a replay: largest gain first.
	Remedies []Remedy `json:"remedies"`
	Tried    []Remedy `json:"did_not_survive"`
	Beaten   int      `json:"beaten"` // settings that survived once, and one of Remedies is better in all
	NotTried []string `json:"not_tried"`
	// Floors are the least capacities found with which the run completes.
	Floors []Floor `json:"floors"`
	// LargestRequest is the largest request that the run's own settings would have met at that moment.
	LargestRequest uint64  `json:"largest_request_bytes"`
	Replays        int     `json:"replays"`
	TookS          float64 `json:"took_s"`
}

// Remedy is something that was replayed.
type Remedy struct {
	Kind  string `json:"kind"`  // one of the Remedy words
	Title string `json:"title"` // what to do
	// Policy and Conf are what was replayed, as cistern replay --policy takes them.
	Policy string `json:"policy"`
	Conf   string `json:"conf"`
	// Environment is what to set, or with "" to unset, and Command how to start the program, where that is what changes. Do is
	// the line for a shell that does it, "" where there is none; DoByVersion is what each version of PyTorch needs of it, where
	// the run's is unknown.
	Environment map[string]string `json:"environment"`
	Command     string            `json:"command"`
	Do          string            `json:"do"`
	DoByVersion []ForVersion      `json:"do_by_version,omitempty"`
	Capacity    uint64            `json:"capacity_bytes"` // of the replay
	Survives    bool              `json:"survives"`
	Peak        uint64            `json:"peak_reserved_bytes"` // the highest of all its replays; times are of the first
	Headroom    uint64            `json:"headroom_bytes"`      // capacity less the peak
	// Floor is the least capacity found with which it survives; 0: not searched.
	Floor         uint64      `json:"floor_bytes"`
	DriverUS      float64     `json:"driver_time_us"`
	DriverLeastUS float64     `json:"driver_time_least_us"` // as in replay.Result
	WaitUS        float64     `json:"wait_us"`              // the host's, at the replay's GPU lag
	Retries       int64       `json:"retries"`
	OOMs          int64       `json:"ooms"`
	FailedAt      *int        `json:"failed_event"`
	Breaks        []string    `json:"breaks"`
	Luck          bool        `json:"luck"`     // it survived at first, and does not hold in many draws
	Barely        bool        `json:"barely"`   // it meets the request, and has no room for More
	Odds          replay.Odds `json:"odds"`     // how often it survives; of a single replay until it was tried in more
	Verified      bool        `json:"verified"` // the model behind it was held against real recordings
	Checked       string      `json:"checked"`
	CheckAgain    string      `json:"check_command"` // for a shell

	judged bool // its odds are of all draws
}

// Kinds of remedies.
const (
	RemedySetting   = "setting"   // another setting of the allocator that the run had
	RemedyAllocator = "allocator" // another allocator
	RemedyLimit     = "limit"     // a higher limit, which the device has room for
	RemedyProcesses = "processes" // what other processes held
	RemedySpill     = "spill"     // memory of another kind, which is slower
)

// searching is one search.
type searching struct {
	*search
	x    *FailureReport
	t    *recording.Trace
	f    *recording.Failure // nil: no words of the process
	out  *Search            // guarded by search.mu while candidates are tried
	kind runKind
	gone bool // the budget is used up
	// beaten survived once, and something else that did is better in all.
	beaten []Remedy
	seen   map[string]bool // guarded by search.mu: what was tried
}

// runKind is whose memory a trace is of.
type runKind uint8

const (
	runTorch runKind = iota
	runCistern
	runDriver // what a program asked of the driver
	runRMM
)

func kindOf(t *recording.Trace) runKind {
	switch {
	case t.Source == recording.FormatDriver:
		return runDriver
	case t.Format == recording.FormatRMM || t.Source == recording.FormatRMM:
		return runRMM
	case t.Format == recording.FormatCistern && (t.Source == "" || t.Source == recording.FormatCistern):
		return runCistern
	}
	return runTorch
}

// leastDevice is less than any GPU has, and enough for an allocator to start on.
const leastDevice = 16 << 20

// search looks for what would have met the request, and fills x.Search.
func (x *FailureReport) search(ctx context.Context, t *recording.Trace, f *recording.Failure, opt RemedyOptions) error {
	begin := time.Now()
	out := &x.Search
	switch {
	case x.cutOff:
		out.Unsearched = "the file was cut off before the request that failed, so there is nothing to replay: copy it again, whole"
	case x.Upstream != "":
		out.Unsearched = "replays are of the device's own memory, and this request was for " + x.Upstream + " memory"
	case f != nil && f.PoolLimit > 0:
		out.Unsearched = "a limit of the request's own pool was in the way, and no setting of the allocator's changes what is missing there"
		out.Advice = raisePool(f)
	case x.Event < 0:
		out.Unsearched = "the history was off, so there is nothing to replay: add history:1000000 to CISTERN_CONF, and run again"
		if f != nil && slices.Contains(settingsOf(f.Conf), "history:0") {
			out.Unsearched = "the history was off, so there is nothing to replay: take history:0 out of CISTERN_CONF, and run again"
		}
	case f != nil && f.Paused > 0:
		out.Unsearched = fmt.Sprintf("%s were paused, which no event tells of: a replay would hold them", units.FormatBytes(f.Paused))
	case x.Capacity == 0:
		out.Unsearched = "the file does not say what memory there was: give it as --capacity"
	}
	if out.Unsearched != "" {
		return nil
	}
	s := &searching{x: x, t: t, f: f, out: out, kind: kindOf(t), seen: map[string]bool{}}
	within, cancel := withBudget(ctx, opt.Budget)
	defer cancel()
	if f != nil && len(f.PoolsElsewhere) > 0 {
		t = onDevice(t, f.PoolsElsewhere)
		s.t = t
	}
	s.start(within, opt)
	out.Searched = true
	err := s.everything(ctx)
	if s.gone {
		out.NotTried = append(out.NotTried, fmt.Sprintf("%d replays and what would have followed from them: the time for them (--budget %s) "+
			"was used up", s.total-s.done, opt.Budget))
	}
	out.Replays, out.TookS = s.done, time.Since(begin).Seconds()
	return err
}

// start makes the search over the run, with what would have followed the request.
func (s *searching) start(ctx context.Context, opt RemedyOptions) {
	x := s.x
	from := TuneOptions{Capacity: opt.Capacity, GPULag: opt.GPULag, Progress: opt.Progress, Work: cmp.Or(opt.Work, replay.NewWork(s.t.StoredBytes))}
	var after aftermath
	s.search, after = searchOf(ctx, s.t, from, x.Capacity, x.Event)
	s.out.More, s.out.MoreFrom = after.more, after.from
	s.optional, s.died, s.survived = true, x.Capacity, s.survives
	device := x.DeviceTotal
	if device < leastDevice { // a file may say anything
		device = 0
	}
	s.device = cmp.Or(opt.Device, device)
}

// onDevice is a trace without what happened in some pools, whose memory is not the device's. Events keep their places.
func onDevice(t *recording.Trace, without []recording.PoolID) *recording.Trace {
	gone := func(pool uint32) bool { return int(pool) < len(t.Pools) && slices.Contains(without, t.Pools[pool]) }
	out := *t
	out.Events = slices.Clone(t.Events)
	for i := range out.Events {
		if gone(out.Events[i].Pool) && out.Events[i].Kind != event.OOM {
			out.Events[i] = event.Event{TimeUS: out.Events[i].TimeUS}
		}
	}
	out.Initial = slices.DeleteFunc(slices.Clone(t.Initial), func(b recording.Block) bool { return gone(b.Pool) })
	out.InitialSegments = slices.DeleteFunc(slices.Clone(t.InitialSegments), func(s recording.Segment) bool { return gone(s.Pool) })
	if t.Final != nil {
		out.Final = slices.DeleteFunc(slices.Clone(t.Final), func(s recording.Segment) bool { return gone(s.Pool) })
	}
	return &out
}

// everything tries all that can matter, what helps most often first.
func (s *searching) everything(ctx context.Context) error {
	defer s.end()
	for _, step := range []struct {
		do    func() error
		to    float64
		about int
	}{{s.own, 0.05, 33}, {s.candidates, 0.3, 34}, {s.again, 0.5, 150}, {s.floors, 0.95, 200}, {s.largest, 1, 10}} {
		s.begin(step.to, step.about)
		err := step.do()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil && !outOfTime(err) {
			return err
		}
		s.rank()
		if s.gone = err != nil; s.gone || s.out.Warning != "" {
			return nil
		}
	}
	return nil
}

// outOfTime reports whether a replay was ended by the budget.
func outOfTime(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, replay.ErrStopped) || errors.Is(err, replay.ErrWork)
}

// candidate is something to try.
type candidate struct {
	Remedy
	spec replay.Spec
}

// survives is replay.Result.Survived, but that what spills has to fit into the host's memory.
func (s *searching) survives(r *replay.Result) bool {
	if strings.Contains(r.Conf, "spill:") && r.PeakReserved > r.Capacity {
		return r.Completed && !slices.Contains(r.FailedOOMs, s.fatal) && r.PeakReserved-r.Capacity <= s.hostMemory()
	}
	return r.Survived(s.fatal)
}

// hostMemory is what the process may have of the host's memory, as far as it said.
func (s *searching) hostMemory() uint64 {
	least := uint64(math.MaxUint64)
	if s.f != nil {
		for _, l := range s.f.Limits {
			if l.Kind == "container" {
				least = min(least, l.Bytes)
			}
		}
	}
	return least
}

// key is what candidates that are the same replay have in common.
func (s *searching) key(c *candidate) string {
	spec := c.spec
	if spec.Name == "torch" {
		spec.Conf = canonical(spec.Conf)
	}
	return fmt.Sprint(spec, c.Capacity, c.Kind == RemedyProcesses)
}

// try replays a candidate, once, and files what came of it.
func (s *searching) try(c candidate) error {
	if c.Capacity == 0 {
		c.Capacity = s.capacity
	}
	key := s.key(&c)
	s.mu.Lock()
	seen := s.seen[key]
	s.seen[key] = true
	s.mu.Unlock()
	if seen {
		return nil
	}
	s.expect(1)
	r, err := s.run(c.spec, c.Capacity)
	if err != nil {
		return err
	}
	s.file(c, r)
	return nil
}

// again takes the odds of what survived once. What does not hold did so by chance, and what was left out for being worse than
// it is tried in its place.
func (s *searching) again() error {
	for {
		before := len(s.out.Tried)
		if err := s.others(); err != nil {
			return err
		}
		if len(s.out.Tried) == before {
			return nil
		}
		s.out.Remedies = append(s.out.Remedies, s.beaten...)
		s.beaten = nil
		s.rank()
	}
}

func (s *searching) others() error {
	var kept []Remedy
	var left error
	for i := range s.out.Remedies {
		m := s.out.Remedies[i]
		if left == nil && !m.judged {
			left = s.judgeRemedy(&m)
		}
		if m.judged && !m.Survives {
			s.out.Tried = append(s.out.Tried, m)
			continue
		}
		kept = append(kept, m)
	}
	s.out.Remedies = kept
	return left
}

// judgeRemedy takes the odds of a remedy.
func (s *searching) judgeRemedy(m *Remedy) error {
	c := s.choice(m)
	if c == nil || !c.judged {
		odds, holds, err := s.holds(specOf(m), m.Capacity)
		if err != nil {
			return err
		}
		c = cmp.Or(c, &Choice{Result: &replay.Result{}})
		c.setOdds(odds, holds)
	}
	m.judged, m.Odds, m.Survives, m.Luck = true, *c.Result.Odds, c.Holds, !c.Holds
	m.Peak = max(m.Peak, m.Odds.PeakMost)
	m.Headroom = m.Capacity - min(m.Peak, m.Capacity)
	m.Checked += fmt.Sprintf(", survives in %s", m.Odds)
	return nil
}

// choice is what the search has of a remedy that is a setting of PyTorch's within the run's limit, nil elsewhere.
func (s *searching) choice(m *Remedy) *Choice {
	if m.Kind != RemedySetting || m.Policy != "torch" || m.Capacity != s.capacity {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.known[canonical(m.Conf)]
}

// defaultLag is the command's own.
const defaultLag = 20 * time.Millisecond

// file keeps the result of a candidate.
func (s *searching) file(c candidate, r *replay.Result) {
	m := c.Remedy
	m.Policy, m.Conf = c.spec.Name, c.spec.Conf
	if c.spec.Name == "torch" && r.Conf != "default" {
		m.Conf = r.Conf
	}
	m.Survives, m.Peak, m.Retries, m.OOMs, m.FailedAt = s.survives(r), r.PeakReserved, r.Retries, r.OOMs, r.FailedEvent
	m.Barely = !m.Survives && s.out.More > 0 && r.FailedEvent != nil && *r.FailedEvent > s.x.Event
	m.Odds = replay.OddsOf([]*replay.Result{r}, s.fatal, s.survived)
	m.Headroom = m.Capacity - min(m.Peak, m.Capacity)
	m.DriverUS, m.DriverLeastUS, m.WaitUS, m.Verified = r.DriverTimeUS, r.DriverLeastUS, r.SyncWaitUS, c.spec.Name != "torch-async"
	m.Checked = fmt.Sprintf("replay of %d events", len(s.t.Events))
	if s.out.More > 0 && c.Kind != "" {
		m.Checked += fmt.Sprintf(" and %s more", units.FormatBytes(s.out.More))
	}
	more := ""
	if s.opt.GPULag != defaultLag {
		more = fmt.Sprintf("--gpu-lag %s ", s.opt.GPULag)
	}
	if m.Policy == "cistern" && s.device != 0 {
		more += fmt.Sprintf("--device-memory %d ", s.device)
	}
	m.CheckAgain = fmt.Sprintf("cistern replay --policy %s --capacity %d %s%s", ShellWord(c.spec.String()), m.Capacity, more, ShellWord(s.t.Path))
	if m.Environment == nil {
		m.Environment = map[string]string{}
	}
	if m.Breaks == nil {
		m.Breaks = []string{}
	}
	m.Do = cmp.Or(m.Do, m.inShell())
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case c.Kind == "":
		s.out.Own = &m
	case m.Survives:
		s.out.Remedies = append(s.out.Remedies, m)
	default:
		s.out.Tried = append(s.out.Tried, m)
	}
}

// each tries candidates, several at once.
func (s *searching) each(all []candidate) error {
	var g errgroup.Group
	for _, c := range all {
		g.Go(func() error { return s.try(c) })
	}
	return g.Wait()
}

// merit of a remedy, as of a choice.
func (s *searching) merit(m *Remedy) merit {
	return merit{holds: m.Survives, verified: m.Verified, affordable: m.DriverUS+m.WaitUS <= s.costUS, peak: m.Peak - min(m.Peak, m.Capacity-s.capacity),
		settings: settingsIn(m.Conf), breaks: len(m.Breaks), costUS: m.DriverUS + m.WaitUS, name: m.Title}
}

// rank sorts what survived, largest gain first, and drops what is worse in all than something else of its kind.
func (s *searching) rank() {
	group := map[string]int{RemedySetting: 0, RemedyAllocator: 0, RemedyLimit: 1, RemedyProcesses: 2, RemedySpill: 3}
	step := s.step()
	slices.SortFunc(s.out.Remedies, func(a, b Remedy) int {
		return cmp.Or(cmp.Compare(group[a.Kind], group[b.Kind]), s.merit(&a).compare(s.merit(&b), step))
	})
	var kept []Remedy
	for i := range s.out.Remedies {
		m := &s.out.Remedies[i]
		if slices.ContainsFunc(kept, func(k Remedy) bool {
			return k.Kind == m.Kind && k.Policy == m.Policy && k.Headroom/step >= m.Headroom/step && settingsIn(k.Conf) <= settingsIn(m.Conf) &&
				k.DriverUS+k.WaitUS <= (m.DriverUS+m.WaitUS)*1.05 && len(k.Breaks) <= len(m.Breaks)
		}) {
			s.beaten = append(s.beaten, *m)
			continue
		}
		kept = append(kept, *m)
	}
	s.out.Remedies, s.out.Beaten = kept, len(s.beaten)
	if kept == nil {
		s.out.Remedies = []Remedy{}
	}
	slices.SortFunc(s.out.Tried, func(a, b Remedy) int {
		return cmp.Or(cmp.Compare(a.Policy, b.Policy), cmp.Compare(settingsIn(a.Conf), settingsIn(b.Conf)), cmp.Compare(a.Title, b.Title))
	})
}

// ShellWord quotes a word for a shell where it needs that.
func ShellWord(w string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_=+./:,@%", r)
	}
	if w != "" && strings.IndexFunc(w, func(r rune) bool { return !plain(r) }) < 0 {
		return w
	}
	return "'" + strings.ReplaceAll(w, "'", `'\''`) + "'"
}

// inShell is the line for a shell that does what a remedy says.
func (m *Remedy) inShell() string {
	switch value, ok := m.Environment[cisternVariable]; {
	case !ok:
		return m.Command
	case value == "":
		return "unset " + cisternVariable
	default:
		return exportLine(cisternVariable, value)
	}
}

// commandLine is how to start the program of the run under Cistern.
func (s *searching) commandLine() string {
	if s.f == nil || len(s.f.Program) == 0 {
		return "cistern run -- PROGRAM"
	}
	words := []string{"cistern run --"}
	for _, w := range s.f.Program {
		words = append(words, ShellWord(w))
	}
	return strings.Join(words, " ")
}
