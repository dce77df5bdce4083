// Package dataset writes what the processes of jobs left as Parquet files in folders by job, restart and rank, which DuckDB,
// Spark, Dask, Ray and others read as tables:
//
//	TABLE/job=JOB/restart=RESTART/rank=RANK/NAME.parquet
//
// A process has a file of its own in each table, with a name of its own: processes of a job, or shards of the work, are written
// side by side, and writing one again replaces it. tables.go has the tables that are made of summaries; those of recordings are
// package export's.
package dataset

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cistern-gpu/cistern/export"
	"github.com/cistern-gpu/cistern/fleet"
	"github.com/cistern-gpu/cistern/internal/outfile"
	"github.com/cistern-gpu/cistern/recording"
)

// Unknown values are no nulls, which would be lost where tables are joined.
const (
	unknownJob  = "unknown"
	unknownRank = -1
)

// ending is that of the files.
const ending = ".parquet"

// OfSummaries reports whether a table is made of summaries alone.
func OfSummaries(table *export.Table) bool { return table == Processes || table == Steps }

// Writer writes processes to a dataset.
type Writer struct {
	Folder string
	Commit string // of programs that did not name theirs
}

// WriteSummary writes the tables that are made of a summary.
func (w *Writer) WriteSummary(s *fleet.Summary, table *export.Table) error {
	rows := processRows
	if table == Steps {
		rows = stepRows
	}
	about := map[string]string{"cistern.path": s.Path, "cistern.version": s.Version}
	return w.write(s.Identity(), table, nameOf(s), func(f io.Writer) error {
		return export.WriteRecords(f, table, about, rows(s, w.Commit))
	})
}

// WriteRecording writes a table that is made of a recording of a process.
func (w *Writer) WriteRecording(id recording.Identity, f *recording.File, table *export.Table) error {
	name := filepath.Base(f.Path)
	return w.write(id, table, name, func(to io.Writer) error { return export.WriteParquet(to, f, table.With(RecordingColumn, name)) })
}

// nameOf is the name of the process's files.
func nameOf(s *fleet.Summary) string { return strings.TrimSuffix(filepath.Base(s.Path), fleet.Ending) }

func (w *Writer) write(id recording.Identity, table *export.Table, name string, fill func(io.Writer) error) error {
	folder := filepath.Join(w.Folder, table.Name, partition(id))
	if err := os.MkdirAll(folder, 0o777); err != nil {
		return err
	}
	f, err := outfile.Create(filepath.Join(folder, name+ending), outfile.Shared)
	if err != nil {
		return err
	}
	defer f.Abandon()
	if err := fill(f); err != nil {
		return fmt.Errorf("%s: %w", filepath.Join(folder, name+ending), err)
	}
	return f.Commit()
}

// partition is the folders of a process.
func partition(id recording.Identity) string {
	return filepath.Join("job="+escape(cmp.Or(id.Job, unknownJob)), "restart="+strconv.Itoa(id.Restart),
		"rank="+strconv.Itoa(max(unknownRank, id.Rank)))
}

// escape writes a value as the name of a folder, as Hive does: what may have a meaning in paths is %XX. Spark would decode bytes
// of letters beyond ASCII one by one, so they stay.
func escape(value string) string {
	var b strings.Builder
	for _, c := range []byte(value) {
		switch {
		case c >= 0x80, c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '-', c == '_', c == '.':
			b.WriteByte(c)
		default:
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}
