package replay

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/recording/pytorch"
)

const gib = 1 << 30

// faithful are the traces recorded from the start of a process, with the capacity that the process was limited to.
var faithful = []struct {
	name     string
	capacity float64 // GiB, 0 is unlimited
	retries  int64   // as counted when it was recorded
}{
	{"gpt2_varlen", 0, 0},
	{"generate_serving", 0, 0},
	{"detection", 0, 0},
	{"multistream_prefetch", 0, 0},
	{"gpt2_varlen.expandable", 0, 0},
	{"detection.expandable.cap17", 17, 0},
	{"gpt2_varlen.cap24", 24, 3},
	{"generate_serving.pow2", 0, 0},
	{"gpt2_varlen.stacks", 0, 0},
	{"gpt2_varlen.expandable.cap20.6", 20.6, 13},
	{"detection.cap16", 16, 3},
	{"detection.gc07.cap20", 20, 0},
	{"gnn.cap11", 11, 2},
	{"pools_graphs", 0, 0},
	{"two_devices", 0, 0},
	// These began mid-run or lost their start: the model takes over the state that the file implies.
	{"gpt2_varlen.ring20000", 0, 0},
	{"detection.midrun", 0, 0},
}

func checkFaithful(t *testing.T, path string, capacity float64, retries int64) {
	f, err := open.File(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, tr := range f.Traces {
		p := NewPlan(tr)
		r, err := p.Run(Spec{Name: "torch"}, Options{Capacity: uint64(capacity * gib), Verify: true})
		if err != nil {
			t.Fatal(err)
		}
		v := r.Verify
		if v.Matched != v.Recorded || v.PlacementsMatched != v.Placements || v.FirstMismatch != nil {
			first := ""
			if v.FirstMismatch != nil {
				first = *v.FirstMismatch
			}
			t.Errorf("device %d: %d of %d segment and oom events, %d of %d placements: %s", tr.Device, v.Matched,
				v.Recorded, v.PlacementsMatched, v.Placements, first)
		}
		if r.PeakReserved != p.Recorded.PeakReserved {
			t.Errorf("device %d: peak reserved %d, recorded %d", tr.Device, r.PeakReserved, p.Recorded.PeakReserved)
		}
		if r.Retries != retries {
			t.Errorf("device %d: %d retries, recorded %d", tr.Device, r.Retries, retries)
		}
		t.Logf("device %d: %d/%d %d/%d, %.0f ns an event, retries %d ooms %d notes %q", tr.Device, v.Matched, v.Recorded,
			v.PlacementsMatched, v.Placements, r.NSPerEvent, r.Retries, r.OOMs, r.Notes)
	}
}

// TestFaithfulSmall holds the models against the traces that come with the tree.
func TestFaithfulSmall(t *testing.T) {
	for _, name := range []string{"gpt2_varlen", "detection", "multistream_prefetch"} {
		t.Run(name, func(t *testing.T) {
			checkFaithful(t, filepath.Join("..", "recording", "testdata", name+".pickle.gz"), 0, 0)
		})
	}
}

// TestFaithful holds the models against what PyTorch did, over the traces in the folder that CISTERN_TRACES names.
func TestFaithful(t *testing.T) {
	dir := os.Getenv("CISTERN_TRACES")
	if dir == "" {
		t.Skip("CISTERN_TRACES names no folder of recorded traces")
	}
	for _, c := range faithful {
		t.Run(c.name, func(t *testing.T) {
			checkFaithful(t, filepath.Join(dir, c.name+".pickle.gz"), c.capacity, c.retries)
		})
	}
}

// TestFaithfulWithoutStart drops the first events of recorded traces, as an overflowed ring does, and holds the model
// against the rest: it begins in the state that the end of the file and its events imply.
func TestFaithfulWithoutStart(t *testing.T) {
	paths := map[string]float64{
		filepath.Join("..", "recording", "testdata", "gpt2_varlen.pickle.gz"):          0,
		filepath.Join("..", "recording", "testdata", "multistream_prefetch.pickle.gz"): 0,
	}
	if dir := os.Getenv("CISTERN_TRACES"); dir != "" {
		paths[filepath.Join(dir, "gpt2_varlen.expandable.pickle.gz")] = 0
		paths[filepath.Join(dir, "gpt2_varlen.expandable.cap20.6.pickle.gz")] = 20.6
		paths[filepath.Join(dir, "detection.cap16.pickle.gz")] = 16
	}
	for path, capacity := range paths {
		for _, cut := range []float64{0.1, 0.5, 0.9} {
			t.Run(fmt.Sprintf("%s/%v", filepath.Base(path), cut), func(t *testing.T) {
				f, err := open.File(path)
				if err != nil {
					t.Fatal(err)
				}
				f.Traces[0].Events = f.Traces[0].Events[int(float64(len(f.Traces[0].Events))*cut):]
				var buf bytes.Buffer
				if err := pytorch.Write(&buf, f.Traces...); err != nil {
					t.Fatal(err)
				}
				g, err := open.Read(&buf, path)
				if err != nil {
					t.Fatal(err)
				}
				r, err := Run(g.Traces[0], Spec{Name: "torch"}, Options{Capacity: uint64(capacity * gib), Verify: true})
				if err != nil {
					t.Fatal(err)
				}
				if v := r.Verify; !v.OK() {
					t.Errorf("%d of %d segment and oom events, %d of %d placements: %s", v.Matched, v.Recorded, v.PlacementsMatched,
						v.Placements, *v.FirstMismatch)
				}
			})
		}
	}
}
