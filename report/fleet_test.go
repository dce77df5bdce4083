package report

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/fleet"
	"github.com/cistern-gpu/cistern/fleet/fleettest"
	"github.com/cistern-gpu/cistern/internal/slow"
)

// fleetOf is the answer for a job of which rank 200 ran out of memory, with a hostile name.
func fleetOf(t *testing.T, dir string, ranks int) *fleet.Answer {
	t.Helper()
	rows := smallTrace()
	fleettest.Make(rows, fleettest.Job{Name: `</script><img src=x onerror="window.hacked=1">`, Ranks: ranks, Stages: 4, Steps: 300, PerGPU: 100 << 20, Seed: 3}, func(rank int, s *fleet.Summary) {
		for i := range s.Devices[0].Series.Outside { // the GPU is a small one
			s.Devices[0].Series.Outside[i] = 1 << 20
		}
		s.Devices[0].PeakOutside.Bytes = 1 << 20
		if rank == 200 {
			fleettest.Fragment(s, 70<<20)
			fleettest.Fail(s, 60<<20)
			s.Recordings = []string{"rank200.pickle"}
			if err := os.WriteFile(filepath.Join(dir, "rank200.pickle.html"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := fleettest.Write(dir, s); err != nil {
			t.Fatal(err)
		}
	})
	f, err := fleet.Load(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	return f.Answer(f.Jobs()[0])
}

// The page is one file, whose data are data, and links to reports beside recordings.
func TestFleetPage(t *testing.T) {
	dir := t.TempDir()
	a := fleetOf(t, dir, 256)
	var page bytes.Buffer
	err := WriteFleetPage(&page, a, filepath.Join(dir, "job.html"))
	if errors.Is(err, ErrNoBundle) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(page.String(), `id="cistern-data">`)
	data, _, _ := strings.Cut(rest, "</script>")
	var v struct {
		Fleet struct {
			Answer              fleet.Answer
			Steps               []int64
			Reserved, Allocated [][]byte
			Envelopes           struct{ Reserved [3][]uint64 }
			Reports             map[string]string
		}
	}
	if err := json.Unmarshal([]byte(data), &v); err != nil {
		t.Fatal(err)
	}
	columns := len(v.Fleet.Steps)
	if columns != 150 || v.Fleet.Steps[columns-1] != 300 || len(v.Fleet.Reserved) != 256 || len(v.Fleet.Allocated[255]) != columns || len(v.Fleet.Envelopes.Reserved[0]) != columns {
		t.Errorf("%d columns of %d ranks", columns, len(v.Fleet.Reserved))
	}
	if v.Fleet.Answer.Limit.Identity.Rank != 200 || v.Fleet.Reports["0"] != "rank200.pickle.html" {
		t.Errorf("rank %d, reports %v", v.Fleet.Answer.Limit.Identity.Rank, v.Fleet.Reports)
	}
	for k := range columns {
		if e := v.Fleet.Envelopes.Reserved; e[0][k] < e[1][k] || e[1][k] < e[2][k] || e[2][k] == 0 {
			t.Fatalf("column %d: %d, %d, %d", k, e[0][k], e[1][k], e[2][k])
		}
	}
}

// TestSlowFleetInBrowser opens the page of a job (web/test/fleet.mjs).
func TestSlowFleetInBrowser(t *testing.T) {
	slow.Only(t)
	node, chromium := needBrowser(t)
	dir := t.TempDir()
	a := fleetOf(t, dir, 256)
	path := filepath.Join(dir, "job.html")
	var page bytes.Buffer
	if err := WriteFleetPage(&page, a, path); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, page.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	data, err := json.Marshal(map[string]any{"page": path, "ranks": 256, "limit": 200, "report": "rank200.pickle.html", "findings": len(a.Findings),
		"texts": []string{"rank 200 sets the limit", "It ran out of memory at step 300"}})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "expect.json")
	if err := os.WriteFile(file, data, 0o644); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), node, "web/test/fleet.mjs", chromium, file).CombinedOutput()
	if err != nil {
		t.Fatalf("the page is not as it should be: %v\n%s", err, bytes.TrimSpace(out))
	}
}
