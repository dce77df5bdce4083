// Package replay drives allocators over a recorded run. It reports what each would have reserved and cost, and whether it
// would have run out of memory.
//
// # How the parts fit
//
// A Plan (plan.go) is a trace prepared once for any number of replays: every allocation has a dense block number, and
// its free events refer to it. Plan.Run drives one Policy over it, event by event, and makes a Result. Replay does that
// for several policies and makes the Report that the command prints.
//
// A Policy is one allocator. It sees requests and frees only, never what the recorded allocator did with them. The models
// are PyTorch's caching allocator (torch*.go: native segments and expandable ones), cudaMallocAsync (async.go), RMM's pool
// (rmm.go) and bare cuMemAlloc (direct.go). The policy "cistern" is the engine itself, through its public API, over the
// simulated device (cistern.go). Work on its stream uses every block, so a replay in which the engine breaks a rule ends with
// a fault of the simulated device.
//
// # Faithful models
//
// A model of PyTorch is faithful when, over a trace recorded from its start and with the recorded settings, it does what
// PyTorch did (verify.go): it makes the recorded segment_alloc, segment_free, segment_map, segment_unmap and oom events in
// order, sizes included, and hands out every allocation at its recorded address. PyTorch's best fit breaks ties by address, so
// under verification a new segment takes the recorded address, never the size. Elsewhere addresses rise, and a note says that
// ties are modelled.
//
// A trace has allocations and frees, not the calls that emptied the cache or released a pool. Those are inferred where the
// record shows them (releases.go), and a note says so. Unknown facts are stated, not guessed.
//
// One replay is one of the ways in which the run could have gone; Options.Draw chooses another (draw.go). What is recommended
// has to hold in many draws.
//
// # Locks
//
// There are none. A Plan is read-only once made and may be shared by goroutines. A Policy and everything it has belong to the
// goroutine that runs it.
package replay

import (
	"errors"
	"fmt"
	"sort"
	"strings"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

const mib = 1 << 20

// Policy is one allocator under test. Blocks are known by dense numbers, 0 to Plan.Blocks-1, each allocated and freed
// at most once, so that a policy can keep slices indexed by them.
type Policy interface {
	// Alloc gets size bytes (never 0) for block b on a stream and pool, indices into Trace.Streams and the plan's
	// pools. An error that is cuda.ErrOutOfMemory (errors.Is) is an out-of-memory; any other ends the replay.
	Alloc(b int, size uint64, stream, pool uint32) (addr uint64, err error)
	// FreeRequested says that the block's owner gave it back; other streams may still use it.
	FreeRequested(b int)
	// Free says that the block may be reused from now on. A block whose Free comes without FreeRequested was given
	// back and reusable at once.
	Free(b int) error
	// Advance moves the host's clock to us microseconds after the first event. It never goes back.
	Advance(us int64)
	// Usage is the bytes handed out (rounded as the allocator rounds) and held from the driver, now.
	Usage() (allocated, reserved uint64)
	// Spent is the host time of all driver calls so far, by the cost model, and of the waits in them.
	Spent() time.Duration
	// Reserved is Usage's second result by itself, which is asked for at every event.
	Reserved() uint64
	// Stats is what the policy did so far.
	Stats() Stats
	// Close ends the replay; the policy is not used again.
	Close() error
}

// Releaser is a Policy that takes part in what a program asks of its allocator beside allocating and freeing.
type Releaser interface {
	// EmptyCache is torch.cuda.empty_cache: cached memory of the default pool goes back to the driver.
	EmptyCache() error
	// ReleasePool ends a private pool and gives back what it caches.
	ReleasePool(pool uint32) error
}

// Snapshotter is a Policy that can say what it holds, for recordings.
type Snapshotter interface {
	Segments() []recording.Segment
}

// Stats is what a policy did.
type Stats struct {
	PeakReserved uint64           // bytes
	Calls        map[string]int64 // driver calls by name, without version suffix
	DriverTime   time.Duration    // of the host, in all those calls, waiting excluded
	SyncWait     time.Duration    // of the host, waiting in synchronising calls, at the GPU lag of the replay
	StreamSyncs  int64            // waits for a stream or an event
	DeviceSyncs  int64            // waits for the device, those of cuMemFree included
	Retries      int64            // requests that were tried again after cached memory had been given back
	OOMs         int64            // requests that failed
}

// Spec names a policy and its settings.
type Spec struct {
	Name    string
	Conf    string
	HasConf bool // false: the trace's own settings (torch) or the policy's defaults
}

// ParseSpec reads NAME or NAME:CONF. A comma belongs to the settings.
func ParseSpec(s string) (Spec, error) {
	name, conf, has := strings.Cut(s, ":")
	if _, ok := factories[name]; !ok {
		return Spec{}, fmt.Errorf("policy %q: expected one of %s", s, strings.Join(PolicyNames(), ", "))
	}
	return Spec{Name: name, Conf: conf, HasConf: has}, nil
}

// String is the policy as ParseSpec reads it.
func (s Spec) String() string {
	if s.HasConf {
		return s.Name + ":" + s.Conf
	}
	return s.Name
}

// Options are the circumstances of a replay.
type Options struct {
	// Capacity is the limit on reserved bytes and the base of fractions; 0 is the trace's own (CapacityFromTrace).
	Capacity uint64
	// CapacityFrom says in words where Capacity came from; "given" by default.
	CapacityFrom string
	// Unlimited keeps a Capacity of 0 from being taken from the trace.
	Unlimited bool
	// GPULag is how long after it was queued the simulated GPU completes work.
	GPULag time.Duration
	// Verify holds a torch policy with the trace's own settings against the record.
	Verify bool
	// Record collects what the policy does, for pytorch.Write; nil is nothing. It serves one run.
	Record *Recording
	// Progress is called now and then with the number of events done and in all, from the goroutine of Run.
	Progress func(done, total int)
	// Samples is the number of points of the Result's curve; 0 is no curve.
	Samples int
	// Device is the memory of the device that policy cistern runs on, in bytes, which some of its rules go by; 0 is an H200.
	Device uint64
	// Draw is which of the ways that the run could have gone is replayed: 0 is the recorded one. What holds in one draw alone
	// holds by chance.
	Draw int
	// Work counts what the run does with that of other plans of the same file; nil is the plan's own.
	Work *Work
	// Search says that the run is one of a search, which ends with ErrWork before other replays of the file do.
	Search bool
	// Done, once closed, ends a run that is under way with ErrStopped; nil is never.
	Done <-chan struct{}
}

// ErrStopped is the error of a run that Options.Done ended.
var ErrStopped = errors.New("the replay was stopped")

// Result is what one policy did with one trace. Its JSON is part of the command's contract.
type Result struct {
	Policy         string           `json:"policy"`
	Conf           string           `json:"conf"`
	Capacity       uint64           `json:"capacity_bytes"` // 0 is unlimited
	CapacityFrom   string           `json:"capacity_from"`
	Completed      bool             `json:"completed"`
	FailedEvent    *int             `json:"failed_event"` // index of the event that could not be met, nil if none
	OOMs           int64            `json:"ooms"`         // requests that failed, recorded ones and the fatal one
	OOMsAvoided    int64            `json:"ooms_avoided"` // recorded out-of-memories that did not happen
	PeakLive       uint64           `json:"peak_live_bytes"`
	PeakReserved   uint64           `json:"peak_reserved_bytes"`
	Ratio          float64          `json:"ratio"`
	MeanReserved   uint64           `json:"mean_reserved_bytes"` // over time, from the first event on
	Requests       Latency          `json:"request_us"`
	Calls          map[string]int64 `json:"driver_calls"`
	DriverTimeUS   float64          `json:"driver_time_us"`
	DriverLeastUS  float64          `json:"driver_time_least_us"` // on the fastest host that was measured
	StreamSyncs    int64            `json:"stream_syncs"`
	DeviceSyncs    int64            `json:"device_syncs"`
	Retries        int64            `json:"retries"`
	NSPerEvent     float64          `json:"ns_per_event"`
	Odds           *Odds            `json:"odds"` // nil where the replay has no limit
	SyncWaitUS     float64          `json:"-"`    // host time lost in waits, at the GPU lag
	TiesModelled   bool             `json:"-"`    // segments lie at made-up, rising addresses, so best-fit ties are modelled
	Curve          Curve            `json:"-"`
	Verify         *Verify          `json:"-"` // nil unless the run was held against the record
	Notes          []string         `json:"-"`
	FailedRequest  uint64           `json:"-"` // bytes of the request that could not be met
	FailedReserved uint64           `json:"-"` // bytes reserved when it failed, after all that could be given back was
	FailedOOMs     []int            `json:"-"` // recorded out-of-memories that happened here too, by event
}

// Env is what a policy is made of: the plan, its settings, and where to tell what it does.
type Env struct {
	Plan     *Plan
	Spec     Spec
	Capacity uint64 // bytes, 0 is unlimited
	GPULag   time.Duration
	Device   uint64 // as in Options
	// Emit takes the policy's segment events as it makes them; nil where there is no listener. Stream and Pool index the
	// plan's; Addr, Size and Handle are the policy's own. A map or unmap is of one handle.
	Emit func(event.Event)
	// Note adds a line to the Result's notes.
	Note func(string)

	verify *verifier // of a torch policy that is the run's own
	draw   *draw     // nil: as recorded
	mean   *meanReserved
}

// Factory makes a policy for one replay. The second result is the effective settings, for the Result.
type Factory func(*Env) (p Policy, conf string, err error)

var factories = map[string]Factory{}

// Register adds a policy. It is called from init functions.
func Register(name string, f Factory) {
	if _, ok := factories[name]; ok {
		panic("replay: policy " + name + " registered twice")
	}
	factories[name] = f
}

// PolicyNames are the registered policies, sorted.
func PolicyNames() []string {
	var names []string
	for name := range factories {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}

// Run replays t under one policy. Where several policies see the same trace, NewPlan and Plan.Run prepare it once.
func Run(t *recording.Trace, spec Spec, opt Options) (*Result, error) {
	return NewPlan(t).Run(spec, opt)
}

// Run replays the plan's trace under one policy. A policy that runs out of memory is a Result; an error is a wrong
// setting or a fault of the policy.
func (p *Plan) Run(spec Spec, opt Options) (*Result, error) {
	factory, ok := factories[spec.Name]
	if !ok {
		return nil, fmt.Errorf("policy %q: expected one of %s", spec.Name, strings.Join(PolicyNames(), ", "))
	}
	r := &Result{Policy: spec.Name, TiesModelled: true}
	r.Capacity, r.CapacityFrom = p.capacity(opt)
	notes := len(p.Notes)
	p = p.counted(opt)
	p = p.withReleases(r.Capacity)
	r.Notes = append(r.Notes, p.Notes[notes:]...)
	draw := newDraw(opt.Draw)
	env := &Env{Plan: p, Spec: spec, Capacity: r.Capacity, GPULag: draw.lag(opt.GPULag, time.Duration(p.DurationUS())*time.Microsecond),
		Device: opt.Device, Note: func(s string) { r.Notes = append(r.Notes, s) }, draw: draw, mean: &meanReserved{}}
	if draw == nil && verifiable(p, spec) {
		env.verify = newVerifier(p)
		r.TiesModelled = false
	}
	if opt.Record != nil {
		env.Emit = opt.Record.segment
	}
	if err := p.take(stepsPerRun + stepsPerPool*int64(len(p.Pools)) + stepsPerStream*int64(p.numStreams())); err != nil {
		return nil, fmt.Errorf("policy %s: %w", spec, err)
	}
	policy, conf, err := factory(env)
	if err != nil {
		return nil, err
	}
	r.Conf = conf
	d := driver{plan: p, spec: spec, policy: policy, opt: opt, result: r, verify: env.verify, record: opt.Record,
		completions: newCompletions(p, draw), mean: env.mean}
	if opt.Record != nil {
		opt.Record.begin(p)
		if c, err := ParseTorchConf(conf); err == nil && spec.Name == "torch" {
			opt.Record.settings = c.settings()
		}
	}
	if opt.Samples > 0 {
		d.curve = newCurver(opt.Samples, len(p.Trace.Initial)+len(p.Trace.Events))
	}
	start := time.Now()
	err = d.run()
	elapsed := time.Since(start)
	if err == nil && opt.Record != nil {
		opt.Record.end(policy)
	}
	s := policy.Stats()
	if cerr := policy.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return nil, fmt.Errorf("policy %s: %w", spec, err)
	}
	r.Calls, r.StreamSyncs, r.DeviceSyncs, r.Retries = s.Calls, s.StreamSyncs, s.DeviceSyncs, s.Retries
	r.PeakReserved, r.PeakLive = s.PeakReserved, d.peak
	r.MeanReserved, r.Requests = d.mean.value(), d.requests.latency()
	r.DriverTimeUS, r.SyncWaitUS = s.DriverTime.Seconds()*1e6, s.SyncWait.Seconds()*1e6
	r.DriverLeastUS = fastestHost * r.DriverTimeUS
	if d.peak > 0 {
		r.Ratio = float64(r.PeakReserved) / float64(d.peak)
	}
	if d.done > 0 {
		r.NSPerEvent = float64(elapsed.Nanoseconds()) / float64(d.done)
	}
	r.Completed = r.FailedEvent == nil
	r.Curve = d.curve.points()
	if opt.Verify {
		r.Verify = env.verify.result()
	}
	if r.Calls == nil {
		r.Calls = map[string]int64{}
	}
	return r, nil
}

// driver is one run of a policy.
type driver struct {
	plan   *Plan
	spec   Spec
	policy Policy
	opt    Options
	result *Result
	verify *verifier
	record *Recording
	curve  *curver

	mean     *meanReserved
	requests requestTimes

	completions *completions // nil: as recorded

	live, peak uint64 // requested bytes
	done       int    // events, initial blocks included
	ahead      int64  // steps that are not in plan.work yet
}

// progressEvery is the number of events between calls of Options.Progress.
const progressEvery = 1 << 14

func (d *driver) run() error {
	if ok, err := d.begin(); err != nil || !ok {
		return err
	}
	events := d.plan.Trace.Events
	release := 0
	for i := range events {
		if i%progressEvery == 0 {
			select {
			case <-d.opt.Done:
				return ErrStopped
			default:
			}
			if d.opt.Progress != nil {
				d.opt.Progress(i, len(events))
			}
		}
		for release < len(d.plan.Releases) && d.plan.Releases[release].Event <= i {
			if err := d.release(d.plan.Releases[release]); err != nil {
				return fmt.Errorf("event %d: %w", i, err)
			}
			release++
		}
		d.done++
		ok, err := d.step(i, &events[i])
		if err == nil {
			err = d.work()
		}
		if err != nil {
			return fmt.Errorf("event %d: %w", i, err)
		}
		if !ok {
			break
		}
	}
	if d.opt.Progress != nil {
		d.opt.Progress(len(events), len(events))
	}
	return nil
}

// stepsAhead is how many steps a run takes before they are counted with those of others.
const stepsAhead = 1 << 12

// work counts the steps of an event or a block.
func (d *driver) work() error {
	d.ahead++
	if s, ok := d.policy.(stepper); ok {
		d.ahead += s.steps()
	}
	if d.ahead < stepsAhead {
		return nil
	}
	n := d.ahead
	d.ahead = 0
	return d.plan.take(n)
}

// begin makes the blocks that were live before the first event; false ends the replay.
func (d *driver) begin() (bool, error) {
	initial := d.plan.Trace.Initial
	if a, ok := d.policy.(adopter); ok && len(initial) > 0 && verifiable(d.plan, d.spec) {
		if addrs, ok := a.adopt(); ok {
			for i, addr := range addrs {
				b := &initial[i]
				d.live += d.plan.size[i]
				if d.record != nil {
					d.record.alloc(i, addr, d.plan.size[i], b.Stream, d.plan.poolOf(i, b.Pool), d.plan.startUS)
				}
			}
			d.peak = d.live
			d.sample(0)
			return true, nil
		}
		d.result.Notes = append(d.result.Notes, "torch: the state before the first event is not whole in the file: its blocks are allocated afresh")
	}
	for i := range initial {
		b := &initial[i]
		if ok, err := d.alloc(-1, i, d.plan.size[i], b.Stream, d.plan.poolOf(i, b.Pool), 0); err != nil || !ok {
			return ok, err
		}
		if err := d.work(); err != nil {
			return false, err
		}
	}
	return true, nil
}

// step plays one event; false ends the replay.
func (d *driver) step(i int, e *event.Event) (bool, error) {
	b := int(d.plan.Block[i])
	switch e.Kind {
	case event.Alloc:
		if b < 0 {
			return true, nil
		}
		us := d.plan.Micros(i)
		if err := d.advance(us); err != nil {
			return false, err
		}
		return d.alloc(i, b, e.Size, e.Stream, d.plan.poolOf(b, e.Pool), us)
	case event.FreeRequested:
		if b < 0 {
			return true, nil
		}
		us := d.plan.Micros(i)
		if err := d.advance(us); err != nil {
			return false, err
		}
		d.policy.FreeRequested(b)
		if d.record != nil {
			d.record.free(event.FreeRequested, b, e.TimeUS)
		}
		d.completions.requested(b, us, d.plan.completedUS(b))
	case event.FreeCompleted:
		if b < 0 || d.completions.moved(b) {
			return true, nil
		}
		us := d.plan.Micros(i)
		if err := d.advance(us); err != nil {
			return false, err
		}
		return true, d.completed(b, us)
	case event.OOM:
		if b < 0 {
			return true, nil
		}
		if err := d.advance(d.plan.Micros(i)); err != nil {
			return false, err
		}
		return true, d.oom(i, b, e)
	}
	return true, nil
}

// advance moves the clock on, past the frees that the draw has complete until then.
func (d *driver) advance(us int64) error {
	for {
		b, ok := d.completions.next(us)
		if !ok {
			break
		}
		if err := d.completed(b, us); err != nil {
			return err
		}
	}
	d.passed(us)
	return nil
}

// passed has time pass, in which memory may go.
func (d *driver) passed(us int64) {
	d.policy.Advance(us)
	d.mean.until(us, d.policy.Reserved())
}

// completed says that a block may be reused.
func (d *driver) completed(b int, us int64) error {
	d.passed(us)
	if err := d.policy.Free(b); err != nil {
		return err
	}
	d.live -= d.plan.size[b]
	if d.record != nil {
		d.record.free(event.FreeCompleted, b, d.plan.startUS+us)
	}
	d.sample(us)
	return nil
}

// alloc serves a request of the record; false ends the replay, since a real run would have died.
func (d *driver) alloc(i, b int, size uint64, stream, pool uint32, us int64) (bool, error) {
	if d.verify != nil {
		d.verify.expect(i)
	}
	addr, err := d.request(b, size, stream, pool)
	if err != nil {
		if !errors.Is(err, cuda.ErrOutOfMemory) {
			return false, err
		}
		d.result.OOMs++
		failed := max(i, 0)
		d.result.FailedEvent, d.result.FailedRequest = &failed, size
		_, d.result.FailedReserved = d.policy.Usage()
		if d.record != nil {
			d.record.oom(&event.Event{Kind: event.OOM, Addr: d.result.Capacity - min(d.result.Capacity, d.result.FailedReserved), Size: size,
				Stream: stream, Pool: pool, TimeUS: d.plan.timeOf(i)})
		}
		if d.verify != nil {
			d.verify.failed(i, size)
		}
		return false, nil
	}
	d.live += size
	d.peak = max(d.peak, d.live)
	if d.verify != nil {
		d.verify.placed(i, addr)
	}
	if d.record != nil {
		d.record.alloc(b, addr, size, stream, pool, d.plan.timeOf(i))
	}
	d.sample(us)
	return true, nil
}

// maxRequest is the size in bytes from which on a request fails under every policy, and maxLive what may be out at a time: more
// than any device has, and little enough for sums to be right and for their pages to be listed.
const (
	maxRequest = 1 << 39
	maxLive    = 1 << 40
)

func (d *driver) request(b int, size uint64, stream, pool uint32) (uint64, error) {
	if size >= maxRequest || d.live+size > maxLive {
		return 0, fmt.Errorf("request of %d bytes: %w", size, cuda.ErrOutOfMemory)
	}
	before := d.policy.Spent()
	addr, err := d.policy.Alloc(b, size, stream, pool)
	d.requests.add(d.policy.Spent() - before)
	return addr, err
}

// oom attempts a request that failed when it was recorded. Memory that it gets is given back at once.
func (d *driver) oom(i, b int, e *event.Event) error {
	if d.verify != nil {
		d.verify.expect(i)
	}
	_, err := d.request(b, e.Size, e.Stream, d.plan.poolOf(b, e.Pool))
	switch {
	case err == nil:
		d.result.OOMsAvoided++
		d.policy.FreeRequested(b)
		err = d.policy.Free(b)
		if d.verify != nil {
			d.verify.avoided(i, e.Size)
		}
	case errors.Is(err, cuda.ErrOutOfMemory):
		err = nil
		d.result.OOMs++
		d.result.FailedOOMs = append(d.result.FailedOOMs, i)
		if d.verify != nil {
			d.verify.oom(e.Size)
		}
		if d.record != nil {
			d.record.oom(e)
		}
	}
	return err
}

func (d *driver) release(r Release) error {
	p, ok := d.policy.(Releaser)
	if !ok {
		return nil
	}
	if d.verify != nil {
		d.verify.expectRelease(r.Event, r.Count)
	}
	if r.Pool == 0 {
		return p.EmptyCache()
	}
	return p.ReleasePool(r.Pool)
}

func (d *driver) sample(us int64) {
	if d.curve != nil {
		allocated, reserved := d.policy.Usage()
		d.curve.add(us, d.live, allocated, reserved)
	}
}
