package main

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/fleet"
	"github.com/cistern-gpu/cistern/fleet/fleettest"
	"github.com/cistern-gpu/cistern/internal/slow"
)

// TestSlowFleet: 1,024 ranks are answered for in 20 s of CPU time (10 s on two cores) and 500 MB.
func TestSlowFleet(t *testing.T) {
	slow.Only(t)
	dir := t.TempDir()
	fleetJob(t, dir, fleettest.Job{Name: "4711", Ranks: 1024, Stages: 4, Steps: 1000, PerGPU: 80 << 30, Seed: 7}, func(rank int, s *fleet.Summary) {
		switch rank {
		case 317:
			fleettest.Fragment(s, 42<<30)
			fleettest.Fail(s, 4<<30)
		case 900:
			fleettest.Leak(s, 1<<20)
		}
	})
	command := filepath.Join(t.TempDir(), "cistern")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", command, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var out bytes.Buffer
	c := exec.CommandContext(t.Context(), command, "fleet", "--json", dir)
	c.Stdout = &out
	began := time.Now()
	if err := c.Run(); err != nil {
		t.Fatal(err)
	}
	used := c.ProcessState.SysUsage().(*syscall.Rusage)
	spent := c.ProcessState.UserTime() + c.ProcessState.SystemTime()
	t.Logf("%v elapsed, %v of CPU time, %d MB", time.Since(began).Round(time.Millisecond), spent, used.Maxrss>>10)
	if spent > 20*time.Second || used.Maxrss>>10 > 500 {
		t.Errorf("%v of CPU time and %d MB; expected at most 20 s and 500 MB", spent, used.Maxrss>>10)
	}
	var a fleet.Answer
	if err := json.Unmarshal(out.Bytes(), &a); err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, f := range a.Findings {
		found = append(found, f.Kind+" "+fleet.RankWords(f.Ranks))
	}
	if want := []string{"out_of_memory rank 317", "fragmentation rank 317", "growth rank 900"}; !slices.Equal(found[:len(found)-1], want) || a.Limit.Identity.Rank != 317 {
		t.Errorf("rank %d sets the limit; found %v, want %v", a.Limit.Identity.Rank, found, want)
	}
	if len(a.Groups) != 4 {
		t.Fatalf("%d groups", len(a.Groups))
	}
	for i, g := range a.Groups {
		if len(g.Ranks) != 256 || g.Ranks[0] != i*256 || g.Ranks[255] != i*256+255 {
			t.Errorf("group %d: %s", i, fleet.RankWords(g.Ranks))
		}
	}
}
