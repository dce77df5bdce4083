package replay

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

// randomTrace is a run without an allocator: requests and frees over streams and pools, at addresses that only tell
// blocks apart.
func randomTrace(seed uint64, steps int, private bool) *recording.Trace {
	rnd := rand.New(rand.NewPCG(seed, 2))
	t := &recording.Trace{Format: recording.FormatPyTorch, Streams: []uint64{0, 0x500, 0x400}, Pools: []recording.PoolID{{}, {0, 1}}, FromStart: true}
	var live []event.Event
	for n := range steps {
		us := int64(n)
		if len(live) == 0 || rnd.IntN(100) < 51 {
			size := uint64(1) << rnd.IntN(25)
			size += rnd.Uint64N(size)
			e := event.Event{Kind: event.Alloc, Addr: uint64(n+1) << 32, Size: size, Stream: uint32(rnd.IntN(3)), TimeUS: us}
			if private {
				e.Pool = uint32(rnd.IntN(2))
			}
			live = append(live, e)
			t.Events = append(t.Events, e)
			continue
		}
		at := rnd.IntN(len(live))
		e := live[at]
		live[at] = live[len(live)-1]
		live = live[:len(live)-1]
		e.TimeUS = us
		e.Kind = event.FreeRequested
		t.Events = append(t.Events, e)
		e.Kind = event.FreeCompleted
		t.Events = append(t.Events, e)
	}
	return t
}

// TestRecordingIsFaithful records the torch model on random requests and holds a second run against the recording.
func TestRecordingIsFaithful(t *testing.T) {
	for _, conf := range []string{"default", "expandable_segments:True", "max_split_size_mb:32", "garbage_collection_threshold:0.5"} {
		for seed := range uint64(4) {
			capacity := uint64(0)
			if seed%2 == 1 {
				capacity = 300 * mib
			}
			name := fmt.Sprintf("%s/%d", conf, seed)
			rec := &Recording{}
			_, err := Run(randomTrace(seed, 3000, true), Spec{"torch", conf, true}, Options{Capacity: capacity, Record: rec})
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			tr := rec.Trace()
			tr.Settings = settingsOf(t, conf)
			r, err := Run(tr, Spec{Name: "torch"}, Options{Capacity: capacity, Verify: true})
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if !r.Verify.OK() {
				t.Errorf("%s: %+v: %s", name, *r.Verify, *r.Verify.FirstMismatch)
			}
			var size uint64
			for _, s := range tr.Final {
				size += s.Size
			}
			if size == 0 || size > r.PeakReserved {
				t.Errorf("%s: final segments hold %d bytes", name, size)
			}
		}
	}
}

func settingsOf(t *testing.T, conf string) recording.Settings {
	c, err := ParseTorchConf(conf)
	if err != nil {
		t.Fatal(err)
	}
	s := recording.Settings{Known: true, Conf: c.String(), Expandable: c.Expandable, MaxSplitSize: -1, GCThreshold: c.GCThreshold}
	if c.MaxSplit != noMaxSplit {
		s.MaxSplitSize = int64(c.MaxSplit)
	}
	return s
}

// TestReleasesAreInferred records runs in which the program empties the cache and ends a pool, takes the pool from the
// file, and holds a second run against it.
func TestReleasesAreInferred(t *testing.T) {
	for _, hide := range []bool{false, true} {
		for seed := range uint64(4) {
			name := fmt.Sprintf("hide=%v/%d", hide, seed)
			base := randomTrace(seed, 2000, true)
			// All blocks of pool 1 are free from event 1200 on; then it ends.
			const end = 1200
			var events []event.Event
			live := map[uint64]event.Event{}
			for i, e := range base.Events {
				if i == end {
					for _, l := range live {
						for _, k := range []event.Kind{event.FreeRequested, event.FreeCompleted} {
							l.Kind = k
							events = append(events, l)
						}
					}
				}
				if i >= end && e.Pool == 1 {
					continue
				}
				events = append(events, e)
				if e.Pool == 1 && e.Kind == event.Alloc {
					live[e.Addr] = e
				} else {
					delete(live, e.Addr)
				}
			}
			base.Events = events
			p := NewPlan(base)
			q := *p
			q.Releases = []Release{{Event: 600}, {Event: end + 2*len(live), Pool: 1}}
			rec := &Recording{}
			if _, err := q.Run(Spec{"torch", "default", true}, Options{Record: rec}); err != nil {
				t.Fatal(err)
			}
			tr := rec.Trace()
			tr.Settings = settingsOf(t, "default")
			if hide {
				for i := range tr.Events {
					tr.Events[i].Pool = 0
				}
			}
			r, err := Run(tr, Spec{Name: "torch"}, Options{Verify: true})
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if !r.Verify.OK() {
				t.Errorf("%s: %+v: %s", name, *r.Verify, *r.Verify.FirstMismatch)
			}
			notes := strings.Join(r.Notes, "\n")
			// With the pool hidden, a release of segments of one kind alone may be taken for the other.
			if !hide && (!strings.Contains(notes, "emptied the cache") || !strings.Contains(notes, "ended")) || len(r.Notes) != 2 {
				t.Errorf("%s: notes %q", name, notes)
			}
		}
	}
}

// TestShortageWaitsForStreams is a request that meets a shortage while another stream still uses a block: PyTorch waits
// for the stream and gives the block's segment back, though it would have fit.
func TestShortageWaitsForStreams(t *testing.T) {
	const a, b, c = 1 << 32, 2 << 32, 3 << 32
	tr := &recording.Trace{Format: recording.FormatPyTorch, Streams: []uint64{0}, FromStart: true, Events: []event.Event{
		{Kind: event.SegmentAlloc, Addr: a, Size: 20 * mib},
		{Kind: event.Alloc, Addr: a, Size: 20 * mib},
		{Kind: event.SegmentAlloc, Addr: b, Size: 40 * mib},
		{Kind: event.Alloc, Addr: b, Size: 40 * mib},
		{Kind: event.FreeRequested, Addr: a, Size: 20 * mib},
		{Kind: event.FreeRequested, Addr: b, Size: 40 * mib},
		{Kind: event.FreeCompleted, Addr: b, Size: 40 * mib},
		{Kind: event.Alloc, Addr: b, Size: 40 * mib},
		{Kind: event.FreeCompleted, Addr: a, Size: 20 * mib},
		{Kind: event.SegmentFree, Addr: a, Size: 20 * mib},
		{Kind: event.SegmentAlloc, Addr: c, Size: 18 * mib},
		{Kind: event.Alloc, Addr: c, Size: 18 * mib},
	}}
	r, err := Run(tr, Spec{Name: "torch"}, Options{Capacity: 64 * mib, Verify: true})
	if err != nil {
		t.Fatal(err)
	}
	if !r.Verify.OK() || r.Retries != 1 || r.StreamSyncs != 1 {
		t.Errorf("%+v, %d retries, %d syncs; want agreement, 1, 1", *r.Verify, r.Retries, r.StreamSyncs)
	}
}

// TestPlanIsShared runs policies over one plan at once.
func TestPlanIsShared(t *testing.T) {
	p := NewPlan(randomTrace(1, 3000, true))
	want := map[string]uint64{}
	for _, s := range modelled {
		spec, _ := ParseSpec(s)
		r, err := p.Run(spec, Options{})
		if err != nil {
			t.Fatal(err)
		}
		want[s] = r.PeakReserved
	}
	for _, s := range modelled {
		t.Run(s, func(t *testing.T) {
			t.Parallel()
			spec, _ := ParseSpec(s)
			r, err := p.Run(spec, Options{})
			if err != nil || r.PeakReserved != want[s] {
				t.Errorf("peak reserved %d, %v; alone %d", r.PeakReserved, err, want[s])
			}
		})
	}
}
