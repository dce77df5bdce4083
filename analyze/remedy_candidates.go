package analyze

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/replay"
)

// cisternVariable is the variable that Cistern's settings are given by; variable.go has PyTorch's.
const cisternVariable = "CISTERN_CONF"

// ownResult replays the settings that the run had as it was recorded: with the GPU as far behind the host as makes the run end as it
// did, if one of two distances does, which is the one that all replays have then. One with which it ends at the very request is
// better than one with which it ends a little earlier.
func (s *searching) ownResult(spec replay.Spec) (best *replay.Result, err error) {
	given := s.opt.GPULag
	lag, exact := given, false
	for _, s.opt.GPULag = range []time.Duration{given, 0} {
		s.expect(1)
		r, err := s.run(spec, s.capacity)
		if err != nil {
			return nil, err
		}
		reproduced := replay.OddsOf([]*replay.Result{r}, s.fatal, s.survived).AsRecorded > 0
		exact = reproduced && r.FailedEvent != nil && *r.FailedEvent == s.x.Event
		if best == nil || exact || reproduced && !s.out.Reproduced {
			best, lag, s.out.Reproduced = r, s.opt.GPULag, reproduced
		}
		if exact {
			break
		}
	}
	s.opt.GPULag = lag
	return best, nil
}

// own replays the settings that the run had: as it was recorded, and in draws, which say whether the model explains the run.
func (s *searching) own() error {
	c := candidate{Remedy: Remedy{Title: "the run's own settings", Capacity: s.capacity}, spec: s.ownSpec()}
	s.seen[s.key(&c)] = true
	r, err := s.ownResult(c.spec)
	if err != nil {
		return err
	}
	s.costUS = max(costShare*float64(s.t.Duration()), r.DriverTimeUS+r.SyncWaitUS)
	s.file(c, r)
	own := s.out.Own
	odds, err := s.odds(c.spec, s.capacity)
	if err != nil {
		return err
	}
	own.Odds = odds
	s.out.Warning = s.unexplained(c.spec, own.Odds)
	switch {
	case s.out.Warning != "":
	case own.Survives:
		s.out.Caveat = "replayed with its own settings the run gets what it asked for. What stood in its way is not in the record: another " +
			"process, threads in another order, memory outside the allocator"
	case s.x.CapacityFrom != "given" && r.FailedEvent != nil && *r.FailedEvent < s.x.Event:
		s.out.Caveat = fmt.Sprintf("replayed with its own settings the run ends before this request, at event %d. It reserved more then than "+
			"was available when the request failed, or the replay packs worse than the run did", *r.FailedEvent)
	}
	return nil
}

func (s *searching) ownSpec() replay.Spec {
	switch s.kind {
	case runCistern:
		return cisternSpec(replayed(s.x.Conf))
	case runDriver:
		return replay.Spec{Name: "direct"}
	case runRMM:
		return replay.Spec{Name: "rmm-pool"}
	}
	return replay.Spec{Name: "torch"}
}

func cisternSpec(conf string) replay.Spec {
	return replay.Spec{Name: "cistern", Conf: conf, HasConf: conf != ""}
}

// candidates tries settings and allocators, and what else there is to change.
func (s *searching) candidates() error {
	switch s.kind {
	case runTorch:
		if err := s.each([]candidate{s.torch("expandable_segments:True", RemedySetting), s.cistern()}); err != nil {
			return err
		}
		return s.torchSettings()
	case runCistern:
		if err := s.each(s.cisternSettings()); err != nil {
			return err
		}
		if err := s.raised(); err != nil {
			return err
		}
		if !s.ofTorch() {
			return nil
		}
		return s.each([]candidate{s.torch("", RemedyAllocator), s.torch("expandable_segments:True", RemedyAllocator)})
	}
	// What asked the driver, or RMM, is not known to be a program whose memory can be Cistern's by a command.
	return s.each([]candidate{
		{Remedy: Remedy{Kind: RemedyAllocator, Title: "Cistern's cache between the program and the driver"}, spec: cisternSpec("")},
		{Remedy: Remedy{Kind: RemedyAllocator, Title: "cudaMallocAsync"}, spec: replay.Spec{Name: "torch-async"}}})
}

// torch is PyTorch's own allocator with these settings.
func (s *searching) torch(conf, kind string) candidate {
	c := candidate{spec: torchSpec(conf)}
	c.Kind, c.Breaks = kind, Breaks(conf)
	set := setTorch(s.t.Environment.PyTorch, s.x.Conf, conf)
	c.Title, c.Environment, c.Do, c.DoByVersion = set.title(), set.environment(), set.Do(), set.ByVersion()
	if kind == RemedyAllocator {
		c.Title = "PyTorch's own allocator (start the program without cistern run), " + c.Title
		c.Breaks = append(c.Breaks, "what the program uses of Cistern's (pools, pausing, other libraries on the same cache) is gone")
	}
	return c
}

// cistern moves a PyTorch program to Cistern.
func (s *searching) cistern() candidate {
	c := candidate{spec: cisternSpec("")}
	c.Kind, c.Command = RemedyAllocator, s.commandLine()
	c.Title = c.Command
	return c
}

// torchSettings tries what tune tries.
func (s *searching) torchSettings() error {
	err := s.search.settings()
	s.mu.Lock()
	known := make([]*Choice, 0, len(s.known))
	for _, c := range s.known {
		known = append(known, c)
	}
	s.mu.Unlock()
	own := s.out.Own.Conf
	for _, k := range known {
		c := s.torch(k.AllocConf, RemedySetting)
		c.Capacity = s.capacity
		key := s.key(&c)
		if s.seen[key] || k.AllocConf == own {
			continue // expandable segments were tried first
		}
		s.seen[key] = true
		s.file(c, k.Result)
	}
	return err
}

// ofTorch reports whether the memory of a run on Cistern was PyTorch's.
func (s *searching) ofTorch() bool {
	if slices.Contains(s.t.Libraries, "torch") || slices.Contains(s.t.Libraries, "pytorch") {
		return true
	}
	return slices.ContainsFunc(s.t.Frames, func(f recording.Frame) bool { return f.Library() == "torch" })
}

// settingsOf splits settings into their items.
func settingsOf(conf string) []string {
	var items []string
	for item := range strings.SplitSeq(conf, ",") {
		if item = strings.TrimSpace(item); item != "" {
			items = append(items, item)
		}
	}
	return items
}

// exactly is a size as a setting has it.
func exactly(n uint64) string {
	for _, u := range []struct {
		shift int
		name  string
	}{{30, "GiB"}, {20, "MiB"}, {10, "KiB"}} {
		if n != 0 && n&(1<<u.shift-1) == 0 {
			return fmt.Sprintf("%d%s", n>>u.shift, u.name)
		}
	}
	return fmt.Sprint(n)
}

func keyOf(item string) string {
	key, _, _ := strings.Cut(item, ":")
	return key
}

// without leaves settings out.
func without(conf string, keys ...string) string {
	return strings.Join(slices.DeleteFunc(settingsOf(conf), func(item string) bool { return slices.Contains(keys, keyOf(item)) }), ",")
}

// with adds a setting in place of the one of its key.
func with(conf, item string) string {
	return strings.Join(append(settingsOf(without(conf, keyOf(item))), item), ",")
}

// besides are the settings that do not decide where memory goes.
var besides = []string{"driver", "history", "magazine", "stacks", "stack_sample", "report", "report_child", "top"}

// replayed are the settings that decide where memory goes: a replay has a device and a limit of its own, and no
// observers.
func replayed(conf string) string { return without(without(conf, besides...), "limit") }

// set is Cistern with other settings: item in the place of its key's, or what is named left out.
func (s *searching) set(kind, item string, leave ...string) candidate {
	full := s.x.Conf
	if item != "" {
		full = with(full, item)
	}
	full = without(full, leave...)
	c := candidate{spec: cisternSpec(replayed(full))}
	c.Kind, c.Environment = kind, map[string]string{cisternVariable: full}
	// The change, not all settings: those stay as they are, and would hide it. Remedy.Do has them.
	c.Title = "add " + item + " to " + cisternVariable
	if len(leave) > 0 {
		gone := slices.DeleteFunc(settingsOf(s.x.Conf), func(i string) bool { return !slices.Contains(leave, keyOf(i)) })
		c.Title = "take " + strings.Join(gone, " and ") + " out of " + cisternVariable
	} else if old := slices.IndexFunc(settingsOf(s.x.Conf), func(i string) bool { return keyOf(i) == keyOf(item) }); old >= 0 {
		c.Title = fmt.Sprintf("set %s in %s, in place of %s", item, cisternVariable, settingsOf(s.x.Conf)[old])
	}
	return c
}

// cisternSettings are the settings of Cistern that can matter, changed one by one, then together.
func (s *searching) cisternSettings() []candidate {
	var all []candidate
	add := func(c candidate, breaks ...string) {
		c.Breaks = breaks
		all = append(all, c)
	}
	has := func(item string) bool { return slices.Contains(settingsOf(s.x.Conf), item) }
	hasKey := func(key string) bool {
		return slices.ContainsFunc(settingsOf(s.x.Conf), func(item string) bool { return keyOf(item) == key })
	}
	set := func(keys ...string) []string {
		return slices.DeleteFunc(keys, func(k string) bool { return !hasKey(k) })
	}
	var changed []string // settings that cost memory, and were set
	if hasKey("stages") && !has("stages:all") {
		add(s.set(RemedySetting, "", "stages"))
		changed = append(changed, "stages")
	}
	if has("cross_stream:ready") {
		add(s.set(RemedySetting, "", "cross_stream"), "a stream may wait on the GPU for another stream's work")
		changed = append(changed, "cross_stream")
	}
	if has("backend:malloc") || has("ipc:legacy") {
		add(s.set(RemedySetting, "", set("backend", "ipc")...), "cudaIpcGetMemHandle fails on this memory")
		changed = append(changed, set("backend", "ipc")...)
	}
	if has("single_handle:true") {
		add(s.set(RemedySetting, "", "single_handle"), "registration with a network may fail across chunks")
		changed = append(changed, "single_handle")
	}
	if len(changed) > 1 {
		add(s.set(RemedySetting, "", changed...), "all that the settings left out were for")
	}
	for _, size := range []string{"2MiB", "8MiB", "128MiB"} {
		if !has("chunk:" + size) {
			c := s.set(RemedySetting, "chunk:"+size)
			if size == "2MiB" || size == "8MiB" {
				c.Breaks = []string{"small chunks are more handles: more driver calls, and more time in them"}
			}
			all = append(all, c)
		}
	}
	if !hasKey("spill") {
		for _, to := range []string{"managed", "pinned", "host_numa"} {
			add(s.set(RemedySpill, "spill:"+to), "what spills lies in the host's memory: work on it runs at the speed of the bus")
		}
	}
	return all
}

// raised looks for the least limit that would have done, where a limit or other processes were in the way.
func (s *searching) raised() error {
	if s.f == nil || s.f.DeviceTotal == 0 {
		return nil
	}
	available := s.f.Reserved - min(s.f.Reserved, s.f.Elsewhere) + s.f.DeviceFree
	spec := s.ownSpec()
	if s.f.Limit > 0 && s.capacity < available {
		found, err := s.least(spec, s.capacity, available)
		if err != nil {
			return err
		}
		if found.Capacity > 0 {
			if err := s.tryLimit(found.Capacity, available); err != nil {
				return err
			}
		}
	}
	others, n := elsewhere(s.f)
	if others == 0 || available > s.capacity {
		return nil
	}
	c := candidate{spec: spec}
	c.Kind, c.Capacity = RemedyProcesses, s.capacity+others
	c.Title = fmt.Sprintf("the %s that %d other processes on the device used", units.FormatBytes(others), n)
	if n == 1 {
		c.Title = fmt.Sprintf("the %s that another process on the device used", units.FormatBytes(others))
	}
	c.Breaks = []string{}
	return s.try(c)
}

// tryLimit tries a limit that holds: the smallest that suffices and a hundredth more, or as much more as it takes, since with a
// little more than the least other pieces lie side by side.
func (s *searching) tryLimit(least, available uint64) error {
	c := candidate{spec: s.ownSpec()}
	c.Kind, c.Floor = RemedyLimit, least
	for more := uint64(margin * float64(least)); ; more = 2*more + 1 {
		c.Capacity = min(available, (least+more+FloorStep-1)/FloorStep*FloorStep)
		_, holds, err := s.holds(c.spec, c.Capacity)
		if err != nil {
			return err
		}
		if holds || c.Capacity == available {
			break
		}
	}
	limit := c.Capacity
	_, from := limitInForce(s.f)
	c.Title = fmt.Sprintf("a limit of %s in place of %s (%s)", units.FormatBytes(limit), units.FormatBytes(s.f.Limit), from)
	if total := s.f.DeviceTotal; s.ofTorch() && strings.Contains(from, "set_per_process_memory_fraction") {
		c.Title = fmt.Sprintf("a limit of %s in place of %s, where the program sets it: torch.cuda.set_per_process_memory_fraction(%.4f), or cistern_set_limit",
			units.FormatBytes(limit), units.FormatBytes(s.f.Limit), math.Ceil(float64(limit)/float64(total)*1e4)/1e4)
	}
	c.Breaks = []string{fmt.Sprintf("%s of the device's memory are no longer left to others", units.FormatBytes(limit-s.capacity))}
	if slices.ContainsFunc(settingsOf(s.x.Conf), func(i string) bool { return keyOf(i) == "limit" }) {
		c.Environment = map[string]string{cisternVariable: with(s.x.Conf, fmt.Sprintf("limit:%dMiB", limit>>20))}
		c.Title = fmt.Sprintf("set limit:%dMiB in %s, in place of limit:%s", limit>>20, cisternVariable, exactly(s.f.Limit))
	}
	return s.try(c)
}

// floors finds with how little the best remedies would still do, and with how much the run's own settings would have.
func (s *searching) floors() error {
	seen := map[string]bool{}
	for i := range s.out.Remedies {
		m := &s.out.Remedies[i]
		if m.Kind != RemedySetting && m.Kind != RemedyAllocator || seen[m.Kind] || !m.Verified {
			continue
		}
		seen[m.Kind] = true
		f, err := s.floor(m.Title, specOf(m), 0)
		if err != nil {
			return err
		}
		m.Floor = f.Capacity
	}
	if !s.out.Own.Survives {
		if _, err := s.floor(s.out.Own.Title, s.ownSpec(), s.died); err != nil {
			return err
		}
	}
	if c := s.torch("expandable_segments:True", RemedySetting); !seen[RemedySetting] && s.kind == runTorch {
		if _, err := s.floor(c.Title, c.spec, 0); err != nil {
			return err
		}
	}
	if !seen[RemedyAllocator] && s.kind != runCistern {
		if _, err := s.floor("Cistern", cisternSpec(""), 0); err != nil {
			return err
		}
	}
	slices.SortStableFunc(s.out.Floors, func(a, b Floor) int { return cmp.Compare(a.Capacity, b.Capacity) })
	return nil
}

// floor is the smallest limit with which a policy meets the request.
func (s *searching) floor(who string, spec replay.Spec, above uint64) (Floor, error) {
	f, err := s.least(spec, above, mostSteps*FloorStep)
	if f.Capacity > 0 {
		f.Who = who
		s.out.Floors = append(s.out.Floors, f)
	}
	return f, err
}

func specOf(m *Remedy) replay.Spec {
	if m.Policy == "torch" {
		return torchSpec(m.Conf)
	}
	return replay.Spec{Name: m.Policy, Conf: m.Conf, HasConf: m.Conf != ""}
}

// largest finds the largest request that the run's own settings would have met when it failed.
func (s *searching) largest() error {
	if s.out.Own == nil || s.out.Own.Survives {
		return nil
	}
	t := *s.t
	t.Events = slices.Clone(t.Events[:s.x.Event+1])
	then := &search{ctx: s.ctx, plan: s.plan.With(&t), opt: TuneOptions{GPULag: s.opt.GPULag, Work: s.opt.Work}, optional: true, device: s.device, slots: s.slots}
	failed := &t.Events[s.x.Event]
	low, high := uint64(0), failed.Size // low fits, or is nothing; high does not
	for high-low > FloorStep {
		failed.Size = (low + (high-low)/2 + FloorStep - 1) / FloorStep * FloorStep
		if failed.Size >= high {
			break
		}
		r, err := then.replay(s.ownSpec(), replay.Options{Capacity: s.capacity, GPULag: s.opt.GPULag})
		if err != nil {
			return err
		}
		if s.survives(r) {
			low = failed.Size
		} else {
			high = failed.Size
		}
	}
	s.out.LargestRequest = low
	return nil
}
