package analyze

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/recording"
)

// Inspection is what a trace holds. Its JSON is what `cistern inspect --json` prints.
type Inspection struct {
	Path       string            `json:"path"`
	Format     string            `json:"format"`
	Device     int               `json:"device"`
	Owner      *recording.Owner  `json:"process,omitempty"` // of a driver trace with several processes on the device
	Events     int               `json:"events"`
	Kinds      map[string]int    `json:"kinds"` // events by PyTorch's name
	DurationUS int64             `json:"duration_us"`
	FromStart  bool              `json:"from_start"`
	Initial    int               `json:"initial_blocks"` // live before the first event
	Stacks     int               `json:"stacks"`         // distinct, the empty one not counted
	Streams    []StreamUse       `json:"streams"`
	Pools      []PoolUse         `json:"pools"`
	Settings   map[string]string `json:"settings"` // as recorded; empty when the file does not say
	Conf       string            `json:"conf"`
	Notes      []string          `json:"notes"`

	PeakLive         uint64  `json:"peak_live_bytes"`
	PeakAllocated    uint64  `json:"peak_allocated_bytes"`         // rounded to 512
	RecordedReserved uint64  `json:"recorded_peak_reserved_bytes"` // 0: the file does not say
	Ratio            float64 `json:"recorded_ratio"`               // recorded peak reserved / peak live, 0 unknown
	Peak             Moment  `json:"peak"`                         // when the most was live
	OOMs             []OOM   `json:"ooms"`                         // recorded
	// Failures is of how many requests that failed the process itself wrote down why: cistern report shows it.
	Failures int `json:"failures,omitempty"`
	// Environment is what the run was recorded with.
	Environment recording.Environment `json:"environment,omitzero"`
	// Identity is the process's place in its job.
	Identity *recording.Identity `json:"identity,omitempty"`
}

// StreamUse counts what a stream asked for.
type StreamUse struct {
	Stream    uint64 `json:"stream"` // handle or id, as recorded
	Allocs    int    `json:"allocs"`
	Bytes     uint64 `json:"bytes"`           // requested, in all
	LiveBytes uint64 `json:"live_peak_bytes"` // requested bytes live when most was live
}

// PoolUse counts what was allocated in a private pool.
type PoolUse struct {
	Pool      string `json:"pool"` // PyTorch's two numbers; 0,0 is the default pool
	Allocs    int    `json:"allocs"`
	Bytes     uint64 `json:"bytes"`
	LiveBytes uint64 `json:"live_peak_bytes"`
}

// Moment is what the record says of one moment.
type Moment struct {
	Event     int    `json:"event"`   // state after this event, -1 before the first
	TimeUS    int64  `json:"time_us"` // since the first event
	Live      uint64 `json:"live_bytes"`
	Allocated uint64 `json:"allocated_bytes"`
	Reserved  uint64 `json:"reserved_bytes"` // 0: the file does not say
	Blocks    int    `json:"blocks"`
	Pending   uint64 `json:"pending_free_bytes"` // of Live: given back, but still in use by some stream

	Segments    int    `json:"segments"`
	FreeBytes   uint64 `json:"free_bytes"` // reserved, not covered by a live block
	FreePieces  int    `json:"free_pieces"`
	LargestFree uint64 `json:"largest_free_bytes"`

	Sizes []SizeUse `json:"by_size"`
	// By tag and thread where the file says any, by library where it or the stacks do; largest first.
	Tags      []LabelUse `json:"by_tag,omitempty"`
	Libraries []LabelUse `json:"by_library,omitempty"`
	Threads   []LabelUse `json:"by_thread,omitempty"`
	Holders   []Holder   `json:"by_stack"`     // largest first, at most MaxHolders
	Others    Holder     `json:"other_stacks"` // all the rest in one

	Map AddressMap `json:"-"`
}

// SizeUse counts the live blocks of one range of sizes.
type SizeUse struct {
	Label  string `json:"label"`
	UpTo   uint64 `json:"up_to_bytes"` // requested size, inclusive; 0 is no upper limit
	Blocks int    `json:"blocks"`
	Bytes  uint64 `json:"bytes"`
}

// LabelUse counts the live blocks of one tag, library or thread.
type LabelUse struct {
	Name   string `json:"name"`
	Blocks int    `json:"blocks"`
	Bytes  uint64 `json:"bytes"`
}

// What stands for blocks without a tag, and for those of which no thread is known.
const (
	NoTag    = "no tag"
	NoThread = "no thread"
)

// Holder is one stack and the live blocks that it allocated.
type Holder struct {
	Stack  uint32 `json:"-"` // index into Trace.Stacks; 0 is the empty one
	Blocks int    `json:"blocks"`
	Bytes  uint64 `json:"bytes"`
	Named
	Frames []string `json:"frames,omitempty"` // innermost first, "func file:line"
	// Tags and Libraries are those that its blocks were recorded with, most bytes first.
	Tags      []string `json:"tags,omitempty"`
	Libraries []string `json:"libraries,omitempty"`

	tags, libraries labelUses
}

// MaxHolders is how many stacks an Inspection lists one by one.
const MaxHolders = 50

// sizeLimits end the ranges of SizeUse. 1 and 10 MiB are where PyTorch changes what it asks the driver for.
var sizeLimits = []uint64{4 << 10, 64 << 10, 1 << 20, 10 << 20, 64 << 20, 256 << 20, 1 << 30, 0}

// Inspect reads a trace once, and once more up to its peak.
func Inspect(t *recording.Trace) *Inspection {
	in := &Inspection{Path: t.Path, Format: t.Format, Device: t.Device, Owner: t.Owner, Events: len(t.Events), Kinds: map[string]int{},
		DurationUS: t.Duration(), FromStart: t.FromStart, Initial: len(t.Initial), Stacks: max(len(t.Stacks)-1, 0),
		Settings: t.Settings.Raw, Conf: t.Settings.Conf, Notes: slices.Clone(t.Notes),
		RecordedReserved: t.RecordedPeakReserved(), OOMs: ExplainRecorded(t), Failures: len(t.Failures),
		Environment: t.Environment, Identity: t.Identity}
	if in.Settings == nil {
		in.Settings = map[string]string{}
	}
	if in.Notes == nil {
		in.Notes = []string{}
	}
	in.Streams = make([]StreamUse, len(t.Streams))
	for i, id := range t.Streams {
		in.Streams[i].Stream = id
	}
	in.Pools = make([]PoolUse, len(t.Pools))
	for i, id := range t.Pools {
		in.Pools[i].Pool = fmt.Sprintf("%d,%d", id[0], id[1])
	}
	var kinds [event.NumKinds]int
	s := startState(t)
	in.PeakAllocated = s.allocated
	for i := range t.Events {
		e := &t.Events[i]
		if e.Kind < event.NumKinds {
			kinds[e.Kind]++
		}
		s.apply(i, e)
		if e.Kind != event.Alloc {
			continue
		}
		in.PeakAllocated = max(in.PeakAllocated, s.allocated)
		if int(e.Stream) < len(in.Streams) {
			in.Streams[e.Stream].Allocs++
			in.Streams[e.Stream].Bytes += e.Size
		}
		if int(e.Pool) < len(in.Pools) {
			in.Pools[e.Pool].Allocs++
			in.Pools[e.Pool].Bytes += e.Size
		}
	}
	for k, n := range kinds {
		if n > 0 {
			in.Kinds[event.Kind(k).String()] = n
		}
	}
	peak, at := t.PeakLive()
	in.PeakLive = peak
	if peak > 0 && in.RecordedReserved > 0 {
		in.Ratio = float64(in.RecordedReserved) / float64(peak)
	}
	walk(t, []int{at}, func(i int, s *state) {
		in.Peak = momentOf(t, i, s)
		for _, h := range s.live {
			if int(h.stream) < len(in.Streams) {
				in.Streams[h.stream].LiveBytes += h.size
			}
			if int(h.pool) < len(in.Pools) {
				in.Pools[h.pool].LiveBytes += h.size
			}
		}
	})
	return in
}

// MomentAt is what the record says of the state after an event; -1 is before the first.
func MomentAt(t *recording.Trace, event int) Moment {
	var m Moment
	walk(t, []int{event}, func(i int, s *state) { m = momentOf(t, i, s) })
	return m
}

func momentOf(t *recording.Trace, i int, s *state) Moment {
	m := Moment{Event: i, TimeUS: timeOf(t, i), Live: s.liveBytes, Allocated: s.allocated, Reserved: s.reserved,
		Blocks: len(s.live), Map: s.addressMap(i)}
	m.FreeBytes, m.FreePieces, m.LargestFree = m.Map.FreeBytes, m.Map.FreePieces, m.Map.LargestFree
	m.Segments = s.segments.Len()
	m.Sizes = make([]SizeUse, len(sizeLimits))
	for k, limit := range sizeLimits {
		m.Sizes[k] = SizeUse{UpTo: limit, Label: sizeLabel(k)}
	}
	byStack := map[uint32]*Holder{}
	ofStack := map[uint32]string{}
	var tags, libraries, threads labelUses
	tagged, labelled, threaded := false, false, false
	for _, h := range s.live {
		if h.pending {
			m.Pending += h.size
		}
		k := slices.IndexFunc(sizeLimits, func(limit uint64) bool { return limit == 0 || h.size <= limit })
		m.Sizes[k].Blocks++
		m.Sizes[k].Bytes += h.size
		o := byStack[h.stack]
		if o == nil {
			o = &Holder{Stack: h.stack}
			byStack[h.stack] = o
			ofStack[h.stack] = StackLibrary(t, h.stack)
		}
		o.Blocks++
		o.Bytes += h.size
		library, tag, thread := ofStack[h.stack], NoTag, NoThread
		if h.library != 0 {
			library = t.LibraryName(h.library)
			o.libraries.add(library, h.size)
		}
		if h.tag != 0 {
			tag, tagged = t.TagName(h.tag), true
			o.tags.add(tag, h.size)
		}
		if h.thread != 0 {
			thread, threaded = t.ThreadName(h.thread), true
		}
		labelled = labelled || library != UnknownLibrary
		tags.add(tag, h.size)
		libraries.add(library, h.size)
		threads.add(thread, h.size)
	}
	if tagged {
		m.Tags = tags.list()
	}
	if labelled {
		m.Libraries = libraries.list()
	}
	if threaded {
		m.Threads = threads.list()
	}
	all := make([]Holder, 0, len(byStack))
	for _, o := range byStack {
		all = append(all, *o)
	}
	slices.SortFunc(all, func(a, b Holder) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Stack, b.Stack))
	})
	m.Holders = all[:min(len(all), MaxHolders)]
	for _, o := range all[len(m.Holders):] {
		m.Others.Blocks += o.Blocks
		m.Others.Bytes += o.Bytes
	}
	stacks := make([][]recording.Frame, len(m.Holders))
	for k := range m.Holders {
		stacks[k] = t.FramesOf(m.Holders[k].Stack)
	}
	for k, n := range NameStacks(stacks) {
		h := &m.Holders[k]
		h.Frames, h.Tags, h.Libraries = frameTexts(stacks[k]), h.tags.names(), h.libraries.names()
		h.Named = n.words(stacks[k])
	}
	return m
}

// labelUses adds up blocks by name.
type labelUses map[string]*LabelUse

func (l *labelUses) add(name string, size uint64) {
	if *l == nil {
		*l = labelUses{}
	}
	u := (*l)[name]
	if u == nil {
		u = &LabelUse{Name: name}
		(*l)[name] = u
	}
	u.Blocks++
	u.Bytes += size
}

// list is the most bytes first.
func (l labelUses) list() []LabelUse {
	all := make([]LabelUse, 0, len(l))
	for _, u := range l {
		all = append(all, *u)
	}
	slices.SortFunc(all, func(a, b LabelUse) int { return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Name, b.Name)) })
	return all
}

func (l labelUses) names() []string {
	var names []string
	for _, u := range l.list() {
		names = append(names, u.Name)
	}
	return names
}

// timeOf is the time of event i since the first, in microseconds.
func timeOf(t *recording.Trace, i int) int64 {
	if i < 0 || i >= len(t.Events) {
		return 0
	}
	for t.Events[i].TimeUS == 0 && i > 0 { // without a time of its own
		i--
	}
	return recording.SinceUS(StartUS(t), t.Events[i].TimeUS)
}

// StartUS is the time of the first event that has one, in microseconds on the recorder's clock.
func StartUS(t *recording.Trace) int64 {
	for i := range t.Events {
		if us := t.Events[i].TimeUS; us != 0 {
			return us
		}
	}
	return 0
}

func sizeLabel(k int) string {
	if sizeLimits[k] == 0 {
		return "over " + shortSize(sizeLimits[k-1])
	}
	return "up to " + shortSize(sizeLimits[k])
}

// shortSize drops the decimals of a whole size: "4 KiB".
func shortSize(n uint64) string {
	return strings.Replace(units.FormatBytes(n), ".00", "", 1)
}

// FrameNames are the frames of a stack as text, innermost first.
func FrameNames(t *recording.Trace, stack uint32) []string {
	return frameTexts(t.FramesOf(stack))
}
