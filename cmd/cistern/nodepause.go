package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cistern-gpu/cistern/internal/node/control"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
	"github.com/cistern-gpu/cistern/internal/units"
)

// pauseFlags are those of cistern node pause and resume.
type pauseFlags struct {
	node         *nodeFlags
	label        string
	within, wait time.Duration
	json         bool
}

// pauseEvery is how often a command looks whether processes allow a pause by now; pauseLongest is the longest that one may take.
const (
	pauseEvery   = 100 * time.Millisecond
	pauseLongest = 10 * time.Minute
)

func newNodePause(a *app, node *nodeFlags) *cobra.Command {
	f := pauseFlags{node: node}
	c := &cobra.Command{
		Use:   "pause --label LABEL",
		Short: "Have processes return the memory that they allow the node to pause",
		Long: "Pause returns the memory of other processes to the device, at the same addresses when they resume. A process has to allow\n" +
			"it: with cistern.node.allow_pause(...) it says which memory, what becomes of the contents, and that it does not use the memory\n" +
			"meanwhile. Root and the broker's user pause all processes, others their own. The command ends with status 2 unless all\n" +
			"processes with the label have paused; those that have stay so.",
		Example: "  cistern node pause --label trainer\n" +
			"  cistern node pause --label 'trainer-*' --wait 5m",
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.nodePause(c.Context(), &f, "paused", func(x *control.Conn) ([]protocol.PauseResult, error) { return x.Pause(f.label, f.within) })
		},
	}
	f.add(c)
	c.Flags().DurationVar(&f.wait, "wait", 0, "wait for so much `time` until the processes are there and allow it")
	return c
}

func newNodeResume(a *app, node *nodeFlags) *cobra.Command {
	f := pauseFlags{node: node}
	c := &cobra.Command{
		Use:   "resume --label LABEL",
		Short: "Have processes resume the memory that the node paused",
		Long: "Resume gives processes the memory back that cistern node pause took, with the contents that were kept. A process that ends its\n" +
			"cistern.node.allow_pause(...) resumes by itself. Where the device has too little, memory stays paused.",
		Example: "  cistern node resume --label trainer",
		Args:    noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.nodePause(c.Context(), &f, "resumed", func(x *control.Conn) ([]protocol.PauseResult, error) { return x.Resume(f.label, f.within) })
		},
	}
	f.add(c)
	return c
}

func (f *pauseFlags) add(c *cobra.Command) {
	c.Flags().StringVar(&f.label, "label", "", "the processes with this `label` (setting node_label), a pattern as the shell's")
	c.Flags().DurationVar(&f.within, "timeout", time.Minute, "`time` that each process has, as contents are copied")
	c.Flags().BoolVar(&f.json, "json", false, "print one JSON object")
}

func (f *pauseFlags) check() error {
	switch {
	case f.label == "":
		return errors.New("--label: expected the label of processes, as set by node_label in CISTERN_CONF")
	case len(f.label) > protocol.MaxLabel:
		return fmt.Errorf("--label: expected at most %d bytes", protocol.MaxLabel)
	case f.within < time.Second || f.within > pauseLongest:
		return fmt.Errorf("--timeout %v: expected from 1s to %v", f.within, pauseLongest)
	case f.wait < 0 || f.wait > 24*time.Hour:
		return fmt.Errorf("--wait %v: expected from 0s to 24h", f.wait)
	}
	return nil
}

// nodePause asks until no process denies it, or the wait is over, and prints what was done.
func (a *app) nodePause(ctx context.Context, f *pauseFlags, done string, ask func(*control.Conn) ([]protocol.PauseResult, error)) error {
	if err := f.check(); err != nil {
		return err
	}
	conn, err := f.node.dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, conn.Close)() // a signal ends the wait for an answer
	sums := pauseSums{}
	var all []protocol.PauseResult
	for until := time.Now().Add(f.wait); ; {
		if all, err = ask(conn); err != nil {
			return cmp.Or(context.Cause(ctx), err)
		}
		sums.add(all)
		if !later(all) || time.Now().After(until) {
			break
		}
		if err := sleep(ctx, pauseEvery); err != nil {
			return err
		}
	}
	if f.json {
		_ = writeJSON(a.out, struct { // checkedWriter remembers
			Processes []protocol.PauseResult `json:"processes"`
		}{append([]protocol.PauseResult{}, all...)}, true)
	}
	return a.pauseOutcome(f, done, all)
}

// pauseOutcome prints what processes did, and is the error of those that failed.
func (a *app) pauseOutcome(f *pauseFlags, done string, all []protocol.PauseResult) error {
	var failed []string
	for _, r := range all {
		who := fmt.Sprintf("process %d (%s) on %s", r.PID, oneLine(r.Name), r.Device)
		switch {
		case r.Error != "":
			failed = append(failed, who+": "+oneLine(r.Error))
		case !f.json:
			fmt.Fprintf(a.out, "%s: %s %s in %v\n", who, done, units.FormatBytes(r.Bytes), time.Duration(r.Seconds*float64(time.Second)).Round(time.Millisecond))
		}
	}
	switch {
	case len(all) == 0:
		return fmt.Errorf("no process with the label %s is connected, or it is another user's", oneLine(f.label))
	case len(failed) > 0:
		return errors.New(strings.Join(failed, "; "))
	}
	return nil
}

// later reports whether asking again may help: a process that is to come, or that does not allow it yet.
func later(all []protocol.PauseResult) bool {
	denied := false
	for _, r := range all {
		if r.Error != "" && !r.Denied {
			return false
		}
		denied = denied || r.Denied
	}
	return denied || len(all) == 0
}

// pauseSums are what processes returned over several questions: one that has paused says 0 when it is asked again.
type pauseSums map[[2]string]protocol.PauseResult

func (s pauseSums) add(all []protocol.PauseResult) {
	for i := range all {
		r := &all[i]
		key := [2]string{fmt.Sprint(r.Client), r.Device}
		if was, known := s[key]; known {
			r.Bytes += was.Bytes
			r.Seconds = max(r.Seconds, was.Seconds)
		}
		if r.Error == "" {
			s[key] = *r
		}
	}
}
