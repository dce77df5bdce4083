package main

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	cis "github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/dump"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/native"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/recording/pytorch"
	"github.com/cistern-gpu/cistern/replay"
)

// writeDied writes a recorded run as it goes under a policy within too little memory, up to the request that fails.
func writeDied(t *testing.T, name, from, policy string, limit uint64) {
	t.Helper()
	f, err := open.File(from)
	if err != nil {
		t.Fatal(err)
	}
	spec, err := replay.ParseSpec(policy)
	if err != nil {
		t.Fatal(err)
	}
	rec := &replay.Recording{}
	r, err := replay.Run(f.Traces[0], spec, replay.Options{Capacity: limit, Record: rec})
	if err != nil {
		t.Fatal(err)
	}
	if r.Completed {
		t.Fatalf("%s completes within %d bytes", policy, limit)
	}
	tr := rec.Trace()
	need := (r.FailedRequest + 511) / 512 * 512
	tr.Events = append(tr.Events, event.Event{Kind: event.OOM, Size: need, Addr: limit - r.FailedReserved,
		TimeUS: tr.Events[len(tr.Events)-1].TimeUS + 1})
	out, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	if spec.Name != "cistern" {
		if err := pytorch.Write(out, tr); err != nil {
			t.Fatal(err)
		}
		return
	}
	tr.Format, tr.Source = recording.FormatCistern, ""
	tr.Failures = []*recording.Failure{{Event: len(tr.Events) - 1, Program: []string{"python", "train.py"}, Conf: spec.Conf, Requested: r.FailedRequest, Need: need,
		Reserved: r.FailedReserved, DeviceFree: limit - r.FailedReserved, DeviceTotal: limit}}
	if err := native.Write(out, &recording.File{Traces: []*recording.Trace{tr}}); err != nil {
		t.Fatal(err)
	}
}

// What a report recommends holds when it is checked with the command that the report names: the run completes, and no
// request fails.
func TestReportRecommendsWhatHolds(t *testing.T) {
	data, err := filepath.Abs("../../recording/testdata")
	if err != nil {
		t.Fatal(err)
	}
	more, _ := filepath.Glob(filepath.Join(os.Getenv("CISTERN_TRACES"), "*.cap*.pickle.gz"))
	t.Chdir(t.TempDir())
	writeDied(t, "torch.pickle", filepath.Join(data, "detection.pickle.gz"), "torch", 12700*mib)
	writeDied(t, "oom-1-1.cistern", filepath.Join(data, "multistream_prefetch.pickle.gz"), "cistern:backend:malloc", 4700*mib)
	files := []string{"torch.pickle", "oom-1-1.cistern"}
	if os.Getenv("CISTERN_TRACES") != "" {
		files = append(files, more...)
	}
	for _, file := range files {
		out, errs, code := cistern(t, "", "report", "--budget", "0", "--json", file)
		if strings.Contains(errs, "no request failed") {
			continue // a limit that was kept by giving memory back
		}
		if code != exitOK || errs != "" {
			t.Fatalf("%s: code %d, %s", file, code, errs)
		}
		var doc struct {
			Reports []struct {
				Path     string
				Failures []struct {
					Reproduced bool
					Remedies   []struct {
						Title, Command string
						Survives       bool
						Environment    map[string]string
						CheckCommand   string `json:"check_command"`
						Capacity       uint64 `json:"capacity_bytes"`
						Peak           uint64 `json:"peak_reserved_bytes"`
					}
				}
			}
		}
		if err := json.Unmarshal([]byte(out), &doc); err != nil {
			t.Fatal(err)
		}
		x := doc.Reports[0].Failures[len(doc.Reports[0].Failures)-1]
		if !x.Reproduced || len(x.Remedies) == 0 || doc.Reports[0].Path != file {
			t.Errorf("%s: reproduced %v, %d remedies", file, x.Reproduced, len(x.Remedies))
		}
		for _, m := range x.Remedies {
			args := strings.Fields(strings.ReplaceAll(m.CheckCommand, "'", ""))
			out, errs, code := cistern(t, "", append(args[1:], "--json")...)
			var again replay.Reports
			if err := json.Unmarshal([]byte(out), &again); err != nil || code != exitOK {
				t.Fatalf("%s: code %d, %v, %s", m.CheckCommand, code, err, errs)
			}
			r := again.Traces[0].Results[0]
			if !r.Completed || r.OOMs > 0 || r.Capacity != m.Capacity || r.PeakReserved > m.Peak || !m.Survives {
				t.Errorf("%s: %s: completed %v, %d OOMs, peak %d of %d", file, m.CheckCommand, r.Completed, r.OOMs, r.PeakReserved, r.Capacity)
			}
			if m.Command == "" && len(m.Environment) == 0 {
				t.Errorf("%s: %s says neither what to set nor what to run", file, m.Title)
			}
		}
	}
}

// The shape of --json is what scripts build on: these names, in this order.
func TestReportJSONShape(t *testing.T) {
	inFolder(t)
	out, errs, code := cistern(t, "", "report", "--json", "tiny.pickle")
	if code != exitOK {
		t.Fatalf("code %d, %s", code, errs)
	}
	var doc struct{ Reports []json.RawMessage }
	if err := json.Unmarshal([]byte(out), &doc); err != nil || len(doc.Reports) != 1 {
		t.Fatalf("%v in %s", err, out)
	}
	var r struct{ Failures []json.RawMessage }
	if err := json.Unmarshal(doc.Reports[0], &r); err != nil || len(r.Failures) != 1 {
		t.Fatalf("%v in %s", err, out)
	}
	var x struct{ Remedies, Limits, Steps, Processes []json.RawMessage }
	if err := json.Unmarshal(r.Failures[0], &x); err != nil || len(x.Remedies) == 0 || x.Limits == nil || x.Steps == nil || x.Processes == nil {
		t.Fatalf("%v in %s", err, out)
	}
	for _, c := range []struct {
		what string
		raw  json.RawMessage
		want string
	}{
		{"document", json.RawMessage(out), "reports"},
		{"report", doc.Reports[0], "path device format events duration_us failed_requests failures notes"},
		{"failure", r.Failures[0], "source event time_us requested_bytes live_bytes reserved_bytes device_free_bytes capacity_bytes " +
			"free_inside_bytes free_pieces largest_free_bytes fragmentation short_by cause why sentence met_later_at_event message pid program version conf " +
			"need_bytes pool stream upstream tag library thread where stack device_name device_uuid device_total_bytes cached_bytes pinned_bytes " +
			"paused_bytes capacity_from limits steps processes processes_unknown held growth shortage_bytes less_live relief stacks_by searched unsearched advice own " +
			"reproduced warning caveat more_bytes more_from remedies did_not_survive beaten not_tried floors largest_request_bytes replays took_s"},
		{"remedy", x.Remedies[0], "kind title policy conf environment command do capacity_bytes survives peak_reserved_bytes headroom_bytes " +
			"floor_bytes driver_time_us driver_time_least_us wait_us retries ooms failed_event breaks luck barely odds verified checked check_command"},
	} {
		if got := strings.Join(keysOf(t, c.raw), " "); got != c.want {
			t.Errorf("%s has %s\nwant %s", c.what, got, c.want)
		}
	}
	for line := range strings.Lines(out) {
		if strings.Contains(line, ": null") && !strings.Contains(line, "event") {
			t.Errorf("a list is null: %s", line)
		}
	}
	// With a page the traces are there as before, and each trace has a line of its own.
	if lines, _, _ := cistern(t, "", "report", "--ndjson", "two.pickle"); strings.Count(lines, "\n") != 2 {
		t.Errorf("--ndjson: %s", lines)
	}
}

// rounds is how often something is tried that does not always come out alike; under the race detector, where each round takes
// a second, once.
func rounds(n int) int {
	if testing.Short() {
		return 1
	}
	return n
}

// A program on Cistern dies, leaking a little with every step: what it wrote down is enough to say who leaks, that the same
// happens in a replay, and what would have kept it alive. No two of its histories are the same.
func TestReportOfADyingProgram(t *testing.T) {
	for range rounds(4) {
		dies(t)
	}
}

// onCistern is a program on Cistern with these settings, its device and a stream.
func onCistern(t *testing.T, conf string) (*cis.Allocator, cis.Device, cis.Stream) {
	t.Helper()
	opts, err := cis.ParseOptions(conf)
	if err != nil {
		t.Fatal(err)
	}
	a, err := cis.New(sim.New(sim.Options{Capacity: 1 << 30}), opts)
	if err != nil {
		t.Fatal(err)
	}
	dev, err := a.Device(0)
	if err != nil {
		t.Fatal(err)
	}
	st, err := dev.Stream(cuda.StreamNull, cis.StreamDurable)
	if err != nil {
		t.Fatal(err)
	}
	return a, dev, st
}

func dies(t *testing.T) {
	t.Helper()
	a, dev, st := onCistern(t, "limit:200MiB,history:100000,stacks:native")
	dir := t.TempDir()
	r := &dump.Reporter{Allocator: a, Bound: longest, Names: func() dump.Names {
		return dump.Names{Tag: func(n uint32) string { return []string{"", "activations", "losses"}[n] },
			Library: func(n uint8) string { return []string{"", "torch"}[n] }}
	}}
	if err := r.To(dir, false); err != nil {
		t.Fatal(err)
	}
	file, leaked := "", 0
	for file == "" {
		var step []cuda.Ptr
		for i := range 13 {
			size, tag := uint64(3+i%5)*mib+uint64(leaked)*4096, uint32(1)
			if i == 12 {
				size, tag = 700<<10, 2
			}
			p, err := dev.AllocWith(size, st, cis.AllocOptions{Tag: tag, Library: 1})
			var oom *cis.OutOfMemoryError
			if errors.As(err, &oom) {
				file = r.OutOfMemory(oom, []string{oom.Error()})
				break
			} else if err != nil {
				t.Fatal(err)
			}
			step = append(step, p)
		}
		if len(step) == 13 {
			leaked++
			step = step[:12] // and the last is never given back
		}
		for _, p := range step {
			if err := a.Free(p); err != nil {
				t.Fatal(err)
			}
		}
	}
	out, errs, code := cistern(t, "", "report", "--budget", "0", "--json", file)
	if code != exitOK || errs != "" {
		t.Fatalf("%s: code %d, %s", file, code, errs)
	}
	var doc struct{ Reports []*analyze.TraceFailures }
	if err := json.Unmarshal([]byte(out), &doc); err != nil {
		t.Fatal(err)
	}
	x := doc.Reports[0].Failures[0]
	kinds := map[string]bool{}
	for _, m := range x.Remedies {
		kinds[m.Kind] = true
	}
	if !x.Reproduced || x.Caveat != "" || !kinds[analyze.RemedyLimit] || !kinds[analyze.RemedySpill] {
		t.Errorf("reproduced %v, %q, remedies %v", x.Reproduced, x.Caveat, kinds)
	}
	h := x.Held
	if h.Unknown != 0 || len(h.Tag) != 2 || h.Tag[0].Name != "losses" || h.Tag[0].Blocks != leaked || h.Tag[0].Bytes != uint64(leaked)*700<<10 ||
		h.Library[0].Name != "torch" || h.Requested+h.Rounding != h.Allocated {
		t.Errorf("%d leaked, held: %+v", leaked, h)
	}
	if len(x.Growth.Steady) != 1 || !strings.Contains(x.Growth.Steady[0].Name, ".dies") {
		t.Errorf("%d suspects: %+v", len(x.Growth.Steady), x.Growth)
	}
	if len(x.Steps) == 0 || len(x.Limits) == 0 || x.ProcessesUnknown == "" || x.PID != os.Getpid() || len(x.Message) != 1 {
		t.Errorf("steps %v, limits %v, processes %q", x.Steps, x.Limits, x.ProcessesUnknown)
	}
}

// TestReportOfAFolderOfMany: of a process that ran out of memory more often than it has files, the newest comes last.
func TestReportOfAFolderOfMany(t *testing.T) {
	a, dev, st := onCistern(t, "limit:200MiB,history:1000")
	dir := t.TempDir()
	r := &dump.Reporter{Allocator: a, Say: func(string) {}, Bound: longest}
	if err := r.To(dir, false); err != nil {
		t.Fatal(err)
	}
	var want []uint64 // of which there are files
	n := uint64(0)
	// The last file is written anew after twenty times as long as it took, for which a busy machine may have stopped.
	for end := time.Now().Add(5 * longest); n <= dump.MostFiles && time.Now().Before(end); time.Sleep(time.Millisecond) {
		size := (300 + uint64(len(want))) * mib
		_, err := dev.Alloc(size, st)
		var oom *cis.OutOfMemoryError
		if !errors.As(err, &oom) {
			t.Fatal(err)
		}
		if r.OutOfMemory(oom, []string{oom.Error()}) != "" {
			want = append(want[:min(len(want), dump.MostFiles-1)], size)
			n++
		}
	}
	out, errs, code := cistern(t, "", "report", "--json", dir)
	if code != exitOK || errs != "" {
		t.Fatalf("code %d, %s", code, errs)
	}
	var doc struct{ Reports []*analyze.TraceFailures }
	if err := json.Unmarshal([]byte(out), &doc); err != nil {
		t.Fatal(err)
	}
	var got []uint64
	for _, x := range doc.Reports {
		got = append(got, x.Failures[len(x.Failures)-1].Requested)
	}
	if n <= dump.MostFiles || !slices.Equal(got, want) {
		t.Errorf("%d files written; reports of %d, want %d", n, got, want)
	}
	notes := doc.Reports[len(doc.Reports)-1].Notes
	if !slices.ContainsFunc(notes, func(n string) bool { return strings.Contains(n, "only the newest has a file") }) {
		t.Errorf("notes of the last %q", notes)
	}
}

func TestReportOfAFolder(t *testing.T) {
	dir := t.TempDir()
	now := time.Now()
	for i, name := range []string{"oom-9-1.cistern", "oom-10-1.cistern", "oom-10-1.cistern.html", "notes.txt"} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, nil, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, now, now.Add(time.Duration(i)*time.Second)); err != nil {
			t.Fatal(err)
		}
	}
	got, err := outOfFolders([]string{"missing", dir, "-"})
	want := []string{"missing", filepath.Join(dir, "oom-9-1.cistern"), filepath.Join(dir, "oom-10-1.cistern"), "-"}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
	if _, err := outOfFolders([]string{t.TempDir()}); err == nil || !strings.Contains(err.Error(), "has no out-of-memory file") {
		t.Errorf("an empty folder: %v", err)
	}
}
