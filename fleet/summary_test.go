package fleet

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cistern-gpu/cistern/event"
)

// sample is a summary with all fields set.
func sample() *Summary {
	s := &Summary{Format: Version, Version: "1.0", Allocator: AllocatorPyTorch, Variables: map[string]string{"RANK": "3", "WORLD_SIZE": "4", "SLURM_JOB_ID": "77"},
		Coordinates: map[string]int{"dp": 1}, Host: "n1", PID: 4711, Program: "train.py", PyTorch: "2.11.0", CUDA: "13.0", Driver: "580", Settings: "x",
		StartedUS: 1, UpdatedUS: 9, Ended: EndExit, Marks: "optimizer", Steps: 2, SpentUS: 5, Recordings: []string{"a.pickle"}}
	d := Device{Ordinal: 0, UUID: "GPU-1", Name: "G", Total: 80 << 30, Limit: 1, PeakAllocated: Peak{Bytes: 5, Step: 1, TimeUS: 2, Allocated: 5, Reserved: 6, Split: 1, Outside: 7},
		Retries: 1, OOMs: 1, Failures: []Failure{{TimeUS: 3, Step: 2, Requested: 9, Free: 1, Recording: "a.oom1.pickle"}}}
	d.Series.Add(Row{Step: 1, TimeUS: 5, Now: 1, Peak: 2, Reserved: 3, Outside: 4, Requests: 5, Requested: 6, HashSum: 7})
	d.Series.Add(Row{Step: 2, TimeUS: 6, Now: 1, Peak: 2, Reserved: 3, Outside: 4, Requests: 5, Requested: 6, HashSum: 8})
	s.Devices = []Device{d}
	return s
}

func TestRoundTrip(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a"+Ending)
	want := sample()
	if err := want.Write(path); err != nil {
		t.Fatal(err)
	}
	got, err := Read(path)
	if err != nil {
		t.Fatal(err)
	}
	want.Path = path
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if id := got.Identity(); id.Rank != 3 || id.World != 4 || id.Job != "77" || id.Node != "n1" || id.Coordinates["dp"] != 1 {
		t.Errorf("identity %+v", id)
	}
}

// A file that ends anywhere is found to be truncated, and only such a file.
func TestTruncated(t *testing.T) {
	data, err := json.Marshal(sample())
	if err != nil {
		t.Fatal(err)
	}
	for n := range len(data) {
		if _, err := Decode(bytes.NewReader(data[:n])); !errors.Is(err, ErrTruncated) {
			t.Fatalf("cut after %d bytes: %v", n, err)
		}
	}
	for _, c := range [][2]string{
		{`{}`, "is missing"},
		{`{"cistern_summary":2}`, "format 2"},
		{`[1]`, "not a summary"},
		{`{"cistern_summary":1,"devices":[{"steps":{"every":3,"step":[1],"time_us":[1]}}]}`, "power of two"},
		{`{"cistern_summary":1,"devices":[{"steps":{"every":1,"step":[1],"time_us":[1]}}]}`, "columns of 1 and 0"},
		{`{"cistern_summary":1,"devices":[{"device":2,"steps":{"every":1,"step":[2,1],"time_us":[1,1],"allocated_bytes":[1,1],"peak_allocated_bytes":[1,1],` +
			`"reserved_bytes":[1,1],"outside_bytes":[1,1],"requests":[1,1],"requested_bytes":[1,1]}}]}`, "device 2: step 1 after step 2"},
		{`{"cistern_summary":1,"pid":"x"}`, "not a summary"},
	} {
		if _, err := Decode(strings.NewReader(c[0])); err == nil || errors.Is(err, ErrTruncated) || !strings.Contains(err.Error(), c[1]) {
			t.Errorf("%s: %v, want %q", c[0], err, c[1])
		}
	}
	if _, err := Decode(strings.NewReader(strings.Repeat(" ", MostBytes+2))); err == nil || errors.Is(err, ErrTruncated) {
		t.Error(err)
	}
	if _, err := Read(filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// However many steps there are, the rows are few, sums are kept, and two processes that did the same have the same rows.
func TestSeries(t *testing.T) {
	var a, b Series
	const steps = 5000
	for i := int64(1); i <= steps; i++ {
		a.Add(Row{Step: i, TimeUS: i, Now: uint64(i), Peak: uint64(2 * i), Requests: 3, Requested: uint64(i), HashSum: event.Mix(event.HashStart, uint64(i))})
	}
	if err := a.check(); err != nil {
		t.Fatal(err)
	}
	if a.Every != 8 || a.Len() != steps/8 {
		t.Errorf("%d rows of %d steps", a.Len(), a.Every)
	}
	var requests, requested uint64
	for i := range a.Len() {
		r := a.Row(i)
		requests, requested = requests+r.Requests, requested+r.Requested
		if r.Step != int64(i+1)*8 || r.Now != uint64(r.Step) || r.Peak != uint64(2*r.Step) || r.HashSum == 0 {
			t.Fatalf("row %d: %+v", i, r)
		}
	}
	if requests != 3*steps || requested != steps*(steps+1)/2 {
		t.Errorf("%d requests of %d bytes", requests, requested)
	}
	// One that skipped a step differs in that row alone.
	for i := int64(1); i <= steps; i++ {
		if i != 17 {
			b.Add(Row{Step: i, TimeUS: i, Now: uint64(i), Peak: uint64(2 * i), Requests: 3, Requested: uint64(i), HashSum: event.Mix(event.HashStart, uint64(i))})
		}
	}
	b.At(8)
	if a.Len() != b.Len() {
		t.Fatalf("%d and %d rows", a.Len(), b.Len())
	}
	for i := range a.Len() {
		if same := a.Row(i).Requests == b.Row(i).Requests; same != (i != 2) {
			t.Errorf("row %d: %+v and %+v", i, a.Row(i), b.Row(i))
		}
	}
}

// Numbers and names that no recorder writes are refused.
func TestHostileSummaries(t *testing.T) {
	for _, c := range []struct {
		want  string
		plant func(s *Summary, d *Device)
	}{
		{"total_bytes 18446744073709551615", func(_ *Summary, d *Device) { d.Total = 1<<64 - 1 }},
		{"limit_bytes", func(_ *Summary, d *Device) { d.Limit = 1 << 60 }},
		{"bytes 9223372036854775808", func(_ *Summary, d *Device) { d.PeakOutside.Bytes = 1 << 63 }},
		{"split_bytes", func(_ *Summary, d *Device) { d.PeakReserved.Split = 1 << 63 }},
		{"requested_bytes", func(_ *Summary, d *Device) { d.Failures[0].Requested = 1 << 63 }},
		{"free_bytes", func(_ *Summary, d *Device) { d.Failures[0].Free = 1<<53 + 1 }},
		{"6 failures", func(_ *Summary, d *Device) { d.Failures = make([]Failure, 6) }},
		{"retries -1", func(_ *Summary, d *Device) { d.Retries = -1 }},
		{"ooms", func(_ *Summary, d *Device) { d.OOMs = 1 << 62 }},
		{"device -1", func(_ *Summary, d *Device) { d.Ordinal = -1 }},
		{"device 0; expected each once", func(s *Summary, d *Device) { s.Devices = append(s.Devices, *d) }},
		{"reserved_bytes", func(_ *Summary, d *Device) { d.Series.Reserved[1] = 1 << 63 }},
		{"step 9223372036854775807", func(_ *Summary, d *Device) { d.Series.Step[1] = 1<<63 - 1 }},
		{"power of two", func(_ *Summary, d *Device) { d.Series.Every = 1 << 62 }},
		{"time_us -", func(_ *Summary, d *Device) { d.Series.TimeUS[0] = -1 << 63 }},
		{"requests of", func(_ *Summary, d *Device) { d.Series.Requested[0] = 1 << 63 }},
		{"updated_us", func(s *Summary, _ *Device) { s.UpdatedUS = 1<<63 - 1 }},
		{"steps -3", func(s *Summary, _ *Device) { s.Steps = -3 }},
		{"pid -1", func(s *Summary, _ *Device) { s.PID = -1 }},
		{"-1 for the coordinate dp", func(s *Summary, _ *Device) { s.Coordinates["dp"] = -1 }},
		{`recording "../a.pickle"`, func(s *Summary, _ *Device) { s.Recordings[0] = "../a.pickle" }},
		{`recording "/etc/passwd"`, func(s *Summary, _ *Device) { s.Recordings[0] = "/etc/passwd" }},
		{`recording ".."`, func(s *Summary, _ *Device) { s.Recordings[0] = ".." }},
		{`recording ""`, func(s *Summary, _ *Device) { s.Recordings[0] = "" }},
		{`recording "other.summary.json"`, func(s *Summary, _ *Device) { s.Recordings[0] = "other.summary.json" }},
		{`recording "a/b"`, func(_ *Summary, d *Device) { d.Failures[0].Recording = "a/b" }},
	} {
		s := sample()
		c.plant(s, &s.Devices[0])
		data, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Decode(bytes.NewReader(data)); err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%v, want %q", err, c.want)
		}
	}
}

// The counts of rows that stand for many steps do not overflow.
func TestCountsSaturate(t *testing.T) {
	var s Series
	for i := int64(1); i <= 4; i++ {
		s.Add(Row{Step: i, Requests: 1<<63 - 1, Requested: 1<<63 - 1})
	}
	s.At(4)
	if r := s.Row(0); s.Len() != 1 || r.Requests != 1<<63-1 || r.Requested != 1<<63-1 {
		t.Errorf("%+v", r)
	}
}

func FuzzSummary(f *testing.F) {
	data, _ := json.Marshal(sample())
	f.Add(data)
	largest := sample()
	largest.Steps, largest.UpdatedUS = mostNumber, mostNumber
	d := &largest.Devices[0]
	d.Total, d.Limit, d.PeakReserved.Bytes, d.PeakOutside.Bytes, d.Failures = mostNumber, mostNumber, mostNumber, mostNumber, nil
	d.Series.Step[1], d.Series.TimeUS[1], d.Series.Reserved[1], d.Series.Outside[1], d.Series.Requested[1] = mostNumber, mostNumber, mostNumber, mostNumber, 1<<63-1
	data, _ = json.Marshal(largest)
	f.Add(data)
	f.Add([]byte(`{"cistern_summary":1,"devices":[{"steps":{}}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := Decode(bytes.NewReader(data))
		if err != nil {
			return
		}
		s.Identity()
		for i := range s.Devices {
			d := &s.Devices[i].Series
			for k := range d.Len() {
				d.Row(k)
			}
			d.At(1 << 20)
			if err := d.check(); err != nil {
				t.Fatal(err)
			}
		}
		answerAll(t, s)
		again, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Decode(bytes.NewReader(again)); err != nil {
			t.Fatalf("written anew: %v", err)
		}
	})
}

// answerAll has everything computed of a job with this summary in it, and checks that no sum has overflowed.
func answerAll(t *testing.T, s *Summary) {
	t.Helper()
	folder := &Folder{Summaries: []*Summary{s, sample()}}
	for _, j := range folder.Jobs() {
		a := folder.Answer(j)
		a.Grid(256)
		for i := range a.Ranks {
			r := &a.Ranks[i]
			p := &r.Parts
			if r.Headroom > mostNumber || r.Headroom < -2*mostNumber || max(p.Used, p.Split, p.Cached, p.Outside, p.Free) > mostNumber {
				t.Fatalf("headroom %d, %+v", r.Headroom, r.Parts)
			}
		}
		if a.Need.Least > 3*mostNumber || a.Need.Recorded > 3*mostNumber {
			t.Fatalf("%+v", a.Need)
		}
		if _, err := json.Marshal(a); err != nil {
			t.Fatal(err)
		}
	}
	if err := folder.WriteMetrics(io.Discard, time.UnixMicro(0)); err != nil {
		t.Fatal(err)
	}
}
