package main

import (
	"github.com/spf13/cobra"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/report"
)

// inspections is what `cistern inspect --json` prints.
type inspections struct {
	Traces  []*analyze.Inspection    `json:"traces"`
	Drivers []*analyze.DriverSummary `json:"drivers,omitempty"`
}

// inspected is what one file holds.
type inspected struct {
	traces []*analyze.Inspection
	driver *analyze.DriverSummary // nil where it is no driver trace
}

func newInspect(a *app) *cobra.Command {
	var format formatFlags
	c := &cobra.Command{
		Use:   "inspect [flags] TRACE...",
		Short: "Show the peak of recorded runs, and the allocations at that moment",
		Long: "Inspect shows what a file holds, when most was live, and what was live then: by size, stream and pool, " +
			"by\ntag, library and thread where that is known, and by stack; what was reserved beside it; and why requests failed.\n" +
			"Of a driver trace also the calls, what they cost, and what was never freed.",
		Example: "  cistern inspect run.pickle\n" +
			"  cistern inspect --json --device 1 run.pickle",
		Args: traceArgs,
		RunE: func(c *cobra.Command, args []string) error {
			if err := format.check(); err != nil {
				return err
			}
			bar := a.startProgress("reading", len(args))
			defer bar.end()
			all := inspections{Traces: []*analyze.Inspection{}}
			err := eachFile(c.Context(), a, args, bar, inspect, func(_ int, o outcome[inspected]) {
				if o.err != nil {
					a.fail(o.err)
					return
				}
				if d := o.value.driver; d != nil {
					switch {
					case format.ndjson:
						_ = writeJSON(a.out, d, false)
					case format.json:
						all.Drivers = append(all.Drivers, d)
					default:
						report.WriteDriver(a.out, d, a.style())
						_, _ = a.out.Write([]byte("\n"))
					}
				}
				for _, in := range o.value.traces {
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
	a.device.add(c)
	format.add(c)
	return c
}

func inspect(f *recording.File, _ func(done, total int)) (inspected, error) {
	var in inspected
	if f.Driver != nil {
		in.driver = analyze.SummarizeDriver(f.Driver)
		in.driver.Path = f.Path
		if in.driver.End.Unknown == nil {
			in.driver.End.Unknown = []string{} // in JSON
		}
	}
	for _, t := range f.Traces {
		in.traces = append(in.traces, analyze.Inspect(t))
	}
	return in, nil
}
