package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"unicode"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/cistern-gpu/cistern/internal/environ"
	"github.com/cistern-gpu/cistern/internal/suggest"
	"github.com/cistern-gpu/cistern/report"
)

// Exit codes of the command line contract.
const (
	exitOK          = 0
	exitMismatch    = 1 // --verify found one
	exitNoRecording = 1 // the program that was recorded succeeded, and nothing was recorded
	exitBad         = 2 // bad usage, bad input, unwritable output

	exitSignal = 128 // and the number of the signal that ended the command: 130 after Ctrl-C
)

// app is one run of the command: its standard streams and what went wrong so far.
type app struct {
	args     []string // of the command line
	in       io.Reader
	out, err io.Writer
	device   chosenDevice
	color    colorWord
	terminal bool // out is one
	private  bool // new files are for their owner only
	bad      bool // some file could not be read, or some output not be written
	stopped  bool // by a signal, before all was done
	mismatch bool
	status   int // exit status of a program that was run, where everything else went well
}

// run is the whole command, without the process around it.
func run(ctx context.Context, args []string, in io.Reader, out, err io.Writer) int {
	checked := &checkedWriter{w: out}
	a := &app{args: args, in: in, out: checked, err: err, terminal: isTerminal(out)}
	root := newRoot(a)
	root.SetArgs(args)
	root.SetIn(in)
	root.SetOut(checked)
	root.SetErr(err)
	if e := root.ExecuteContext(ctx); e != nil {
		a.fail(e)
	}
	if checked.err != nil {
		a.fail(cannotWrite("standard output", checked.err))
	}
	switch {
	case a.stopped:
		return interruptedStatus(ctx)
	case a.bad:
		return exitBad
	case a.mismatch:
		return exitMismatch
	}
	return a.status
}

// stopSignal is why a context ended: a signal that the command heeds.
type stopSignal struct{ syscall.Signal }

func (s stopSignal) Error() string { return s.String() }

// interruptedStatus is the exit status after the signal that ended ctx, as shells report it.
func interruptedStatus(ctx context.Context) int {
	var s stopSignal
	if errors.As(context.Cause(ctx), &s) {
		return exitSignal + int(s.Signal)
	}
	return exitSignal + int(syscall.SIGINT)
}

// fail prints an error as one line on standard error, and notes that the command was interrupted if that is the error. The run ends with code 2, later if not now. That the reader of an
// output has seen enough (head) is no error: other filters end by a signal then, without a word.
func (a *app) fail(e error) {
	if errors.Is(e, context.Canceled) {
		if !a.stopped {
			fmt.Fprintln(a.err, "cistern: interrupted")
		}
		a.stopped = true
		return
	}
	a.bad = true
	if errors.Is(e, syscall.EPIPE) {
		return
	}
	fmt.Fprintln(a.err, "cistern: "+oneLine(e.Error()))
}

// oneLine keeps whatever a file name or a file put into a message from breaking the line or steering the terminal.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t':
			return ' '
		case unicode.IsControl(r):
			return '\uFFFD'
		}
		return r
	}, strings.TrimSpace(s))
}

func newRoot(a *app) *cobra.Command {
	root := &cobra.Command{
		Use:   "cistern",
		Short: "GPU memory: run PyTorch on Cistern, record runs, replay them under other allocators and settings",
		Long: "Cistern runs a PyTorch program on its own allocator of GPU memory (run), records the allocations of any CUDA program\n" +
			"(record, trace), shows the GPU memory of processes live (top), and explains why a request failed (report). From a\n" +
			"recorded run it computes the memory and the driver time that PyTorch's allocator with other settings, and Cistern,\n" +
			"would have needed (replay, tune). That needs no GPU. A recorded run is a PyTorch memory snapshot, an RMM log or a\n" +
			"Cistern trace; plain, gzip or zstd.",
		Example: "  cistern report run.oom1.pickle                   why a request failed, and what would have met it\n" +
			"  cistern record -o run.pickle -- python train.py  record a run under PyTorch's own allocator\n" +
			"  cistern run -- python train.py                   run on Cistern",
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          noArgs,
		RunE:          func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	root.AddCommand(newRun(), newRecord(a), newTrace(a), newTop(a), newServe(a), newNode(a), newDoctor(a), newBuildAdapter(a), newReplay(a), newInspect(a), newDiff(a), newTune(a), newReport(a), newFleet(a),
		newConvert(a), newVersion(a), newCheckConf(), newMan(), newFormatsTopic())
	root.InitDefaultHelpCmd()
	if help, _, err := root.Find([]string{"help"}); err == nil {
		help.Args = helpArgs
		root.RemoveCommand(help) // cobra adds it when it runs a command
	}
	root.SetHelpTemplate(helpTemplate)
	root.SetUsageTemplate(usageTemplate)
	a.color = colorAuto
	root.PersistentFlags().Var(&a.color, "color", "colours: auto (on a terminal, if NO_COLOR is not set), always or never")
	_ = root.RegisterFlagCompletionFunc("color", cobra.FixedCompletions(colorWords, cobra.ShellCompDirectiveNoFileComp))
	root.Version = buildVersion().String()
	root.SetVersionTemplate("{{.Version}}\n")
	root.Flags().Bool("version", false, "show the version of this command")
	root.CompletionOptions.HiddenDefaultCmd = false
	root.SetFlagErrorFunc(func(c *cobra.Command, e error) error {
		if !c.HasParent() && !strings.HasPrefix(a.args[0], "-") {
			return noArgs(c, a.args) // flags of a command that does not exist
		}
		return flagError(c, e)
	})
	return root
}

// noArgs refuses a command that does not exist, naming those that do.
func noArgs(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	var names []string
	for _, sub := range c.Commands() {
		if sub.IsAvailableCommand() {
			names = append(names, sub.Name())
		}
	}
	if len(names) == 0 {
		return fmt.Errorf("%s takes no arguments, got %q", c.Name(), args[0])
	}
	if hint := suggest.Question(args[0], "", names); hint != "" {
		return fmt.Errorf("unknown command %q: %s", args[0], hint)
	}
	return fmt.Errorf("unknown command %q: expected one of %s", args[0], strings.Join(names, ", "))
}

// helpArgs refuses what is neither a command nor a topic of help.
func helpArgs(c *cobra.Command, args []string) error {
	found, rest, err := c.Root().Find(args)
	if err == nil && len(rest) == 0 {
		return nil
	}
	if found == nil || found == c.Root() {
		return noArgs(c.Root(), args)
	}
	return fmt.Errorf("help %s: there is no command %q below it", found.Name(), rest[0])
}

// traceArgs wants at least one trace, and standard input at most once.
func traceArgs(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("%s: no trace named: give one or more files, or - for standard input", c.Name())
	}
	stdin := 0
	for _, x := range args {
		if x == "-" {
			stdin++
		}
	}
	if stdin > 1 {
		return errors.New("-: standard input can be named once only")
	}
	return nil
}

// style is how tables are written to this output.
func (a *app) style() report.Style {
	return a.styleOf(a.out0(), a.terminal)
}

// styleOf is how text is written to w. What is no terminal gets lines as long as they are.
func (a *app) styleOf(w io.Writer, terminal bool) report.Style {
	if !terminal {
		return report.Style{Color: a.color == colorAlways}
	}
	width := outputWidth(w, func(string) string { return "" })
	if width <= 0 {
		width = mostColumns
	}
	return report.Style{Color: a.color.wanted() && environ.Get("TERM") != "dumb", Width: min(max(width, leastColumns), mostColumns)}
}

// leastColumns and mostColumns bound the columns of text: below, prose is not wrapped further; above, it is hard to read.
const (
	leastColumns = 80
	mostColumns  = 120
)

// isTerminal reports whether w is a terminal, where a bar and colours have a place.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// checkedWriter remembers that a write failed, so that the run can end with code 2.
type checkedWriter struct {
	w   io.Writer
	err error
}

func (c *checkedWriter) Write(p []byte) (int, error) {
	if c.err != nil {
		return 0, c.err
	}
	n, err := c.w.Write(p)
	c.err = err
	return n, err
}
