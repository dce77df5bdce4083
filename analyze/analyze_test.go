package analyze

import (
	"context"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/event"
	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/replay"
)

const mib = 1 << 20

// recorder builds a trace event by event, one every millisecond.
type recorder struct{ recording.Trace }

func newRecorder() *recorder {
	return &recorder{recording.Trace{Format: recording.FormatPyTorch, Streams: []uint64{0, 7}, Pools: []recording.PoolID{{}, {0, 1}},
		Frames: []recording.Frame{{File: "a.py", Line: 3, Func: "f"}, {File: "??", Func: "c10::alloc"}},
		Stacks: []recording.Stack{nil, {0, 1}, {1}}, FromStart: true}}
}

func (r *recorder) add(k event.Kind, addr, size uint64) *event.Event {
	r.Events = append(r.Events, event.Event{Kind: k, Addr: addr, Size: size,
		TimeUS: 1_000_000 + 1000*int64(len(r.Events))})
	return &r.Events[len(r.Events)-1]
}

func (r *recorder) free(addr, size uint64) {
	r.add(event.FreeRequested, addr, size)
	r.add(event.FreeCompleted, addr, size)
}

// smallTraces are recordings of real runs.
func smallTraces(t *testing.T) []*recording.Trace {
	t.Helper()
	var all []*recording.Trace
	for _, name := range []string{"gpt2_varlen", "detection", "multistream_prefetch"} {
		f, err := open.File("../recording/testdata/" + name + ".pickle.gz")
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, f.Traces...)
	}
	return all
}

// The sums of every table add up to the peak, which is the trace's own.
func TestInspectAddsUp(t *testing.T) {
	for _, tr := range smallTraces(t) {
		in := Inspect(tr)
		peak, at := tr.PeakLive()
		if in.PeakLive != peak || in.Peak.Live != peak || in.Peak.Event != at {
			t.Errorf("%s: peak of %d bytes at event %d, the trace says %d at %d", tr.Path, in.Peak.Live, in.Peak.Event, peak, at)
		}
		var sizes, stacks, streams, pools, blocks uint64
		for _, x := range in.Peak.Sizes {
			sizes += x.Bytes
		}
		for _, x := range append(slices.Clone(in.Peak.Holders), in.Peak.Others) {
			stacks += x.Bytes
		}
		for _, x := range in.Streams {
			streams += x.LiveBytes
		}
		for _, x := range in.Pools {
			pools += x.LiveBytes
		}
		covered, reserved := uint64(0), uint64(0)
		for _, g := range in.Peak.Map.Segments {
			reserved += g.Size
			end := g.Addr
			for _, b := range g.Blocks {
				if b.Addr < end || b.Addr+b.Size > g.Addr+g.Size {
					t.Fatalf("%s: block %#x of %d bytes overlaps its neighbour or leaves its segment", tr.Path, b.Addr, b.Size)
				}
				end = b.Addr + b.Size
				covered += b.Size
				blocks += b.Request
			}
		}
		for what, n := range map[string]uint64{"sizes": sizes, "stacks": stacks, "streams": streams, "pools": pools,
			"the address map": blocks} {
			if n != peak {
				t.Errorf("%s: %s add up to %d bytes, want %d", tr.Path, what, n, peak)
			}
		}
		if in.Peak.Reserved != reserved || in.Peak.FreeBytes != reserved-covered {
			t.Errorf("%s: %d bytes reserved and %d free, the map has %d and %d", tr.Path, in.Peak.Reserved, in.Peak.FreeBytes,
				reserved, reserved-covered)
		}
		if in.RecordedReserved < reserved || in.PeakAllocated < peak {
			t.Errorf("%s: peak reserved %d below %d, or peak allocated %d below live", tr.Path, in.RecordedReserved, reserved,
				in.PeakAllocated)
		}
	}
}

// The state is right at any event, not only at the peak: compared with the plain sum of what was allocated and freed.
func TestStateAgainstPlainSums(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		r := newRecorder()
		type block struct{ addr, size uint64 }
		var live []block
		var pages []block
		var wantLive, wantReserved []uint64
		for range 400 {
			switch n := rng.IntN(10); {
			case n < 4:
				b := block{uint64(len(r.Events)) << 30, rng.Uint64N(1<<20) + 1}
				r.add(event.Alloc, b.addr, b.size)
				live = append(live, b)
			case n < 7 && len(live) > 0:
				i := rng.IntN(len(live))
				r.free(live[i].addr, live[i].size)
				live = slices.Delete(live, i, i+1)
			case n < 9:
				// Pages of an expandable segment, each mapped at most once.
				p := block{1<<50 + rng.Uint64N(64)*2*mib, 2 * mib}
				if !slices.Contains(pages, p) {
					r.add(event.SegmentMap, p.addr, p.size)
					pages = append(pages, p)
				}
			case len(pages) > 0:
				i := rng.IntN(len(pages))
				r.add(event.SegmentUnmap, pages[i].addr, pages[i].size)
				pages = slices.Delete(pages, i, i+1)
			}
			for len(wantLive) < len(r.Events) {
				sum, held := uint64(0), uint64(len(pages))*2*mib
				for _, b := range live {
					sum += b.size
				}
				if e := r.Events[len(wantLive)]; e.Kind == event.FreeRequested {
					sum += e.Size // until it completes
				}
				wantLive, wantReserved = append(wantLive, sum), append(wantReserved, held)
			}
		}
		curves := RecordedCurves(&r.Trace)
		for _, i := range []int{0, 1, len(r.Events) / 3, len(r.Events) / 2, len(r.Events) - 1} {
			m := MomentAt(&r.Trace, i)
			if m.Live != wantLive[i] || m.Reserved != wantReserved[i] {
				t.Fatalf("seed %d, event %d: %d live and %d reserved, want %d and %d", seed, i, m.Live, m.Reserved, wantLive[i],
					wantReserved[i])
			}
			if got := valueAt(curves.Live, i); got != wantLive[i] {
				t.Fatalf("seed %d, event %d: the curve says %d live, want %d", seed, i, got, wantLive[i])
			}
			var segments uint64
			end := uint64(0)
			for _, g := range m.Map.Segments {
				if g.Addr < end {
					t.Fatalf("seed %d: segments overlap at %#x", seed, g.Addr)
				}
				if end = g.Addr + g.Size; !g.Inferred {
					segments += g.Size
				}
			}
			if segments != wantReserved[i] {
				t.Fatalf("seed %d, event %d: segments of %d bytes, want %d", seed, i, segments, wantReserved[i])
			}
		}
	}
}

func valueAt(c Curve, event int) uint64 {
	v := uint64(0)
	for i := range c.Event {
		if int(c.Event[i]) <= event {
			v = c.Value[i]
		}
	}
	return v
}

// Pages that touch are one segment; unmapping the middle makes two.
func TestExpandableSegmentsJoinAndSplit(t *testing.T) {
	r := newRecorder()
	for _, page := range []uint64{2, 0, 1} {
		r.add(event.SegmentMap, page*2*mib, 2*mib)
	}
	r.add(event.SegmentMap, 3*2*mib, 2*mib).Stream = 1 // another stream's: kept apart
	r.add(event.SegmentUnmap, 2*mib, 2*mib)
	shape := func(event int) (s []uint64) {
		for _, g := range MapAt(&r.Trace, event).Segments {
			s = append(s, g.Addr/mib, g.Size/mib)
		}
		return s
	}
	for event, want := range map[int][]uint64{1: {0, 2, 4, 2}, 2: {0, 6}, 3: {0, 6, 6, 2}, 4: {0, 2, 4, 2, 6, 2}} {
		if got := shape(event); !slices.Equal(got, want) {
			t.Errorf("after event %d: addresses and sizes in MiB %v, want %v", event, got, want)
		}
	}
}

// The record of an engine that maps a chunk twice: addresses lie in both ranges, the bytes count once.
func TestHandlesCountOnce(t *testing.T) {
	r := newRecorder()
	r.add(event.SegmentMap, 0, 2*mib).Handle = 9
	r.add(event.SegmentMap, 64*mib, 2*mib).Handle = 9
	r.add(event.SegmentUnmap, 0, 2*mib).Handle = 9
	r.add(event.SegmentUnmap, 64*mib, 2*mib).Handle = 9
	for event, want := range []struct{ segments, reserved uint64 }{{1, 2 * mib}, {2, 2 * mib}, {1, 2 * mib}, {0, 0}} {
		m := MomentAt(&r.Trace, event)
		if uint64(m.Segments) != want.segments || m.Reserved != want.reserved {
			t.Errorf("after event %d: %d bytes in %d segments, want %+v", event, m.Reserved, m.Segments, want)
		}
	}
}

func TestFreeRanges(t *testing.T) {
	r := newRecorder()
	r.add(event.SegmentAlloc, 0, 20*mib)
	r.add(event.SegmentAlloc, 64*mib, 4*mib) // wholly free
	r.add(event.Alloc, 9*mib, 1*mib)
	r.add(event.Alloc, 13*mib, 6*mib)
	m := MapAt(&r.Trace, 3)
	if m.FreeBytes != 17*mib || m.FreePieces != 4 || m.LargestFree != 9*mib {
		t.Errorf("%d bytes free in %d pieces, the largest %d; want 17, 4 and 9 MiB", m.FreeBytes, m.FreePieces, m.LargestFree)
	}
}

// Blocks outside every known segment are shown in ranges of their own, and called inferred.
func TestBlocksWithoutSegments(t *testing.T) {
	r := newRecorder()
	r.add(event.Alloc, 0, 1*mib)
	r.add(event.Alloc, 1*mib, 1*mib)
	r.add(event.Alloc, 64*mib, 1*mib)
	m := MapAt(&r.Trace, 2)
	if len(m.Segments) != 2 || !m.Segments[0].Inferred || m.Segments[0].Size != 2*mib || len(m.Segments[1].Blocks) != 1 ||
		m.FreeBytes != 0 {
		t.Errorf("got %+v", m)
	}
}

// What was live before the first event counts, and its free is seen.
func TestInitialBlocks(t *testing.T) {
	r := newRecorder()
	r.FromStart = false
	r.InitialSegments = []recording.Segment{{Addr: 0, Size: 20 * mib}}
	r.Initial = []recording.Block{{Addr: 0, Size: 4 * mib, Requested: 3 * mib, State: recording.Active, Stack: 1},
		{Addr: 8 * mib, Size: 2 * mib, Requested: 2 * mib, State: recording.PendingFree}}
	r.add(event.FreeCompleted, 8*mib, 2*mib)
	in := Inspect(&r.Trace)
	if in.Peak.Event != -1 || in.Peak.Live != 5*mib || in.Peak.Pending != 2*mib || in.Peak.Reserved != 20*mib {
		t.Errorf("peak %+v", in.Peak)
	}
	if m := MomentAt(&r.Trace, 0); m.Live != 3*mib || m.Blocks != 1 {
		t.Errorf("after the free: %+v", m)
	}
}

// Downsample keeps every peak and valley of its stretches at its own event, and stays within its bound.
func TestDownsampleKeepsExtremes(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	var c Curve
	for i := range 50_000 {
		c.add(i*3, rng.Uint64N(1000))
	}
	c.Value[31_234], c.Value[44_000] = 5000, 6000
	sampled := c.Downsample(1000)
	if len(sampled.Value) > 1000 || !slices.IsSorted(sampled.Event) {
		t.Errorf("%d points", len(sampled.Value))
	}
	for _, i := range []int{31_234, 44_000, 0, len(c.Value) - 1} {
		k := slices.Index(sampled.Event, c.Event[i])
		if k < 0 || sampled.Value[k] != c.Value[i] {
			t.Errorf("the point at event %d is lost", c.Event[i])
		}
	}
	wantPeak, wantAt := c.Peak()
	if peak, at := sampled.Peak(); peak != wantPeak || at != wantAt {
		t.Errorf("peak %d at %d, want %d at %d", peak, at, wantPeak, wantAt)
	}
	if short := c.Downsample(1 << 20); len(short.Value) != len(c.Value) {
		t.Errorf("%d points, want all %d", len(short.Value), len(c.Value))
	}
}

func TestExplainRecorded(t *testing.T) {
	for _, c := range []struct {
		name             string
		request, devFree uint64
		gap              uint64 // kept free between two blocks of 4 MiB
		cause            string
		say              string
	}{
		{"more than there is", 40 * mib, 2 * mib, 4 * mib, CauseCapacity, "48.00 MiB, 18.00 MiB over the limit of 30.00 MiB"},
		{"in pieces", 14 * mib, 1 * mib, 8 * mib, CauseFragmentation, "in 2 pieces, the largest of 12.00 MiB"},
		{"in one piece, out of reach", 10 * mib, 1 * mib, 8 * mib, CauseCached, "free in one piece"},
	} {
		r := newRecorder()
		r.add(event.SegmentAlloc, 0, 28*mib)
		r.add(event.Alloc, 0, 4*mib)
		r.add(event.Alloc, 4*mib+c.gap, 4*mib)
		r.add(event.OOM, c.devFree, c.request)
		got := ExplainRecorded(&r.Trace)
		if len(got) != 1 {
			t.Fatalf("%s: %d failures, want 1", c.name, len(got))
		}
		o := got[0]
		if o.Cause != c.cause || !strings.Contains(strings.Join(o.Why, " "), c.say) {
			t.Errorf("%s: %s, want %s and %q:\n%s", c.name, o.Cause, c.cause, c.say, strings.Join(o.Why, "\n"))
		}
		if o.Live != 8*mib || o.Reserved != 28*mib || o.FreeInside != 20*mib || o.Requested != c.request {
			t.Errorf("%s: %+v", c.name, o)
		}
	}
}

func TestFrameNames(t *testing.T) {
	r := newRecorder()
	if got := FrameNames(&r.Trace, 1); !slices.Equal(got, []string{"f a.py:3", "c10::alloc"}) {
		t.Errorf("got %q", got)
	}
	if got := FrameNames(&r.Trace, 99); got != nil {
		t.Errorf("a stack that is not there has frames %q", got)
	}
}

// A smallest limit suffices in nearly all draws, as larger ones do, and a smaller one does not.
func TestFloorsHold(t *testing.T) {
	if testing.Short() {
		t.Skip("TestAnswersAgree makes the same searches")
	}
	for _, tr := range smallTraces(t) {
		tn, err := Tune(context.Background(), tr, TuneOptions{GPULag: 20 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		if len(tn.Floors) < 2 || tn.Floors[0].Who != "own" {
			t.Fatalf("%s: floors %+v", tr.Path, tn.Floors)
		}
		s, _ := searchOf(context.Background(), tr, TuneOptions{GPULag: 20 * time.Millisecond}, 0, -1)
		for _, f := range tn.Floors {
			spec := replay.Spec{Name: f.Policy}
			if f.Who == "best" || f.Who == "least" {
				spec = torchSpec(f.AllocConf)
			}
			for _, part := range []uint64{0, 3, 10, 50} {
				odds, err := s.odds(spec, f.Capacity+f.Capacity*part/100)
				if err != nil {
					t.Fatal(err)
				}
				if !odds.Sure() || part == 0 && odds != f.Odds {
					t.Errorf("%s: %s: survives %s with %d %% over %d bytes", tr.Path, f.Who, odds, part, f.Capacity)
				}
			}
			if f.Below != nil && (f.Below.Capacity >= f.Capacity) {
				t.Errorf("%s: %s: %s survive at %d, below %d", tr.Path, f.Who, f.Below.Odds, f.Below.Capacity, f.Capacity)
			}
			if f.Capacity < tn.PeakLive || f.Capacity%FloorStep != 0 {
				t.Errorf("%s: %s: %d bytes with a peak of %d live", tr.Path, f.Who, f.Capacity, tn.PeakLive)
			}
		}
	}
}

// What Tune recommends does what it says when it is replayed, and nothing on the frontier is beaten.
func TestTuneRecommendsWhatHolds(t *testing.T) {
	tr := smallTraces(t)[2]
	calls, last, half, whole, ended := 0, 0, 0, 0, 0
	tn, err := Tune(context.Background(), tr, TuneOptions{Progress: func(done, total int) {
		calls++
		if done < last || done > total {
			t.Errorf("progress went from %d to %d of %d", last, done, total)
		}
		if last, whole = done, total; done > total/2 && done < total {
			half++
		}
		if done == total {
			ended++
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	if tn.Best == nil || !tn.Best.Holds || tn.Best.Result.PeakReserved > tn.Own.Result.PeakReserved || calls == 0 {
		t.Fatalf("best %+v, own %+v, %d calls of progress", tn.Best, tn.Own, calls)
	}
	if last != whole || half < 10 || ended != 1 {
		t.Errorf("progress ended at %d of %d, and came %d times in the second half and %d times at the end", last, whole, half, ended)
	}
	again, err := replay.Run(tr, torchSpec(tn.Best.AllocConf), replay.Options{})
	if err != nil || again.PeakReserved != tn.Best.Result.PeakReserved {
		t.Errorf("replayed alone, %q reserves %d, %v; want %d", tn.Best.AllocConf, again.PeakReserved, err,
			tn.Best.Result.PeakReserved)
	}
	frontier := 0
	for i := range tn.Choices {
		a := &tn.Choices[i]
		if a.Frontier {
			frontier++
		}
		for k := range tn.Choices {
			b := &tn.Choices[k]
			if a.Frontier && b.Result.PeakReserved < a.Result.PeakReserved && b.Result.DriverTimeUS < a.Result.DriverTimeUS &&
				b.Syncs() <= a.Syncs() && b.survives() {
				t.Errorf("%q is on the frontier, but %q beats it", a.AllocConf, b.AllocConf)
			}
		}
	}
	if frontier == 0 {
		t.Error("nothing is on the frontier")
	}
}

func TestTuneStopsWhenAsked(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	tr := smallTraces(t)[2]
	if _, err := Tune(ctx, tr, TuneOptions{}); err == nil {
		t.Error("no error from a search that was cancelled")
	}
}

// choice is a setting and its results for the tests of the rules.
func choice(conf string, reserved uint64, us float64, syncs int64, holds bool) *Choice {
	return &Choice{AllocConf: conf, Verified: true, Holds: holds, judged: true, Result: &replay.Result{PeakReserved: reserved, DriverTimeUS: us,
		StreamSyncs: syncs, Completed: holds, Odds: &replay.Odds{Replays: 32, PeakMost: reserved}}}
}

func TestFrontier(t *testing.T) {
	choices := []*Choice{
		choice("small", 10, 100, 0, true),
		choice("fast", 20, 50, 0, true),
		choice("beaten by small", 11, 100, 0, true),
		choice("beaten by fast", 20, 50, 1, true),
		choice("beaten by fast, which is simpler:1", 20, 50, 0, true),
		choice("dead", 1, 1, 0, false),
	}
	markFrontier(choices)
	for _, c := range choices {
		if want := !strings.HasPrefix(c.AllocConf, "beaten") && c.AllocConf != "dead"; c.Frontier != want {
			t.Errorf("%s: on the frontier is %v, want %v", c.AllocConf, c.Frontier, want)
		}
	}
}

func TestBestChoice(t *testing.T) {
	own := func(holds bool) *Choice { return choice("", 4000, 1000, 0, holds) }
	unverified := choice(asyncConf, 500, 10, 0, true)
	unverified.Verified = false
	// The floor of the run's own settings is 1000, of a choice what it reserves, less 1000.
	for _, c := range []struct {
		name    string
		own     *Choice
		choices []*Choice
		want    string // "none" is no choice
	}{
		{"least reserved", own(true), []*Choice{choice("a:1", 1500, 9000, 0, true), choice("b:1", 1900, 100, 0, true)}, "a:1"},
		{"not at any price", own(true), []*Choice{choice("a:1", 1500, 16000, 0, true), choice("b:1", 1900, 100, 0, true)}, "b:1"},
		{"unless all are dear", own(false), []*Choice{choice("a:1", 1500, 16000, 0, true)}, "a:1"},
		{"fewest settings within 1 %", own(true), []*Choice{choice("a:1,b:1", 1501, 100, 0, true), choice("b:1", 1519, 100, 0, true)}, "b:1"},
		{"no more than 1 %", own(true), []*Choice{choice("a:1,b:1", 1501, 100, 0, true), choice("b:1", 1521, 100, 0, true)}, "a:1,b:1"},
		{"no unverified model", own(true), []*Choice{unverified}, ""},
		{"nothing that dies", own(false), []*Choice{choice("a:1", 1500, 100, 0, false)}, "none"},
		{"nothing that needs a larger limit", own(true), []*Choice{choice("a:1", 2500, 100, 0, true)}, ""},
		{"unless the run's own do not hold", own(false), []*Choice{choice("a:1", 2500, 100, 0, true)}, "a:1"},
	} {
		s := &search{capacity: 2000, costUS: 15_000, plan: &replay.Plan{}, known: map[string]*Choice{}}
		found := []Floor{{Capacity: 1000}}
		for _, x := range append(c.choices, c.own) {
			s.known[x.AllocConf] = x
		}
		var rivals []*Choice
		for _, x := range s.ranked() {
			if x != c.own && x.Verified {
				rivals = append(rivals, x)
				found = append(found, Floor{Capacity: x.Result.PeakReserved - 1000})
			}
		}
		tn := Tuning{Own: c.own, Capacity: 2000}
		tn.pick(s, rivals, found)
		got := "none"
		if tn.Best != nil {
			got = tn.Best.AllocConf
		}
		if got != c.want || tn.Why == "" {
			t.Errorf("%s: %q, want %q (%s)", c.name, got, c.want, tn.Why)
		}
	}
}

// Every setting that is tried is one that the model knows, and says what it breaks.
func TestTriedSettings(t *testing.T) {
	for _, k := range tried {
		for _, v := range k.values {
			conf := k.key + ":" + v
			if _, err := replay.ParseTorchConf(conf); err != nil {
				t.Error(err)
			}
			if len(Breaks(conf)) == 0 {
				t.Errorf("%s breaks nothing, it seems", conf)
			}
			if canonical(conf) == "" {
				t.Errorf("%s is PyTorch's default", conf)
			}
		}
	}
	if got := Breaks(""); len(got) != 0 {
		t.Errorf("the defaults break %q", got)
	}
	if got := Breaks("max_split_size_mb:32,expandable_segments:True"); len(got) != 4 {
		t.Errorf("%d lines for two settings, want 4: %q", len(got), got)
	}
}

// A phase of more replays than were expected of it does not end before they do.
func TestPhasePart(t *testing.T) {
	last := -1.0
	for done := range 400 {
		part := phasePart(done, 100)
		if part <= last || part >= 1 || done <= 80 && part != float64(done)/100 {
			t.Fatalf("%d of about 100 replays are %v of the phase, after %v", done, part, last)
		}
		last = part
	}
}
