package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/cistern-gpu/cistern/export"
	"github.com/cistern-gpu/cistern/fleet"
	"github.com/cistern-gpu/cistern/fleet/dataset"
	"github.com/cistern-gpu/cistern/recording"
)

// datasetTables are written where --table does not say which: not those that are as large as the recordings.
var datasetTables = []*export.Table{dataset.Processes, dataset.Steps, export.ByStack}

func newFleetExport(a *app) *cobra.Command {
	var out, commit, part string
	var tables []string
	c := &cobra.Command{
		Use:   "export [flags] FOLDER... -o DATASET",
		Short: "Write the summaries and recordings of jobs as Parquet, for DuckDB, Spark, Dask and Ray",
		Long: "Export adds the processes in folders of recordings to a dataset of Parquet files:\n\n" +
			"  DATASET/TABLE/job=JOB/restart=RESTART/rank=RANK/NAME.parquet\n\n" + tablesHelp() +
			"\nA process that is there already is replaced, so jobs are added one after the other, or side by side.\n" +
			"--shard 2/8 writes a part of the processes, for an array of jobs.\n\n" +
			"docs/datasets.md: the columns, and questions answered by each engine.",
		Example: "  cistern fleet export runs/ -o /data/cistern\n" +
			"  cistern fleet export --commit 4fe21c8 --table processes,stacks runs/ -o /data/cistern",
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return fmt.Errorf("%s: expected folders of recordings", c.Name())
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			if err := needOutput(c, out); err != nil {
				return err
			}
			chosen, err := chooseTables(tables)
			if err != nil {
				return err
			}
			shard, shards, err := shardOf(part)
			if err != nil {
				return err
			}
			found, err := fleet.Find(a.fail, args...)
			if err != nil {
				return err
			}
			if len(found) == 0 {
				return fmt.Errorf("%s: no summary of a process (*%s)", strings.Join(args, ", "), fleet.Ending)
			}
			x := &datasetExport{app: a, Writer: dataset.Writer{Folder: out, Commit: commit}, tables: chosen}
			return x.run(c.Context(), everyOf(found, shard, shards))
		},
	}
	c.Flags().StringVarP(&out, "output", "o", "", "`folder` of the dataset")
	c.Flags().StringSliceVar(&tables, "table", nil, "`tables` to write (default processes,steps,stacks)")
	c.Flags().StringVar(&commit, "commit", "", "`version` of the program, of processes without CISTERN_COMMIT")
	c.Flags().StringVar(&part, "shard", "", "write only part `i/n` of the processes")
	_ = c.RegisterFlagCompletionFunc("table", cobra.FixedCompletions(datasetTableNames(), cobra.ShellCompDirectiveNoFileComp))
	_ = c.MarkFlagDirname("output")
	return c
}

// tablesHelp lists the tables.
func tablesHelp() string {
	var b strings.Builder
	for _, t := range dataset.Tables {
		from := "summaries"
		if !dataset.OfSummaries(t) {
			from = "recordings"
		}
		fmt.Fprintf(&b, "  %-12s of %-11s %s\n", t.Name, from, t.What)
	}
	return b.String()
}

func datasetTableNames() []string {
	var names []string
	for _, t := range dataset.Tables {
		names = append(names, t.Name)
	}
	return names
}

func chooseTables(names []string) ([]*export.Table, error) {
	if len(names) == 0 {
		return datasetTables, nil
	}
	var chosen []*export.Table
	for _, name := range names {
		i := slices.IndexFunc(dataset.Tables, func(t *export.Table) bool { return t.Name == name })
		if i < 0 {
			return nil, fmt.Errorf("--table %s: expected %s", name, oneOf(datasetTableNames()))
		}
		if !slices.Contains(chosen, dataset.Tables[i]) {
			chosen = append(chosen, dataset.Tables[i])
		}
	}
	return chosen, nil
}

// everyOf is a part of a list.
func everyOf(all []string, shard, shards int) (part []string) {
	for i := shard - 1; i < len(all); i += shards {
		part = append(part, all[i])
	}
	return part
}

// datasetExport is one run of cistern fleet export.
type datasetExport struct {
	*app
	dataset.Writer
	tables  []*export.Table
	missing atomic.Int64 // recordings that are not beside their summaries
}

// recordingOf is a recording and its process.
type recordingOf struct {
	path string
	id   recording.Identity
}

func (x *datasetExport) run(ctx context.Context, summaries []string) error {
	recordings := make([][]recordingOf, len(summaries))
	errs := make([]error, len(summaries))
	group, stopped := errgroup.WithContext(ctx)
	group.SetLimit(runtime.GOMAXPROCS(0))
	for i, path := range summaries {
		group.Go(func() error {
			if stopped.Err() == nil {
				recordings[i], errs[i] = x.summary(path)
			}
			return stopped.Err()
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	for _, err := range errs {
		if err != nil {
			x.fail(err)
		}
	}
	if n := int(x.missing.Load()); n > 0 {
		fmt.Fprintf(x.err, "cistern: %s not beside the summaries: removed, or left on the nodes\n", plural(n, "recording is", "recordings are"))
	}
	return x.recordings(ctx, slices.Concat(recordings...))
}

// summary writes the tables of a summary; the recordings are those that are needed for others.
func (x *datasetExport) summary(path string) (recordings []recordingOf, err error) {
	s, err := fleet.Read(path)
	if err != nil {
		return nil, err
	}
	ofRecordings := false
	for _, t := range x.tables {
		if !dataset.OfSummaries(t) {
			ofRecordings = true
		} else if err := x.WriteSummary(s, t); err != nil {
			return nil, err
		}
	}
	if !ofRecordings {
		return nil, nil
	}
	for _, name := range s.Recordings {
		file := filepath.Join(filepath.Dir(path), name)
		switch st, err := os.Stat(file); {
		case errors.Is(err, fs.ErrNotExist):
			x.missing.Add(1)
		case err != nil:
			return nil, err
		case !st.Mode().IsRegular():
			return nil, fmt.Errorf("%s: expected a recording, a regular file", file)
		default:
			recordings = append(recordings, recordingOf{file, s.Identity()})
		}
	}
	return recordings, nil
}

// recordings writes the tables of recordings, several at once.
func (x *datasetExport) recordings(ctx context.Context, all []recordingOf) error {
	if len(all) == 0 {
		return nil
	}
	paths := make([]string, len(all))
	identities := map[string]recording.Identity{}
	for i, r := range all {
		paths[i], identities[r.path] = r.path, r.id
	}
	bar := x.startProgress("converting", len(paths))
	defer bar.end()
	return eachFile(ctx, x.app, paths, bar, func(f *recording.File, _ func(int, int)) (struct{}, error) {
		for _, t := range x.tables {
			if dataset.OfSummaries(t) {
				continue
			}
			if err := x.WriteRecording(identities[f.Path], f, t); err != nil {
				return struct{}{}, err
			}
		}
		return struct{}{}, nil
	}, func(_ int, r outcome[struct{}]) {
		if r.err != nil {
			x.fail(r.err)
		}
	})
}
