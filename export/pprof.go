package export

import (
	"fmt"
	"io"
	"path/filepath"

	"github.com/google/pprof/profile"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

// sizeLimits end the ranges of the label "size"; package analyze shows the same ones.
var sizeLimits = []struct {
	upTo uint64
	name string
}{
	{4 << 10, "up to 4 KiB"}, {64 << 10, "up to 64 KiB"}, {1 << 20, "up to 1 MiB"}, {10 << 20, "up to 10 MiB"},
	{64 << 20, "up to 64 MiB"}, {256 << 20, "up to 256 MiB"}, {1 << 30, "up to 1 GiB"}, {^uint64(0), "over 1 GiB"},
}

func sizeClass(n uint64) uint8 {
	for i := range sizeLimits {
		if n <= sizeLimits[i].upTo {
			return uint8(i)
		}
	}
	return uint8(len(sizeLimits) - 1)
}

// sampleKey is what a sample has in common: its stack and its labels.
type sampleKey struct {
	stack, stream, pool, thread uint32
	tag                         uint16
	library                     uint8
	size                        uint8
	pending                     bool
}

// The values of a sample, in the order of SampleType.
const (
	inuseSpace = iota
	inuseObjects
	allocSpace
	allocObjects
	numValues
)

// WritePprof writes a profile as it would have been taken at the moment: inuse_* are the blocks that are live then
// (bytes as requested, from alloc to free_completed), alloc_* all that were allocated until then, those included that
// were live before the first event. Each device of the file is looked at at its own moment.
func WritePprof(w io.Writer, f *recording.File, at Moment) error {
	p := &profile.Profile{
		SampleType: []*profile.ValueType{
			{Type: "inuse_space", Unit: "bytes"}, {Type: "inuse_objects", Unit: "count"},
			{Type: "alloc_space", Unit: "bytes"}, {Type: "alloc_objects", Unit: "count"},
		},
		DefaultSampleType: "inuse_space",
	}
	// Names and lines are in the profile: nothing is to be looked up in a binary.
	mapping := &profile.Mapping{ID: 1, File: filepath.Base(f.Path), HasFunctions: true, HasFilenames: true,
		HasLineNumbers: true, HasInlineFrames: true}
	p.Mapping = []*profile.Mapping{mapping}
	places := &locations{p: p, mapping: mapping, named: &recording.Trace{Threads: threadNames(f)}, functions: map[[2]string]*profile.Function{},
		byFrame: map[recording.Frame]*profile.Location{}}
	c := clockOf(f)
	for _, t := range f.Traces {
		i, err := at.index(t, c)
		if err != nil {
			return err
		}
		samples, state := collect(t, i)
		places.add(t, samples, len(f.Traces) > 1)
		line := c.line(t)
		for k := range t.Events[:i+1] {
			line.at(&t.Events[k])
		}
		if line.last >= dated {
			p.TimeNanos = max(p.TimeNanos, line.last*1000)
		}
		p.DurationNanos = max(p.DurationNanos, (line.last-c.start)*1000)
		when := fmt.Sprintf("after event %d of %d, %.6f s after the file's first", i, len(t.Events), float64(line.last-c.start)/1e6)
		if i < 0 {
			when = "before the first event"
		}
		p.Comments = append(p.Comments, fmt.Sprintf("%s, %s, %s: live bytes %d, blocks %d", f.Path, t.Where(), when, state.bytes, len(state.live)))
		for _, n := range t.Notes {
			p.Comments = append(p.Comments, "note: "+n)
		}
	}
	if err := p.CheckValid(); err != nil {
		return err
	}
	return p.Write(w)
}

// collect sums up a trace until event i, in the order in which keys are first seen.
func collect(t *recording.Trace, i int) ([]sample, *walker) {
	var samples []sample
	index := map[sampleKey]int{}
	of := func(b block, pending bool) *sample {
		k := sampleKey{b.stack, b.stream, b.pool, b.thread, b.tag, b.library, sizeClass(b.size), pending}
		n, ok := index[k]
		if !ok {
			n = len(samples)
			index[k] = n
			samples = append(samples, sample{key: k})
		}
		return &samples[n]
	}
	add := func(b block) {
		s := of(b, false)
		s.values[allocSpace] += int64(b.size)
		s.values[allocObjects]++
	}
	for k := range t.Initial {
		if t.Initial[k].State != recording.Inactive {
			add(initialBlock(&t.Initial[k]))
		}
	}
	w := newWalker(t)
	for k := range t.Events[:i+1] {
		if e := &t.Events[k]; e.Kind == event.Alloc {
			add(allocated(k, e))
		}
		w.apply(k)
	}
	// In the order of their allocation, so that the same trace makes the same file.
	for _, b := range w.inOrder() {
		s := of(b, b.pending)
		s.values[inuseSpace] += int64(b.size)
		s.values[inuseObjects]++
	}
	return samples, w
}

type sample struct {
	key    sampleKey
	values [numValues]int64
}

// locations numbers what samples of a profile share.
type locations struct {
	p         *profile.Profile
	mapping   *profile.Mapping
	named     *recording.Trace // with the names of all threads of the file
	functions map[[2]string]*profile.Function
	byFrame   map[recording.Frame]*profile.Location
}

// unknownStack stands for the stack of what was recorded without one, so that sums stay whole.
var unknownStack = recording.Frame{Func: "[no stack was recorded]"}

func (l *locations) add(t *recording.Trace, samples []sample, devices bool) {
	stacks := map[uint32][]*profile.Location{}
	for i := range samples {
		s := &samples[i]
		locs, ok := stacks[s.key.stack]
		if !ok {
			frames := t.FramesOf(s.key.stack)
			if len(frames) == 0 {
				frames = []recording.Frame{unknownStack}
			}
			for _, f := range frames {
				locs = append(locs, l.of(f))
			}
			stacks[s.key.stack] = locs
		}
		labels := map[string][]string{
			"pool":   {poolName(poolOf(t, s.key.pool))},
			"stream": {streamName(streamOf(t, s.key.stream))},
			"size":   {sizeLimits[s.key.size].name},
		}
		if devices {
			labels["device"] = []string{fmt.Sprint(t.Device)}
		}
		if t.Owner != nil {
			labels["process"] = []string{ownerName(t.Owner)}
		}
		for name, value := range map[string]string{"tag": t.TagName(s.key.tag), "library": t.LibraryName(s.key.library),
			"thread": l.named.ThreadName(s.key.thread)} {
			if value != "" {
				labels[name] = []string{value}
			}
		}
		if s.key.pending {
			labels["state"] = []string{"pending_free"}
		}
		l.p.Sample = append(l.p.Sample, &profile.Sample{Location: locs, Value: s.values[:], Label: labels})
	}
}

func (l *locations) of(f recording.Frame) *profile.Location {
	if !f.HasFile() {
		f.File, f.Line = "", 0
	}
	if f.Func == "" {
		f.Func = "?"
	}
	loc, ok := l.byFrame[f]
	if !ok {
		name := [2]string{f.Func, f.File}
		fn, ok := l.functions[name]
		if !ok {
			// Without a SystemName pprof takes the name as it is: demangled, Python's "<module>" would be an empty
			// template.
			fn = &profile.Function{ID: uint64(len(l.p.Function) + 1), Name: f.Func, Filename: f.File}
			l.functions[name] = fn
			l.p.Function = append(l.p.Function, fn)
		}
		loc = &profile.Location{ID: uint64(len(l.p.Location) + 1), Mapping: l.mapping,
			Line: []profile.Line{{Function: fn, Line: int64(f.Line)}}}
		l.byFrame[f] = loc
		l.p.Location = append(l.p.Location, loc)
	}
	return loc
}
