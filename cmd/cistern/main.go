// Command cistern replays, inspects and reports recorded GPU-memory runs: a PyTorch memory snapshot, an RMM log or a
// Cistern trace goes in; what other allocators and settings would have held and cost comes out.
//
// The work is done by the packages trace, replay, analyze and report. Here are only the command line, the files
// (several at once, output in the order of the arguments), the progress bar and the exit codes: 0 when it ran, 1 when
// --verify found a mismatch, 2 on bad usage, bad input or an unwritable output, 128 and the number of the signal that
// ended it (130 after Ctrl-C).
package main

import (
	"context"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"charm.land/lipgloss/v2"
)

func main() {
	// Old consoles of Windows do not understand colours unless asked; elsewhere these do nothing.
	lipgloss.EnableLegacyWindowsANSI(os.Stdout)
	lipgloss.EnableLegacyWindowsANSI(os.Stderr)
	// A reader that has seen enough (head) ends the output, not the run: its files are still written. The signal is handled,
	// as one that is ignored would be so in every program started from here too.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	ctx, stop := untilSignal(heeded(os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)...)
	code := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// untilSignal is a context that the first of these signals ends, with the signal as its cause. A second one ends the
// command where it waits in the kernel, as for the reader of a pipe.
func untilSignal(signals ...os.Signal) (ctx context.Context, stop func()) {
	if len(signals) == 0 { // Notify would take all
		return context.Background(), func() {}
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	came := make(chan os.Signal, 1)
	signal.Notify(came, signals...)
	go func() {
		s := <-came
		signal.Stop(came)
		n, _ := s.(syscall.Signal)
		cancel(stopSignal{n})
	}()
	return ctx, func() {
		signal.Stop(came)
		cancel(nil)
	}
}

// heeded are those of these signals that this process was not started to ignore, as in the background or by nohup. To
// handle one of the others would also have the programs that are started from here end by it. Of those that Go handles by
// itself it is not known; they are heeded.
func heeded(signals ...os.Signal) []os.Signal {
	return slices.DeleteFunc(signals, signal.Ignored)
}
