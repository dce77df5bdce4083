package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/report"
)

var errBudget = errors.New("--budget: expected a time of 0 or more with its unit, such as 60s or 5m")

// addBudget adds the flag that bounds a search.
func addBudget(c *cobra.Command, budget *time.Duration) {
	c.Flags().DurationVar(budget, "budget", time.Minute, "time limit of the search, for each device of a file; 0 is no limit")
}

// tunings is what `cistern tune --json` prints.
type tunings struct {
	Traces []*analyze.Tuning `json:"traces"`
}

func newTune(a *app) *cobra.Command {
	var (
		flags  replayFlags
		format formatFlags
		budget time.Duration
	)
	c := &cobra.Command{
		Use:   "tune [flags] TRACE...",
		Short: "Find the best settings of PyTorch's allocator for a recorded run, and the smallest GPU that suffices",
		Long: "Tune replays a recorded run under many settings of PyTorch's allocator. It recommends one, with its drawbacks, and\n" +
			"lists the settings that no other one beats in memory, driver time and synchronizations together. It also finds\n" +
			"the smallest memory limit with which the run completes: as recorded, with the best settings, and on Cistern.",
		Example: "  cistern tune run.pickle\n" +
			"  cistern tune --capacity 24G --budget 5m run.pickle",
		Args: traceArgs,
		RunE: func(c *cobra.Command, args []string) error {
			if err := format.check(); err != nil {
				return err
			}
			if budget < 0 {
				return errBudget
			}
			bar := a.startProgress("tuning", len(args))
			defer bar.end()
			all := tunings{Traces: []*analyze.Tuning{}}
			tune := func(f *recording.File, step func(done, total int)) ([]*analyze.Tuning, error) {
				var found []*analyze.Tuning
				if len(f.Traces) == 0 {
					return nil, errors.New("no device has events, expected a recording of at least one")
				}
				work := fileWork(f)
				for i, t := range f.Traces {
					tn, err := analyze.Tune(c.Context(), t, analyze.TuneOptions{Capacity: flags.capacity.bytes,
						Unlimited: flags.capacity.unlimited, GPULag: flags.lag.d, Work: work, Budget: budget,
						Progress: func(done, total int) { step(i*total+done, len(f.Traces)*total) }})
					if err != nil {
						return nil, fmt.Errorf("%s: %w", t.Where(), err)
					}
					found = append(found, tn)
				}
				return found, nil
			}
			err := eachFile(c.Context(), a, args, bar, tune, func(_ int, o outcome[[]*analyze.Tuning]) {
				if o.err != nil {
					a.fail(o.err)
					return
				}
				for _, tn := range o.value {
					switch {
					case format.ndjson:
						_ = writeJSON(a.out, tn, false) // checkedWriter remembers
					case format.json:
						all.Traces = append(all.Traces, tn)
					default:
						report.WriteTuning(a.out, tn, a.style())
					}
				}
			})
			if err == nil && format.json {
				_ = writeJSON(a.out, all, true)
			}
			return err
		},
	}
	flags.addLimits(c)
	addBudget(c, &budget)
	a.device.add(c)
	format.add(c)
	return c
}
