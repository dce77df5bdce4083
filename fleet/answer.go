package fleet

import (
	"cmp"
	"maps"
	"slices"

	"github.com/cistern-gpu/cistern/recording"
)

// Causes of a rank's need of memory, and kinds of findings.
const (
	CauseUsed          = "used"
	CauseFragmentation = "fragmentation"
	CauseCached        = "cached"
	CauseOutside       = "outside"
	CauseGrowth        = "growth"

	KindOutOfMemory = "out_of_memory"
	KindTwin        = "twin"      // its peak differs from those of its twins
	KindRequests    = "requests"  // its requests do
	KindImbalance   = "imbalance" // stages of a pipeline differ
	KindRestarted   = "restarted"
	KindMissing     = "missing"
	KindEnded       = "ended" // before the others, without a last summary
	KindTruncated   = "truncated"
	KindUnreadable  = "unreadable"
	KindOtherJob    = "other_job"
	KindClock       = "clock"
	KindIdentity    = "identity"
)

// Answer is what is known of a job. It is what `cistern fleet --json` prints.
type Answer struct {
	Job      string   `json:"job"`
	Run      string   `json:"run,omitempty"`
	Launcher string   `json:"launcher,omitempty"`
	World    int      `json:"world_size"` // -1 unknown
	Nodes    int      `json:"nodes"`
	Steps    int64    `json:"steps"` // of the rank that has most
	GPUs     []string `json:"gpus"`
	PyTorch  []string `json:"pytorch,omitempty"`

	Limit    *RankAnswer   `json:"limit"` // the rank with least headroom; null where no rank used a GPU
	Need     Need          `json:"need"`
	Findings []Finding     `json:"findings"`
	Groups   []GroupAnswer `json:"groups"`
	Stages   []Stage       `json:"stages,omitempty"`
	Ranks    []RankAnswer  `json:"ranks"` // by headroom, the least first
	Tuning   *Tuning       `json:"tuning,omitempty"`

	ranks  []*Rank
	groups []*Group
	twins  map[*Rank][]*Rank
}

// RankAnswer is one rank. Bytes are as in Parts and Device.
type RankAnswer struct {
	Identity      recording.Identity `json:"identity"`
	File          string             `json:"file"`
	Recordings    []string           `json:"recordings,omitempty"`
	Report        string             `json:"report,omitempty"` // for cistern report: the file of the last request that failed, else the newest recording
	Device        int                `json:"device"`
	UUID          string             `json:"uuid,omitempty"`
	GPU           string             `json:"gpu,omitempty"`
	Total         uint64             `json:"total_bytes"`
	Limit         uint64             `json:"limit_bytes"` // of the process, 0: none
	Headroom      int64              `json:"headroom_bytes"`
	Cause         string             `json:"cause"`
	Excess        int64              `json:"excess_bytes"` // of the cause, over the median of its twins
	Twins         int                `json:"twins"`
	Parts         Parts              `json:"parts"`
	PeakAllocated uint64             `json:"peak_allocated_bytes"`
	PeakReserved  uint64             `json:"peak_reserved_bytes"`
	PeakOutside   uint64             `json:"peak_outside_bytes"`
	PeakStep      int64              `json:"peak_step"`
	Growth        float64            `json:"growth_bytes_per_step"`
	Group         int                `json:"group"`
	Steps         int64              `json:"steps"`
	Ended         string             `json:"ended"`
	Status        int                `json:"status"` // with which it failed, negative for a signal; 0: unknown, or it did not
	OOMs          int64              `json:"ooms"`
	Retries       int64              `json:"retries"`
	Failure       *Failure           `json:"failure,omitempty"` // the last

	of *Rank
}

// Need is what GPU the job needs, by its peaks.
type Need struct {
	// Least is the most that a rank allocated at a time, and what was outside its allocator: no allocator needs less.
	Least     uint64 `json:"least_bytes"`
	LeastRank int    `json:"least_rank"`
	// Recorded is the most that a rank had reserved, and outside: no allocator needs more.
	Recorded     uint64 `json:"recorded_bytes"`
	RecordedRank int    `json:"recorded_rank"`
	// LeastGB and RecordedGB are the smallest common GPUs of that memory; 0: there is none.
	LeastGB    int `json:"least_gb"`
	RecordedGB int `json:"recorded_gb"`
}

// Finding is something that stands out.
type Finding struct {
	Kind  string   `json:"kind"`
	Ranks []int    `json:"ranks,omitempty"`
	Node  string   `json:"node,omitempty"`
	Files []string `json:"files,omitempty"`
	Bytes int64    `json:"bytes,omitempty"`
	Step  int64    `json:"step,omitempty"`
	Text  string   `json:"text"`
}

// GroupAnswer is ranks with equal requests.
type GroupAnswer struct {
	Same           string `json:"same"`
	Ranks          []int  `json:"ranks"`
	Representative int    `json:"representative"` // the one with least headroom
	Least          int64  `json:"least_headroom_bytes"`
	Most           int64  `json:"most_headroom_bytes"`
	Peak           uint64 `json:"peak_allocated_bytes"` // the median
}

// Stage is the ranks of one stage of a pipeline.
type Stage struct {
	Stage int    `json:"stage"`
	Ranks int    `json:"ranks"`
	Peak  uint64 `json:"peak_allocated_bytes"` // the median
}

// Answer answers for one job of a folder.
func (f *Folder) Answer(job *Job) *Answer {
	ranks, restarted, _ := job.ranks()
	ranks = slices.DeleteFunc(ranks, func(r *Rank) bool { return len(r.Summary.Devices) == 0 })
	a := &Answer{Job: job.Name, World: -1, GPUs: []string{}, Findings: []Finding{}, Ranks: []RankAnswer{}, Groups: []GroupAnswer{}, ranks: ranks}
	nodes, gpus, versions := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, r := range ranks {
		a.World = max(a.World, r.ID.World)
		a.Steps = max(a.Steps, r.Summary.Steps)
		a.Run, a.Launcher = cmp.Or(a.Run, r.ID.Run), cmp.Or(a.Launcher, r.ID.Launcher)
		nodes[r.ID.Node] = true
		gpus[r.Device.Name] = true
		versions[r.Summary.PyTorch] = true
	}
	delete(gpus, "")
	delete(versions, "")
	a.Nodes, a.GPUs, a.PyTorch = len(nodes), slices.AppendSeq(a.GPUs, maps.Keys(gpus)), slices.Sorted(maps.Keys(versions))
	slices.Sort(a.GPUs)
	a.groups = groupsOf(ranks)
	a.findTwins()
	for _, r := range ranks {
		a.Ranks = append(a.Ranks, a.rank(r))
	}
	slices.SortStableFunc(a.Ranks, func(x, y RankAnswer) int { return cmp.Compare(x.Headroom, y.Headroom) })
	if len(a.Ranks) > 0 {
		first := a.Ranks[0]
		a.Limit = &first
	}
	for _, g := range a.groups {
		a.Groups = append(a.Groups, groupAnswer(g))
	}
	a.stages()
	a.need()
	a.find(f, job, restarted)
	return a
}

// findTwins sets the twins of all ranks, itself among them: those with the same coordinates but dp; without coordinates those of the
// group, or of a rank that is a group alone all ranks. A rank that has none is compared with none.
func (a *Answer) findTwins() {
	a.twins = map[*Rank][]*Rank{}
	by := map[string][]*Rank{}
	for _, r := range a.ranks {
		if len(r.ID.Coordinates) > 0 {
			key := twinKey(r)
			by[key] = append(by[key], r)
		}
	}
	for _, r := range a.ranks {
		list := a.groups[r.group].Ranks
		if len(r.ID.Coordinates) > 0 {
			list = by[twinKey(r)]
		} else if len(list) == 1 {
			list = a.ranks
		}
		if len(list) > 1 {
			a.twins[r] = list
		}
	}
}

func (a *Answer) rank(r *Rank) RankAnswer {
	d := r.Device
	x := RankAnswer{Identity: r.ID, File: r.Summary.Path, Recordings: r.Summary.Recordings, Device: d.Ordinal, UUID: d.UUID, GPU: d.Name, Total: d.Total, Limit: d.Limit,
		Headroom: r.Headroom, Parts: r.Parts, PeakAllocated: d.PeakAllocated.Bytes, PeakReserved: d.PeakReserved.Bytes, PeakOutside: d.PeakOutside.Bytes,
		PeakStep: d.PeakReserved.Step, Growth: r.Growth, Group: r.group, Steps: r.Summary.Steps, Ended: r.Summary.Ended, Status: r.Summary.Status, OOMs: d.OOMs, Retries: d.Retries, of: r}
	if n := len(d.Failures); n > 0 {
		x.Failure = &d.Failures[n-1]
	}
	x.Report = r.recordingFile()
	x.Cause, x.Excess = a.cause(r)
	x.Twins = max(0, len(a.twins[r])-1)
	return x
}

// cause is what a rank's memory is used for, more than that of its twins.
func (a *Answer) cause(r *Rank) (cause string, excess int64) {
	twins, most := a.twins[r], uint64(0)
	for i, p := range r.Parts.list() {
		usual := median(twins, func(t *Rank) uint64 { return t.Parts.list()[i].bytes })
		if more := int64(p.bytes) - int64(usual); more > excess {
			cause, excess = p.name, more
		}
		most = max(most, p.bytes)
	}
	if excess < significant(r.Device.Total) || len(twins) == 0 {
		cause, excess = CauseUsed, 0
		for _, p := range r.Parts.list() {
			if p.bytes == most && most > 0 {
				cause = p.name
				break
			}
		}
	}
	if grown := r.Growth * float64(r.Summary.Steps); cause == CauseUsed && grown > 0 && grown >= float64(excess)/2 {
		return CauseGrowth, int64(grown)
	}
	return cause, excess
}

// significant is what two ranks that do the same differ by at most.
func significant(total uint64) int64 { return max(256<<20, int64(total/100)) }

// median is the lower one; 0 of none.
func median(ranks []*Rank, of func(*Rank) uint64) uint64 {
	if len(ranks) == 0 {
		return 0
	}
	values := make([]uint64, len(ranks))
	for i, r := range ranks {
		values[i] = of(r)
	}
	slices.Sort(values)
	return values[(len(values)-1)/2]
}

func groupAnswer(g *Group) GroupAnswer {
	x := GroupAnswer{Same: g.Same, Representative: g.Ranks[0].ID.Rank, Least: g.Ranks[0].Headroom, Most: g.Ranks[len(g.Ranks)-1].Headroom,
		Peak: median(g.Ranks, func(r *Rank) uint64 { return r.Device.PeakAllocated.Bytes })}
	for _, r := range g.Ranks {
		x.Ranks = append(x.Ranks, r.ID.Rank)
	}
	slices.Sort(x.Ranks)
	return x
}

// stages are those of the pipeline, by the coordinate pp.
func (a *Answer) stages() {
	by := map[int][]*Rank{}
	for _, r := range a.ranks {
		if pp, ok := r.ID.Coordinates["pp"]; ok {
			by[pp] = append(by[pp], r)
		}
	}
	if len(by) < 2 {
		return
	}
	for _, pp := range slices.Sorted(maps.Keys(by)) {
		a.Stages = append(a.Stages, Stage{pp, len(by[pp]), median(by[pp], func(r *Rank) uint64 { return r.Device.PeakAllocated.Bytes })})
	}
}

// need is what the ranks together need.
func (a *Answer) need() {
	for _, r := range a.ranks {
		d := r.Device
		outside := d.PeakOutside.Bytes
		least := d.PeakAllocated.Bytes
		for _, f := range d.Failures {
			least = max(least, f.Allocated+f.Requested)
		}
		if least+outside > a.Need.Least {
			a.Need.Least, a.Need.LeastRank = least+outside, r.ID.Rank
		}
		if recorded := max(least, d.PeakReserved.Bytes) + outside; recorded > a.Need.Recorded {
			a.Need.Recorded, a.Need.RecordedRank = recorded, r.ID.Rank
		}
	}
	a.Need.LeastGB, a.Need.RecordedGB = smallestGPU(a.Need.Least), smallestGPU(a.Need.Recorded)
}

// gpus are common sizes of GPUs, by their name in GB and what the driver says is the total of one, rounded down, in MiB.
var gpus = []struct {
	gb  int
	mib uint64
}{{16, 14900}, {24, 22500}, {32, 32100}, {40, 40300}, {48, 45400}, {80, 81000}, {96, 95800}, {141, 143100}, {180, 182600}, {288, 274000}}

// smallestGPU is the smallest that has so many bytes, 0 where none has.
func smallestGPU(bytes uint64) int {
	for _, g := range gpus {
		if bytes <= g.mib<<20 {
			return g.gb
		}
	}
	return 0
}
