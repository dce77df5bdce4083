package replay

import (
	"encoding/json"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
)

func TestPlanPairsFreesWithAllocations(t *testing.T) {
	p := NewPlan(&recording.Trace{
		Initial: []recording.Block{{Addr: 0x100, Size: 512, Requested: 300}},
		Events: []event.Event{
			{Kind: event.Alloc, Addr: 0x200, Size: 700},
			{Kind: event.SegmentAlloc, Addr: 0x200, Size: 2 * mib},
			{Kind: event.FreeRequested, Addr: 0x100},
			{Kind: event.FreeCompleted, Addr: 0x100},
			{Kind: event.Alloc, Addr: 0x100, Size: 50},
			{Kind: event.FreeCompleted, Addr: 0x999},
			{Kind: event.OOM, Addr: 5, Size: 1024},
			{Kind: event.Alloc, Addr: 0x200, Size: 60}, // its first block was never freed
			{Kind: event.Alloc, Addr: 0, Size: 0},
			{Kind: event.FreeCompleted, Addr: 0x200},
		},
	})
	if want := []int32{1, -1, 0, 0, 2, -1, 3, 4, -1, 4}; !slices.Equal(p.Block, want) {
		t.Errorf("blocks %v, want %v", p.Block, want)
	}
	if p.Blocks != 5 || p.PeakLive != 1000 {
		t.Errorf("%d blocks, peak live %d; want 5, 1000", p.Blocks, p.PeakLive)
	}
	if len(p.Notes) != 2 {
		t.Errorf("notes %q, want one on the free and one on the block that is never freed", p.Notes)
	}
}

func TestAddrTable(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 3))
	table, want := newAddrTable(1), map[uint64]int32{}
	for n := range int32(200000) {
		addr := (1 + rnd.Uint64N(3000)) * 512
		switch rnd.IntN(3) {
		case 0:
			old, ok := table.put(addr, n)
			if w, wok := want[addr]; ok != wok || ok && old != w {
				t.Fatalf("step %d: put returns %d %v, want %d %v", n, old, ok, w, wok)
			}
			want[addr] = n
		case 1:
			got, ok := table.take(addr)
			if w, wok := want[addr]; ok != wok || ok && got != w {
				t.Fatalf("step %d: take returns %d %v, want %d %v", n, got, ok, w, wok)
			}
			delete(want, addr)
		default:
			got, ok := table.get(addr)
			if w, wok := want[addr]; ok != wok || ok && got != w {
				t.Fatalf("step %d: get returns %d %v, want %d %v", n, got, ok, w, wok)
			}
		}
	}
}

func TestCapacityFromTrace(t *testing.T) {
	seg := func(k event.Kind, size uint64) event.Event { return event.Event{Kind: k, Size: size} }
	oom := func(size, free uint64) event.Event { return event.Event{Kind: event.OOM, Size: size, Addr: free} }
	for name, c := range map[string]struct {
		events []event.Event
		want   uint64
		from   string
	}{
		"no oom":        {[]event.Event{seg(event.SegmentAlloc, 100)}, 0, "unlimited"},
		"device full":   {[]event.Event{seg(event.SegmentAlloc, 100), oom(50, 20)}, 120, "oom at event 1: reserved then and free on the device"},
		"process limit": {[]event.Event{seg(event.SegmentAlloc, 100), oom(50, 1000)}, 100, "oom at event 1: reserved then"},
		"released before": {[]event.Event{seg(event.SegmentAlloc, 100), seg(event.SegmentFree, 60), oom(70, 1000)}, 100,
			"oom at event 2: peak reserved, the least that the run was allowed"},
	} {
		if got, from := CapacityFromTrace(&recording.Trace{Events: c.events}); got != c.want || from != c.from {
			t.Errorf("%s: %d, %q; want %d, %q", name, got, from, c.want, c.from)
		}
	}
}

func TestParseSpec(t *testing.T) {
	for s, want := range map[string]Spec{
		"torch":         {"torch", "", false},
		"torch:default": {"torch", "default", true},
		"torch:":        {"torch", "", true},
		"torch:max_split_size_mb:40,backend:native":   {"torch", "max_split_size_mb:40,backend:native", true},
		"torch:roundup_power2_divisions:[64:8,>:128]": {"torch", "roundup_power2_divisions:[64:8,>:128]", true},
		"rmm-pool:initial_pool_size:1GiB":             {"rmm-pool", "initial_pool_size:1GiB", true},
	} {
		if got, err := ParseSpec(s); err != nil || got != want || got.String() != s {
			t.Errorf("ParseSpec(%q) = %+v, %v; want %+v", s, got, err, want)
		}
	}
	if _, err := ParseSpec("tourch"); err == nil || !strings.Contains(err.Error(), "torch, torch-async") {
		t.Errorf("ParseSpec(tourch): %v; want the choices", err)
	}
}

// TestTorchConfRoundTrip: what String writes, ParseTorchConf reads back as the same settings.
func TestTorchConfRoundTrip(t *testing.T) {
	for _, s := range []string{"", "default", "expandable_segments:True", "max_split_size_mb:128,garbage_collection_threshold:0.8",
		"roundup_power2_divisions:8", "roundup_power2_divisions:[256:1,512:2,>:8]", "roundup_power2_divisions:[1:2,4:0,32768:16]",
		"large_segment_size_mb:12,max_non_split_rounding_mb:64", "release_lock_on_cudamalloc:True,pinned_num_register_threads:8",
		" expandable_segments : True , per_process_memory_fraction:0.25"} {
		c, err := ParseTorchConf(s)
		if err != nil {
			t.Errorf("%q: %v", s, err)
			continue
		}
		back, err := ParseTorchConf(c.String())
		if err != nil || back.String() != c.String() || back.Roundup != c.Roundup {
			t.Errorf("%q: written %q, read back %+v, %v", s, c.String(), back, err)
		}
	}
}

func FuzzParseTorchConf(f *testing.F) {
	f.Add("expandable_segments:True,roundup_power2_divisions:[64:8,>:4]")
	f.Add("max_split_size_mb:18446744073709551615")
	f.Add("roundup_power2_divisions:[]")
	f.Fuzz(func(t *testing.T, s string) {
		c, err := ParseTorchConf(s)
		if err != nil {
			return
		}
		back, err := ParseTorchConf(c.String())
		if err != nil || back.Roundup != c.Roundup || back.MaxSplit != c.MaxSplit {
			t.Fatalf("%q: written %q, read back %+v, %v", s, c.String(), back, err)
		}
		for _, size := range []uint64{1, 511, 513, 1<<20 + 1, 3 << 30} {
			if r := c.BlockSize(size); r < size || r%minBlock != 0 || c.SegmentSize(r) < r {
				t.Fatalf("%q: %d bytes are rounded to %d in a segment of %d", s, size, r, c.SegmentSize(r))
			}
		}
	})
}

// TestJSON pins the names that the command promises.
func TestJSON(t *testing.T) {
	f, err := open.File(filepath.Join("..", "recording", "testdata", "multistream_prefetch.pickle.gz"))
	if err != nil {
		t.Fatal(err)
	}
	rep, err := Replay(f.Traces[0], []Spec{{Name: "torch", Conf: "default", HasConf: true}}, Options{Capacity: 4 << 30, Verify: true, Samples: 100})
	if err != nil {
		t.Fatal(err)
	}
	r := rep.Results[0]
	if r.Completed || r.FailedEvent == nil || r.OOMs != 1 || r.PeakReserved > 4<<30 || r.CapacityFrom != "given" {
		t.Errorf("%+v: want a run that failed under 4 GiB", r)
	}
	if rep.Verify == nil || rep.Verify.OK() {
		t.Errorf("verify %+v: a run that failed cannot agree with the record", rep.Verify)
	}
	if n := len(r.Curve.TimeUS); n < 20 || n > 200 || len(r.Curve.Reserved) != n || slices.Max(r.Curve.Live) != r.PeakLive {
		t.Errorf("a curve of %d points with a peak of %d, want 20 to 200, %d", n, slices.Max(r.Curve.Live), r.PeakLive)
	}
	raw, err := json.Marshal(Reports{Traces: []*Report{rep}})
	if err != nil {
		t.Fatal(err)
	}
	var v struct{ Traces []map[string]any }
	if err := json.Unmarshal(raw, &v); err != nil {
		t.Fatal(err)
	}
	keys := func(m any) []string {
		var out []string
		for k := range m.(map[string]any) {
			out = append(out, k)
		}
		slices.Sort(out)
		return out
	}
	tr := v.Traces[0]
	for _, c := range []struct {
		got  any
		want string
	}{
		{tr, "device duration_us events format notes path peak_live_bytes recorded results streams verify warning"},
		{tr["recorded"], "ooms peak_reserved_bytes segment_events settings"},
		{tr["results"].([]any)[0], "capacity_bytes capacity_from completed conf device_syncs driver_calls driver_time_least_us driver_time_us failed_event mean_reserved_bytes ns_per_event odds ooms ooms_avoided peak_live_bytes peak_reserved_bytes policy ratio request_us retries stream_syncs"},
		{tr["verify"], "first_mismatch matched placements placements_matched recorded"},
	} {
		if diff := cmp.Diff(strings.Fields(c.want), keys(c.got)); diff != "" {
			t.Errorf("JSON keys (-want +got):\n%s", diff)
		}
	}
}

// TestRecordedOOM replays a recorded out-of-memory: where it failed it fails, with more memory it is avoided and its
// memory is given back at once.
func TestRecordedOOM(t *testing.T) {
	tr := &recording.Trace{Format: recording.FormatPyTorch, Streams: []uint64{0}, FromStart: true, Events: []event.Event{
		{Kind: event.SegmentAlloc, Addr: 1 << 32, Size: 40 * mib},
		{Kind: event.Alloc, Addr: 1 << 32, Size: 40 * mib},
		{Kind: event.OOM, Addr: 1 << 40, Size: 50 * mib},
		{Kind: event.SegmentAlloc, Addr: 2 << 32, Size: 20 * mib},
		{Kind: event.Alloc, Addr: 2 << 32, Size: 20 * mib},
	}}
	for _, policy := range []string{"torch:default", "torch:expandable_segments:True", "rmm-pool", "direct"} {
		spec, _ := ParseSpec(policy)
		for capacity, want := range map[uint64]Result{
			0:         {Completed: true, OOMs: 1}, // 60 MiB from the trace, the most it held
			100 * mib: {Completed: true, OOMsAvoided: 1},
		} {
			r, err := Run(tr, spec, Options{Capacity: capacity})
			if err != nil {
				t.Fatal(err)
			}
			if r.Completed != want.Completed || r.OOMs != want.OOMs || r.OOMsAvoided != want.OOMsAvoided || r.PeakLive != 60*mib {
				t.Errorf("%s at %d: %+v; want %+v", policy, capacity, r, want)
			}
		}
	}
}

// TestSyncWait: freeing waits for the GPU, and the wait grows with the lag.
func TestSyncWait(t *testing.T) {
	var events []event.Event
	for i := range 10 {
		us := int64(i) * 50_000
		events = append(events, event.Event{Kind: event.Alloc, Addr: uint64(i+1) << 32, Size: 5 * mib, TimeUS: us},
			event.Event{Kind: event.FreeCompleted, Addr: uint64(i+1) << 32, Size: 5 * mib, TimeUS: us})
	}
	tr := &recording.Trace{Events: events}
	for lag, want := range map[time.Duration]float64{0: 0, 20 * time.Millisecond: 9 * 20_000, 500 * time.Millisecond: 9 * 50_000} {
		r, err := Run(tr, Spec{Name: "direct"}, Options{GPULag: lag})
		if err != nil {
			t.Fatal(err)
		}
		if r.SyncWaitUS != want || r.DeviceSyncs != 10 {
			t.Errorf("lag %v: %d syncs wait %v us, want 10, %v", lag, r.DeviceSyncs, r.SyncWaitUS, want)
		}
	}
}

func BenchmarkTorch(b *testing.B) {
	f, err := open.File(filepath.Join("..", "recording", "testdata", "gpt2_varlen.pickle.gz"))
	if err != nil {
		b.Fatal(err)
	}
	t := f.Traces[0]
	b.Run("plan", func(b *testing.B) {
		for b.Loop() {
			NewPlan(t)
		}
		b.ReportMetric(float64(b.N*len(t.Events))/b.Elapsed().Seconds()/1e6, "Mevents/s")
	})
	p := NewPlan(t)
	for _, s := range []string{"torch", "torch:expandable_segments:True", "torch-async", "rmm-pool", "direct"} {
		spec, _ := ParseSpec(s)
		b.Run(s, func(b *testing.B) {
			for b.Loop() {
				if _, err := p.Run(spec, Options{}); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.N*len(t.Events))/b.Elapsed().Seconds()/1e6, "Mevents/s")
		})
	}
}
