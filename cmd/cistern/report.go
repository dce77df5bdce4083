package main

import (
	"cmp"

	"github.com/spf13/cobra"
)

func newReport(a *app) *cobra.Command {
	var (
		flags  replayFlags
		format formatFlags
		job    replayJob
	)
	c := &cobra.Command{
		Use:   "report [flags] TRACE... -o FILE",
		Short: "Write a page of recorded runs: memory over time, who held it at any moment, allocators compared",
		Long: "Report replays recorded runs and writes one HTML page that opens without a network: memory over time with " +
			"zoom,\nin bands by pool, stream, stack or size, and the driver's calls; at the peak and at any moment a flame " +
			"graph of live\nbytes by stack and the address map; what grew between two moments; the comparison of allocators, " +
			"out-of-memory\nexplained, and who held the memory. The comparison is printed too.",
		Example: "  cistern report snapshot.pickle -o page.html",
		Args:    traceArgs,
		RunE: func(c *cobra.Command, args []string) error {
			if err := cmp.Or(needOutput(c, job.html), flags.parse()); err != nil {
				return err
			}
			job.specs, job.opt = flags.specs, flags.options()
			return job.run(c, a, args, format)
		},
	}
	flags.add(c)
	c.Flags().StringVarP(&job.html, "output", "o", "", "the page's `file`")
	format.add(c)
	return c
}
