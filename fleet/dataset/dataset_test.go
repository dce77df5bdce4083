package dataset

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/parquet-go/parquet-go"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/export"
	"github.com/cistern-gpu/cistern/fleet"
	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
	"github.com/cistern-gpu/cistern/recording"
)

func sample() *fleet.Summary {
	s := &fleet.Summary{Path: "runs/rank3.summary.json", Format: fleet.Version, Version: "1.0", Allocator: fleet.AllocatorPyTorch, Host: "n1", PID: 7,
		Variables:   map[string]string{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "CISTERN_JOB": "a/b", "TORCHELASTIC_RESTART_COUNT": "2"},
		Coordinates: map[string]int{"dp": 3, "ep": 1}, Program: "train.py", StartedUS: 11, UpdatedUS: 12, Steps: 2}
	d := fleet.Device{Ordinal: 1, UUID: "GPU-1", Total: 80, PeakAllocated: fleet.Peak{Bytes: 50, Step: 2}, PeakReserved: fleet.Peak{Bytes: 60, Step: 1, Split: 4},
		PeakOutside: fleet.Peak{Bytes: 5}, OOMs: 1, Failures: []fleet.Failure{{TimeUS: 9, Step: 2, Requested: 30, Free: 8}}}
	d.Series.Add(fleet.Row{Step: 1, TimeUS: 21, Now: 1, Peak: 2, Reserved: 3, Outside: 4, Requests: 5, Requested: 6, HashSum: 7})
	d.Series.Add(fleet.Row{Step: 2, TimeUS: 22, Now: 1, Peak: 2, Reserved: 3, Outside: 4, Requests: 5, Requested: 6})
	s.Devices = []fleet.Device{d, {Ordinal: 2, Limit: 9}}
	return s
}

// rows are those of a file, as text by column.
func rows(t *testing.T, path string) (found []map[string]string) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	f, err := parquet.OpenFile(bytes.NewReader(data), int64(len(data)))
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range f.RowGroups() {
		r := g.Rows()
		for {
			buffer := make([]parquet.Row, 8)
			n, err := r.ReadRows(buffer)
			for _, row := range buffer[:n] {
				cells := map[string]string{}
				for i, v := range row {
					if !v.IsNull() {
						cells[f.Schema().Fields()[i].Name()] = v.String()
					}
				}
				found = append(found, cells)
			}
			if err != nil {
				break
			}
		}
	}
	return found
}

// A process is in its folder, once, however often it is written.
func TestSummary(t *testing.T) {
	w := &Writer{Folder: filepath.Join(t.TempDir(), "new", "set"), Commit: "abc"}
	for range 2 {
		for _, table := range []*export.Table{Processes, Steps} {
			if err := w.WriteSummary(sample(), table); err != nil {
				t.Fatal(err)
			}
		}
	}
	const place = "job=a%2Fb/restart=2/rank=3/rank3.parquet"
	got := rows(t, filepath.Join(w.Folder, "processes", place))
	want := []map[string]string{
		{"summary": "rank3.summary.json", "requeue": "0", "launcher": "torchrun", "node": "n1", "local_rank": "1", "world_size": "4", "pid": "7", "program": "train.py",
			"commit": "abc", "dp": "3", "coordinates": `{"dp":3,"ep":1}`, "allocator": "pytorch", "cistern": "1.0", "started_us": "11", "updated_us": "12", "steps": "2",
			"device": "1", "gpu_uuid": "GPU-1", "total_bytes": "80", "peak_allocated_bytes": "50", "peak_allocated_step": "2", "peak_reserved_bytes": "60",
			"peak_reserved_step": "1", "peak_split_bytes": "4", "peak_outside_bytes": "5", "needed_bytes": "65", "retries": "0", "ooms": "1", "failed_us": "9",
			"failed_step": "2", "failed_requested_bytes": "30", "failed_free_bytes": "8"},
		{"device": "2", "limit_bytes": "9", "needed_bytes": "0"},
	}
	for k, v := range want[0] {
		if _, own := want[1][k]; !own && !strings.HasPrefix(k, "gpu") && !strings.HasPrefix(k, "failed") {
			want[1][k] = v
			if strings.HasPrefix(k, "peak") || k == "ooms" || k == "total_bytes" {
				want[1][k] = "0"
			}
		}
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	got = rows(t, filepath.Join(w.Folder, "steps", place))
	step := map[string]string{"device": "1", "step": "1", "every": "1", "time_us": "21", "allocated_bytes": "1", "peak_allocated_bytes": "2", "reserved_bytes": "3",
		"outside_bytes": "4", "requests": "5", "requested_bytes": "6"}
	if len(got) != 2 || got[0]["hash"] == "" || got[1]["hash"] != "" {
		t.Errorf("%v", got)
	}
	delete(got[0], "hash")
	if d := cmp.Diff(step, got[0]); d != "" {
		t.Error(d)
	}
	// The version that the process names itself comes first.
	s := sample()
	s.Variables["CISTERN_COMMIT"] = "own"
	if err := w.WriteSummary(s, Processes); err != nil {
		t.Fatal(err)
	}
	if got := rows(t, filepath.Join(w.Folder, "processes", place)); got[0]["commit"] != "own" {
		t.Errorf("commit %q", got[0]["commit"])
	}
}

// Rows of recordings say which one they are of.
func TestRecording(t *testing.T) {
	w := &Writer{Folder: t.TempDir()}
	tr := &recording.Trace{Streams: []uint64{0}, Events: []event.Event{{Kind: event.Alloc, Addr: 512, Size: 5}}}
	f := &recording.File{Path: "x/run.pickle", Format: "pytorch-snapshot", Traces: []*recording.Trace{tr}}
	for _, table := range Tables {
		if OfSummaries(table) {
			continue
		}
		if err := w.WriteRecording(sample().Identity(), f, table); err != nil {
			t.Fatal(err)
		}
		got := rows(t, filepath.Join(w.Folder, table.Name, "job=a%2Fb/restart=2/rank=3/run.pickle.parquet"))
		if len(got) != 1 || got[0]["recording"] != "run.pickle" {
			t.Errorf("%s: %v", table.Name, got)
		}
	}
}

// Whatever a job is called, its folder is one below the table's, and another than that of another job.
func TestPartition(t *testing.T) {
	seen := map[string]string{}
	for _, c := range [][2]string{
		{"", "job=unknown/restart=0/rank=-1"},
		{"77", "job=77/restart=0/rank=-1"},
		{"a/../../b", "job=a%2F..%2F..%2Fb/restart=0/rank=-1"},
		{"..", "job=../restart=0/rank=-1"},
		{"x=%2F é\\", "job=x%3D%252F%20é%5C/restart=0/rank=-1"},
	} {
		got := filepath.ToSlash(partition(recording.Identity{Job: c[0], Rank: -1}))
		if got != c[1] {
			t.Errorf("%q is %s, want %s", c[0], got, c[1])
		}
		if other, twice := seen[got]; twice {
			t.Errorf("%q and %q are in one folder", c[0], other)
		}
		seen[got] = c[0]
	}
}

// A dataset that cannot be written is one error, and leaves no file.
func TestUnwritable(t *testing.T) {
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, "processes"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := (&Writer{Folder: folder}).WriteSummary(sample(), Processes); err == nil || !strings.Contains(err.Error(), "processes") {
		t.Errorf("%v", err)
	}
}
