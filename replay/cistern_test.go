package replay

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/event"
	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/recording/pytorch"
)

// lags are the delays of the GPU behind the host at which Cistern must meet its figures.
var lags = []time.Duration{0, 20 * time.Millisecond, 500 * time.Millisecond}

// TestCisternTargets holds policy cistern against its figures on the large recordings: with unlimited memory, peak
// reserved at most 1.03 of peak live for each and 1.02 on average, no synchronisation, driver time at most 1.8 % of
// the run; within 1.02 of peak live every run completes, within 0.99 none does.
func TestCisternTargets(t *testing.T) {
	dir := os.Getenv("CISTERN_TRACES")
	if dir == "" {
		t.Skip("CISTERN_TRACES does not name the folder of the large recordings")
	}
	names := []string{"gpt2_varlen", "generate_serving", "detection", "multistream_prefetch"}
	sum := map[time.Duration]float64{}
	for _, name := range names {
		f, err := open.File(filepath.Join(dir, name+".pickle.gz"))
		if err != nil {
			t.Fatal(err)
		}
		tr := f.Traces[0]
		plan := NewPlan(tr)
		for _, lag := range lags {
			r, err := plan.Run(Spec{Name: "cistern"}, Options{GPULag: lag})
			if err != nil {
				t.Fatal(err)
			}
			share := r.DriverTimeUS / float64(tr.Duration())
			t.Logf("%-22s lag %-6v ratio %.4f, driver time %.2f %%, %.0f ns per event", name, lag, r.Ratio, 100*share, r.NSPerEvent)
			if !r.Completed || r.Ratio > 1.03 || share > 0.018 || r.StreamSyncs != 0 || r.DeviceSyncs != 0 || r.Retries != 0 {
				t.Errorf("%s at lag %v: completed %v, ratio %.4f, driver time %.2f %%, %d and %d syncs, %d retries", name, lag,
					r.Completed, r.Ratio, 100*share, r.StreamSyncs, r.DeviceSyncs, r.Retries)
			}
			sum[lag] += r.Ratio
			for _, limit := range []float64{1.02, 0.99} {
				r, err := plan.Run(Spec{Name: "cistern"}, Options{GPULag: lag, Capacity: uint64(limit * float64(plan.PeakLive))})
				if err != nil {
					t.Fatal(err)
				}
				if r.Completed != (limit > 1) {
					t.Errorf("%s at lag %v within %.2f of peak live: completed %v", name, lag, limit, r.Completed)
				}
				if r.Completed && r.Retries != 0 { // one pool: there is no other to borrow from
					t.Errorf("%s at lag %v within %.2f of peak live: %d retries", name, lag, limit, r.Retries)
				}
				if r.PeakReserved > r.Capacity {
					t.Errorf("%s at lag %v: %d bytes reserved of %d allowed", name, lag, r.PeakReserved, r.Capacity)
				}
			}
		}
	}
	for lag, s := range sum {
		if mean := s / float64(len(names)); mean > 1.02 {
			t.Errorf("mean ratio %.4f at lag %v", mean, lag)
		}
	}
}

// small reads a committed recording.
func small(t *testing.T, name string) *recording.Trace {
	t.Helper()
	f, err := open.File(filepath.Join("..", "recording", "testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return f.Traces[0]
}

// TestCisternSmall: the committed recordings under every kind of settings, with the simulator checking order.
// TestCisternUpstream: what is recorded of a program over a library is replayed without that library, from whole segments.
func TestCisternUpstream(t *testing.T) {
	f, err := open.File("../recording/testdata/multistream_prefetch.pickle.gz")
	if err != nil {
		t.Fatal(err)
	}
	plan := NewPlan(f.Traces[0])
	const conf = "upstream:external:library=/nowhere.so;alloc=a;free=b"
	got, err := plan.Run(Spec{Name: "cistern", Conf: conf}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	want, err := plan.Run(Spec{Name: "cistern", Conf: "backend:malloc"}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if got.PeakReserved != want.PeakReserved || !maps.Equal(got.Calls, want.Calls) || got.Calls["cuMemAlloc"] == 0 || got.Conf != conf {
		t.Errorf("%+v; want the figures of %+v", got, want)
	}
}

func TestCisternSmall(t *testing.T) {
	for _, name := range smallTraces(t) {
		tr := small(t, name)
		for _, conf := range []string{"", "chunk:2MiB", "chunk:64MiB", "cross_stream:ready", "backend:malloc", "stages:grow"} {
			for _, lag := range lags {
				t.Run(fmt.Sprintf("%s/%s/%v", name, conf, lag), func(t *testing.T) {
					r, err := Run(tr, Spec{Name: "cistern", Conf: conf, HasConf: true}, Options{GPULag: lag})
					if err != nil {
						t.Fatal(err)
					}
					if !r.Completed || r.PeakReserved < r.PeakLive || r.OOMs != 0 {
						t.Errorf("%+v", r)
					}
					if conf == "" && (r.Ratio > 1.03 || r.StreamSyncs+r.DeviceSyncs != 0) {
						t.Errorf("ratio %.4f, %d and %d syncs", r.Ratio, r.StreamSyncs, r.DeviceSyncs)
					}
				})
			}
		}
	}
}

// TestCisternLittleMemory: the committed recordings, and the same of models a sixteenth as large, complete within little
// more than what is live at their peak.
func TestCisternLittleMemory(t *testing.T) {
	for _, c := range []struct {
		name  string
		part  uint64 // of the recorded sizes
		limit float64
	}{
		{"detection", 1, 1.010}, {"detection", 16, 1.025}, {"gpt2_varlen", 1, 1.010}, {"gpt2_varlen", 16, 1.015},
		{"multistream_prefetch", 1, 1.016}, {"multistream_prefetch", 16, 1.05},
	} {
		tr := small(t, c.name+".pickle.gz")
		for i, e := range tr.Events {
			if e.Size > 256<<10 {
				tr.Events[i].Size = max(e.Size/c.part, 256<<10+512)
			}
		}
		plan := NewPlan(tr)
		for _, lag := range lags {
			r, err := plan.Run(Spec{Name: "cistern"}, Options{GPULag: lag, Capacity: uint64(c.limit * float64(plan.PeakLive))})
			if err != nil {
				t.Fatal(err)
			}
			if !r.Completed {
				t.Errorf("%s at 1/%d at lag %v within %.3f of peak live: out of memory", c.name, c.part, lag, c.limit)
			}
		}
	}
}

// TestCisternRecording: what --record writes of a replay names every handle that is mapped, each mapping of the engine
// lies apart from the others that exist then, and the segments at the end are the ones mapped.
func TestCisternRecording(t *testing.T) {
	tr := small(t, smallTraces(t)[0])
	rec := &Recording{}
	r, err := Run(tr, Spec{Name: "cistern"}, Options{GPULag: 20 * time.Millisecond, Record: rec})
	if err != nil {
		t.Fatal(err)
	}
	out := rec.Trace()
	mapped := map[uint64]uint64{} // address → size
	handles := map[uint64]uint64{}
	for i, e := range out.Events {
		switch e.Kind {
		case event.SegmentMap:
			if e.Handle == 0 {
				t.Fatalf("event %d: a mapping without handle", i)
			}
			if mapped[e.Addr] != 0 {
				t.Fatalf("event %d: %#x is mapped already", i, e.Addr)
			}
			mapped[e.Addr] = e.Size
			handles[e.Handle] = e.Size
		case event.SegmentUnmap:
			if mapped[e.Addr] != e.Size {
				t.Fatalf("event %d: %#x is not mapped with %d bytes", i, e.Addr, e.Size)
			}
			delete(mapped, e.Addr)
		}
	}
	total := uint64(0)
	for _, size := range handles {
		total += size
	}
	if total != r.PeakReserved {
		t.Errorf("handles of %d bytes were mapped, %d reserved", total, r.PeakReserved)
	}
	final := uint64(0)
	for _, s := range out.Final {
		final += s.Size
	}
	if final != total {
		t.Errorf("the segments at the end hold %d bytes of %d", final, total)
	}
	if len(mapped) == 0 {
		t.Error("nothing is mapped at the end")
	}
	for addr, size := range mapped {
		inside := false
		for _, s := range out.Final {
			inside = inside || addr-s.Addr < s.Size
		}
		if !inside {
			t.Errorf("%#x+%d is still mapped and in no segment", addr, size)
		}
	}

	// A recording is a run like any other: replayed, it is what it was made from. Mappings that went away are no sign
	// of a program that emptied its cache.
	var file bytes.Buffer
	if err := pytorch.Write(&file, out); err != nil {
		t.Fatal(err)
	}
	f, err := open.Read(&file, "recording")
	if err != nil {
		t.Fatal(err)
	}
	again, err := Run(f.Traces[0], Spec{Name: "cistern"}, Options{GPULag: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if again.PeakReserved != r.PeakReserved || again.DriverTimeUS != r.DriverTimeUS || again.StreamSyncs != 0 {
		t.Errorf("replayed again: %d bytes, %.0f us, %d syncs; at first %d, %.0f", again.PeakReserved, again.DriverTimeUS,
			again.StreamSyncs, r.PeakReserved, r.DriverTimeUS)
	}
	for _, n := range f.Traces[0].Notes {
		if strings.Contains(n, "disagree") {
			t.Error(n)
		}
	}
}

// smallTraces are the names of the committed recordings.
func smallTraces(t *testing.T) []string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join("..", "recording", "testdata", "*.pickle.gz"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("no recordings in recording/testdata: %v", err)
	}
	var names []string
	for _, p := range paths {
		names = append(names, filepath.Base(p))
	}
	return names
}
