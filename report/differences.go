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

// shownChanges bounds what a terminal gets of a list of changes.
const shownChanges = 15

// WriteDifference writes what grew from one run to another.
func WriteDifference(w io.Writer, d *analyze.Difference, s Style) {
	for i, side := range []*analyze.Side{&d.A, &d.B} {
		path := side.Path
		if path == "-" {
			path = "standard input"
		}
		writeWrapped(w, "   ", fmt.Sprintf("%s: %s, %s, %s over %s", s.paint(string(rune('A'+i)), bold), clean(path), clean(recording.WhereOf(side.Device, side.Owner)),
			plural(side.Events, "event"), microseconds(float64(side.DurationUS))), s)
	}
	fmt.Fprintln(w)
	g := grid{head: []string{"", "A", "B", "change"}}
	size := func(name string, a, b uint64) {
		g.add(name, units.FormatBytes(a), units.FormatBytes(b), signedBytes(int64(b-a)))
	}
	num := func(name string, a, b int) { g.add(name, number(a), number(b), signedNumber(b-a)) }
	size("peak live", d.A.PeakLive, d.B.PeakLive)
	if d.A.PeakReserved > 0 || d.B.PeakReserved > 0 {
		size("peak reserved", d.A.PeakReserved, d.B.PeakReserved)
	}
	if d.At == "end" {
		size("live at the end", d.A.Live, d.B.Live)
	}
	num("blocks "+atWords(d.At), d.A.Blocks, d.B.Blocks)
	num("allocations", d.A.Allocs, d.B.Allocs)
	size("requested in all", d.A.Requested, d.B.Requested)
	num("driver calls", d.A.DriverCalls, d.B.DriverCalls)
	if d.A.DriverNS+d.B.DriverNS > 0 {
		g.add("time in the driver", nanoseconds(d.A.DriverNS), nanoseconds(d.B.DriverNS), signedTime(int64(d.B.DriverNS-d.A.DriverNS)))
	}
	if d.A.OOMs+d.B.OOMs > 0 {
		num("out of memory", d.A.OOMs, d.B.OOMs)
	}
	g.write(w, s)
	if len(d.Stack) > 1 || len(d.Stack) == 1 && d.Stack[0].Frames != nil {
		writeStackChanges(w, d, s)
	}
	if len(d.Library) > 1 {
		writeChanges(w, "library", d.At, d.Library, s)
	}
	if len(d.Tag) > 0 {
		writeChanges(w, "tag", d.At, d.Tag, s)
	}
	writeChanges(w, "size", d.At, d.Size, s)
	if !d.A.Stacks || !d.B.Stacks {
		writeChanges(w, "exact size", d.At, d.Exact, s)
	}
	if len(d.Pool) > 1 {
		writeChanges(w, "pool", d.At, d.Pool, s)
	}
	if len(d.Stream) > 1 {
		writeChanges(w, "stream", d.At, d.Stream, s)
	}
	writeNotes(w, d.Notes, s)
	fmt.Fprintln(w)
}

func atWords(at string) string {
	if at == "end" {
		return "at the end"
	}
	return "at the peak"
}

// changed is what a terminal shows of a list, the largest change first, and how many of those that changed are left out.
func changed(all []analyze.Change) (shown []analyze.Change, left int) {
	shown, left = mostChanged(all, shownChanges)
	same := slices.IndexFunc(shown, func(c analyze.Change) bool { return c.Grew == 0 })
	if same >= 0 {
		shown = shown[:same]
	}
	return shown, left
}

func writeStackChanges(w io.Writer, d *analyze.Difference, s Style) {
	fmt.Fprintf(w, "\n%s\n", s.paint("what changed "+atWords(d.At)+", by stack", bold))
	shown, left := changed(d.Stack)
	for _, c := range shown {
		writeWrapped(w, strings.Repeat(" ", 15), fmt.Sprintf("%13s  %s: %s → %s in %s → %s", signedBytes(c.Grew), shortName(c.Named),
			units.FormatBytes(c.BytesA), units.FormatBytes(c.BytesB), number(c.BlocksA), plural(c.BlocksB, "block")), s)
		writeFrames(w, 17, c.Frames, c.Name, s)
	}
	writeLeft(w, len(shown), left, "stack")
}

func writeLeft(w io.Writer, shown, left int, what string) {
	switch {
	case left > 0:
		fmt.Fprintf(w, "%s changed less\n", plural(left, "other "+what))
	case shown == 0:
		fmt.Fprintln(w, "nothing changed")
	}
}

func writeChanges(w io.Writer, what, at string, all []analyze.Change, s Style) {
	fmt.Fprintf(w, "\n%s\n", s.paint("what changed "+atWords(at)+", by "+what, bold))
	shown, left := changed(all)
	if len(shown) > 0 {
		g := grid{head: []string{what, "A", "B", "change", "blocks A", "blocks B"}, optional: []string{"blocks A", "blocks B"}}
		for _, c := range shown {
			g.add(clean(c.Name), units.FormatBytes(c.BytesA), units.FormatBytes(c.BytesB), signedBytes(c.Grew), number(c.BlocksA),
				number(c.BlocksB))
		}
		g.write(w, s)
	}
	if strings.HasSuffix(what, "y") && left > 1 {
		what = strings.TrimSuffix(what, "y") + "ie" // plural adds the s
	}
	writeLeft(w, len(shown), left, what)
}

// signedBytes is a difference of sizes: "+1.00 GiB".
func signedBytes(n int64) string {
	if n < 0 {
		return "-" + units.FormatBytes(uint64(-n))
	}
	return "+" + units.FormatBytes(uint64(n))
}

func signedTime(ns int64) string {
	if ns < 0 {
		return "-" + nanoseconds(uint64(-ns))
	}
	return "+" + nanoseconds(uint64(ns))
}

func signedNumber(n int) string {
	if n < 0 {
		return number(n)
	}
	return "+" + number(n)
}
