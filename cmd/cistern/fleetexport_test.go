package main

import (
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/export"
	"github.com/cistern-gpu/cistern/fleet"
	"github.com/cistern-gpu/cistern/fleet/dataset"
)

// TestDatasetsPage: docs/datasets.md has the columns of the tables that are made of summaries.
// `go test ./cmd/cistern -run TestDatasetsPage -rewrite` writes them.
func TestDatasetsPage(t *testing.T) {
	const file = "../../docs/datasets.md"
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	head, _, found := strings.Cut(string(got), "-rewrite -->\n")
	if !found {
		t.Fatal("the mark is missing")
	}
	var b strings.Builder
	b.WriteString(head + "-rewrite -->\n")
	for _, table := range dataset.Tables {
		if dataset.OfSummaries(table) {
			fmt.Fprintf(&b, "\n## Table %s\n\n%s%s.\n\n%s", table.Name, strings.ToUpper(table.What[:1]), table.What[1:], columnsTable(table))
			continue
		}
		fmt.Fprintf(&b, "\n## Table %s\n\n%s%s. It has the columns of [that table](formats.md#table-%s), and `%s`, the %s.\n", table.Name,
			strings.ToUpper(table.What[:1]), table.What[1:], table.Name, dataset.RecordingColumn.Name, dataset.RecordingColumn.Doc)
	}
	if flag.Lookup("rewrite").Value.String() == "true" {
		if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if string(got) != b.String() {
		t.Errorf("%s is not what the program has: run this test with -rewrite", file)
	}
}

// columnsTable describes the columns of a table in Markdown.
func columnsTable(table *export.Table) string {
	var b strings.Builder
	b.WriteString("| column | type | contents |\n|---|---|---|\n")
	for _, c := range table.Columns {
		kind := c.Type.String()
		if c.Null {
			kind += ", may be null"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", c.Name, kind, c.Doc)
	}
	return b.String()
}

// ranks leaves the summaries of a job of four ranks in the folder runs; the first two have a recording.
func ranks(t *testing.T) {
	t.Helper()
	inFolder(t)
	if err := os.Mkdir("runs", 0o777); err != nil {
		t.Fatal(err)
	}
	for rank := range 4 {
		s := &fleet.Summary{Format: fleet.Version, Allocator: fleet.AllocatorPyTorch, Devices: []fleet.Device{{Total: 80 << 30}},
			Variables: map[string]string{"RANK": fmt.Sprint(rank), "WORLD_SIZE": "4", "SLURM_JOB_ID": "7"}}
		if rank < 2 {
			s.Recordings = []string{fmt.Sprintf("r%d.pickle", rank)}
			data, err := os.ReadFile("tiny.pickle")
			if err == nil {
				err = os.WriteFile(filepath.Join("runs", s.Recordings[0]), data, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Write(fmt.Sprintf("runs/r%d%s", rank, fleet.Ending)); err != nil {
			t.Fatal(err)
		}
	}
}

// files are those below a folder.
func files(t *testing.T, folder string) (found []string) {
	t.Helper()
	err := filepath.WalkDir(folder, func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			found = append(found, filepath.ToSlash(strings.TrimPrefix(path, folder+string(filepath.Separator))))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// Parts of the work are together the whole, and doing it again changes nothing.
func TestFleetExport(t *testing.T) {
	ranks(t)
	if out, errs, code := cistern(t, "", "fleet", "export", "runs", "-o", "whole"); code != 0 || out+errs != "" {
		t.Fatalf("code %d: %s%s", code, out, errs)
	}
	var want []string
	for rank := range 4 {
		place := fmt.Sprintf("/job=7/restart=0/rank=%d/r%d", rank, rank)
		want = append(want, "processes"+place+".parquet", "steps"+place+".parquet")
		if rank < 2 {
			want = append(want, "stacks"+place+".pickle.parquet")
		}
	}
	slices.Sort(want)
	if got := files(t, "whole"); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	for _, part := range []string{"1/3", "2/3", "3/3", "2/3"} {
		if _, errs, code := cistern(t, "", "fleet", "export", "--shard", part, "runs", "-o", "parts"); code != 0 {
			t.Fatal(errs)
		}
	}
	if got := files(t, "parts"); !slices.Equal(got, want) {
		t.Errorf("in parts: %q, want %q", got, want)
	}
	if _, errs, code := cistern(t, "", "fleet", "export", "--table", "events,allocations,events", "runs", "-o", "large"); code != 0 {
		t.Fatal(errs)
	}
	if got := files(t, "large"); len(got) != 4 || !strings.HasPrefix(got[0], "allocations/job=7/") {
		t.Errorf("%q", got)
	}
}

// What cannot be read is a line; the rest is written.
func TestFleetExportBad(t *testing.T) {
	ranks(t)
	for name, text := range map[string]string{
		"runs/r0.pickle": "nothing", "runs/r2" + fleet.Ending: `{"cistern_summary":1,`,
		"runs/r3" + fleet.Ending: `{"cistern_summary":1,"recordings":["../tiny.pickle"]}`} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	_, errs, code := cistern(t, "", "fleet", "export", "runs", "-o", "set")
	if lines := strings.Split(strings.TrimSpace(errs), "\n"); code != exitBad || len(lines) != 3 || !strings.Contains(errs, "runs/r2.summary.json: the summary is truncated") ||
		!strings.Contains(errs, "runs/r3.summary.json: recording \"../tiny.pickle\"; expected a file beside it") || !strings.Contains(errs, "runs/r0.pickle: ") {
		t.Errorf("code %d: %s", code, errs)
	}
	if got := files(t, "set/stacks"); len(got) != 1 || !strings.HasSuffix(got[0], "/r1.pickle.parquet") {
		t.Errorf("%q", got)
	}
	// One that is not there is no error: it may be on its node.
	if err := os.Remove("runs/r1.pickle"); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll("runs/r0" + fleet.Ending); err != nil {
		t.Fatal(err)
	}
	_, errs, code = cistern(t, "", "fleet", "export", "--shard", "1/3", "runs", "-o", "set")
	if code != 0 || errs != "cistern: 1 recording is not beside the summaries: removed, or left on the nodes\n" {
		t.Errorf("code %d: %s", code, errs)
	}
	if err := os.Mkdir("runs/r1.pickle", 0o700); err != nil {
		t.Fatal(err)
	}
	if _, errs, code = cistern(t, "", "fleet", "export", "--shard", "1/3", "runs", "-o", "set"); code != exitBad || !strings.Contains(errs, "a regular file") {
		t.Errorf("code %d: %s", code, errs)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"runs"}, "-o"},
		{[]string{"-o", "set"}, "expected folders"},
		{[]string{"none", "-o", "set"}, "none"},
		{[]string{"set", "-o", "set"}, "no summary of a process"},
		{[]string{"runs", "-o", "set", "--table", "calls"}, "--table calls: expected processes, steps"},
		{[]string{"runs", "-o", "set", "--shard", "0/4"}, "--shard 0/4: expected i/n"},
		{[]string{"runs", "-o", "tiny.pickle"}, "tiny.pickle"},
	} {
		if _, errs, code := cistern(t, "", append([]string{"fleet", "export"}, c.args...)...); code != exitBad || !strings.Contains(errs, c.want) {
			t.Errorf("%v: code %d, %q, want %q", c.args, code, errs, c.want)
		}
	}
}
