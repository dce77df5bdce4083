package main

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/fleet"
	"github.com/cistern-gpu/cistern/fleet/fleettest"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
)

// fleetJob writes the summaries of a job that is made of a recorded run.
func fleetJob(t *testing.T, dir string, j fleettest.Job, plant func(rank int, s *fleet.Summary)) {
	t.Helper()
	f, err := open.File("../../recording/testdata/gpt2_varlen.pickle.gz")
	if err != nil {
		t.Fatal(err)
	}
	fleettest.Make(f.Traces[0], j, func(rank int, s *fleet.Summary) {
		plant(rank, s)
		if _, err := fleettest.Write(dir, s); err != nil {
			t.Fatal(err)
		}
	})
}

// plantTwo has rank 3 run out of memory by fragmentation, and rank 9 leak.
func plantTwo(rank int, s *fleet.Summary) {
	switch rank {
	case 3:
		fleettest.Fragment(s, 42<<30)
		fleettest.Fail(s, 4<<30)
	case 9:
		fleettest.Leak(s, 1<<20)
	}
}

// The text fits 80 columns and names the rank that sets the limit in its first lines.
func TestFleetText(t *testing.T) {
	dir := t.TempDir()
	fleetJob(t, dir, fleettest.Job{Name: "77", Ranks: 16, Stages: 2, Steps: 100, PerGPU: 80 << 30, Seed: 1}, plantTwo)
	out, errs, code := cistern(t, "", "fleet", dir)
	if code != exitOK || errs != "" {
		t.Fatalf("code %d, %s", code, errs)
	}
	compareTranscript(t, "fleet", out)
	for _, line := range strings.Split(out, "\n") {
		if len([]rune(line)) > 80 {
			t.Errorf("%d columns: %s", len([]rune(line)), line)
		}
	}
}

func compareTranscript(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name+".txt")
	if flag.Lookup("rewrite").Value.String() == "true" {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil || string(want) != got {
		t.Errorf("%s differs (%v), -rewrite writes it:\n%s", file, err, got)
	}
}

func TestFleetJSON(t *testing.T) {
	dir := t.TempDir()
	fleetJob(t, dir, fleettest.Job{Name: "77", Ranks: 16, Stages: 2, Steps: 100, PerGPU: 80 << 30, Seed: 1}, plantTwo)
	out, errs, code := cistern(t, "", "fleet", "--json", dir)
	var a fleet.Answer
	if err := json.Unmarshal([]byte(out), &a); err != nil || code != exitOK {
		t.Fatalf("code %d, %v, %s", code, err, errs)
	}
	if a.Limit.Identity.Rank != 3 || len(a.Ranks) != 16 || a.Limit.Cause != fleet.CauseFragmentation {
		t.Errorf("%+v", a.Limit)
	}
}

func TestFleetErrors(t *testing.T) {
	dir := t.TempDir()
	empty := t.TempDir()
	fleetJob(t, dir, fleettest.Job{Name: "77", Ranks: 2, Stages: 1, Steps: 3, PerGPU: 80 << 30, Seed: 1}, func(int, *fleet.Summary) {})
	other := filepath.Join(empty, "other.json")
	if err := os.WriteFile(other, []byte(`{"cistern_fleet_tuning":1,"job":"78","shard":1,"shards":1}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{}, "no folder named"},
		{[]string{empty}, "no summary of a process"},
		{[]string{filepath.Join(empty, "none")}, "no such file"},
		{[]string{"--job", "78", dir}, "expected one of 77"},
		{[]string{"--shard", "1/2", dir}, "part of --tune"},
		{[]string{"--tune", "--shard", "3/2", dir}, "expected i/n"},
		{[]string{"--tune", "--shard", "1/2x", dir}, "expected i/n"},
		{[]string{"--tune", "--merge", "x", dir}, "choose one"},
		{[]string{"--merge", filepath.Join(empty, "no.json"), dir}, "no such file"},
		{[]string{"--merge", other, dir}, `of job "78"`},
		{[]string{"collect", dir}, "expected folders"},
	} {
		_, errs, code := cistern(t, "", append([]string{"fleet"}, c.args...)...)
		if code != exitBad || !strings.Contains(errs, c.want) || strings.Count(errs, "\n") != 1 {
			t.Errorf("%v: code %d, %q, want %q", c.args, code, errs, c.want)
		}
	}
}

// recordedRank is a summary of one process whose recording lies beside it.
func recordedRank(t *testing.T, dir string, rank string) {
	t.Helper()
	data, err := os.ReadFile("../../recording/testdata/detection.pickle.gz")
	if err != nil {
		t.Fatal(err)
	}
	name := "rank" + rank + ".pickle.gz"
	if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := open.File(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	s := &fleet.Summary{Format: fleet.Version, Allocator: fleet.AllocatorPyTorch, Variables: map[string]string{"RANK": rank, "WORLD_SIZE": "2", "CISTERN_JOB": "j"},
		Ended: fleet.EndExit, Recordings: []string{name}}
	d := fleet.Device{Ordinal: f.Traces[0].Device, Total: 80 << 30}
	for _, row := range fleet.Steps(f.Traces[0], stepEnds(f.Traces[0])) {
		row.HashSum, row.Peak = 0, row.Now
		d.PeakReserved.Bytes = max(d.PeakReserved.Bytes, row.Reserved)
		s.Steps = row.Step
		d.Series.Add(row)
	}
	s.Devices = []fleet.Device{d}
	if _, err := fleettest.Write(dir, s); err != nil {
		t.Fatal(err)
	}
}

func stepEnds(t *recording.Trace) (ends []int64) {
	for i := 1; i <= 4; i++ {
		ends = append(ends, t.Events[i*(len(t.Events)-1)/4].TimeUS)
	}
	return ends
}

// Both shards together say what the whole says, whatever their order.
func TestFleetTune(t *testing.T) {
	if testing.Short() {
		t.Skip("replays a run many times")
	}
	dir := t.TempDir()
	recordedRank(t, dir, "0")
	recordedRank(t, dir, "1")
	var shards []string
	for _, shard := range []string{"1/2", "2/2"} {
		out, errs, code := cistern(t, "", "fleet", "--tune", "--budget", "0", "--shard", shard, dir)
		if code != exitOK {
			t.Fatal(errs)
		}
		file := filepath.Join(t.TempDir(), "shard.json")
		if err := os.WriteFile(file, []byte(out), 0o600); err != nil {
			t.Fatal(err)
		}
		shards = append(shards, "--merge", file)
	}
	merged, errs, code := cistern(t, "", append(append([]string{"fleet"}, shards...), dir)...)
	if code != exitOK {
		t.Fatal(errs)
	}
	slices.Reverse(shards)
	for i := 0; i < len(shards); i += 2 {
		shards[i], shards[i+1] = shards[i+1], shards[i]
	}
	again, _, _ := cistern(t, "", append(append([]string{"fleet"}, shards...), dir)...)
	whole, _, _ := cistern(t, "", "fleet", "--tune", "--budget", "0", dir)
	if merged != again || merged != whole {
		t.Errorf("merged\n%s\nin another order\n%s\nwhole\n%s", merged, again, whole)
	}
	if !strings.Contains(whole, "by replays of 1 rank") || !strings.Contains(whole, "1 of 1") || !strings.Contains(whole, "Cistern") {
		t.Error(whole)
	}
	if _, errs, code := cistern(t, "", append(append([]string{"fleet"}, shards[:2]...), dir)...); code != exitBad || !strings.Contains(errs, "is missing") {
		t.Errorf("code %d, %s", code, errs)
	}
}

func TestFleetCollect(t *testing.T) {
	from, to := t.TempDir(), filepath.Join(t.TempDir(), "all")
	recordedRank(t, from, "0")
	recordedRank(t, from, "1")
	running := fleet.Summary{Format: fleet.Version, Variables: map[string]string{"RANK": "2"}, Recordings: []string{"gone.pickle"}}
	if _, err := fleettest.Write(from, &running); err != nil {
		t.Fatal(err)
	}
	for range 2 { // again, as an epilog may run twice
		if _, errs, code := cistern(t, "", "fleet", "collect", from, to); code != exitOK || !strings.Contains(errs, "3 processes") {
			t.Fatalf("code %d, %s", code, errs)
		}
	}
	f, err := fleet.Load(t.Context(), to)
	if err != nil || len(f.Summaries) != 3 {
		t.Fatalf("%v, %d summaries", err, len(f.Summaries))
	}
	for _, s := range f.Summaries[:2] {
		series := &s.Devices[0].Series
		if len(series.Hash) != 4 || slices.Contains(series.Hash, 0) || series.Peak[0] <= series.Now[0] {
			t.Errorf("the recording of %s was not read: %+v", s.Path, series)
		}
		if _, err := os.Stat(filepath.Join(to, s.Recordings[0])); err != nil {
			t.Error(err)
		}
	}
	if _, errs, code := cistern(t, "", "fleet", "collect", "--move", from, to); code != exitOK {
		t.Fatalf("code %d, %s", code, errs)
	}
	left, err := filepath.Glob(filepath.Join(from, "*"))
	if err != nil || len(left) != 1 || !strings.HasPrefix(filepath.Base(left[0]), "rank2") {
		t.Errorf("left %v, %v: expected that of the process that goes on", left, err)
	}
}

// The next command is one to be copied, whatever the names: the file of the failure where there is one, and none that is not there.
func TestFleetNextCommand(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "it's $HOME")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	s := ended("0", "gpu7", "newest.cistern")
	s.Devices[0].OOMs = 2
	s.Devices[0].Failures = []fleet.Failure{{Recording: "oom-7-1.cistern"}, {Requested: 4 << 30, Free: 1 << 30, Reserved: 79 << 30, Recording: "oom-7-2.cistern"}}
	if _, err := fleettest.Write(dir, s); err != nil {
		t.Fatal(err)
	}
	out, _, _ := cistern(t, "", "fleet", dir)
	if words := strings.Join(strings.Fields(out), " "); strings.Contains(out, "cistern report") || !strings.Contains(words, "the newest is newest.cistern, of node gpu7") {
		t.Error(out)
	}
	for _, name := range []string{"newest.cistern", "oom-7-1.cistern", "oom-7-2.cistern"} { // each says more than the one before
		file := write(t, filepath.Join(dir, name), "")
		out, _, _ := cistern(t, "", "fleet", dir)
		if want := "\n  cistern report '" + strings.ReplaceAll(file, "'", `'\''`) + "'\n"; !strings.Contains(out, want) {
			t.Errorf("%s\nwant %s", out, want)
		}
	}
	// Of a process with a limit, what was left of that.
	s.Devices[0].Limit = 80 << 30
	if _, err := fleettest.Write(dir, s); err != nil {
		t.Fatal(err)
	}
	out, _, _ = cistern(t, "", "fleet", dir)
	if !strings.Contains(strings.Join(strings.Fields(out), " "), "it requested 4.00 GiB with 1.00 GiB free of 80.00 GiB.") {
		t.Error(out)
	}
	s.Devices[0].Limit = 79<<30 + 512<<20
	if _, err := fleettest.Write(dir, s); err != nil {
		t.Fatal(err)
	}
	out, _, _ = cistern(t, "", "fleet", "--json", dir)
	var a fleet.Answer
	if err := json.Unmarshal([]byte(out), &a); err != nil || a.Limit.Headroom != -(4<<30-512<<20) || filepath.Base(a.Limit.Report) != "oom-7-2.cistern" {
		t.Errorf("%v, %+v", err, a.Limit)
	}
	out, _, _ = cistern(t, "", "fleet", dir)
	if !strings.Contains(strings.Join(strings.Fields(out), " "), "it requested 4.00 GiB with 512.00 MiB left of its limit of 79.50 GiB.") {
		t.Error(out)
	}
}
