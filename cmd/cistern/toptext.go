package main

import (
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"

	"github.com/charmbracelet/x/ansi"

	"github.com/cistern-gpu/cistern/internal/top"
	"github.com/cistern-gpu/cistern/recording"
)

// The table that `cistern top --once` prints: plain text, columns that stay where they are.

// onceGPUs are the columns of GPUs.
var onceGPUs = []column{
	{name: "GPU", width: 4},
	{name: "NAME", width: 12, most: 40, left: true},
	{name: "USED", width: 5},
	{name: "TOTAL", width: 5},
	{name: "FREE", width: 5},
	{name: "UTIL", width: 4},
	{name: "RESERVED", width: 8},
	{name: "ALLOC", width: 5},
	{name: "TRACED", width: 6, drop: 1},
}

// onceProcesses are the columns of processes; the program's arguments may be long, and are last.
var onceProcesses = []column{
	{name: "PID", width: 7},
	{name: "KIND", width: 7, left: true, drop: 3},
	{name: "GPU", width: 4, drop: 2},
	{name: "USED", width: 5},
	{name: "OTHER", width: 5, drop: 7},
	{name: "RESERVED", width: 8},
	{name: "ALLOC", width: 5},
	{name: "CACHED", width: 6, drop: 5},
	{name: "PEAK", width: 5, drop: 1},
	{name: "LIMIT", width: 5, drop: 6},
	{name: "CALL/S", width: 6},
	{name: "OOM", width: 4, drop: 4},
	{name: "PROGRAM", width: 10, most: 400, left: true},
}

// writeTop prints a table within a width, 0 for no limit.
func writeTop(w io.Writer, t top.Table, l *top.Look, width int, details bool) {
	var lines []string
	if len(t.GPUs) > 0 {
		g := fit(onceGPUs, width, widest(len(t.GPUs), func(i int) string { return gpuName(&t.GPUs[i]) }))
		lines = append(g.table(plainStyle, len(t.GPUs), func(i int, name string) cell { return gpuCell(&t.GPUs[i], name) }, true), "")
	}
	g := fit(onceProcesses, width, widest(len(t.Rows), func(i int) string { return programText(&t.Rows[i]) }))
	lines = append(lines, g.table(plainStyle, len(t.Rows), func(i int, name string) cell { return rowCell(&t, &t.Rows[i], name) }, true)...)
	if len(t.Rows) == 0 {
		lines = append(lines, fitText(emptyText(&t), width))
	}
	fmt.Fprintln(w, strings.Join(lines, "\n"))
	if node := nodeLines(&t, l.Node, width); node != nil {
		fmt.Fprintln(w, "\n"+strings.Join(node, "\n"))
	}
	if details {
		for i := range t.Rows {
			writeDetails(w, &t.Rows[i], width)
		}
	}
	notes := notesOf(l)
	if len(notes) > 0 {
		fmt.Fprintln(w)
	}
	for _, n := range notes {
		for _, line := range wrapText(n, width) {
			fmt.Fprintln(w, strings.TrimRight(line, " "))
		}
	}
}

// widest measures the one text of a table that grows.
func widest(n int, text func(i int) string) func(string) int {
	most := 0
	for i := range n {
		most = max(most, ansi.StringWidth(text(i)))
	}
	return func(string) int { return most }
}

func fitText(s string, width int) string {
	if width == 0 {
		return s
	}
	return fitLine(s, width)
}

func wrapText(s string, width int) []string {
	if width == 0 {
		return []string{s}
	}
	return strings.Split(ansi.Wrap(s, width, ""), "\n")
}

// programText is a program with, where its page is old, since when it says nothing.
func programText(r *top.Row) string {
	if r.Stale {
		return age(r.Age) + " silent: " + r.Title
	}
	return r.Title
}

// rowCell is what a column says of a process.
func rowCell(t *top.Table, r *top.Row, name string) cell {
	switch name {
	case "PID":
		return cell{fmt.Sprint(r.PID), plainStyle}
	case "PROGRAM":
		return cell{programText(r), plainStyle}
	case "KIND":
		switch r.Kind {
		case top.Cistern:
			return cell{r.Kind, allocatedStyle}
		case top.Traced:
			return cell{r.Kind, tracedStyle}
		}
		return cell{r.Kind, dimStyle}
	case "GPU":
		return cell{rowGPUs(t, r), plainStyle}
	}
	return memoryCell(&r.Sum, r.Stale, name)
}

// rowGPUs names the GPUs on which a process holds memory, or how many where that is too long.
func rowGPUs(t *top.Table, r *top.Row) string {
	if len(r.Holdings) == 1 {
		return gpuLabel(&t.GPUs[r.Holdings[0].GPU])
	}
	s := indices(r.On(t.GPUs))
	if len(s) > 3 {
		return fmt.Sprintf("%d×", len(r.Holdings))
	}
	return s
}

// emptyText says that there is no process, or none that was chosen.
func emptyText(t *top.Table) string {
	if t.All > 0 {
		return fmt.Sprintf("none of %s is chosen", plural(t.All, "process", "processes"))
	}
	return "no process uses GPU memory, as far as can be seen"
}

func plural(n int, one, more string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, more)
}

// notesOf says what is missing, a line each.
func notesOf(l *top.Look) []string {
	var notes []string
	if l.NoCards != "" {
		notes = append(notes, "Without NVML only processes on Cistern and traced ones are seen: "+oneLine(strings.TrimPrefix(l.NoCards, "NVML: ")))
	}
	if l.NoPages != "" {
		notes = append(notes, "Only what NVML knows is seen: "+oneLine(l.NoPages))
	}
	if l.Unreadable > 0 {
		notes = append(notes, plural(l.Unreadable, "process of another user", "processes of other users")+" cannot be looked into; root sees all")
	}
	if l.Strange > 0 {
		notes = append(notes, plural(l.Strange, "process", "processes")+" that the driver names cannot be found; in a container, numbers may be the host's")
	}
	for _, p := range l.Problems {
		notes = append(notes, oneLine(p))
	}
	return notes
}

// detailSections are the lists of a process's details; only: of one kind of process.
var detailSections = []struct {
	name, only string
	of         func(*top.Details) []top.Use
}{
	{"calls", top.Traced, func(d *top.Details) []top.Use { return d.Kinds }},
	{"tags", top.Cistern, func(d *top.Details) []top.Use { return d.Tags }},
	{"libraries", "", func(d *top.Details) []top.Use { return d.Libraries }},
	{"pools", top.Cistern, func(d *top.Details) []top.Use { return d.Pools }},
	{"stacks", "", func(d *top.Details) []top.Use { return d.Stacks }},
}

// mostDetails is how many of a list --once prints; --json has all.
const mostDetails = 20

// writeDetails prints the allocations of a process.
func writeDetails(w io.Writer, r *top.Row, width int) {
	if !r.Sum.Page {
		return
	}
	fmt.Fprintln(w)
	fmt.Fprintln(w, fitText(fmt.Sprintf("%d %s", r.PID, r.Title), width))
	d := top.Gather(r.Holdings)
	if d == nil {
		fmt.Fprintln(w, "  no details: it did not answer in time")
		return
	}
	any := false
	for _, s := range detailSections {
		uses := s.of(d)
		if len(uses) == 0 {
			continue
		}
		any = true
		fmt.Fprintf(w, "  %s\n", s.name)
		for i, u := range uses {
			if i == mostDetails {
				fmt.Fprintf(w, "    and %d more\n", len(uses)-i)
				break
			}
			fmt.Fprintln(w, fitText(fmt.Sprintf("    %5s %5s  %s", amount(u.Bytes), blockCount(u.Blocks), useName(u.Name)), width))
		}
	}
	switch {
	case !any && r.Sum.Allocated == 0:
		fmt.Fprintln(w, "  it has allocated nothing")
	case !any:
		fmt.Fprintln(w, "  no details: it has no tags, libraries, pools or stacks")
	}
}

func blockCount(n int64) string { return count(uint64(max(0, n))) }

// useName is a name on one line: the frames of a stack one after the other, the innermost first. Where some have lines of
// a source these are enough: what lies between a program and its memory is the same everywhere.
func useName(s string) string {
	if s == "" {
		return "(none)"
	}
	frames := strings.Split(s, "\n")
	if len(frames) > 1 && slices.ContainsFunc(frames, sourceLine.MatchString) {
		frames = slices.DeleteFunc(frames, func(f string) bool { return !sourceLine.MatchString(f) })
	}
	for i := range frames {
		if strings.Contains(s, "\n") {
			frames[i] = shortFrame(frames[i])
		}
	}
	return oneLine(strings.Join(frames, " < "))
}

// sourceLine ends the name of a file of which the line is known.
var sourceLine = regexp.MustCompile(`:[0-9]+$`)

// shortFrame is a frame, "function file:line", without folders. A file without a line is a library, and is left out where
// the function says something.
func shortFrame(s string) string {
	function, file, ok := strings.Cut(s, " /")
	if !ok {
		function, file = "", s
	}
	file = file[strings.LastIndexByte(file, '/')+1:]
	function = recording.ShortFrame(function)
	switch {
	case function == "":
		return file
	case sourceLine.MatchString(file):
		return function + " " + file
	}
	return function
}
