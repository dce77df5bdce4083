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
		Short: "Write a page of recorded runs: memory over time, addresses, allocators compared",
		Long: "Report replays recorded runs and writes one HTML page that opens without a network: memory over time with " +
			"zoom,\nthe address map at the peak, the comparison of allocators, out-of-memory explained, and who held the " +
			"memory.\nThe comparison is printed too.",
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
