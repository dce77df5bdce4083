package fleet_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/fleet"
	"github.com/cistern-gpu/cistern/fleet/fleettest"
	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
)

func trace(t testing.TB) *recording.Trace {
	t.Helper()
	f, err := open.File(filepath.Join("..", "recording", "testdata", "gpt2_varlen.pickle.gz"))
	if err != nil {
		t.Fatal(err)
	}
	return f.Traces[0]
}

// made writes a job's summaries, changed by plant, and is their files.
func made(t testing.TB, dir string, j fleettest.Job, plant func(rank int, s *fleet.Summary)) []string {
	t.Helper()
	files := make([]string, j.Ranks)
	fleettest.Make(trace(t), j, func(rank int, s *fleet.Summary) {
		plant(rank, s)
		var err error
		if files[rank], err = fleettest.Write(dir, s); err != nil {
			t.Fatal(err)
		}
	})
	return files
}

func answer(t testing.TB, dir string) *fleet.Answer {
	t.Helper()
	f, err := fleet.Load(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	jobs := f.Jobs()
	if len(jobs) == 0 {
		t.Fatal("no job")
	}
	return f.Answer(jobs[0])
}

// kinds are the findings, each as its kind, its ranks and its node.
func kinds(a *fleet.Answer) []string {
	list := []string{}
	for _, f := range a.Findings {
		s := f.Kind
		if len(f.Ranks) > 0 {
			s += fmt.Sprint(" ", f.Ranks)
		}
		if f.Kind == fleet.KindClock {
			s += " " + f.Node
		}
		list = append(list, s)
	}
	return list
}

func small() fleettest.Job {
	return fleettest.Job{Name: "77", Ranks: 32, Stages: 2, Steps: 100, PerGPU: 80 << 30, Seed: 1}
}

// A job in which nothing is wrong has no findings but what it is.
func TestNothingWrong(t *testing.T) {
	for _, lengths := range []bool{false, true} {
		dir := t.TempDir()
		j := small()
		j.Lengths = lengths
		made(t, dir, j, func(int, *fleet.Summary) {})
		a := answer(t, dir)
		if got := kinds(a); !slices.Equal(got, []string{"imbalance"}) {
			t.Errorf("lengths %v: %v", lengths, got)
		}
		if a.World != 32 || a.Nodes != 4 || a.Steps != 100 || a.Job != "77" || len(a.Ranks) != 32 || a.Launcher != "torchrun" {
			t.Errorf("%+v", a)
		}
		// Without coordinates the groups are found by requests alone.
		want := []int{16, 16}
		if lengths {
			want = []int{32} // sizes differ, numbers do not
		}
		var sizes []int
		for _, g := range a.Groups {
			sizes = append(sizes, len(g.Ranks))
		}
		if !slices.Equal(sizes, want) {
			t.Errorf("lengths %v: groups of %v ranks", lengths, sizes)
		}
	}
}

// Each fault is found by name, on the rank that has it and on no other.
func TestPlanted(t *testing.T) {
	for _, c := range []struct {
		name  string
		plant func(rank int, s *fleet.Summary)
		after func(t *testing.T, dir string, files []string)
		want  []string // beside the imbalance of stages
		limit int      // -1: any
		cause string
	}{
		{name: "fragmentation", want: []string{"fragmentation [7]"}, limit: 7, cause: fleet.CauseFragmentation, plant: func(rank int, s *fleet.Summary) {
			if rank == 7 {
				fleettest.Fragment(s, 9<<30)
			}
		}},
		{name: "leak", want: []string{"growth [21]"}, limit: -1, plant: func(rank int, s *fleet.Summary) {
			if rank == 21 {
				fleettest.Leak(s, 1<<20)
			}
		}},
		{name: "outside", want: []string{"outside [9]"}, limit: 9, cause: fleet.CauseOutside, plant: func(rank int, s *fleet.Summary) {
			if rank == 9 {
				fleettest.Beside(s, 3<<30)
			}
		}},
		{name: "a request failed", want: []string{"out_of_memory [30]", "fragmentation [30]"}, limit: 30, cause: fleet.CauseFragmentation, plant: func(rank int, s *fleet.Summary) {
			if rank == 30 {
				fleettest.Fragment(s, 44<<30)
				fleettest.Fail(s, 4<<30)
			}
		}},
		{name: "restarted", want: []string{"restarted [4]"}, limit: -1, plant: func(int, *fleet.Summary) {}, after: func(t *testing.T, dir string, files []string) {
			s, err := fleet.Read(files[4])
			if err != nil {
				t.Fatal(err)
			}
			s.Variables["TORCHELASTIC_RESTART_COUNT"] = "1"
			s.StartedUS += 1e6
			if _, err := fleettest.Write(dir, s); err != nil {
				t.Fatal(err)
			}
		}},
		{name: "truncated", want: []string{"missing [12]", "truncated"}, limit: -1, plant: func(int, *fleet.Summary) {}, after: func(t *testing.T, _ string, files []string) {
			if err := fleettest.Truncate(files[12]); err != nil {
				t.Fatal(err)
			}
		}},
		{name: "another job", want: []string{"missing [3]", "other_job"}, limit: -1, plant: func(rank int, s *fleet.Summary) {
			if rank == 3 {
				s.Variables["SLURM_JOB_ID"] = "78"
			}
		}},
		{name: "clocks", want: []string{"clock gpu002"}, limit: -1, plant: func(rank int, s *fleet.Summary) {
			if s.Host == "gpu002" {
				fleettest.Clock(s, 300e6)
			}
		}},
		{name: "killed", want: []string{"ended [17]"}, limit: -1, plant: func(rank int, s *fleet.Summary) {
			if rank == 17 {
				fleettest.Kill(s, 40)
			}
		}},
		{name: "killed, as its launcher says", want: []string{"ended [17]"}, limit: -1, plant: func(rank int, s *fleet.Summary) {
			switch rank {
			case 17:
				fleettest.Kill(s, 40)
				s.Status = -9
			case 3, 4: // of the last, its launcher says nothing
				fleettest.Kill(s, 40)
				s.Status = 4 - rank
			}
		}},
		{name: "ranks that lose another one", want: []string{"out_of_memory [3]", "ended [3]"}, limit: 3, cause: fleet.CauseUsed, plant: func(rank int, s *fleet.Summary) {
			if rank >= 3 && rank <= 5 {
				s.Status = 1
			}
			if rank == 3 {
				fleettest.Fail(s, 100<<30)
			}
		}},
		{name: "other requests", want: []string{"requests [5]"}, limit: -1, plant: func(rank int, s *fleet.Summary) {
			if rank == 5 {
				s.Devices[0].Series.Requests[60]++
			}
		}},
		{name: "a twin that needs more", want: []string{"twin [6]"}, limit: 6, cause: fleet.CauseUsed, plant: func(rank int, s *fleet.Summary) {
			if rank == 6 {
				for _, p := range []*fleet.Peak{&s.Devices[0].PeakAllocated, &s.Devices[0].PeakReserved} {
					p.Bytes += 4 << 30
					p.Allocated += 4 << 30
				}
			}
		}},
		{name: "an old RANK", want: []string{"identity [8]"}, limit: -1, plant: func(rank int, s *fleet.Summary) {
			if rank == 8 {
				s.Variables["SLURM_NTASKS"], s.Variables["SLURM_PROCID"] = "32", "9"
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			files := made(t, dir, small(), c.plant)
			if c.after != nil {
				c.after(t, dir, files)
			}
			a := answer(t, dir)
			got := slices.DeleteFunc(kinds(a), func(k string) bool { return k == fleet.KindImbalance })
			if !slices.Equal(got, c.want) {
				for _, f := range a.Findings {
					t.Log(f.Text)
				}
				t.Errorf("found %v, want %v", got, c.want)
			}
			if c.limit >= 0 && (a.Limit.Identity.Rank != c.limit || a.Limit.Cause != c.cause) {
				t.Errorf("rank %d sets the limit by %s, want rank %d by %s", a.Limit.Identity.Rank, a.Limit.Cause, c.limit, c.cause)
			}
		})
	}
}

// The slope of a leak is that of the leak.
func TestGrowth(t *testing.T) {
	dir := t.TempDir()
	made(t, dir, small(), func(rank int, s *fleet.Summary) {
		if rank == 0 {
			fleettest.Leak(s, 1<<20)
		}
	})
	a := answer(t, dir)
	for _, r := range a.Ranks {
		if grows := r.Growth > 0; grows != (r.Identity.Rank == 0) {
			t.Errorf("rank %d grows by %.0f bytes a step", r.Identity.Rank, r.Growth)
		} else if grows && (r.Growth < 0.9*(1<<20) || r.Growth > 1.1*(1<<20)) {
			t.Errorf("growth %.0f bytes a step", r.Growth)
		}
	}
}

// A folder of files of all kinds is read as far as it goes.
func TestLoad(t *testing.T) {
	dir := t.TempDir()
	made(t, filepath.Join(dir), fleettest.Job{Name: "1", Ranks: 2, Stages: 1, Steps: 3, PerGPU: 1 << 30}, func(int, *fleet.Summary) {})
	for name, text := range map[string]string{"a.summary.json": "", "b.summary.json": "{}", "c.pickle": "x", ".d.summary.json": "{"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	f, err := fleet.Load(t.Context(), dir, dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(f.Summaries) != 2 || len(f.Truncated) != 1 || len(f.Bad) != 1 || !strings.Contains(f.Bad[0], "is missing") {
		t.Errorf("%d summaries, truncated %v, bad %v", len(f.Summaries), f.Truncated, f.Bad)
	}
	if _, err := fleet.Load(t.Context(), filepath.Join(dir, "none")); err == nil {
		t.Error("a folder that is not there")
	}
}

func TestRankWords(t *testing.T) {
	for want, numbers := range map[string][]int{"rank 3": {3}, "2 ranks (3, 4)": {3, 4}, "5 ranks (1, 3 to 5, 9)": {1, 3, 4, 5, 9}} {
		if got := fleet.RankWords(numbers); got != want {
			t.Errorf("%v: %s, want %s", numbers, got, want)
		}
	}
}

// What is computed from a recording replaces estimates, and only where the recording has the whole step.
func TestExact(t *testing.T) {
	tr := trace(t)
	ends := []int64{}
	for i := 1; i <= 10; i++ {
		ends = append(ends, tr.Events[i*(len(tr.Events)-1)/10].TimeUS)
	}
	rows := fleet.Steps(tr, ends)
	var want, got fleet.Series
	for _, r := range rows {
		want.Add(r)
		r.HashSum, r.Peak = 0, r.Now
		got.Add(r)
	}
	if n := got.Exact(tr); n != 10 {
		t.Errorf("%d rows were changed", n)
	}
	for i := range want.Len() {
		if want.Row(i) != got.Row(i) {
			t.Errorf("row %d: %+v, want %+v", i, got.Row(i), want.Row(i))
		}
	}
	late := *tr
	late.FromStart, late.Events = false, tr.Events[len(tr.Events)/2+100:]
	for i := range got.Hash {
		got.Hash[i] = 0
	}
	if n := got.Exact(&late); n != 4 || got.Hash[5] != 0 || got.Hash[6] != want.Hash[6] {
		t.Errorf("%d rows were changed: %v", n, got.Hash)
	}
}

// With stages of one rank each, none has a twin, and stages that need different memory are no faults.
func TestRanksWithoutTwins(t *testing.T) {
	dir := t.TempDir()
	made(t, dir, fleettest.Job{Name: "1", Ranks: 4, Stages: 4, Steps: 50, PerGPU: 80 << 30, Seed: 1}, func(rank int, s *fleet.Summary) {
		if rank == 2 {
			fleettest.Fragment(s, 9<<30)
		}
	})
	a := answer(t, dir)
	if got := kinds(a); !slices.Equal(got, []string{"imbalance"}) {
		t.Errorf("%v", got)
	}
	if a.Limit.Identity.Rank != 2 || a.Limit.Twins != 0 || a.Limit.Excess != 0 {
		t.Errorf("%+v", a.Limit)
	}
}

// Without coordinates, a rank that makes other requests than most is named.
func TestOtherRequestsWithoutCoordinates(t *testing.T) {
	dir := t.TempDir()
	made(t, dir, fleettest.Job{Name: "1", Ranks: 8, Stages: 1, Steps: 50, PerGPU: 80 << 30, Seed: 1}, func(rank int, s *fleet.Summary) {
		s.Coordinates = nil
		if rank == 0 {
			s.Devices[0].Series.Requested[20] += 512
		}
	})
	a := answer(t, dir)
	if got := kinds(a); !slices.Equal(got, []string{"requests [0]"}) || a.Findings[0].Step != 21 {
		t.Errorf("%v, %+v", got, a.Findings)
	}
}

// Ranks of a job that goes on have written their summaries at different times.
func TestRunning(t *testing.T) {
	for _, c := range []struct {
		steps int64 // of rank 3, 0.4 s each
		want  []string
	}{{90, []string{}}, {10, []string{"ended [3]"}}} {
		dir := t.TempDir()
		made(t, dir, fleettest.Job{Name: "1", Ranks: 8, Stages: 1, Steps: 3000, PerGPU: 80 << 30, Seed: 1}, func(rank int, s *fleet.Summary) {
			s.Ended = fleet.EndNone
			if rank == 3 {
				fleettest.Kill(s, 30*c.steps)
			}
		})
		if got := kinds(answer(t, dir)); !slices.Equal(got, c.want) {
			t.Errorf("rank 3 at step %d: %v", 30*c.steps, got)
		}
	}
}

// What launchers say of how ranks failed, and of the attempt before.
func TestStatusWords(t *testing.T) {
	for _, c := range []struct {
		want   string
		status map[int]int
	}{
		{"rank 17 was killed by SIGKILL (as the kernel does where host memory runs out) after step 40 or later; 2 ranks (3, 4) ended with it", map[int]int{17: -9, 3: 1, 4: 0}},
		{"rank 17 was killed by SIGSEGV, rank 3 was killed by signal 5 after step 40 or later; rank 4 ended with it", map[int]int{17: -11, 3: -5, 4: 2}},
		{"2 ranks (3, 17) ended with status 1 after step 40 or later; rank 4 ended with it", map[int]int{17: 1, 3: 1, 4: 0}},
	} {
		dir := t.TempDir()
		again := t.TempDir()
		made(t, dir, small(), func(rank int, s *fleet.Summary) {
			status, ok := c.status[rank]
			if ok {
				fleettest.Kill(s, 40)
				s.Status = status
			}
			if _, err := fleettest.Write(again, s); err != nil {
				t.Fatal(err)
			}
			s.Variables["TORCHELASTIC_RESTART_COUNT"] = "1"
			s.Status, s.Ended = 0, fleet.EndExit
			s.StartedUS += 1e6
			if _, err := fleettest.Write(again, s); err != nil {
				t.Fatal(err)
			}
			s.Variables["TORCHELASTIC_RESTART_COUNT"] = "0"
			s.StartedUS -= 1e6
			s.Status = status
			if ok {
				s.Ended = fleet.EndNone
			}
		})
		find := func(dir, kind string) string {
			for _, f := range answer(t, dir).Findings {
				if f.Kind == kind {
					return f.Text
				}
			}
			return ""
		}
		if got := find(dir, fleet.KindEnded); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
		how, _, _ := strings.Cut(c.want, " after step")
		if got := find(again, fleet.KindRestarted); !strings.HasSuffix(got, "; the newest attempt is shown; before, "+how) {
			t.Errorf("%q, want %q", got, how)
		}
	}
}
