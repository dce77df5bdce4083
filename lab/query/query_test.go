package query

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
	"github.com/cistern-gpu/cistern/lab/cli"
)

var small = shape{queries: 3, resident: 4, column: 1 << 20, scale: 0.1}

// A job is a program that could run: buffers are allocated once, written before they are read, used while they live, and
// all freed in the end; the same seed makes the same job.
func TestJob(t *testing.T) {
	for seed := range uint64(20) {
		j := newJob(seed, small)
		const unborn, raw, written, gone = 0, 1, 2, 3
		state := make([]int, j.buffers)
		next := int32(0)
		var live, peak, bytes uint64
		for i, s := range j.steps {
			switch s.what {
			case stepAlloc:
				if s.buffer != next || s.size == 0 {
					t.Fatalf("seed %d, step %d: %+v", seed, i, s)
				}
				next++
				state[s.buffer] = raw
				live += s.size
				bytes += s.size
				peak = max(peak, live)
			case stepWrite:
				if state[s.buffer] != raw {
					t.Fatalf("seed %d, step %d: a write to what is %d", seed, i, state[s.buffer])
				}
				state[s.buffer] = written
			case stepRead:
				if state[s.buffer] != written {
					t.Fatalf("seed %d, step %d: a read of what is %d", seed, i, state[s.buffer])
				}
			case stepFree:
				if state[s.buffer] != raw && state[s.buffer] != written {
					t.Fatalf("seed %d, step %d: a free of what is %d", seed, i, state[s.buffer])
				}
				state[s.buffer] = gone
				live -= s.size
			}
		}
		if slices.ContainsFunc(state, func(s int) bool { return s != gone }) || live != 0 {
			t.Errorf("seed %d: %d bytes are left", seed, live)
		}
		if peak != j.peak || bytes != j.bytes || int(next) != j.buffers {
			t.Errorf("seed %d: summed up wrongly", seed)
		}
		if j.buffers < 200*small.queries {
			t.Errorf("seed %d: only %d buffers", seed, j.buffers)
		}
		if again := newJob(seed, small); !slices.Equal(again.steps, j.steps) {
			t.Errorf("seed %d: another job the second time", seed)
		}
	}
}

// The places that are decided beforehand do not overlap while they are used.
func TestPlan(t *testing.T) {
	j := newJob(7, small)
	offsets, size := plan(j)
	live := map[int32]uint64{} // sizes
	for i, s := range j.steps {
		switch s.what {
		case stepAlloc:
			lo, hi := offsets[s.buffer], offsets[s.buffer]+s.size
			if lo%512 != 0 || hi > size {
				t.Fatalf("step %d: [%d, %d) of %d", i, lo, hi, size)
			}
			for o, n := range live {
				if lo < offsets[o]+n && offsets[o] < hi {
					t.Fatalf("step %d: buffers %d and %d overlap", i, s.buffer, o)
				}
			}
			live[s.buffer] = s.size
		case stepFree:
			delete(live, s.buffer)
		}
	}
	if size < j.peak || size > j.peak*2 {
		t.Errorf("%d bytes for %d live", size, j.peak)
	}
}

// Over the simulated device, whose checker sees every use of memory, Cistern is the fastest by what driver calls cost on
// an H200, and waits and launches are the same for all.
func TestRun(t *testing.T) {
	file := filepath.Join(t.TempDir(), "query.json")
	args := []string{"-driver", "sim:16GiB", "-queries", "8", "-rounds", "3", "-resident", "1GiB", "-scale", "0.5", "-want", "2", "-json", file,
		"-also", "limiting:bytes=8GiB|virtual"}
	var out bytes.Buffer
	if err := Run(args, &out); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	line, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var r report
	if err := json.Unmarshal(line, &r); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, x := range r.Results {
		names = append(names, x.Name)
		if len(x.Times) != 3 || x.Median <= 0 || x.Cold <= 0 {
			t.Errorf("%+v", x)
		}
	}
	if got := fmt.Sprint(names); got != "[direct async 0 async all cistern limiting:bytes=8GiB|virtual none]" {
		t.Error(got)
	}
	direct, c, none := r.of("direct"), r.of("cistern"), r.of("none")
	if direct.Speed != 1 || c.Speed < 2 || r.Fastest != "cistern" || !r.Met {
		t.Errorf("%+v", r)
	}
	if c.AllocMS+c.FreeMS > direct.AllocMS/20 || none.AllocMS != 0 {
		t.Errorf("%.2f ms in direct allocations, %.2f in Cistern's, %.2f where there are none", direct.AllocMS, c.AllocMS, none.AllocMS)
	}
	if direct.Held != 0 || c.Held < 1<<30 {
		t.Errorf("direct holds %d bytes, Cistern %d", direct.Held, c.Held)
	}
	for _, word := range []string{"times direct", "cistern", "queries", "the fastest that allocates is cistern"} {
		if !strings.Contains(out.String(), word) {
			t.Errorf("%q is not printed:\n%s", word, out.String())
		}
	}
	// More is asked than there is.
	args = []string{"-driver", "sim", "-queries", "2", "-rounds", "1", "-resident", "64MiB", "-scale", "0.1", "-threads", "2", "-want", "1000"}
	if err := Run(args, &out); err == nil || !strings.Contains(err.Error(), "expected Cistern to be the fastest, and 1000.00 times") {
		t.Error(err)
	}
}

func TestFlags(t *testing.T) {
	for _, args := range [][]string{{"-threads", "0"}, {"-queries", "1", "-threads", "2"}, {"-resident", "4Gi"}, {"more"}, {"-rounds", "x"},
		{"-driver", "sim", "-conf", "chunk:0"}, {"-device", "-1"}} {
		if err := Run(args, t.Output()); !errors.Is(err, cli.ErrUsage) {
			t.Errorf("%v: %v", args, err)
		}
	}
	for _, args := range [][]string{{"-driver", "sim:lots"}, {"-driver", "sim", "-also", "virtual|device"}, {"-driver", "sim:1GiB"}} {
		if err := Run(args, t.Output()); err == nil || errors.Is(err, cli.ErrUsage) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%v: %v", args, err)
		}
	}
}
