package main

import (
	"fmt"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/report"
)

// differences is what `cistern diff --json` prints.
type differences struct {
	Devices []*analyze.Difference `json:"devices"`
}

func newDiff(a *app) *cobra.Command {
	var (
		format   formatFlags
		at, html string
	)
	c := &cobra.Command{
		Use:   "diff [flags] A B",
		Short: "Show what grew from one recorded run to another: by stack, tag, library, size, pool and stream",
		Long: "Diff compares the allocations of two recorded runs, each at its peak or, with --at end, after its last event: what\n" +
			"was not freed. The largest change is first, growth or not.\n\n" +
			"Stacks are the same if their functions and file names are: folders may differ, and lines may have moved, as when\n" +
			"the program was edited between the runs.",
		Example: "  cistern diff before.pickle after.pickle\n" +
			"  cistern diff --at end --html diff.html before.pickle after.pickle",
		Args: func(c *cobra.Command, args []string) error {
			if len(args) != 2 {
				return fmt.Errorf("%s: expected two traces, A and B; got %d", c.Name(), len(args))
			}
			return traceArgs(c, args)
		},
		RunE: func(c *cobra.Command, args []string) error {
			if err := format.check(); err != nil {
				return err
			}
			if at != "peak" && at != "end" {
				return fmt.Errorf("--at %s: expected peak or end", at)
			}
			return a.diff(c, args, format, at == "end", html)
		},
	}
	c.Flags().StringVar(&at, "at", "peak", "`moment` of each run: peak (most bytes live) or end (after the last event)")
	c.Flags().StringVar(&html, "html", "", "write an HTML report of the differences to this `file`")
	a.device.add(c)
	format.add(c)
	return c
}

func (a *app) diff(c *cobra.Command, args []string, format formatFlags, atEnd bool, html string) error {
	page, err := a.openPage(html, args)
	if err != nil {
		return err
	}
	defer page.abandon()
	bar := a.startProgress("reading", len(args))
	var runs [2][]*recording.Trace
	var drivers [2]*recording.Driver
	read := func(f *recording.File, _ func(done, total int)) (*recording.File, error) { return f, nil }
	err = eachFile(c.Context(), a, args, bar, read, func(i int, o outcome[*recording.File]) {
		if o.err != nil {
			a.fail(o.err)
			return
		}
		runs[i], drivers[i] = o.value.Traces, o.value.Driver
	})
	bar.end()
	if err != nil || a.bad {
		return err
	}
	pairs, missing := pairDevices(runs[0], runs[1])
	if len(pairs) == 0 {
		return fmt.Errorf("the runs have no device in common: %s", strings.Join(missing, ", "))
	}
	all := differences{Devices: []*analyze.Difference{}}
	var views []*report.DifferenceView
	for _, p := range pairs {
		if err := c.Context().Err(); err != nil {
			return err
		}
		d := analyze.Diff(p[0], p[1], atEnd)
		d.Notes = append(d.Notes, missing...)
		d.A.Driver(drivers[0])
		d.B.Driver(drivers[1])
		switch {
		case format.ndjson:
			_ = writeJSON(a.out, d, false) // checkedWriter remembers
		case format.json:
			all.Devices = append(all.Devices, d)
		default:
			report.WriteDifference(a.out, d, a.style())
		}
		if page != nil {
			v, err := report.NewDifferenceView(p[0], p[1], d)
			if err != nil {
				return err
			}
			views = append(views, v)
		}
	}
	if format.json {
		_ = writeJSON(a.out, all, true)
	}
	if page == nil {
		return nil
	}
	if err := c.Context().Err(); err != nil {
		return err
	}
	if err := report.WriteDifferencePage(page, views); err != nil {
		return cannotWrite(html, err)
	}
	return page.commit()
}

// pairDevices puts the traces of two files together, device by device, and says which only one has. Where each file has
// one trace, these are meant. Where there are several processes on a device, those of the same program are put together in
// the order in which they first asked for memory, and then what is left, in that order.
func pairDevices(a, b []*recording.Trace) (pairs [][2]*recording.Trace, missing []string) {
	if len(a) == 1 && len(b) == 1 {
		return [][2]*recording.Trace{{a[0], b[0]}}, nil
	}
	program := func(t *recording.Trace) string {
		if t.Owner == nil {
			return ""
		}
		return filepath.Base(t.Owner.Program)
	}
	partner, taken := map[*recording.Trace]*recording.Trace{}, map[*recording.Trace]bool{}
	pair := func(alike func(x, y *recording.Trace) bool) {
		for _, x := range a {
			for _, y := range b {
				if partner[x] == nil && !taken[y] && x.Device == y.Device && alike(x, y) {
					partner[x], taken[y] = y, true
				}
			}
		}
	}
	pair(func(x, y *recording.Trace) bool { return program(x) == program(y) })
	pair(func(_, _ *recording.Trace) bool { return true })
	for _, x := range a {
		if y := partner[x]; y != nil {
			pairs = append(pairs, [2]*recording.Trace{x, y})
		} else {
			missing = append(missing, x.Where()+" is in A only")
		}
	}
	for _, y := range b {
		if !taken[y] {
			missing = append(missing, y.Where()+" is in B only")
		}
	}
	return pairs, missing
}
