package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/replay"
	"github.com/cistern-gpu/cistern/report"
)

func newReport(a *app) *cobra.Command {
	var (
		flags  replayFlags
		format formatFlags
		job    reportJob
		html   string
	)
	c := &cobra.Command{
		Use:   "report [flags] FILE|FOLDER... [-o PAGE]",
		Short: "Explain why a run ran out of memory and what would have helped; an HTML report of recorded runs",
		Long: "Report explains requests that failed: what was allocated, what was free and why it did not suffice, and which\n" +
			"settings would have met the request. Each answer is checked by replaying the recorded run.\n\n" +
			"It reads files of three commands:\n" +
			"  cistern run --report FOLDER   oom-*.cistern, one for each failure; FOLDER stands for all of them, the newest last\n" +
			"  cistern record -o run.pickle  run.oom1.pickle and so on, and run.pickle\n" +
			"  cistern trace -o run.cistern  run.cistern\n\n" +
			"With -o it writes an HTML report, a single file that needs no network: memory over time by pool, stream, stack or\n" +
			"size; flame graph and address map of any moment; what grew between two moments; the comparison of allocators.\n" +
			"For a run without a failure -o is required, and the comparison is printed too.",
		Example: "  cistern report run.oom1.pickle\n" +
			"  cistern report run.pickle -o report.html\n" +
			"  cistern report oom/",
		Args: traceArgs,
		RunE: func(c *cobra.Command, args []string) error {
			if job.search.Budget < 0 {
				return errBudget
			}
			if err := flags.parse(); err != nil {
				return err
			}
			if job.html != "" && html != "" && job.html != html {
				return fmt.Errorf("-o %s and --html %s: both name the HTML report: give one of them", job.html, html)
			}
			job.html = cmp.Or(job.html, html)
			args, err := outOfFolders(args)
			if err != nil {
				return err
			}
			job.specs, job.opt = flags.specs, flags.options()
			job.search.Capacity, job.search.GPULag, job.search.Device = job.opt.Capacity, job.opt.GPULag, job.opt.Device
			return job.run(c, a, args, format)
		},
	}
	flags.add(c)
	c.Flags().StringVarP(&job.html, "output", "o", "", "write an HTML report to this `file`; required if no request failed")
	c.Flags().StringVar(&html, "html", "", "the same as -o `file`")
	c.Flags().BoolVar(&a.private, "private", false, "a new HTML report is for its owner only, as recordings are")
	_ = c.Flags().MarkHidden("private") // for what a process that runs out of memory starts
	addBudget(c, &job.search.Budget)
	a.device.add(c)
	format.add(c)
	return c
}

// outOfFolders puts the files of out-of-memory that a folder has in its place, oldest first.
func outOfFolders(args []string) ([]string, error) {
	var files []string
	for _, arg := range args {
		if st, err := os.Stat(arg); err != nil || !st.IsDir() {
			files = append(files, arg) // an error with the others, if it cannot be read
			continue
		}
		entries, err := os.ReadDir(arg)
		if err != nil {
			return nil, err
		}
		var found []fs.FileInfo
		for _, e := range entries {
			if ok, _ := filepath.Match("*oom-*.cistern", e.Name()); ok {
				if info, err := e.Info(); err == nil && info.Mode().IsRegular() {
					found = append(found, info)
				}
			}
		}
		if len(found) == 0 {
			return nil, fmt.Errorf("%s: the folder has no out-of-memory file (oom-*.cistern)", arg)
		}
		slices.SortStableFunc(found, func(a, b fs.FileInfo) int { return a.ModTime().Compare(b.ModTime()) })
		for _, info := range found {
			files = append(files, filepath.Join(arg, info.Name()))
		}
	}
	return files, nil
}

// reportJob is what report does.
type reportJob struct {
	replayJob
	search analyze.RemedyOptions
}

// reported is what became of one file.
type reported struct {
	replayed
	failures []*analyze.TraceFailures // of each trace, nil where nothing failed
	paths    []string                 // of each trace, to say so
}

// reports is what `cistern report --json` prints: Reports of traces in which requests failed, Traces of all others and,
// where a page is written, of those too.
type reports struct {
	Traces  []*replay.Report         `json:"traces,omitempty"`
	Reports []*analyze.TraceFailures `json:"reports,omitempty"`
}

func (j *reportJob) run(c *cobra.Command, a *app, args []string, format formatFlags) error {
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
	bar := a.startProgress("reporting", len(args))
	defer bar.end()
	var (
		all     reports
		views   []*report.View
		failed  int
		without []string // traces in which nothing failed
	)
	work := func(f *recording.File, step func(done, total int)) (reported, error) { return j.one(c, f, step) }
	err = eachFile(c.Context(), a, args, bar, work, func(_ int, o outcome[reported]) {
		if o.err != nil {
			a.fail(o.err)
			return
		}
		views = append(views, o.value.views...)
		for i, r := range o.value.failures {
			if r == nil && j.html == "" {
				without = append(without, o.value.paths[i])
				continue
			}
			if r != nil {
				failed++
			}
			switch {
			case format.json && r != nil:
				all.Reports = append(all.Reports, r)
			case format.ndjson && r != nil:
				_ = writeJSON(a.out, r, false) // checkedWriter remembers
			case format.json:
				all.Traces = append(all.Traces, o.value.reports[i])
			case format.ndjson:
				_ = writeJSON(a.out, o.value.reports[i], false)
			case r != nil:
				report.WriteFailures(a.out, r, a.style())
			default:
				report.WriteReplay(a.out, o.value.reports[i], o.value.ooms[i], a.style())
			}
		}
	})
	if err != nil {
		return err
	}
	if j.html == "" && failed == 0 && len(without) > 0 {
		return fmt.Errorf("report: no request failed in %s: give -o FILE for an HTML report of the run", without[0])
	}
	if format.json {
		_ = writeJSON(a.out, all, true)
	} else if !format.ndjson {
		for _, path := range without {
			fmt.Fprintf(a.out, "%s: no request failed\n", path)
		}
	}
	if page == nil || len(views) == 0 {
		return nil
	}
	if err := c.Context().Err(); err != nil {
		return err
	}
	if err := report.WritePage(page, views); err != nil {
		return cannotWrite(j.html, err)
	}
	return page.commit()
}

// one reports on one file: what failed on each device, and what the page shows.
func (j *reportJob) one(c *cobra.Command, f *recording.File, step func(done, total int)) (reported, error) {
	var r reported
	if len(f.Traces) == 0 {
		return r, errors.New("no device has events, expected a recording of at least one")
	}
	parts := len(f.Traces)
	if j.html != "" {
		parts *= 2
	}
	const whole = 1 << 20
	at := 0
	part := func(done, total int) {
		if total > 0 {
			step(at*whole+int(float64(whole)*float64(done)/float64(total)), parts*whole)
		}
	}
	work := fileWork(f)
	for _, t := range f.Traces {
		opt := j.search
		opt.Progress, opt.Work = part, work
		x, err := analyze.ReportFailures(c.Context(), t, f.Driver, opt)
		if err != nil {
			return r, fmt.Errorf("%s: %w", t.Where(), err)
		}
		at++
		r.failures = append(r.failures, x)
		r.paths = append(r.paths, displayPath(f.Path)+", "+t.Where())
	}
	if j.html == "" {
		return r, nil
	}
	var err error
	r.replayed, err = j.counted(c.Context(), f, work, func(done, total int) {
		step(parts/2*whole+int(float64(parts/2*whole)*float64(done)/float64(max(1, total))), parts*whole)
	})
	for i, v := range r.views {
		v.Failures = r.failures[i]
	}
	return r, err
}
