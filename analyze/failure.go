package analyze

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/replay"
)

// The report on requests that failed: oom.go and oom_process.go say why, held.go lists the allocations, growth.go what grew,
// remedy*.go what would have met the request.

// TraceFailures is the report on the requests that failed on one device of one file. Its JSON is what
// `cistern report --json` prints of it.
type TraceFailures struct {
	Path       string           `json:"path"`
	Device     int              `json:"device"`
	Owner      *recording.Owner `json:"process,omitempty"` // of a driver trace with several processes on the device
	Format     string           `json:"format"`
	Events     int              `json:"events"`
	DurationUS int64            `json:"duration_us"`
	Count      int              `json:"failed_requests"` // in all
	// Failures are the last MaxFailures, in order, up to the one that the process wrote the file for, where it did. Remedies
	// are searched for one of them (FailureReport.Searched).
	Failures []*FailureReport `json:"failures"`
	Notes    []string         `json:"notes"`
	// Environment is what the run was recorded with.
	Environment recording.Environment `json:"environment,omitzero"`
	// Identity is the process's place in its job.
	Identity *recording.Identity `json:"identity,omitempty"`
}

// MaxFailures is how many requests that failed a report has: a program that catches the error may fail without end.
const MaxFailures = 5

// FailureReport is all that is known of one request that failed.
type FailureReport struct {
	OOM
	// Sentence is the first line: how much was missing, of what, and what to do, without a full stop.
	Sentence string `json:"sentence"`
	// MetLater is the event at which a request of the same size was met after all, nil if none was.
	MetLater *int     `json:"met_later_at_event"`
	Message  []string `json:"message"` // of the exception, line by line
	PID      int      `json:"pid"`
	Program  []string `json:"program"`
	Version  string   `json:"version"`
	Conf     string   `json:"conf"` // the settings of the run: CISTERN_CONF or PYTORCH_ALLOC_CONF

	Need     uint64   `json:"need_bytes"` // rounded
	Pool     string   `json:"pool"`
	Stream   string   `json:"stream"`
	Upstream string   `json:"upstream"`
	Tag      string   `json:"tag"`
	Library  string   `json:"library"`
	Thread   string   `json:"thread"`
	Where    string   `json:"where"` // the frame that says what it was for
	Stack    []string `json:"stack"`

	DeviceName  string `json:"device_name"`
	DeviceUUID  string `json:"device_uuid"`
	DeviceTotal uint64 `json:"device_total_bytes"`
	Cached      uint64 `json:"cached_bytes"`
	Pinned      uint64 `json:"pinned_bytes"`
	Paused      uint64 `json:"paused_bytes"`

	CapacityFrom     string                  `json:"capacity_from"`
	Limits           []recording.Limit       `json:"limits"`
	Steps            []recording.FailureStep `json:"steps"`
	Processes        []recording.Neighbour   `json:"processes"`
	ProcessesUnknown string                  `json:"processes_unknown"`

	Held   Held   `json:"held"`
	Growth Growth `json:"growth"`
	// Shortage is what is missing even if every free byte could be used; LessLive are the largest holders that together
	// hold as much.
	Shortage uint64  `json:"shortage_bytes"`
	LessLive []Share `json:"less_live"`
	// Relief are the classes of what was held, with what would change them; StacksBy is the command that records stacks, where
	// the recording has none.
	Relief   []Relief `json:"relief"`
	StacksBy string   `json:"stacks_by"`

	Search

	said      *recording.Failure // by the process, nil where it said nothing
	away      uint64             // of what is held: not the device's memory
	poolLimit bool               // the limit of the request's own pool was in the way
	cutOff    bool               // the file announces events, and lacks them
	followed  bool               // ShortBy is from the blocks of PyTorch's allocator, one by one
}

// ReportFailures reports on the requests that failed in a trace; nil where none did. driver is what a driver trace says
// beside the trace's events, nil elsewhere.
func ReportFailures(ctx context.Context, t *recording.Trace, driver *recording.Driver, opt RemedyOptions) (*TraceFailures, error) {
	var events []int // at which requests failed; -1 for one that no event tells of
	words := map[int]*recording.Failure{}
	for i := range t.Events {
		if t.Events[i].Kind == event.OOM {
			events = append(events, i)
		}
	}
	var silent []*recording.Failure
	for _, f := range t.Failures {
		if f.Event >= 0 && f.Event < len(t.Events) && t.Events[f.Event].Kind == event.OOM {
			words[f.Event] = f
		} else {
			silent = append(silent, f)
		}
	}
	r := &TraceFailures{Path: t.Path, Device: t.Device, Owner: t.Owner, Format: t.Format, Events: len(t.Events), DurationUS: t.Duration(),
		Count: len(events) + len(silent), Failures: []*FailureReport{}, Notes: slices.Clone(t.Notes), Environment: t.Environment, Identity: t.Identity}
	if r.Notes == nil {
		r.Notes = []string{}
	}
	if r.Count == 0 {
		return nil, nil
	}
	// Other threads may have gone on to fail while the process wrote of its failure: of theirs it said nothing.
	about := -1
	if n := len(t.Failures); n > 0 && words[t.Failures[n-1].Event] == t.Failures[n-1] {
		about = t.Failures[n-1].Event
		events, silent = events[:slices.Index(events, about)+1], nil
	}
	events = events[max(0, len(events)+len(silent)-MaxFailures, len(events)-MaxFailures):]
	capacity, from := replay.CapacityFromTrace(t)
	if opt.Capacity > 0 {
		capacity, from = opt.Capacity, "given"
	}
	full := func(i int) bool { return words[i] == nil && t.Events[i].Addr < t.Events[i].Size } // the device itself, or unknown
	if limit, set := limitOfSettings(t); opt.Capacity == 0 && limit > capacity && !slices.ContainsFunc(events, full) {
		capacity, from = limit, set // of which events do not tell
	}
	r.recorded(t, events, words, capacity, from, opt.Capacity)
	for _, f := range silent[max(0, len(silent)-MaxFailures):] {
		r.Failures = append(r.Failures, silentFailure(t, f))
	}
	for _, x := range r.Failures {
		if driver != nil && x.Event >= 0 {
			x.driver(t, driver)
		}
		x.whole()
		if opt.Capacity > 0 {
			x.Capacity, x.CapacityFrom = opt.Capacity, "given"
		}
		x.lessLive()
	}
	// The failure that the file is about, or what the run died of, as far as is known (trace.FailedAt).
	target := r.Failures[len(r.Failures)-1]
	for _, x := range r.Failures {
		if x.MetLater == nil && about < 0 {
			target = x
		}
	}
	err := target.search(ctx, t, target.said, opt)
	for _, x := range r.Failures {
		if !x.followed {
			x.ShortBy = x.shortOtherwise(kindOf(t))
		}
		x.Sentence = x.firstLine()
	}
	return r, err
}

// recorded reports on the failures that events tell of, in one walk over the trace. given is the capacity that the user said,
// else 0.
func (r *TraceFailures) recorded(t *recording.Trace, events []int, words map[int]*recording.Failure, capacity uint64, from string, given uint64) {
	if len(events) == 0 {
		return
	}
	walk(t, events, func(i int, s *state) {
		x := &FailureReport{OOM: recordedOOM(t, i, s, capacity, given), CapacityFrom: from, Conf: t.Settings.Conf}
		e := &t.Events[i]
		x.Need, x.Pool, x.Stream = e.Size, poolName(t, e.Pool), streamName(t, e.Stream)
		x.Thread, x.Tag, x.Library = t.ThreadName(e.Thread), t.TagName(e.Tag), t.LibraryName(e.Library)
		x.Where, x.Stack = UsefulFrame(t, e.Stack), FrameNames(t, e.Stack)
		allocated := uint64(0)
		if f := words[i]; f != nil {
			x.words(t, f)
			allocated = f.Allocated + f.Pending
		}
		x.Held, x.Growth.Steady = heldAfter(t, i, s, allocated), []Grown{}
		x.relieve(t, s)
		x.followed = kindOf(t) == runTorch && s.hasSegs && x.said == nil
		x.MetLater = metLater(t, i)
		r.Failures = append(r.Failures, x)
	})
	r.Failures[len(r.Failures)-1].Growth = growthUntil(t, events[len(events)-1])
}

// silentFailure reports on a request of which there is nothing but the process's words.
func silentFailure(t *recording.Trace, f *recording.Failure) *FailureReport {
	x := &FailureReport{OOM: OOM{Source: "recorded", Event: -1}}
	x.words(t, f)
	last := len(t.Events) - 1
	walk(t, []int{last}, func(i int, s *state) {
		x.Held = heldAfter(t, i, s, f.Allocated+f.Pending)
		x.relieve(t, s)
	})
	x.Growth.Steady = []Grown{}
	x.Live = x.Held.Requested
	x.cutOff = f.Cut
	if x.Live == 0 { // no block was written, or what was is cut off
		x.Live = f.Allocated
	}
	x.fromProcess(f)
	return x
}

// words takes in what the process wrote down.
func (x *FailureReport) words(t *recording.Trace, f *recording.Failure) {
	x.Message, x.PID, x.Program, x.Version, x.Conf = f.Lines, f.PID, f.Program, f.Version, f.Conf
	x.Requested, x.Need, x.Upstream = f.Requested, max(f.Need, f.Requested), f.Upstream
	x.Pool, x.Stream = "the default pool", fmt.Sprint(f.Stream)
	if f.Pool != (recording.PoolID{}) {
		x.Pool = fmt.Sprintf("pool %d,%d", f.Pool[0], f.Pool[1])
	}
	if f.Stream >= 1<<16 {
		x.Stream = fmt.Sprintf("%#x", f.Stream)
	}
	x.Tag, x.Library, x.Thread = t.TagName(f.Tag), t.LibraryName(f.Library), t.ThreadName(f.Thread)
	if f.Stack != 0 || len(x.Stack) == 0 {
		x.Where, x.Stack = UsefulFrame(t, f.Stack), FrameNames(t, f.Stack)
	}
	x.DeviceName, x.DeviceUUID, x.DeviceTotal = f.Device, f.UUID, f.DeviceTotal
	x.Cached, x.Pinned, x.Paused = f.Cached, f.Pinned, f.Paused
	x.said, x.away, x.poolLimit = f, away(f), f.PoolLimit > 0
	x.Limits, x.Steps, x.Processes, x.ProcessesUnknown = f.Limits, f.Steps, f.Others, f.OthersUnknown
	x.Capacity, x.CapacityFrom = limitInForce(f)
	slices.SortStableFunc(x.Processes, func(a, b recording.Neighbour) int { return cmp.Compare(b.Bytes, a.Bytes) })
}

// whole makes empty lists of those that nothing is known of.
func (x *FailureReport) whole() {
	x.Message, x.Program, x.Stack = list(x.Message), list(x.Program), list(x.Stack)
	x.Limits, x.Steps, x.Processes = list(x.Limits), list(x.Steps), list(x.Processes)
	x.Remedies, x.Tried, x.NotTried, x.Floors = []Remedy{}, []Remedy{}, []string{}, []Floor{}
	x.Why = list(x.Why)
	if x.Relief = list(x.Relief); x.poolLimit || x.Upstream != "" { // less of what lies elsewhere does not help
		x.Relief, x.StacksBy = []Relief{}, ""
	}
	h := &x.Held
	for _, by := range []*[]Share{&h.Stack, &h.Tag, &h.Library, &h.Thread, &h.Pool, &h.Stream, &h.Size, &h.Age} {
		*by = list(*by)
	}
}

// list is the list, not nil.
func list[T any](l []T) []T {
	if l == nil {
		return []T{}
	}
	return l
}

// metLater is trace.MetLater, nil where there is none.
func metLater(t *recording.Trace, i int) *int {
	if k, ok := t.MetLater(i); ok {
		return &k
	}
	return nil
}

// heldHere is what was held of the device's own memory.
func (x *FailureReport) heldHere() uint64 {
	held := max(x.Held.Allocated, x.Live)
	return held - min(held, x.away)
}

// lessLive says what would have had to be gone for the request to fit, however it is laid out.
func (x *FailureReport) lessLive() {
	x.LessLive = []Share{}
	held := x.heldHere()
	if x.Capacity == 0 || held+x.Need <= x.Capacity || x.Upstream != "" || x.poolLimit {
		return
	}
	x.Shortage = held + x.Need - x.Capacity
	if x.Version != "" { // Cistern's own words
		x.Shortage = held + inUnits(x.Need) - x.Capacity
	}
	holders, kind := x.Held.Stack, ""
	if len(holders) == 0 || holders[0].Name == NoStack {
		holders, kind = x.Held.Tag, "tag "
	}
	sum := uint64(0)
	for _, s := range holders {
		if sum >= x.Shortage || s.Rest || len(x.LessLive) == 5 {
			break
		}
		if s.Name != NoTag {
			s.Name = kind + s.Name
		}
		x.LessLive = append(x.LessLive, s)
		sum += s.Bytes
	}
	if sum < x.Shortage {
		x.LessLive = []Share{} // not a few holders' doing
	}
}

// inUnits is what Cistern's engine needs from the driver for a request: memory comes in multiples of 2 MiB.
func inUnits(need uint64) uint64 {
	const unit = 2 << 20
	return (need + unit - 1) / unit * unit
}

// inOneSentence is what was requested and why it could not be allocated, where it is not known how much was missing.
func (x *FailureReport) inOneSentence() string {
	say := func(format string, sizes ...any) string {
		return units.Sprintf("%s could not be allocated: "+format, append([]any{sized(x.Requested)}, sizes...)...)
	}
	switch x.Cause {
	case CauseCapacity:
		if x.Capacity == 0 {
			return say("too little memory")
		}
		return say("%s were in use of the %s that there were", sized(x.heldHere()), sized(x.Capacity))
	case CauseLimit:
		if x.poolLimit {
			return say("the limit of its pool was in the way")
		}
		if x.Capacity == 0 {
			return say("a limit was in the way")
		}
		return say("a limit was in the way, though the device had %s free", sized(x.DeviceFree))
	case CauseProcesses:
		return say("other processes used the memory")
	case CausePinned:
		return say("%s were free, but captured graphs keep what is theirs", sized(x.Cached))
	case CausePending:
		return say("enough was given back, but other streams still used it")
	case CauseUpstream:
		return say("it was to be %s memory, and that ran out", x.Upstream)
	case CauseCached:
		return say("%s were free in one piece, but for other streams, pools or sizes", sized(x.LargestFree))
	}
	if x.Pieces == 0 {
		return say("%s of the %s reserved were free, but the largest %s", sized(x.FreeInside), sized(x.Reserved), sized(x.LargestFree))
	}
	return say("%s of the %s reserved were free, but in %d pieces, the largest %s", sized(x.FreeInside), sized(x.Reserved), x.Pieces,
		sized(x.LargestFree))
}
