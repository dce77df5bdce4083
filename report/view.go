package report

import (
	"cmp"
	"fmt"
	"path/filepath"
	"slices"
	"sort"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/replay"
)

// CurveSamples is the number of points to ask of a replay (replay.Options.Samples) whose result goes into a page.
const CurveSamples = maxPoints

// View is one trace as the page shows it. It no longer needs the trace.
type View struct {
	Name       string              `json:"name"`
	Inspection *analyze.Inspection `json:"inspection"`
	Recorded   replay.Recorded     `json:"recorded"`
	Results    []*replay.Result    `json:"results"`
	Verify     *replay.Verify      `json:"verify"`
	OOMs       []analyze.OOM       `json:"ooms"`
	// Failures is the report on the requests that failed; nil where none did, or it was not asked for.
	Failures *analyze.TraceFailures `json:"failures"`
	Notes    []string               `json:"notes"`
	Lines    []line                 `json:"lines"` // of the chart, in the order of the curves in series

	StreamNames []string   `json:"stream_names"`
	PoolNames   []string   `json:"pool_names"`
	Frames      []string   `json:"frames"`
	ShortFrames []string   `json:"short_frames"` // "" where it is the same
	FrameLayers []int      `json:"frame_layers"` // recording.Layer
	CallKinds   []callKind `json:"call_kinds"`   // of driver calls
	// Libraries are those whose code is on any stack, FrameLibraries of each frame an index there, -1 where it has no file.
	Libraries      []string `json:"libraries"`
	FrameLibraries []int    `json:"frame_libraries"`
	TagNames       []string `json:"tag_names"`    // by number, [0] is none; empty where there are no others
	ThreadNames    []string `json:"thread_names"` // likewise
	TopStacks      []uint32 `json:"top_stacks"`   // largest holders at the peak, as nodes of the tree of stacks

	// Thinned says that the chart is first drawn from fewer points than there are, the rest of which come behind.
	Thinned bool `json:"thinned"`

	long longData
}

// line is one curve of the chart.
type line struct {
	Name   string `json:"name"`
	Kind   string `json:"kind"`   // "live", "allocated", "recorded" or "policy"
	Policy int    `json:"policy"` // index into View.Results
	Hidden bool   `json:"hidden"` // until it is asked for
	Until  *int   `json:"until"`  // event at which the policy died, null if it did not
}

// NewView collects what a page shows of a trace: what it holds, and what the policies made of it. in is
// analyze.Inspect's; the results of rep have curves where they were run with Samples.
// driver is what a driver trace says beside its events; nil elsewhere.
func NewView(t *recording.Trace, in *analyze.Inspection, rep *replay.Report, driver *recording.Driver) (*View, error) {
	v := &View{Name: name(t), Inspection: in, Recorded: rep.Recorded, Results: rep.Results, Verify: rep.Verify,
		Notes: rep.Notes, OOMs: OOMs(t, in.OOMs, rep.Results)}
	for _, id := range t.Streams {
		v.StreamNames = append(v.StreamNames, streamName(id))
	}
	for _, id := range t.Pools {
		v.PoolNames = append(v.PoolNames, fmt.Sprintf("%d,%d", id[0], id[1]))
	}
	curves := analyze.RecordedCurves(t)
	var drawn []analyze.Curve
	add := func(l line, c analyze.Curve) {
		v.Lines = append(v.Lines, l)
		drawn = append(drawn, c)
	}
	add(line{Name: "live", Kind: "live"}, curves.Live)
	add(line{Name: "allocated", Kind: "allocated", Hidden: true}, curves.Allocated)
	for i, r := range rep.Results {
		if len(r.Curve.TimeUS) == 0 {
			continue
		}
		add(line{Name: "reserved by " + policyName(r), Kind: "policy", Policy: i, Until: r.FailedEvent}, reservedCurve(t, r.Curve))
	}
	// The record is drawn last: a faithful model's line lies under it, and shows between its dashes.
	if len(curves.Reserved.Value) > 0 {
		add(line{Name: "reserved when recorded", Kind: "recorded"}, curves.Reserved)
	}
	stacks := newStackTable(t)
	v.TopStacks = []uint32{}
	for _, h := range in.Peak.Holders {
		v.TopStacks = append(v.TopStacks, stacks.node(h.Stack))
	}
	var lives encoder
	all := analyze.LifetimesOf(t)
	if driver != nil {
		all.Driver(t, driver)
	}
	v.CallKinds = lives.lifetimes(all, stacks)
	lives.stackNames(stacks)
	var tables encoder
	tables.stacks(stacks) // which all of the above have filled
	tables.buf = append(tables.buf, lives.buf...)
	v.ShortFrames, v.FrameLayers = stacks.short(), stacks.layers()
	v.Frames, v.Libraries, v.FrameLibraries = stacks.frames, stacks.libraries, stacks.library
	v.TagNames, v.ThreadNames = []string{}, []string{}
	for i := range stacks.tags {
		v.TagNames = append(v.TagNames, cmp.Or(t.TagName(uint16(i)), analyze.NoTag))
	}
	for _, n := range stacks.threads {
		if len(v.ThreadNames) == 0 {
			v.ThreadNames = append(v.ThreadNames, analyze.NoThread)
		}
		v.ThreadNames = append(v.ThreadNames, t.ThreadName(n))
	}
	var err error
	if v.long.tables, err = tables.text(); err != nil {
		return nil, err
	}
	if v.long.series, err = chart(t, drawn); err != nil {
		return nil, err
	}
	if v.Thinned = len(t.Events) > manyEvents; v.Thinned {
		v.long.curves = v.long.series
		v.long.series, err = firstChart(t, drawn)
	}
	return v, err
}

// OOMs are the failures of the record (analyze.ExplainRecorded), then those of the policies.
func OOMs(t *recording.Trace, recorded []analyze.OOM, results []*replay.Result) []analyze.OOM {
	ooms := slices.Clone(recorded)
	for _, r := range results {
		if r.FailedEvent != nil {
			ooms = append(ooms, analyze.ExplainReplayed(t, analyze.Failure{Policy: policyName(r), Event: *r.FailedEvent,
				Requested: r.FailedRequest, Reserved: r.FailedReserved, Capacity: r.Capacity}))
		}
	}
	return ooms
}

func name(t *recording.Trace) string {
	n := filepath.Base(t.Path)
	if t.Path == "-" {
		n = "standard input"
	}
	return n + ", " + t.Where()
}

func policyName(r *replay.Result) string {
	if r.Conf == "" {
		return r.Policy
	}
	return r.Policy + ":" + r.Conf
}

// streamName shows a small stream number as such and a handle in hexadecimal.
func streamName(id uint64) string {
	if id < 1<<16 {
		return fmt.Sprint(id)
	}
	return fmt.Sprintf("%#x", id)
}

// reservedCurve puts a replay's curve, which is over time, on the events of the trace: a point belongs to the last
// event that is not later.
func reservedCurve(t *recording.Trace, c replay.Curve) analyze.Curve {
	start := analyze.StartUS(t)
	var out analyze.Curve
	for i, us := range c.TimeUS {
		at := sort.Search(len(t.Events), func(k int) bool { return recording.SinceUS(start, t.Events[k].TimeUS) > us }) - 1
		n := len(out.Event)
		if n > 0 && int(out.Event[n-1]) >= at {
			// Several points within a microsecond: the highest stands for them.
			out.Value[n-1] = max(out.Value[n-1], c.Reserved[i])
			continue
		}
		if n > 0 && out.Value[n-1] == c.Reserved[i] {
			continue
		}
		out.Event = append(out.Event, int32(at))
		out.Value = append(out.Value, c.Reserved[i])
	}
	return out
}
