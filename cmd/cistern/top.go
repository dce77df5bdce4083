package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/colorprofile"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/cistern-gpu/cistern/internal/environ"
	"github.com/cistern-gpu/cistern/internal/live"
	"github.com/cistern-gpu/cistern/internal/top"
)

// topFlags are what `cistern top` was asked for.
type topFlags struct {
	once, json, details bool
	interval            time.Duration
	count               int
	sort, socket        string
	device              int

	choice top.Choice
	sleep  func(context.Context, time.Duration) error
}

// The shortest and the longest time between two looks: every process that is looked at works for it.
const (
	topOften  = 100 * time.Millisecond
	topSeldom = time.Hour
)

func newTop(a *app) *cobra.Command {
	var f topFlags
	c := &cobra.Command{
		Use:   "top [flags]",
		Short: "Show GPU memory by process, live",
		Long: "Top shows the memory and utilisation of each GPU, and the processes with memory there. Of processes on Cistern or under\n" +
			"cistern trace it shows reserved and allocated bytes, peaks, limits, driver calls a second and out-of-memory errors; of\n" +
			"others the figures of the driver. \"used\" is the driver's figure. \"other\" is the part of it that is not from Cistern: the\n" +
			"CUDA context with its code, and other allocators. K, M, G are KiB, MiB, GiB.\n\n" +
			"Where cistern serve runs, a table has its clients by GPU: spare is what they would be asked for now, granted what is granted and\n" +
			"not created yet, pressure the share of time in which a request waited for memory of other processes.\n\n" +
			"Enter shows the allocations of a process by tag, library, pool and stack; ? explains the keys. --once and --json print\n" +
			"and end. Details of other users' processes need root.",
		Example: "  cistern top\n" +
			"  cistern top --once --sort used\n" +
			"  cistern top --json --interval 5s --count 12",
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			f.once = f.once || f.json
			if err := f.check(c.Flags().Changed("count")); err != nil {
				return err
			}
			if !f.once {
				if err := a.wantTerminal(); err != nil {
					return err
				}
			}
			source, err := openTop(f.socket)
			if err != nil {
				return err
			}
			defer source.Close()
			if f.once {
				return a.topOnce(c.Context(), source, &f, outputWidth(a.out0(), environ.Get))
			}
			return a.topLive(c.Context(), source, &f)
		},
	}
	c.Flags().BoolVar(&f.once, "once", false, "print one table and end; rates are measured over the interval")
	c.Flags().BoolVar(&f.json, "json", false, "print one JSON object and end; with --count one line for each look")
	c.Flags().DurationVar(&f.interval, "interval", time.Second, "`time` between two looks")
	c.Flags().IntVar(&f.count, "count", 1, "print so many `times`, an interval apart; with --once or --json")
	c.Flags().StringVar(&f.sort, "sort", string(top.Keys[0]), "sort processes by this `key`: "+strings.Join(top.KeyNames(), ", "))
	_ = c.RegisterFlagCompletionFunc("sort", cobra.FixedCompletions(top.KeyNames(), cobra.ShellCompDirectiveNoFileComp))
	c.Flags().IntVar(&f.device, "device", -1, "only this GPU, by nvidia-smi's `number`, and the processes there (default all); a simulated one where\nthere is no other")
	c.Flags().Lookup("device").DefValue = "0" // of which help says nothing: the text does
	c.Flags().StringVar(&f.socket, "socket", "", "the node's broker at this `path` (default as for cistern node)")
	c.Flags().BoolVar(&f.details, "details", false, "with --once or --json: the allocations of each process, by tag, library, pool and stack")
	return c
}

func (f *topFlags) check(counted bool) error {
	key, err := top.ParseKey(f.sort)
	switch {
	case err != nil:
		return fmt.Errorf("--sort %w", err)
	case f.interval < topOften || f.interval > topSeldom:
		return fmt.Errorf("--interval %v: expected from %v to %v", f.interval, topOften, topSeldom)
	case f.device < -1:
		return fmt.Errorf("--device %d: expected the number of a GPU, from 0", f.device)
	case f.count < 1:
		return fmt.Errorf("--count %d: expected 1 or more", f.count)
	case !f.once && counted:
		return errors.New("--count: goes with --once or --json")
	case !f.once && f.details:
		return errors.New("--details: goes with --once or --json; else press enter on a process")
	}
	f.choice = top.Choice{Sort: key, GPU: f.device}
	if f.sleep == nil {
		f.sleep = sleep
	}
	return nil
}

// wantTerminal says what is missing for a live view.
func (a *app) wantTerminal() error {
	in, _ := a.in.(*os.File)
	switch {
	case in == nil || !term.IsTerminal(int(in.Fd())):
		return errors.New("top: standard input is not a terminal: use cistern top --once for a table, or --json")
	case !a.terminal:
		return errors.New("top: standard output is not a terminal: use cistern top --once for a table, or --json")
	case environ.Get("TERM") == "dumb":
		return errors.New("top: the terminal has no cursor control (TERM=dumb): use cistern top --once for a table")
	}
	return nil
}

// out0 is the output itself, which a terminal's width is asked of.
func (a *app) out0() io.Writer {
	if c, ok := a.out.(*checkedWriter); ok {
		return c.w
	}
	return a.out
}

// outputWidth is how wide a table may be: as wide as the terminal, or as COLUMNS says; 0: as it likes.
func outputWidth(w io.Writer, env func(string) string) int {
	if n, err := strconv.Atoi(env("COLUMNS")); err == nil && n > 0 {
		return n
	}
	if f, ok := w.(*os.File); ok {
		if n, _, err := term.GetSize(int(f.Fd())); err == nil {
			return n
		}
	}
	return 0
}

// topOnce prints what there is, as often as was asked for.
func (a *app) topOnce(ctx context.Context, source top.Source, f *topFlags, width int) error {
	wanted := top.Wanted{All: f.details}
	var s top.State
	s.Add(source.Look(ctx, wanted)) // for the rates, and to have details made
	for i := range f.count {
		if err := f.sleep(ctx, f.interval); err != nil {
			return err
		}
		s.Add(source.Look(ctx, wanted))
		for waited := time.Duration(0); i == 0 && waited < answerMost && !s.Answered(wanted); waited += answerEvery {
			if err := f.sleep(ctx, answerEvery); err != nil {
				return err
			}
			s.Add(source.Look(ctx, wanted))
		}
		t := s.Table(f.choice)
		if err := f.knownGPU(&t); err != nil {
			return err
		}
		switch {
		case f.json:
			_ = writeJSON(a.out, newTopDocument(t, s.Look(), f.interval), f.count == 1) // checkedWriter remembers
		default:
			if i > 0 {
				fmt.Fprintln(a.out)
			}
			writeTop(a.out, t, s.Look(), width, f.details)
		}
		if c, ok := a.out.(*checkedWriter); ok && c.err != nil {
			return nil
		}
	}
	return nil
}

// A process without readers publishes once a second only, and its details a little later. So the first table waits
// a while until every process has published twice, which its rates need, and with the details that are wanted.
const (
	answerMost  = 2 * time.Second
	answerEvery = live.EveryWatched
)

// sleep waits; it fails when ctx ends.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// knownGPU checks --device against what there is.
func (f *topFlags) knownGPU(t *top.Table) error {
	if f.device < 0 {
		return nil
	}
	all := t.Indices()
	for _, i := range all {
		if i == f.device {
			return nil
		}
	}
	if len(all) == 0 {
		return fmt.Errorf("--device %d: no GPU was found", f.device)
	}
	return fmt.Errorf("--device %d: the GPUs here are %s", f.device, indices(all))
}

// topLive shows the view until the user ends it.
func (a *app) topLive(ctx context.Context, source top.Source, f *topFlags) error {
	// Bubbletea's own context would kill it; this way it tidies the terminal up first.
	v := newTopView(source, f, asciiOnly(environ.Get))
	options := []tea.ProgramOption{tea.WithInput(a.in), tea.WithOutput(a.out0()), tea.WithoutSignalHandler(), tea.WithFPS(30)}
	if !a.color.wanted() {
		options = append(options, tea.WithColorProfile(colorprofile.ASCII))
	}
	p := tea.NewProgram(v, options...)
	looking, cancel := context.WithCancel(ctx)
	defer cancel()
	v.ctx = looking
	stop := context.AfterFunc(ctx, p.Quit)
	defer stop()
	_, err := p.Run()
	if err != nil {
		return fmt.Errorf("top: %w", err)
	}
	a.stopped = ctx.Err() != nil // without a line: the terminal is as it was
	return nil
}
