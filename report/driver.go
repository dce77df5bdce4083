package report

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/recording"
)

// WriteDriver writes what a traced program asked of the driver: peaks, calls, time, and what was never given back.
func WriteDriver(w io.Writer, d *analyze.DriverSummary, s Style) {
	title := "driver calls of " + commandLine(d.Program)
	if d.Path != "" {
		title = s.paint(clean(d.Path), bold) + ", " + title
	}
	writeWrapped(w, "  ", title, s)
	if how := ending(d.End.Status); d.Ended && how != "" {
		fmt.Fprintln(w, s.paint(how, red))
	}
	if len(d.Calls) == 0 {
		why := "no call of the driver allocated or freed memory"
		if d.Processes == 0 {
			why += ": no process that could be seen loaded libcuda.so.1"
		}
		fmt.Fprintln(w, why)
	}
	for _, v := range d.Devices {
		name := clean(v.Name)
		if name != "" {
			name = " (" + name + ")"
		}
		writeWrapped(w, "  ", fmt.Sprintf("device %d%s: peak %s allocated from the driver, %s requested, %s", v.Device, name, units.FormatBytes(v.PeakHeld),
			units.FormatBytes(v.PeakRequested), plural(int64(v.OOMs), "OOM")), s)
	}
	if d.HostPeak > 0 || d.Managed > 0 {
		fmt.Fprintf(w, "host: peak %s page-locked; managed: peak %s\n", units.FormatBytes(d.HostPeak), units.FormatBytes(d.Managed))
	}
	if len(d.Calls) > 0 {
		writeWrapped(w, "  ", fmt.Sprintf("%s in the driver, %s of it in calls that may wait for the GPU; processes: %d", nanoseconds(d.DriverNS),
			nanoseconds(d.WaitingNS), d.Processes), s)
		if d.End.Spent > 0 {
			fmt.Fprintf(w, "tracing itself took %s of the program's threads, %d ns a call\n", nanoseconds(d.End.Spent), d.End.Spent/max(1, d.CallCount()))
		}
		fmt.Fprintln(w)
		g := grid{head: []string{"call", "calls", "failed", "time", "each", "longest", "waits"}, textFrom: 6}
		for _, c := range d.Calls {
			waits := ""
			if c.Waits {
				waits = "yes"
			}
			g.add(c.Name, number(int64(c.Count)), number(int64(c.Failed)), nanoseconds(c.NS), nanoseconds(c.NS/max(1, c.Count)),
				nanoseconds(c.MaxNS), waits)
		}
		g.optional = []string{"each"} // which the time and the number of calls say too
		if !slices.ContainsFunc(d.Calls, func(c analyze.DriverCalls) bool { return c.Failed > 0 }) {
			g.optional = append(g.optional, "failed")
		}
		g.write(w, s)
	}
	if d.KeptCount > 0 {
		fmt.Fprintln(w)
		fmt.Fprintf(w, "never freed: %s in %s\n", units.FormatBytes(d.KeptBytes), plural(int64(d.KeptCount), "allocation"))
		writeKept(w, d, s)
	}
	var notes []string
	if d.End.Dropped > 0 {
		notes = append(notes, fmt.Sprintf("dropped, as they came faster than they could be written: %s; what they got or freed is missing",
			plural(int64(d.End.Dropped), "call")))
	}
	if d.End.Lost > 0 {
		notes = append(notes, fmt.Sprintf("not recorded whole, as their process was killed or stopped meanwhile: %s",
			plural(int64(d.End.Lost), "call")))
	}
	if len(d.End.Unknown) > 0 {
		notes = append(notes, "these functions were not seen: "+strings.Join(d.End.Unknown, ", "))
	}
	notes = append(notes, analyze.UntracedLines(d.Untraced)...)
	if !d.Ended {
		notes = append(notes, "the trace was cut off: what came later is not known")
	}
	writeNotes(w, notes, s)
}

// commandLine is a program with its arguments, the beginning of them where they are a text of their own: a script behind -c,
// or a thousand files.
func commandLine(args []string) string {
	const most = 400
	text := []rune(clean(strings.Join(args, " ")))
	if len(text) > most {
		return string(text[:most]) + " …"
	}
	return string(text)
}

// ending says how a program ended that did not end well. What shells do is done by them and by cistern trace: 128 and the
// signal's number stand for a signal.
func ending(status int) string {
	name, ok := signals[status-128]
	switch {
	case status == 0:
		return ""
	case ok:
		return fmt.Sprintf("the program ended with status %d: signal %d, %s", status, status-128, name)
	}
	return fmt.Sprintf("the program ended with status %d", status)
}

// signals are those that end programs, by the numbers that they have on Linux.
var signals = map[int]string{1: "hangup", 2: "interrupted", 3: "quit", 4: "illegal instruction", 5: "trace trap", 6: "aborted", 7: "bus error",
	8: "floating-point exception", 9: "killed", 11: "segmentation fault", 13: "broken pipe", 14: "alarm", 15: "terminated",
	24: "limit of CPU time", 25: "limit of a file's size", 31: "bad system call"}

// writeKept writes what was never freed, by caller. Names come last, and are wrapped: those of C++ may be wider than a terminal.
func writeKept(w io.Writer, d *analyze.DriverSummary, s Style) {
	g := grid{head: []string{"bytes", "count", "memory", "process", "by"}, textFrom: 2, numberFirst: true}
	var stacks [][]recording.Frame
	for _, k := range d.Kept {
		stacks = append(stacks, k.Stack)
	}
	names := analyze.StackNames(stacks)
	for i, k := range d.Kept {
		memory := k.Memory
		if k.Device >= 0 {
			memory += fmt.Sprintf(", device %d", k.Device)
		}
		name := shortName(names[i])
		if len(k.Stack) == 0 {
			name = "unknown"
		}
		g.add(units.FormatBytes(k.Bytes), number(int64(k.Count)), memory, fmt.Sprint(k.PID), name)
	}
	g.write(w, s)
}

func nanoseconds(ns uint64) string { return microseconds(float64(ns) / 1000) }
