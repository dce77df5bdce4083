package main

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/cistern-gpu/cistern/fleet"
)

func newFleetCollect(a *app) *cobra.Command {
	var o fleet.CollectOptions
	c := &cobra.Command{
		Use:   "collect [flags] FROM... TO",
		Short: "Copy or move summaries and recordings of a node to another folder",
		Long: "Collect copies the files of each process from local folders to one that all nodes share, whole or not at all, the summary\n" +
			"last. Where a process has recordings, its summary gets from them what the process could not know: peaks within steps, and\n" +
			"hashes of requests in their order. It may run many times, also while the job runs; what is there already stays.",
		Example: "  cistern fleet collect /tmp/runs /shared/runs\n" +
			"  cistern fleet collect --move --summaries /tmp/runs /shared/runs",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) < 2 {
				return fmt.Errorf("collect: expected folders to collect from, and one to collect to")
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			to, err := fleetFolder(args[len(args)-1])
			if err != nil {
				return err
			}
			folder, err := fleet.Load(c.Context(), args[:len(args)-1]...)
			if err != nil {
				return err
			}
			o.Warn = a.fail
			for _, bad := range folder.Bad {
				a.fail(errors.New(bad))
			}
			for _, path := range folder.Truncated {
				a.fail(fmt.Errorf("%s: %w", path, fleet.ErrTruncated))
			}
			n, err := folder.Collect(c.Context(), to, o)
			fmt.Fprintf(a.err, "cistern: %s in %s\n", plural(n, "process", "processes"), args[len(args)-1])
			return err
		},
	}
	c.Flags().BoolVar(&o.Move, "move", false, "remove what was copied of processes that ended")
	c.Flags().BoolVar(&o.Summaries, "summaries", false, "leave recordings where they are")
	c.Flags().BoolVar(&o.AsIs, "as-is", false, "leave summaries as they are: recordings are not read")
	return c
}

// patterns are the files that patterns stand for; a name without a match is a file that is not there.
func patterns(list []string) (files []string, err error) {
	for _, p := range list {
		found, err := filepath.Glob(p)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", p, err)
		}
		if len(found) == 0 {
			found = []string{p}
		}
		files = append(files, found...)
	}
	return files, nil
}
