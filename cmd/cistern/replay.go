package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/pytorch"
	"github.com/cistern-gpu/cistern/replay"
	"github.com/cistern-gpu/cistern/report"
)

func newReplay(a *app) *cobra.Command {
	var (
		flags  replayFlags
		format formatFlags
		job    replayJob
	)
	c := &cobra.Command{
		Use:   "replay [flags] TRACE...",
		Short: "Compare allocators and settings on recorded runs, without a GPU",
		Long: "Replay repeats the requests of a recorded run under each allocator. It shows how much memory each would have\n" +
			"reserved, the time of its driver calls, and whether the run would have completed. The ratio is peak reserved\n" +
			"over peak live bytes: 1.000 is the least that an allocator can reserve.",
		Example: "  cistern replay run.pickle\n" +
			"  cistern replay --policy torch --policy torch:expandable_segments:True --capacity 24G run.pickle\n" +
			"  cistern replay --html replay.html run.pickle",
		Args: traceArgs,
		RunE: func(c *cobra.Command, args []string) error {
			if err := flags.parse(); err != nil {
				return err
			}
			job.specs, job.opt = flags.specs, flags.options()
			return job.run(c, a, args, format)
		},
	}
	flags.add(c)
	c.Flags().BoolVar(&job.verify, "verify", false, "compare the model of PyTorch's allocator with the recorded driver calls; exit status 1 where they differ")
	c.Flags().StringVar(&job.record, "record", "", "write the replay of a single --policy to this `file`, as a PyTorch snapshot")
	c.Flags().StringVar(&job.html, "html", "", "write an HTML report of the results to this `file`")
	a.device.add(c)
	format.add(c)
	return c
}

// replayJob is what replay and report do.
type replayJob struct {
	specs        []replay.Spec
	opt          replay.Options
	verify       bool
	record, html string // paths, "" is none
}

// replayed is what became of one file.
type replayed struct {
	reports    []*replay.Report
	ooms       [][]analyze.OOM // of each report
	views      []*report.View
	recordings []*recording.Trace
}

func (j *replayJob) run(c *cobra.Command, a *app, args []string, format formatFlags) error {
	if err := format.check(); err != nil {
		return err
	}
	page, err := a.openPage(j.html, args)
	if err != nil {
		return err
	}
	defer page.abandon()
	if page != nil {
		j.opt.Samples = report.CurveSamples
	}
	var record *output
	if j.record != "" {
		if len(j.specs) != 1 || len(args) != 1 {
			return fmt.Errorf("--record takes what one policy did with one trace: got %d policies and %d traces; "+
				"name one --policy", len(j.specs), len(args))
		}
		var err error
		if record, err = a.openOutput(j.record, args); err != nil {
			return err
		}
		defer record.abandon()
	}
	j.opt.Verify = j.verify

	bar := a.startProgress("replaying", len(args))
	defer bar.end()
	all := replay.Reports{Traces: []*replay.Report{}}
	var views []*report.View
	var recordings []*recording.Trace
	one := func(f *recording.File, step func(done, total int)) (replayed, error) {
		return j.one(c.Context(), f, step)
	}
	err = eachFile(c.Context(), a, args, bar, one, func(_ int, o outcome[replayed]) {
		if o.err != nil {
			a.fail(o.err)
			return
		}
		for i, rep := range o.value.reports {
			a.mismatch = a.mismatch || !rep.Verify.OK()
			switch {
			case format.ndjson:
				_ = writeJSON(a.out, rep, false) // checkedWriter remembers
			case !format.json:
				report.WriteReplay(a.out, rep, o.value.ooms[i], a.style())
			}
		}
		if format.json {
			all.Traces = append(all.Traces, o.value.reports...)
		}
		views = append(views, o.value.views...)
		recordings = append(recordings, o.value.recordings...)
	})
	if err != nil {
		return err
	}
	if format.json {
		_ = writeJSON(a.out, all, true)
	}
	if err := c.Context().Err(); err != nil {
		return err
	}
	if page != nil && len(views) > 0 {
		if err := report.WritePage(page, views); err != nil {
			a.fail(cannotWrite(j.html, err))
		} else if err := page.commit(); err != nil {
			a.fail(err)
		}
	}
	if record != nil && len(recordings) > 0 {
		if err := pytorch.Write(record, recordings...); err != nil {
			a.fail(cannotWrite(j.record, err))
		} else if err := record.commit(); err != nil {
			a.fail(err)
		}
	}
	return nil
}

// wholeFile is the progress of a device when it is done, and runsPart the part of it that the first replay of each policy is: what
// its odds take is not known before.
const (
	wholeFile = 1 << 20
	runsPart  = 0.2
)

// one replays one file: every device that has events under every policy.
func (j *replayJob) one(ctx context.Context, f *recording.File, step func(done, total int)) (replayed, error) {
	return j.counted(ctx, f, fileWork(f), step)
}

// fileWork counts what is replayed of a file.
func fileWork(f *recording.File) *replay.Work {
	if len(f.Traces) == 0 {
		return nil
	}
	return replay.NewWork(f.Traces[0].StoredBytes)
}

// counted is one, with what has been replayed of the file already.
func (j *replayJob) counted(ctx context.Context, f *recording.File, work *replay.Work, step func(done, total int)) (replayed, error) {
	var r replayed
	if len(f.Traces) == 0 {
		return r, errors.New("no device has events, expected a recording of at least one")
	}
	for i, t := range f.Traces {
		part := func(from, to, part float64) {
			step(int((float64(i)+from+(to-from)*part)*wholeFile), len(f.Traces)*wholeFile)
		}
		opt := j.opt
		opt.Work = work
		runs := 0.0
		opt.Progress = func(done, n int) {
			of := float64(done) / float64(max(1, n))
			part(0, runsPart, min(1, (runs+of)/float64(len(j.specs))))
			if done == n {
				runs++
			}
		}
		if j.record != "" {
			opt.Record = &replay.Recording{}
		}
		rep, err := replay.Replay(t, j.specs, opt)
		if err != nil {
			if len(f.Traces) > 1 {
				err = fmt.Errorf("%s: %w", t.Where(), err)
			}
			return r, err
		}
		if err := analyze.Judge(ctx, t, rep, j.specs, analyze.TuneOptions{Capacity: opt.Capacity, GPULag: opt.GPULag, Work: work,
			Progress: func(done, total int) { part(runsPart, 1, float64(done)/float64(max(1, total))) }}); err != nil {
			return r, err
		}
		r.reports = append(r.reports, rep)
		if opt.Record != nil {
			if rec := opt.Record.Trace(); rec != nil {
				r.recordings = append(r.recordings, rec)
			}
		}
		r.ooms = append(r.ooms, report.OOMs(t, analyze.ExplainRecorded(t), rep.Results))
		if j.html != "" {
			v, err := report.NewView(t, analyze.Inspect(t), rep, f.Driver)
			if err != nil {
				return r, err
			}
			r.views = append(r.views, v)
			for _, res := range rep.Results {
				res.Curve = replay.Curve{} // the view has what it needs of it
			}
		}
	}
	return r, nil
}
