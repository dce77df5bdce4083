package analyze

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/replay"
)

// diedUnder is a recorded run as it would have gone within a limit under other settings of PyTorch's allocator, up to the
// request that failed; nil where none does. The device has free bytes then.
func diedUnder(t *testing.T, tr *recording.Trace, conf string, limit uint64, free func(reserved uint64) uint64) *recording.Trace {
	t.Helper()
	rec := &replay.Recording{}
	r, err := replay.Run(tr, replay.Spec{Name: "torch", Conf: conf, HasConf: true}, replay.Options{Capacity: limit, Record: rec})
	if err != nil {
		t.Fatal(err)
	}
	if r.Completed {
		return nil
	}
	out := rec.Trace()
	out.Path = fmt.Sprintf("%s under %q within %d", tr.Path, conf, limit)
	failed := tr.Events[*r.FailedEvent]
	out.Events = append(out.Events, event.Event{Kind: event.OOM, Size: r.FailedRequest, Addr: free(r.FailedReserved), Stream: failed.Stream, Pool: failed.Pool,
		TimeUS: out.Events[len(out.Events)-1].TimeUS + 1})
	return out
}

// moment is the state in which the failure at event i came, in a model of the allocator that did what the record says until
// then: the segments, with every block as large as it was.
func moment(t *testing.T, tr *recording.Trace, i int, limit uint64) *recording.Trace {
	t.Helper()
	until := *tr
	until.Events = tr.Events[:i+1]
	rec := &replay.Recording{}
	r, err := replay.Run(&until, replay.Spec{Name: "torch"}, replay.Options{Capacity: limit, Verify: true, Record: rec})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.FailedOOMs) == 0 {
		t.Fatalf("%s: the model meets the request at event %d", tr.Path, i)
	}
	if v := r.Verify; v.FirstMismatch != nil {
		t.Fatalf("%s: the model does not do what is recorded: %s", tr.Path, *v.FirstMismatch)
	}
	at := rec.Trace()
	at.Settings = tr.Settings
	at.InitialSegments, at.Final, at.FromStart = at.Final, nil, false
	for k := range at.InitialSegments {
		for _, b := range at.InitialSegments[k].Blocks {
			if b.State != recording.Inactive {
				at.Initial = append(at.Initial, b)
			}
		}
	}
	at.Events = []event.Event{tr.Events[i]}
	return at
}

// metAt reports whether a request of so many bytes is met at a moment within a limit.
func metAt(t *testing.T, at *recording.Trace, size, limit uint64) bool {
	t.Helper()
	now := *at
	now.Events = slices.Clone(at.Events)
	now.Events[0].Size = size
	r, err := replay.Run(&now, replay.Spec{Name: "torch"}, replay.Options{Capacity: limit, Verify: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range r.Notes {
		if strings.Contains(n, "not whole") {
			t.Fatal(n)
		}
	}
	return !slices.Contains(r.FailedOOMs, 0)
}

// checkShortBy holds an exact shortage against the model at that moment: a limit that is higher by as much as is said meets
// the request, and one step less does not; a request of what was available is met, and a larger one is not.
func checkShortBy(t *testing.T, tr *recording.Trace, i int, s *ShortBy, limit uint64) {
	t.Helper()
	what := fmt.Sprintf("%s, %d bytes at event %d: %+v", tr.Path, tr.Events[i].Size, i, *s)
	at := moment(t, tr, i, limit)
	if s.Bytes != s.Asked-s.Available || s.More < s.Bytes {
		t.Errorf("%s: does not add up", what)
	}
	if !metAt(t, at, tr.Events[i].Size, limit+s.More) {
		t.Errorf("%s: it fails with %d bytes more too", what, s.More)
	}
	step := min(s.More, uint64(mib))
	if metAt(t, at, tr.Events[i].Size, limit+s.More-step) {
		t.Errorf("%s: it is met with %d bytes less than said", what, step)
	}
	if conf := tr.Settings.Conf; s.More == s.Bytes && tr.Events[i].Size < minLargeAlloc || strings.Contains(conf, "roundup") || strings.Contains(conf, "max_split") {
		return // other sizes are rounded otherwise, or use other pieces
	}
	larger := s.Available + grain
	if s.More == s.Bytes {
		larger = s.Available/roundLarge*roundLarge + grain
	}
	if s.Available > minLargeAlloc && (!metAt(t, at, larger-grain, limit) || metAt(t, at, larger, limit)) {
		t.Errorf("%s: of requests of %d and %d bytes the first is met: %v, the second: %v", what, larger-grain, larger,
			metAt(t, at, larger-grain, limit), metAt(t, at, larger, limit))
	}
}

// Constants of c10/cuda/CUDACachingAllocator.cpp (torch 2.11), in bytes: requests from the first on get segments of their own size,
// rounded to the second.
const (
	minLargeAlloc = 10 << 20
	roundLarge    = 2 << 20
)

// Runs of PyTorch's allocator within a little too little memory, under settings that change what a request may use.
func TestShortBy(t *testing.T) {
	kinds := map[string]int{}
	for _, tr := range shortTraces(t) {
		peak, _ := tr.PeakLive()
		for _, conf := range []string{"", "expandable_segments:True", "max_split_size_mb:64", "roundup_power2_divisions:4"} {
			for _, part := range []float64{0.7, 0.97, 1.02, 1.06, 1.15} {
				limit := uint64(part*float64(peak)) >> 20 << 20
				d := diedUnder(t, tr, conf, limit, func(reserved uint64) uint64 {
					if strings.HasPrefix(conf, "expandable") {
						return 1 << 40
					}
					return limit - reserved
				})
				if d == nil {
					continue
				}
				given := limit
				if conf == "" {
					given = 0 // as much as the device had
				}
				x := reportOn(t, d, RemedyOptions{Capacity: given, Budget: time.Nanosecond}).Failures[0]
				s := x.ShortBy
				if s == nil || s.Bound != "" {
					t.Errorf("%s: %+v", d.Path, s)
					continue
				}
				checkShortBy(t, d, x.Event, s, limit)
				kind := "segment"
				if s.More > s.Bytes {
					kind = "piece"
				}
				kinds[kind]++
				if !strings.HasPrefix(x.Sentence, "Short by ") || strings.Contains(x.Sentence, atMost) {
					t.Errorf("%s: %s", d.Path, x.Sentence)
				}
				if wholeRun(t, d, x.Event, s, limit) {
					kinds["whole run"]++
				}
			}
		}
	}
	if kinds["segment"] == 0 || kinds["piece"] == 0 || kinds["whole run"] == 0 {
		t.Errorf("%v were checked: want all kinds", kinds)
	}
}

// wholeRun replays a run from its start, at the recorded addresses, with a limit that is higher by what is said: the request is
// met, and with one step less it is not. It reports false where memory was given back before, which more memory would change.
func wholeRun(t *testing.T, d *recording.Trace, i int, s *ShortBy, limit uint64) bool {
	t.Helper()
	back := slices.IndexFunc(d.Events, func(e event.Event) bool { return e.Kind == event.SegmentFree || e.Kind == event.SegmentUnmap })
	if back >= 0 && slices.ContainsFunc(d.Events[back:i], func(e event.Event) bool { return e.Kind == event.Alloc }) {
		return false
	}
	for _, less := range []uint64{0, min(s.More, mib)} {
		r, err := replay.Run(d, replay.Spec{Name: "torch"}, replay.Options{Capacity: limit + s.More - less, Verify: true})
		if err != nil {
			t.Fatal(err)
		}
		if failed := slices.Contains(r.FailedOOMs, i); failed != (less > 0) || !r.Completed {
			t.Errorf("%s: with %d bytes more, less %d, it fails: %v; %+v", d.Path, s.More, less, failed, *s)
		}
	}
	return true
}

// shortTraces are recordings of real runs, with those of the folder that CISTERN_TRACES names where they are small enough.
func shortTraces(t *testing.T) []*recording.Trace {
	t.Helper()
	all := smallTraces(t)
	if dir := os.Getenv("CISTERN_TRACES"); dir != "" && !testing.Short() {
		for _, name := range []string{"gpt2_varlen.expandable", "detection.cap16", "gpt2_varlen.stacks", "generate_serving.pow2", "pools_graphs"} {
			f, err := open.File(filepath.Join(dir, name+".pickle.gz"))
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, f.Traces...)
		}
	}
	return all
}

// A run whose process had a limit that the recording does not have: a bound without it, and exact with it.
func TestShortByOfRecordedFailure(t *testing.T) {
	dir := os.Getenv("CISTERN_TRACES")
	if dir == "" {
		t.Skip("CISTERN_TRACES names no folder of recorded traces")
	}
	f, err := open.File(filepath.Join(dir, "gnn.cap11.pickle.gz"))
	if err != nil {
		t.Fatal(err)
	}
	const limit = 11 << 30
	bound := reportOn(t, f.Traces[0], RemedyOptions{Budget: time.Nanosecond}).Failures[0]
	x := reportOn(t, f.Traces[0], RemedyOptions{Budget: time.Nanosecond, Capacity: limit}).Failures[0]
	if x.ShortBy.Bound != "" || x.ShortBy.Bytes>>20 != 316 {
		t.Errorf("%+v", x.ShortBy)
	}
	checkShortBy(t, f.Traces[0], x.Event, x.ShortBy, limit)
	if b := bound.ShortBy; b.Bound != atMost || b.Bytes < x.ShortBy.Bytes || b.Available > x.ShortBy.Available || b.More != 0 {
		t.Errorf("without the limit %+v, with it %+v", b, x.ShortBy)
	}
	if want := "Short by at most 597.50 MiB: 4.09 GiB asked for, at least 3.51 GiB available"; !strings.HasPrefix(bound.Sentence, want) {
		t.Errorf("%s; want %s", bound.Sentence, want)
	}
}

// Cistern's engine: the shortage is exact where the run was replayed. A limit that is higher by as much meets the request, as
// memory moves to where it is needed, and one with 2 MiB less does not; so do requests of what was available, and of 2 MiB more.
func TestShortByOfTheEngine(t *testing.T) {
	for _, conf := range []string{"limit:100MiB", "limit:180MiB"} {
		tr := scattered(t, conf).trace()
		x := reportOn(t, tr, RemedyOptions{GPULag: 20 * time.Millisecond}).Failures[0]
		s := x.ShortBy
		if s == nil || s.Bound != "" || !strings.HasPrefix(x.Sentence, "Short by "+units.FormatBytes(s.Bytes)+": ") {
			t.Fatalf("%s: %+v; %s", conf, s, x.Sentence)
		}
		met := func(size, limit uint64) bool {
			again := *tr
			again.Events = slices.Clone(tr.Events)
			again.Events[x.Event].Size = size
			r, err := replay.Run(&again, cisternSpec(replayed(x.Conf)), replay.Options{Capacity: limit, GPULag: 20 * time.Millisecond, Device: x.DeviceTotal})
			if err != nil {
				t.Fatal(err)
			}
			return !slices.Contains(r.FailedOOMs, x.Event)
		}
		if !met(x.Need, x.Capacity+s.Bytes) || met(x.Need, x.Capacity+s.Bytes-2*mib) {
			t.Errorf("%s: within %d more it is met: %v, within one step less: %v", conf, s.Bytes, met(x.Need, x.Capacity+s.Bytes), met(x.Need, x.Capacity+s.Bytes-2*mib))
		}
		if !met(s.Available, x.Capacity) || met(s.Available+2*mib, x.Capacity) {
			t.Errorf("%s: %d bytes are not the most that was available", conf, s.Available)
		}
	}
}

// Without a replay the figures of the process bound the shortage, and never more is claimed than they bear.
func TestShortByFromFigures(t *testing.T) {
	const gib = 1 << 30
	for name, c := range map[string]struct {
		f    recording.Failure
		want string
	}{
		"nothing cached": {recording.Failure{Need: gib, Reserved: 80 * gib, Allocated: 80 * gib, DeviceTotal: 80 * gib, DeviceFree: 0},
			"Short by 1.00 GiB: 1.00 GiB asked for, 0 bytes available (80.00 GiB in use)"},
		"over by more than is cached": {recording.Failure{Need: 14 * gib, Reserved: 78 * gib, Allocated: 70 * gib, Cached: 8 * gib, Largest: 3 * gib, DeviceTotal: 80 * gib,
			DeviceFree: 2 * gib}, "Short by at least 4.00 GiB: 14.00 GiB asked for, at most 10.00 GiB available (70.00 GiB in use, 8.00 GiB free)"},
		"in pieces": {recording.Failure{Need: 4 * gib, Reserved: 80 * gib, Allocated: 70 * gib, Cached: 10 * gib, Largest: gib, DeviceTotal: 80 * gib},
			"Short by at most 3.00 GiB: 4.00 GiB asked for, at least 1.00 GiB available (70.00 GiB in use, 10.00 GiB free)"},
		"a limit": {recording.Failure{Need: gib, Limit: 10 * gib, Reserved: 10 * gib, Allocated: 10 * gib, DeviceTotal: 80 * gib, DeviceFree: 40 * gib},
			"Short by 1.00 GiB: 1.00 GiB asked for, 0 bytes available (10.00 GiB in use; a limit was in the way, though the device had 40.00 GiB free)"},
		"its pool's": {recording.Failure{Need: gib, PoolLimit: 2 * gib, PoolHolds: 3 * gib / 2, DeviceTotal: 80 * gib, DeviceFree: 40 * gib},
			"Short by at most 512.00 MiB: 1.00 GiB asked for, at least 512.00 MiB available (0 bytes in use; the limit of its pool was in the way)"},
		"other memory": {recording.Failure{Need: gib, Upstream: "pinned", DeviceTotal: 80 * gib, DeviceFree: 40 * gib},
			"1.00 GiB could not be allocated: it was to be pinned memory, and that ran out"},
	} {
		c.f.Requested, c.f.Event = c.f.Need, -1
		tr := &recording.Trace{Format: recording.FormatCistern, Failures: []*recording.Failure{&c.f}}
		x := reportOn(t, tr, RemedyOptions{}).Failures[0]
		if got, _, _ := strings.Cut(x.Sentence, ". Fix: "); got != c.want {
			t.Errorf("%s:\n%s\nwant\n%s", name, got, c.want)
		}
	}
}

// What a full device leaves to expandable segments: free memory in whole pages, with what is free next to where they go.
func TestShortByAtTheEdge(t *testing.T) {
	const page = 20 * mib
	at := func(addr, size uint64, used ...extent) *torchSegment {
		g := &torchSegment{extent: extent{addr: addr, size: size, expandable: true}}
		for _, b := range used {
			g.use(b)
		}
		return g
	}
	one := []*torchSegment{at(0, 2*page, extent{addr: 0, size: 33 * mib})}
	// An unmapped page, with 5 MiB free before and 3 MiB behind it.
	split := []*torchSegment{at(0, page, extent{addr: 0, size: 15 * mib}), at(2*page, page, extent{addr: 2*page + 3*mib, size: 17 * mib})}
	for _, c := range []struct {
		segments []*torchSegment
		room     uint64
		want     uint64
	}{{nil, 45 * mib, 2 * page}, {one, 19 * mib, 7 * mib}, {one, 45 * mib, 2*page + 7*mib}, {split, 10 * mib, 5 * mib},
		{split, 25 * mib, 28 * mib}, {split, 45 * mib, 2 * page}} {
		if got := growable(c.segments, c.room, page); got != c.want {
			t.Errorf("with %d MiB free a request of %d MiB is met, want %d", c.room/mib, got/mib, c.want/mib)
		}
	}
	r := newRecorder()
	r.Settings = recording.Settings{Known: true, Expandable: true, MaxSplitSize: -1}
	r.add(event.SegmentMap, 1<<40, page)
	r.add(event.SegmentMap, 1<<40+page, page)
	r.add(event.Alloc, 1<<40, 33*mib)
	r.add(event.OOM, 45*mib, 60*mib)
	x := reportOn(t, &r.Trace, RemedyOptions{Budget: time.Nanosecond}).Failures[0]
	if want := (ShortBy{Bytes: 13 * mib, Asked: 60 * mib, Available: 47 * mib, More: 15 * mib}); *x.ShortBy != want {
		t.Errorf("%+v, want %+v", *x.ShortBy, want)
	}
}

// What is left of the block that another was cut from, and too small to be used, is not free; blocks of other streams, pools
// and classes of sizes are free for others.
func TestLargestUsable(t *testing.T) {
	r := newRecorder()
	r.add(event.SegmentAlloc, 1<<40, 20*mib)
	r.add(event.Alloc, 1<<40, 8*mib)
	r.add(event.Alloc, 1<<40+8*mib, 11*mib+mib/2) // the last half MiB is its own
	r.free(1<<40, 8*mib)
	r.add(event.Alloc, 1<<40, 7*mib+mib/4) // so are three quarters of one
	r.add(event.SegmentAlloc, 2<<40, 2*mib)
	r.add(event.Alloc, 2<<40, mib/2)
	r.add(event.SegmentAlloc, 3<<40, 30*mib).Stream = 1
	r.add(event.SegmentAlloc, 4<<40, 40*mib).Pool = 1
	r.add(event.SegmentAlloc, 5<<40, 24*mib)
	r.add(event.Alloc, 5<<40, 18*mib)
	r.add(event.OOM, 9*mib, 30*mib)
	for request, want := range map[uint64]ShortBy{
		30 * mib:       {Bytes: 21 * mib, Asked: 30 * mib, Available: 9 * mib, More: 21 * mib},
		8 * mib:        {Bytes: 2 * mib, Asked: 8 * mib, Available: 6 * mib, More: 11 * mib},
		29*mib + mib/2: {Bytes: 21 * mib, Asked: 30 * mib, Available: 9 * mib, More: 21 * mib},
	} {
		r.Events[len(r.Events)-1].Size = request
		x := reportOn(t, &r.Trace, RemedyOptions{Budget: time.Nanosecond}).Failures[0]
		if x.ShortBy == nil || *x.ShortBy != want {
			t.Errorf("%d bytes: %+v, want %+v", request, x.ShortBy, want)
		}
	}
	r.Events[len(r.Events)-1].Size = 5 * mib // which 6 MiB that are free would have met: the record is not of this
	if x := reportOn(t, &r.Trace, RemedyOptions{Budget: time.Nanosecond}).Failures[0]; x.ShortBy != nil || strings.Contains(x.Sentence, "Short by") {
		t.Errorf("%s", x.Sentence)
	}
}

// Sizes that a sentence compares never read the same.
func TestSizesThatAreClose(t *testing.T) {
	s := &ShortBy{Bytes: 2 * mib, Asked: 2282 * mib, Available: 2280 * mib}
	if got, want := s.words(2282*mib, "nothing"), "Short by 2.00 MiB: 2.229 GiB asked for, 2.227 GiB available (nothing)"; got != want {
		t.Errorf("%s; want %s", got, want)
	}
	o := OOM{Source: "torch", Capacity: 22800 * mib, Reserved: 20520 * mib, DeviceFree: 2280 * mib, Live: 20000 * mib, Requested: 2281 * mib}
	o.explain(false)
	if why := o.Why[len(o.Why)-1]; !strings.Contains(why, units.Sprintf("%s, less than the %s asked", units.Size(2280*mib), units.Size(2281*mib))) || strings.Contains(why, "2.23 GiB, less than the 2.23") {
		t.Errorf("%q", why)
	}
}

// What the first line says to do: what was replayed, what follows from the figures, else what to allocate less of.
func TestFix(t *testing.T) {
	state := []Relief{{Class: "optimizer state", Advice: "less of it", Bytes: 5 * mib}}
	found := []Remedy{{Title: "set this"}, {Title: "or that"}}
	for want, x := range map[string]FailureReport{
		"set this":                               {Search: Search{Remedies: found, Advice: "figures."}},
		"figures.":                               {Search: Search{Remedies: found, Advice: "figures.", Caveat: "it may not hold"}},
		"set this, with care (see the remedies)": {Search: Search{Remedies: found, Caveat: "it may not hold"}},
		"allocate less, first of the optimizer state (5.00 MiB): less of it":                                     {Relief: state},
		"no setting that was tried meets it; allocate less, first of the optimizer state (5.00 MiB): less of it": {Relief: state, Search: Search{Tried: found}},
		"a smaller request, or more memory: with nothing else in use it would have failed too":                   {Relief: state, Need: 8 * mib, OOM: OOM{Capacity: 7 * mib}},
		"allocate less at this moment": {OOM: OOM{Live: mib}},
		"":                             {},
	} {
		if got := x.fix(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
