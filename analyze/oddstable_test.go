package analyze

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/replay"
)

var rewrite = flag.Bool("rewrite", false, "write the table of odds into docs/what-if.md anew")

// limits are those that recordings ran under, which the files do not have: set_per_process_memory_fraction.
var limits = map[string]float64{"detection.cap16": 16, "detection.expandable.cap17": 17, "detection.gc07.cap20": 20, "gnn.cap11": 11,
	"gpt2_varlen.cap24": 24, "gpt2_varlen.expandable.cap20.6": 20.6}

// TestOddsTable: docs/what-if.md has the odds of every recorded run, as they are.
func TestOddsTable(t *testing.T) {
	folder := os.Getenv("CISTERN_TRACES")
	if folder == "" {
		t.Skip("CISTERN_TRACES names no folder of recordings")
	}
	files, err := filepath.Glob(filepath.Join(folder, "*.pickle.gz"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no recordings in %s: %v", folder, err)
	}
	var rows []string
	for _, file := range files {
		f, err := open.File(file)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimSuffix(filepath.Base(file), ".pickle.gz")
		for _, tr := range f.Traces {
			if len(f.Traces) > 1 {
				name = fmt.Sprintf("%s, device %d", strings.Split(name, ",")[0], tr.Device)
			}
			rows = append(rows, oddsRow(t, name, tr))
		}
	}
	const doc, head = "../docs/what-if.md", "|---|---|---|---|---|---|\n"
	text, err := os.ReadFile(doc)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(text), head)
	table, after, end := strings.Cut(rest, "\n\n")
	if !ok || !end {
		t.Fatalf("%s has no table of odds", doc)
	}
	want := strings.Join(rows, "\n")
	if *rewrite {
		if err := os.WriteFile(doc, []byte(before+head+want+"\n\n"+after), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if table != want {
		t.Errorf("%s has\n%s\nand the odds are\n%s", doc, table, want)
	}
}

// oddsRow is a run's line of the table.
func oddsRow(t *testing.T, name string, tr *recording.Trace) string {
	t.Helper()
	capacity := uint64(limits[name] * (1 << 30))
	fatal := fatalOf(tr)
	s, _ := searchOf(context.Background(), tr, TuneOptions{GPULag: 20 * time.Millisecond}, capacity, fatal)
	odds, err := s.odds(replay.Spec{Name: "torch"}, capacity)
	if err != nil {
		t.Fatal(err)
	}
	limit, outcome := "none", "completed"
	if capacity > 0 {
		limit = fmt.Sprintf("%v GiB", limits[name])
	}
	if fatal >= 0 {
		outcome = "died"
	}
	peak := units.FormatBytes(odds.PeakLeast)
	if most := units.FormatBytes(odds.PeakMost); most != peak {
		peak += " to " + most
	}
	if !odds.Explained() {
		t.Errorf("%s: the recorded outcome occurs in %d of %d draws", name, odds.AsRecorded, odds.Replays)
	}
	return fmt.Sprintf("| %s | %s | %s | %s | %s | %s |", name, limit, outcome, odds, units.FormatBytes(s.plan.Recorded.PeakReserved), peak)
}
