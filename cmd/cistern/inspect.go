package main

import (
	"github.com/spf13/cobra"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/report"
	"github.com/cistern-gpu/cistern/trace"
)

// inspections is what `cistern inspect --json` prints.
type inspections struct {
	Traces []*analyze.Inspection `json:"traces"`
}

func newInspect(a *app) *cobra.Command {
	var format formatFlags
	c := &cobra.Command{
		Use:   "inspect [flags] TRACE...",
		Short: "Show what recorded runs hold: the peak, and who held memory then",
		Long: "Inspect shows what a file holds, when most was live, and what was live then: by size, by stream, by pool and " +
			"by\nstack; what was reserved beside it; and why requests failed.",
		Args: traceArgs,
		RunE: func(c *cobra.Command, args []string) error {
			if err := format.check(); err != nil {
				return err
			}
			bar := a.startProgress("reading", len(args))
			defer bar.end()
			all := inspections{Traces: []*analyze.Inspection{}}
			err := eachFile(c.Context(), a, args, bar, inspect, func(_ int, o outcome[[]*analyze.Inspection]) {
				if o.err != nil {
					a.fail(o.err)
					return
				}
				for _, in := range o.value {
					switch {
					case format.ndjson:
						_ = writeJSON(a.out, in, false) // checkedWriter remembers
					case format.json:
						all.Traces = append(all.Traces, in)
					default:
						report.WriteInspection(a.out, in, a.style())
					}
				}
			})
			if err == nil && format.json {
				_ = writeJSON(a.out, all, true)
			}
			return err
		},
	}
	format.add(c)
	return c
}

func inspect(f *trace.File, _ func(done, total int)) ([]*analyze.Inspection, error) {
	var all []*analyze.Inspection
	for _, t := range f.Traces {
		all = append(all, analyze.Inspect(t))
	}
	return all, nil
}
