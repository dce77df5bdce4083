package report

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"charm.land/lipgloss/v2"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/recording"
)

// What `cistern report` writes of requests that failed: the answer first, then the allocations, then what would
// have fitted, then the rest. It fits 80 columns, and says nothing by colour alone.

// failureWidth is what the report wraps at.
const failureWidth = 80

// Bounds of what a terminal gets; the page and --json have more.
const (
	failureHolders  = 6
	failureShares   = 9
	failureStacks   = 3 // of these the whole stack is shown
	failureFrames   = 12
	failureRemedies = 5
	failureTried    = 6
)

type failureText struct {
	w io.Writer
	s Style
	x *analyze.FailureReport
	// broken is by which remedy it was first said what breaks.
	broken map[string]int
}

// WriteFailures writes the report on the requests that failed on one device.
func WriteFailures(w io.Writer, r *analyze.TraceFailures, s Style) {
	s.Width = failureWidth
	writeTitle(w, s, r.Path, r.Device, r.Owner, r.Format, r.Environment)
	writeIdentity(w, s, r.Identity)
	for i, x := range r.Failures {
		f := failureText{w, s, x, map[string]int{}}
		if last := x.Searched || x.Unsearched != "" || i == len(r.Failures)-1; !last {
			f.short()
			continue
		}
		if r.Count > 1 {
			f.say("", fmt.Sprintf("%s failed in this run; the report is of the one at event %s.", plural(r.Count, "request"), number(x.Event)))
		}
		f.all()
	}
	f := failureText{w: w, s: s}
	if len(r.Notes) > 0 {
		fmt.Fprintln(w)
	}
	for _, n := range r.Notes {
		f.wrap("      ", "note: "+clean(n))
	}
	fmt.Fprintln(w)
}

// short tells of a failure that the run survived.
func (f *failureText) short() {
	f.say("", fmt.Sprintf("event %s: %s.%s", number(f.x.Event), clean(f.x.Sentence), f.metLater()))
}

func (f *failureText) metLater() string {
	if f.x.MetLater == nil {
		return ""
	}
	return fmt.Sprintf(" The program asked again and got it, at event %s.", number(*f.x.MetLater))
}

func (f *failureText) all() {
	fmt.Fprintln(f.w)
	what, rest, _ := strings.Cut(clean(f.x.Sentence), ": ")
	f.say("", f.s.paint(what, red)+": "+rest+"."+f.metLater())
	if answer := f.answer(); answer != "" {
		f.say("", answer)
	}
	f.holders()
	f.remedies()
	f.request()
	f.memory()
	f.stages()
	f.processes()
	f.growth()
}

// answer is what came nearest, where nothing met the request.
func (f *failureText) answer() string {
	x := f.x
	switch barely := slices.IndexFunc(x.Tried, func(m analyze.Remedy) bool { return m.Barely }); {
	case len(x.Remedies) > 0 || x.Advice != "" || !x.Searched:
	case barely >= 0:
		return fmt.Sprintf("Nothing that was tried has room for what would have followed; %s meets the request alone.", clean(x.Tried[barely].Title))
	case len(x.Floors) > 0:
		f0 := x.Floors[0]
		return units.Sprintf("Nothing that was tried meets it within %s; the smallest capacity that suffices is %s, with %s.",
			units.Size(x.Capacity), units.Size(f0.Capacity), clean(f0.Who))
	}
	return ""
}

// say writes a paragraph, with its later lines indented by two more than its first.
func (f *failureText) say(indent, text string) {
	f.wrap(indent+"  ", indent+text)
}

// wrap breaks a line between words, with later lines indented.
func (f *failureText) wrap(indent, line string) {
	text := strings.TrimLeft(line, " ")
	first := line[:len(line)-len(text)]
	var b strings.Builder
	b.WriteString(first)
	at, fresh := len(first), true
	for _, word := range strings.Split(text, " ") {
		n := lipgloss.Width(word)
		switch {
		case fresh:
		case at+1+n > f.s.Width && len(indent)+n <= f.s.Width:
			b.WriteString("\n" + indent)
			at = len(indent)
		default:
			b.WriteByte(' ')
			at++
		}
		b.WriteString(word)
		at, fresh = at+n, false
	}
	fmt.Fprintln(f.w, b.String())
}

func (f *failureText) head(text string) { fmt.Fprintf(f.w, "\n%s\n", f.s.paint(text, bold)) }

func (f *failureText) holders() {
	h := &f.x.Held
	unknown := "allocated before the history began, by unknown callers"
	if h.Blocks > 0 {
		f.head(fmt.Sprintf("allocations: %s in %s", units.FormatBytes(h.Allocated), plural(h.Blocks, "block")))
	} else { // the file was cut off before them, or never had them
		f.head("allocations: " + units.FormatBytes(h.Allocated))
		unknown = "in blocks that the file does not list"
	}
	var rest analyze.Share
	for i, x := range h.Stack {
		if x.Rest || i >= failureHolders {
			rest.Bytes, rest.Blocks = rest.Bytes+x.Bytes, rest.Blocks+x.Blocks
			continue
		}
		f.share(x.Bytes, fmt.Sprintf("%s, %s", shortName(x.Named), plural(x.Blocks, "block")))
		if i < failureStacks {
			f.frames(x.Frames, x.Name)
		}
	}
	if rest.Blocks > 0 {
		f.share(rest.Bytes, fmt.Sprintf("other stacks, %s", plural(rest.Blocks, "block")))
	}
	if h.Rounding > 0 {
		f.share(h.Rounding, "lost to rounding")
	}
	if h.Unknown > 0 {
		f.share(h.Unknown, unknown)
	}
	for _, by := range []struct {
		name string
		all  []analyze.Share
	}{{"tag", h.Tag}, {"library", h.Library}, {"pool", h.Pool}, {"stream", h.Stream}, {"thread", h.Thread}, {"size", h.Size}, {"age", h.Age}} {
		if len(by.all) < 2 && !slices.Contains([]string{"tag", "library", "size", "age"}, by.name) || len(by.all) == 0 {
			continue // all of it is of one
		}
		var parts []string
		for i, x := range by.all {
			if i == failureShares {
				parts = append(parts, fmt.Sprintf("%d more", len(by.all)-i))
				break
			}
			parts = append(parts, clean(x.Name)+" "+units.FormatBytes(x.Bytes))
		}
		f.say("  ", "by "+by.name+": "+strings.Join(parts, ", "))
	}
}

func (f *failureText) share(bytes uint64, text string) {
	line := fmt.Sprintf("%12s %7s  %s", units.FormatBytes(bytes), share(bytes, f.x.Held.Allocated), text)
	f.wrap(strings.Repeat(" ", 22), line)
}

// shortFrame is recording.ShortFrame for a terminal.
func shortFrame(frame string) string { return clean(recording.ShortFrame(frame)) }

// shortName is what a stack is called, in short frames.
func shortName(n analyze.Named) string {
	name := shortFrame(n.Name)
	if n.Through != "" {
		name += ", through " + shortFrame(n.Through)
	}
	if n.From != "" {
		name += ", from " + shortFrame(n.From)
	}
	return name
}

// frames writes a stack, but for a single frame that was just named.
func (f *failureText) frames(frames []string, named string) {
	if len(frames) == 1 && frames[0] == named {
		return
	}
	for _, x := range frames[:min(len(frames), failureFrames)] {
		f.wrap(strings.Repeat(" ", 26), strings.Repeat(" ", 24)+shortFrame(x))
	}
	if n := len(frames) - failureFrames; n > 0 {
		fmt.Fprintf(f.w, "%24s%s\n", "", f.s.paint("... "+plural(n, "frame")+" more", faint))
	}
}

func (f *failureText) remedies() {
	x := f.x
	f.head("remedies")
	if !x.Searched {
		f.say("  ", "Nothing was replayed: "+clean(x.Unsearched)+".")
		f.lessLive()
		f.relief()
		return
	}
	if x.Warning != "" {
		f.say("  ", f.s.paint("Warning", bold)+": "+clean(x.Warning)+".")
		f.lessLive()
		f.relief()
		return
	}
	included := "the request included"
	if x.More > 0 {
		included += fmt.Sprintf(" and %s more behind it (%s)", units.FormatBytes(x.More), x.MoreFrom)
	}
	checked := fmt.Sprintf("Each was checked by many replays of the recorded run, %s, within %s (%s).", included, units.FormatBytes(x.Capacity),
		clean(x.CapacityFrom))
	if x.Own != nil {
		checked += fmt.Sprintf(" The run's own settings survive %s.", x.Own.Odds)
	}
	f.say("  ", checked)
	if x.Caveat != "" {
		f.say("  ", f.s.paint("Take it with care", bold)+": "+x.Caveat+".")
	}
	for i := range x.Remedies[:min(len(x.Remedies), failureRemedies)] {
		f.remedy(i, &x.Remedies[i])
	}
	if more := len(x.Remedies) - failureRemedies; more > 0 {
		f.say("  ", fmt.Sprintf("%s more would do, with less to spare.", plural(more, "setting")))
	}
	if x.Beaten > 0 {
		f.say("  ", fmt.Sprintf("%s more did once; none was better than these, so they were tried no further.", plural(x.Beaten, "setting")))
	}
	switch {
	case len(x.Remedies) > 0:
	case len(x.Tried) == 0:
		f.say("  ", "Nothing was tried.")
	default:
		f.say("  ", "Nothing that was tried meets it.")
	}
	f.lessLive()
	f.relief()
	if x.LargestRequest > 0 && (x.ShortBy == nil || x.ShortBy.Bound != "") { // else the first line says it exactly
		f.say("  ", fmt.Sprintf("With the run's own settings a request of up to %s would have been met then.", units.FormatBytes(x.LargestRequest)))
	}
	f.floors()
	if len(x.Tried) > 0 {
		var names []string
		for i, m := range x.Tried {
			if i == failureTried {
				names = append(names, fmt.Sprintf("%d more", len(x.Tried)-i))
				break
			}
			name := clean(m.Title)
			switch {
			case m.Luck:
				name += fmt.Sprintf(" (survives %s)", m.Odds)
			case m.Barely:
				name += " (the request, but not what followed)"
			}
			names = append(names, name)
		}
		f.say("  ", "Tried, and not enough: "+strings.Join(names, "; ")+".")
	}
	for _, n := range x.NotTried {
		f.say("  ", "Not tried: "+clean(n)+".")
	}
	f.say("  ", f.s.paint(fmt.Sprintf("%s in %.1f s.", plural(x.Replays, "replay"), x.TookS), faint))
}

func (f *failureText) remedy(i int, m *analyze.Remedy) {
	f.wrap("     ", fmt.Sprintf("  %d. %s", i+1, f.s.paint(clean(m.Title), bold)))
	if m.Do != "" && m.Do != m.Title {
		writeShell(f.w, "     ", m.Do, m.DoByVersion, f.s)
	}
	text, sizes := "peak %s, %s to spare", []any{units.Size(m.Peak), units.Size(m.Headroom)}
	if m.Kind == analyze.RemedySpill && m.Peak > m.Capacity {
		text, sizes[1] = "peak %s, %s of it in the host's memory", units.Size(m.Peak-m.Capacity)
	}
	if m.Floor > 0 {
		text, sizes = text+", would do with %s", append(sizes, units.Size(m.Floor))
	}
	line := fmt.Sprintf("survives %s; ", m.Odds) + units.Sprintf(text, sizes...)
	line += fmt.Sprintf("; %s in the driver", timeRange(m.DriverLeastUS, m.DriverUS))
	if m.WaitUS > 0 {
		line += fmt.Sprintf(", %s waiting", microseconds(m.WaitUS))
	}
	if m.Retries > 0 {
		line += ", " + strings.Replace(plural(m.Retries, "retry"), "retrys", "retries", 1)
	}
	f.say("     ", line)
	if !m.Verified {
		f.say("     ", "Its model was not checked against recordings.")
	}
	var known []string // of those before it that break as much
	for _, b := range m.Breaks {
		if k, ok := f.broken[b]; ok {
			if n := fmt.Sprint(k); !slices.Contains(known, n) {
				known = append(known, n)
			}
			continue
		}
		f.broken[b] = i + 1
		f.say("     ", "- "+clean(b))
	}
	if len(known) > 0 {
		f.say("     ", "- as under "+strings.Join(known, " and "))
	}
}

func (f *failureText) lessLive() {
	x := f.x
	if x.Shortage == 0 || x.Shortage > max(x.Held.Allocated, x.Live) { // with nothing held it would have failed too
		return
	}
	text := fmt.Sprintf("Or %s less in use at this moment", units.FormatBytes(x.Shortage))
	if len(x.LessLive) > 0 {
		var names []string
		for _, h := range x.LessLive {
			names = append(names, shortName(h.Named)+" ("+units.FormatBytes(h.Bytes)+")")
		}
		what := "the largest share is "
		if len(names) > 1 {
			what = fmt.Sprintf("the %d largest shares are ", len(names))
		}
		text += ": " + what + strings.Join(names, ", ")
	}
	f.say("  ", text+".")
}

// relief is what to reduce, where no setting is known to help.
func (f *failureText) relief() {
	x := f.x
	if len(x.Remedies) > 0 {
		return
	}
	if x.StacksBy != "" {
		f.say("  ", "The recording has no stacks, which show what to reduce. To record them: "+x.StacksBy)
	}
	if len(x.Relief) == 0 || x.Relief[0].Advice == "" {
		return
	}
	f.say("  ", "Allocations, by what would reduce them:")
	for _, r := range x.Relief {
		text := r.Class
		if r.Advice != "" {
			text += ": " + r.Advice
		}
		f.share(r.Bytes, text)
	}
}

func (f *failureText) floors() {
	var names []string
	var sizes []any
	for _, x := range f.x.Floors {
		if x.Capacity > f.x.Capacity {
			names = append(names, "%s with %s")
			sizes = append(sizes, units.Size(x.Capacity), clean(x.Who))
		}
	}
	if len(names) > 0 {
		f.say("  ", units.Sprintf("The least memory with which the run survives: "+strings.Join(names, ", ")+".", sizes...))
	}
}

func (f *failureText) request() {
	x := f.x
	f.head("the request")
	line := units.FormatBytes(x.Requested)
	if units.FormatBytes(x.Need) != line {
		line += " (" + units.FormatBytes(x.Need) + " rounded)"
	}
	if x.Upstream != "" {
		line += " of " + clean(x.Upstream) + " memory"
	}
	line += fmt.Sprintf(" for %s, stream %s", clean(x.Pool), clean(x.Stream))
	if x.Event >= 0 {
		line += fmt.Sprintf(", at event %s, %s into the run", number(x.Event), microseconds(float64(x.TimeUS)))
	}
	f.say("  ", line)
	for _, p := range []struct{ name, value string }{{"tag", x.Tag}, {"library", x.Library}, {"thread", x.Thread}} {
		if p.value != "" {
			f.say("  ", p.name+": "+clean(p.value))
		}
	}
	if x.PID != 0 {
		f.say("  ", fmt.Sprintf("process %d: %s", x.PID, commandLine(x.Program)))
	}
	if x.Version != "" {
		f.say("  ", "Cistern "+clean(x.Version))
	}
	conf := clean(x.Conf)
	if conf == "" {
		conf = "the defaults"
	}
	f.say("  ", "settings: "+conf)
	if len(x.Stack) == 0 {
		f.say("  ", analyze.NoStack)
	}
	for i, s := range x.Stack {
		if i == failureFrames {
			f.say("    ", f.s.paint("... "+plural(len(x.Stack)-i, "frame")+" more", faint))
			break
		}
		f.say("    ", shortFrame(s))
	}
	if len(x.Message) > 0 {
		f.say("  ", "error message:")
		for _, line := range x.Message {
			f.say("    ", clean(line))
		}
	}
}

func (f *failureText) memory() {
	x := f.x
	f.head("memory at the failure")
	if x.DeviceName != "" {
		f.say("  ", clean(x.DeviceName+" "+x.DeviceUUID))
	}
	row := func(name string, n uint64, when bool) {
		if when {
			f.wrap(strings.Repeat(" ", 16), fmt.Sprintf("%12s  %s", units.FormatBytes(n), name))
		}
	}
	row("on the device in all", x.DeviceTotal, x.DeviceTotal > 0)
	row("free on the device", x.DeviceFree, x.DeviceFree > 0 || x.DeviceTotal > 0)
	row(clean("available: "+x.CapacityFrom), x.Capacity, x.Capacity > 0)
	row("reserved", x.Reserved, x.Reserved > 0)
	row("of it live", x.Live, true)
	row("of that given back, still used by other streams", x.Held.Pending, x.Held.Pending > 0)
	row("paused: kept without memory", x.Paused, x.Paused > 0)
	pieces := ""
	if x.Pieces > 0 {
		pieces = fmt.Sprintf(" in %s, the largest %s", plural(x.Pieces, "piece"), units.FormatBytes(x.LargestFree))
	}
	row("free inside"+pieces, x.FreeInside, x.Reserved > 0)
	row("of it pinned by captured graphs", x.Pinned, x.Pinned > 0)
	for _, line := range x.Why {
		f.say("  ", clean(line))
	}
	for _, l := range x.Limits {
		from := ""
		if l.From != "" {
			from = ", " + clean(l.From)
		}
		f.say("  ", fmt.Sprintf("limit in force: %s (%s%s)", units.FormatBytes(l.Bytes), clean(l.Kind), from))
	}
}

func (f *failureText) stages() {
	if len(f.x.Steps) == 0 {
		return
	}
	f.head("reclaim stages before the failure")
	for _, s := range f.x.Steps {
		line := fmt.Sprintf("%-9s", clean(s.Stage))
		switch {
		case s.Tries == 0:
			line += "passed over"
		case s.Gained == 0:
			line += "got nothing"
		default:
			line += "got " + units.FormatBytes(s.Gained)
		}
		if s.Tries > 1 {
			line += fmt.Sprintf(" in %d tries", s.Tries)
		}
		if s.TookUS > 0 {
			line += ", " + microseconds(float64(s.TookUS))
		}
		if s.Note != "" {
			line += ": " + clean(s.Note)
		}
		f.say("  ", line)
	}
}

func (f *failureText) processes() {
	x := f.x
	if len(x.Processes) == 0 && x.ProcessesUnknown == "" {
		return
	}
	f.head("processes on the device")
	if x.ProcessesUnknown != "" {
		f.say("  ", "unknown: "+clean(x.ProcessesUnknown))
	}
	for _, p := range x.Processes {
		bytes := units.FormatBytes(p.Bytes)
		if p.Bytes == 0 {
			bytes = "unknown"
		}
		line := fmt.Sprintf("%12s  %d %s", bytes, p.PID, clean(p.Name))
		if p.Self {
			line += " (this one)"
		}
		f.wrap(strings.Repeat(" ", 16), line)
	}
}

func (f *failureText) growth() {
	g := &f.x.Growth
	if !g.Known {
		return
	}
	f.head(fmt.Sprintf("growth over the last %s", microseconds(float64(g.DurationUS))))
	if len(g.Steady) == 0 {
		f.say("  ", units.Sprintf("Nothing that grew steadily: live memory rose and fell %s, at its least from %s to %s.", times(g.Repeats),
			units.Size(g.Before), units.Size(g.After)))
		return
	}
	f.say("  ", units.Sprintf("Live memory rose and fell %s. At its least it went from %s to %s. These never fell, and may be leaks:",
		times(g.Repeats), units.Size(g.Before), units.Size(g.After)))
	for _, x := range g.Steady[:min(len(g.Steady), failureHolders)] {
		line := fmt.Sprintf("%12s more  %s: %s, now in %s", units.FormatBytes(x.After-x.Before), shortName(x.Named), units.FormatBytes(x.After),
			plural(x.Blocks, "block"))
		f.wrap(strings.Repeat(" ", 19), line)
	}
}

func times(n int) string {
	if n == 1 {
		return "once"
	}
	return number(n) + " times"
}
