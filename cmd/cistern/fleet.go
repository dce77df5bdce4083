package main

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cistern-gpu/cistern/fleet"
	"github.com/cistern-gpu/cistern/report"
)

// fleetCommand is what `cistern fleet` does.
type fleetCommand struct {
	job    string
	json   bool
	tune   bool
	shard  string
	merge  []string
	html   string
	budget time.Duration
}

func newFleet(a *app) *cobra.Command {
	var f fleetCommand
	c := &cobra.Command{
		Use:   "fleet [flags] FOLDER...",
		Short: "Answer for a job of many ranks: which one sets the limit, why, and what would fit all",
		Long: "Fleet reads the summaries that cistern run --record FOLDER and cistern record -o FOLDER/ leave, one of each process, and\n" +
			"those in folders below. It names the rank that sets the limit and the cause (used memory, fragmentation, cached memory,\n" +
			"memory outside the allocator, growth), ranks that differ from their twins, stages of a pipeline that differ, restarts and\n" +
			"missing ranks, and the smallest GPU for the job. Ranks are aligned by step, so clocks may differ. Recordings are not read.\n\n" +
			"With --tune it replays the recordings of one rank of each group and of each outlier, and finds settings that let all ranks\n" +
			"through. --shard 2/8 does a part of that and prints it as JSON, for an array of jobs; --merge puts all parts together.",
		Example: "  cistern fleet runs/\n" +
			"  cistern fleet -o job.html runs/\n" +
			"  cistern fleet --tune runs/\n" +
			"  cistern fleet --merge 'shards/*.json' runs/",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("fleet: no folder named: give the folder that cistern run --record wrote to")
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error { return f.run(c, a, args) },
	}
	c.Flags().StringVar(&f.job, "job", "", "the `job` by its name, where the folder has several (default the one with most processes)")
	c.Flags().BoolVar(&f.json, "json", false, "print one JSON object")
	c.Flags().BoolVar(&f.tune, "tune", false, "replay recordings of representatives to find settings for all ranks")
	c.Flags().StringVar(&f.shard, "shard", "", "with --tune: only part `i/n` of the replays, printed as JSON for --merge")
	c.Flags().StringArrayVar(&f.merge, "merge", nil, "put the parts in these `files` together; a pattern stands for several")
	c.Flags().StringVarP(&f.html, "output", "o", "", "write an HTML page to this `file`: heat map of ranks and steps, envelope, tables")
	addBudget(c, &f.budget)
	c.AddCommand(newFleetCollect(a), newFleetExport(a), newFleetMetrics(a))
	return c
}

// shardOf parses "i/n".
func shardOf(text string) (shard, shards int, err error) {
	if text == "" {
		return 1, 1, nil
	}
	var rest string
	n, _ := fmt.Sscanf(text+"\x00", "%d/%d%s", &shard, &shards, &rest)
	if n != 3 || rest != "\x00" || shard < 1 || shards < shard {
		return 0, 0, fmt.Errorf("--shard %s: expected i/n with i from 1 to n, such as 2/8", text)
	}
	return shard, shards, nil
}

func (f *fleetCommand) check() error {
	switch {
	case f.shard != "" && !f.tune:
		return errors.New("--shard: it is a part of --tune")
	case f.shard != "" && f.html != "":
		return errors.New("--shard and -o: the page is of all shards together: give it with --merge")
	case f.tune && len(f.merge) > 0:
		return errors.New("--tune and --merge: choose one")
	case f.budget < 0:
		return errBudget
	}
	return nil
}

func (f *fleetCommand) run(c *cobra.Command, a *app, args []string) error {
	if err := f.check(); err != nil {
		return err
	}
	shard, shards, err := shardOf(f.shard)
	if err != nil {
		return err
	}
	page, err := a.openPage(f.html, nil)
	if err != nil {
		return err
	}
	defer page.abandon()
	folder, err := fleet.Load(c.Context(), args...)
	if err != nil {
		return err
	}
	job, err := f.choose(folder, args)
	if err != nil {
		return err
	}
	answer := folder.Answer(job)
	if f.tune {
		bar := a.startProgress("tuning", 1)
		defer bar.end()
		step := bar.file(0, args[0])
		t, err := answer.Tune(c.Context(), shard, shards, f.budget, func(done, total int) { step(float64(done) / float64(total)) })
		if err != nil {
			return err
		}
		if f.shard != "" {
			return writeJSON(a.out, t, true)
		}
		if answer.Tuning, err = fleet.Merge([]*fleet.Tuning{t}); err != nil {
			return err
		}
	}
	if len(f.merge) > 0 {
		if answer.Tuning, err = f.merged(answer); err != nil {
			return err
		}
	}
	if page != nil {
		if err := report.WriteFleetPage(page, answer, f.html); err != nil {
			return err
		}
		if err := page.commit(); err != nil {
			return err
		}
	}
	if f.json {
		return writeJSON(a.out, answer, true)
	}
	report.WriteFleet(a.out, answer, a.style())
	return nil
}

// choose is the job that was named, or the largest.
func (f *fleetCommand) choose(folder *fleet.Folder, args []string) (*fleet.Job, error) {
	jobs := folder.Jobs()
	if len(jobs) == 0 {
		why := ""
		switch {
		case len(folder.Truncated) > 0:
			why = fmt.Sprintf("; %s is truncated", folder.Truncated[0])
		case len(folder.Bad) > 0:
			why = "; " + folder.Bad[0]
		}
		return nil, fmt.Errorf("%s: no summary of a process (*%s)%s", strings.Join(args, ", "), fleet.Ending, why)
	}
	if f.job == "" {
		return jobs[0], nil
	}
	var names []string
	for _, j := range jobs {
		if j.Name == f.job {
			return j, nil
		}
		names = append(names, j.Name)
	}
	return nil, fmt.Errorf("--job %s: there is no such job: expected one of %s", f.job, strings.Join(names[:min(len(names), 20)], ", "))
}

func (f *fleetCommand) merged(answer *fleet.Answer) (*fleet.Tuning, error) {
	files, err := patterns(f.merge)
	if err != nil {
		return nil, err
	}
	var shards []*fleet.Tuning
	for _, file := range files {
		t, err := fleet.ReadTuning(file)
		if err != nil {
			return nil, err
		}
		if t.Job != answer.Job {
			return nil, fmt.Errorf("%s: of job %q; expected job %q", file, t.Job, answer.Job)
		}
		shards = append(shards, t)
	}
	t, err := fleet.Merge(shards)
	if err != nil {
		return nil, fmt.Errorf("--merge: %w", err)
	}
	return t, nil
}
