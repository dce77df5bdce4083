package report

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"charm.land/lipgloss/v2"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/replay"
)

// Style says how tables are written.
type Style struct {
	Color bool // the output is a terminal that shows colours
	Width int  // columns to wrap text at; 0 is never
}

func (s Style) paint(text string, style lipgloss.Style) string {
	if !s.Color {
		return text
	}
	return style.Render(text)
}

var (
	bold  = lipgloss.NewStyle().Bold(true)
	faint = lipgloss.NewStyle().Faint(true)
	red   = lipgloss.NewStyle().Foreground(lipgloss.Red)
	green = lipgloss.NewStyle().Foreground(lipgloss.Green)
)

// WriteReplay writes one trace's comparison, and why requests failed.
func WriteReplay(w io.Writer, rep *replay.Report, ooms []analyze.OOM, s Style) {
	writeTitle(w, s, rep.Path, rep.Device, rep.Owner, rep.Format, rep.Environment)
	fmt.Fprintf(w, "%s on %s over %s; peak live %s\n", plural(rep.Events, "event"), plural(rep.Streams, "stream"),
		microseconds(float64(rep.DurationUS)), units.FormatBytes(rep.PeakLive))
	if r := rep.Recorded; r.PeakReserved > 0 {
		writeWrapped(w, "  ", fmt.Sprintf("recorded: peak reserved %s (ratio %s), %s, %s", units.FormatBytes(r.PeakReserved),
			ratio(r.PeakReserved, rep.PeakLive), plural(r.SegmentEvents, "segment event"), plural(r.OOMs, "OOM")), s)
	}
	fmt.Fprintln(w)
	WriteResults(w, rep.Results, s)
	fmt.Fprintln(w)
	writeRequests(w, rep.Results, s)
	seen := map[string]bool{}
	for _, r := range rep.Results {
		if line := "capacity: " + capacity(r); r.Capacity > 0 && !seen[line] {
			seen[line] = true
			writeWrapped(w, "  ", line, s)
		}
	}
	writeWarning(w, rep.Warning, s)
	if v := rep.Verify; v != nil {
		fmt.Fprintln(w)
		verdict := s.paint("matches the record", green)
		if !v.OK() {
			verdict = s.paint("differs from the record", red)
		}
		fmt.Fprintf(w, "verify: %s: %s of %s driver events, %s of %s placements\n", verdict, number(v.Matched),
			number(v.Recorded), number(v.PlacementsMatched), number(v.Placements))
		if v.FirstMismatch != nil {
			fmt.Fprintf(w, "  first mismatch: %s\n", clean(*v.FirstMismatch))
		}
	}
	WriteOOMs(w, ooms, s)
	writeNotes(w, rep.Notes, s)
	fmt.Fprintln(w)
}

// writeWarning writes why nothing is recommended, where that is so.
func writeWarning(w io.Writer, warning string, s Style) {
	if warning != "" {
		writeWrapped(w, "  ", s.paint("warning", red)+": "+warning, s)
	}
}

// WriteResults writes what policies did, one to a line.
func WriteResults(w io.Writer, results []*replay.Result, s Style) {
	g := grid{head: []string{"policy", "peak reserved", "ratio", "driver calls", "driver time", "stream syncs",
		"device syncs", "retries", "OOMs", "completed", "survives"}, textFrom: 9,
		optional: []string{"retries", "device syncs", "stream syncs", "driver calls", "ratio"}}
	limited := false
	for _, r := range results {
		calls := int64(0)
		for _, n := range r.Calls {
			calls += n
		}
		completed := s.paint("yes", green)
		if r.OOMs > 0 { // but for requests that failed in the run too
			completed = "yes, as recorded"
		}
		if !r.Completed {
			completed = s.paint("no, died at event "+number(*r.FailedEvent), red)
		}
		ooms := number(r.OOMs)
		if r.OOMsAvoided > 0 {
			ooms += fmt.Sprintf(" (%s avoided)", number(r.OOMsAvoided))
		}
		g.add(clean(policyName(r)), units.FormatBytes(r.PeakReserved), fmt.Sprintf("%.3f", r.Ratio), number(calls),
			driverTime(r), number(r.StreamSyncs), number(r.DeviceSyncs), number(r.Retries), ooms, completed, survives(r))
		limited = limited || r.Odds != nil
	}
	if !limited {
		g.cut()
	}
	g.write(w, s)
}

// writeRequests writes how long requests took, and what was reserved in the mean.
func writeRequests(w io.Writer, results []*replay.Result, s Style) {
	fmt.Fprintln(w, s.paint("time of a request in driver calls and waits", bold))
	g := grid{head: []string{"policy", "median", "p99", "p99.9", "longest", "mean reserved"}, optional: []string{"mean reserved", "p99.9"}}
	for _, r := range results {
		t := r.Requests
		g.add(clean(policyName(r)), microseconds(t.P50), microseconds(t.P99), microseconds(t.P999), microseconds(t.Max),
			units.FormatBytes(r.MeanReserved))
	}
	g.write(w, s)
}

// survives is how often the run survives, and what it reserves then where that differs.
func survives(r *replay.Result) string {
	o := r.Odds
	if o == nil {
		return ""
	}
	text := o.String() + " replays"
	if least, most := units.FormatBytes(o.PeakLeast), units.FormatBytes(o.PeakMost); least != most {
		text += fmt.Sprintf(", peak %s to %s", least, most)
	}
	return text
}

// driverTime is the modelled time of driver calls, on the hosts that were measured.
func driverTime(r *replay.Result) string { return timeRange(r.DriverLeastUS, r.DriverTimeUS) }

// timeRange is from one time to another, with one unit where that is the same.
func timeRange(leastUS, mostUS float64) string {
	if leastUS == mostUS {
		return microseconds(mostUS)
	}
	least, most := microseconds(leastUS), microseconds(mostUS)
	if n, unit, ok := strings.Cut(least, " "); ok && strings.HasSuffix(most, " "+unit) {
		least = n
	}
	return least + " to " + most
}

func capacity(r *replay.Result) string {
	return fmt.Sprintf("%s (%s)", units.FormatBytes(r.Capacity), clean(r.CapacityFrom))
}

// WriteOOMs explains failed requests.
func WriteOOMs(w io.Writer, ooms []analyze.OOM, s Style) {
	for _, o := range ooms {
		fmt.Fprintln(w)
		writeWrapped(w, "  ", fmt.Sprintf("%s %s at event %s, %s into the run: %s", s.paint("out of memory", red), clean(o.Source),
			number(o.Event), microseconds(float64(o.TimeUS)), o.Cause), s)
		for _, line := range o.Why {
			writeWrapped(w, "  ", "  "+line, s)
		}
	}
}

// WriteInspection writes what a trace holds.
func WriteInspection(w io.Writer, in *analyze.Inspection, s Style) {
	writeTitle(w, s, in.Path, in.Device, in.Owner, in.Format, in.Environment)
	writeIdentity(w, s, in.Identity)
	line := fmt.Sprintf("%s over %s", plural(in.Events, "event"), microseconds(float64(in.DurationUS)))
	sep := ": "
	for _, k := range kindOrder {
		if n := in.Kinds[k]; n > 0 {
			line += fmt.Sprintf("%s%s %s", sep, number(n), k)
			sep = ", "
		}
	}
	writeWrapped(w, "  ", line, s)
	start := "recorded from the start"
	if !in.FromStart {
		start = "the start is missing"
	}
	writeWrapped(w, "  ", fmt.Sprintf("%s; %s live before the first event; %s", start, plural(in.Initial, "block"),
		plural(in.Stacks, "distinct stack")), s)
	if in.Conf != "" {
		fmt.Fprintf(w, "settings: %s\n", clean(in.Conf))
	}
	p := &in.Peak
	when := fmt.Sprintf("at event %s, %s into the run", number(p.Event), microseconds(float64(p.TimeUS)))
	if p.Event < 0 {
		when = "before the first event"
	}
	fmt.Fprintf(w, "\n%s %s\n", s.paint("peak", bold), when)
	g := grid{head: []string{"", "bytes", "of peak live"}}
	of := func(n uint64) string { return ratio(n, in.PeakLive) }
	g.add("live", units.FormatBytes(p.Live), of(p.Live))
	g.add("allocated (rounded to 512)", units.FormatBytes(p.Allocated), of(p.Allocated))
	if p.Pending > 0 {
		g.add("live but given back", units.FormatBytes(p.Pending), of(p.Pending))
	}
	if p.Reserved > 0 {
		g.add("reserved then", units.FormatBytes(p.Reserved), of(p.Reserved))
		g.add("peak reserved, whole run", units.FormatBytes(in.RecordedReserved), of(in.RecordedReserved))
	}
	g.write(w, s)
	if p.Reserved > 0 {
		writeWrapped(w, "  ", fmt.Sprintf("%s in %s; free inside: %s in %s, the largest %s", plural(p.Blocks, "block"),
			plural(p.Segments, "segment"), units.FormatBytes(p.FreeBytes), plural(p.FreePieces, "piece"),
			units.FormatBytes(p.LargestFree)), s)
	}

	fmt.Fprintf(w, "\n%s\n", s.paint("live at the peak, by size", bold))
	g = grid{head: []string{"size", "blocks", "bytes", "share"}}
	for _, x := range p.Sizes {
		if x.Blocks > 0 {
			g.add(x.Label, number(x.Blocks), units.FormatBytes(x.Bytes), share(x.Bytes, p.Live))
		}
	}
	g.write(w, s)

	fmt.Fprintf(w, "\n%s\n", s.paint("live at the peak, by stream", bold))
	g = grid{head: []string{"stream", "allocations", "requested in all", "live at the peak", "share"}, optional: []string{"requested in all", "allocations"}}
	for _, x := range in.Streams {
		g.add(streamName(x.Stream), number(x.Allocs), units.FormatBytes(x.Bytes), units.FormatBytes(x.LiveBytes),
			share(x.LiveBytes, p.Live))
	}
	g.write(w, s)
	if len(in.Pools) > 1 {
		fmt.Fprintf(w, "\n%s\n", s.paint("live at the peak, by pool", bold))
		g = grid{head: []string{"pool", "allocations", "requested in all", "live at the peak", "share"}, optional: []string{"requested in all", "allocations"}}
		for _, x := range in.Pools {
			g.add(x.Pool, number(x.Allocs), units.FormatBytes(x.Bytes), units.FormatBytes(x.LiveBytes), share(x.LiveBytes, p.Live))
		}
		g.write(w, s)
	}
	for _, by := range []struct {
		what string
		uses []analyze.LabelUse
		from int // how many there must be
	}{{"tag", p.Tags, 1}, {"library", p.Libraries, 2}, {"thread", p.Threads, 2}} {
		if len(by.uses) >= by.from {
			writeLabels(w, by.what, by.uses, p.Live, s)
		}
	}
	writeHolders(w, p, s)
	WriteOOMs(w, in.OOMs, s)
	if in.Failures > 0 {
		fmt.Fprintln(w)
		writeWrapped(w, "  ", fmt.Sprintf("The file has what the process itself said of %s: cistern report shows it.",
			plural(in.Failures, "failed request")), s)
	}
	writeNotes(w, in.Notes, s)
	fmt.Fprintln(w)
}

// shownLabels bounds the tags, libraries and threads that a terminal gets.
const shownLabels = 20

// writeLabels writes the memory at the peak, by tag, library or thread.
func writeLabels(w io.Writer, what string, uses []analyze.LabelUse, live uint64, s Style) {
	fmt.Fprintf(w, "\n%s\n", s.paint("live at the peak, by "+what, bold))
	g := grid{head: []string{what, "blocks", "bytes", "share"}}
	for _, x := range uses[:min(len(uses), shownLabels)] {
		g.add(clean(x.Name), number(x.Blocks), units.FormatBytes(x.Bytes), share(x.Bytes, live))
	}
	g.write(w, s)
	var rest analyze.LabelUse
	for _, x := range uses[min(len(uses), shownLabels):] {
		rest.Blocks += x.Blocks
		rest.Bytes += x.Bytes
	}
	if rest.Blocks > 0 {
		fmt.Fprintf(w, "%s in %s of %d others\n", units.FormatBytes(rest.Bytes), plural(rest.Blocks, "block"), len(uses)-shownLabels)
	}
}

// labelled is "; tag a, b; library c", or nothing.
func labelled(h *analyze.Holder) string {
	text := ""
	for _, l := range []struct {
		what  string
		names []string
	}{{"tag", h.Tags}, {"library", h.Libraries}} {
		if len(l.names) == 0 {
			continue
		}
		text += "; " + l.what + " " + clean(strings.Join(l.names[:min(len(l.names), shownOfHolder)], ", "))
		if n := len(l.names) - shownOfHolder; n > 0 {
			text += fmt.Sprintf(" and %d more", n)
		}
	}
	return text
}

// shownOfHolder bounds the tags and libraries of one stack.
const shownOfHolder = 3

// kindOrder is the order in which kinds of events are listed.
var kindOrder = []string{"alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
	"segment_unmap", "oom", "retry", "snapshot", "annotate"}

// shownHolders and shownFrames bound what a terminal gets; the page and --json have more.
const (
	shownHolders = 8
	shownFrames  = 4
)

func writeHolders(w io.Writer, p *analyze.Moment, s Style) {
	fmt.Fprintf(w, "\n%s\n", s.paint("live at the peak, by stack", bold))
	for _, h := range p.Holders[:min(len(p.Holders), shownHolders)] {
		line := fmt.Sprintf("%12s %6s  %s, %s%s", units.FormatBytes(h.Bytes), share(h.Bytes, p.Live), shortName(h.Named),
			plural(h.Blocks, "block"), labelled(&h))
		writeWrapped(w, strings.Repeat(" ", 21), line, s)
		writeFrames(w, 23, h.Frames, h.Name, s)
	}
	var bytes uint64
	blocks := 0
	for _, h := range p.Holders[min(len(p.Holders), shownHolders):] {
		bytes += h.Bytes
		blocks += h.Blocks
	}
	bytes, blocks = bytes+p.Others.Bytes, blocks+p.Others.Blocks
	if blocks > 0 {
		fmt.Fprintf(w, "%12s %6s  in %s of other stacks\n", units.FormatBytes(bytes), share(bytes, p.Live),
			plural(blocks, "block"))
	}
}

// writeFrames writes the innermost frames of a stack, but for a single one that was just named.
func writeFrames(w io.Writer, indent int, frames []string, named string, s Style) {
	if len(frames) == 1 && frames[0] == named {
		return
	}
	for _, f := range frames[:min(len(frames), shownFrames)] {
		writeWrapped(w, strings.Repeat(" ", indent+2), strings.Repeat(" ", indent)+shortFrame(f), s)
	}
	if n := len(frames) - shownFrames; n > 0 {
		fmt.Fprintf(w, "%*s%s\n", indent, "", s.paint("... "+plural(n, "frame")+" more", faint))
	}
}

func writeTitle(w io.Writer, s Style, path string, device int, of *recording.Owner, format string, e recording.Environment) {
	if path == "-" {
		path = "standard input"
	}
	writeWrapped(w, "  ", fmt.Sprintf("%s, %s, %s", s.paint(clean(path), bold), clean(recording.WhereOf(device, of)), format), s)
	if line := environmentLine(e); line != "" {
		writeWrapped(w, "  ", clean(line), s)
	}
}

// environmentLine is what a run was recorded with, "" where nothing of it is known.
func environmentLine(e recording.Environment) string {
	var parts []string
	for _, p := range []struct{ before, value string }{{"PyTorch ", e.PyTorch}, {"CUDA ", e.CUDA}, {"driver ", e.Driver}, {"", e.Device}} {
		if p.value != "" {
			parts = append(parts, p.before+p.value)
		}
	}
	if e.DeviceTotal > 0 {
		parts = append(parts, units.FormatBytes(e.DeviceTotal)+" of memory")
	}
	return strings.Join(parts, ", ")
}

// writeShell writes a line for a shell in one piece, to be copied: one for each version of PyTorch, where they differ.
func writeShell(w io.Writer, indent, do string, by []analyze.ForVersion, s Style) {
	if len(by) == 0 {
		fmt.Fprintf(w, "%s%s\n", indent, s.paint(clean(do), green))
	}
	for _, x := range by {
		fmt.Fprintf(w, "%s%s: %s\n", indent, x.Versions, s.paint(clean(x.Do), green))
	}
}

func writeNotes(w io.Writer, notes []string, s Style) {
	if len(notes) > 0 {
		fmt.Fprintln(w)
	}
	for _, n := range notes {
		writeWrapped(w, "      ", "note: "+clean(n), s)
	}
}

// writeWrapped breaks a line at the style's width, with later lines indented.
func writeWrapped(w io.Writer, indent, line string, s Style) {
	if s.Width < 40 {
		fmt.Fprintln(w, line)
		return
	}
	at, blanks := 0, "" // which are written with the word behind them: at the end of a full line they would begin another one
	for _, word := range strings.SplitAfter(line, " ") {
		text := strings.TrimRight(word, " ")
		n := len([]rune(text))
		if n > 0 && at > 0 && at+len(blanks)+n > s.Width {
			fmt.Fprint(w, "\n", indent)
			at, blanks = len(indent), ""
		}
		if n > 0 {
			fmt.Fprint(w, blanks, text)
			at, blanks = at+len(blanks)+n, ""
		}
		blanks += word[len(text):]
	}
	fmt.Fprintln(w)
}

// clean keeps control characters of a trace's text from steering the terminal.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r < 0x20 || r >= 0x7f && r < 0xa0 {
			return '\uFFFD'
		}
		return r
	}, s)
}

// number writes an integer with commas between thousands.
func number[T int | int64](n T) string {
	s := strconv.FormatInt(int64(n), 10)
	sign := ""
	if s[0] == '-' {
		sign, s = "-", s[1:]
	}
	var b strings.Builder
	for i, c := range s {
		if i > 0 && (len(s)-i)%3 == 0 {
			b.WriteByte(',')
		}
		b.WriteRune(c)
	}
	return sign + b.String()
}

func plural[T int | int64](n T, what string) string {
	if n != 1 {
		what += "s"
	}
	return number(n) + " " + what
}

func ratio(n, of uint64) string {
	if of == 0 {
		return "-"
	}
	return fmt.Sprintf("%.3f", float64(n)/float64(of))
}

func share(n, of uint64) string {
	if of == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f %%", 100*float64(n)/float64(of))
}

// microseconds writes a time as people read it.
func microseconds(us float64) string {
	d := time.Duration(us * float64(time.Microsecond))
	switch {
	case d < time.Millisecond:
		return fmt.Sprintf("%.0f us", us)
	case d < time.Second:
		return fmt.Sprintf("%.2f ms", us/1e3)
	case d < time.Minute:
		return fmt.Sprintf("%.2f s", us/1e6)
	}
	return d.Round(time.Second).String()
}
