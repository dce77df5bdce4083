package main

import (
	"fmt"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/cistern-gpu/cistern/internal/top"
)

// What the live view of `cistern top` looks like. Every frame has at most as many lines as the terminal and none of them
// is wider.

// liveGPUs are the columns of GPUs.
var liveGPUs = []column{
	{name: "GPU", width: 4},
	{name: "NAME", width: 8, most: 24, left: true, first: true, drop: 5},
	{name: "MEMORY", width: 16, most: 60, left: true, drop: 6},
	{name: "USED", width: 5},
	{name: "TOTAL", width: 5},
	{name: "FREE", width: 5, drop: 1},
	{name: "UTIL", width: 4, drop: 4},
	{name: "RESERVED", width: 8, drop: 3},
	{name: "ALLOC", width: 5, drop: 7},
	{name: "TREND", width: 10, most: 40, left: true, drop: 8},
}

// liveProcesses are the columns of processes.
var liveProcesses = []column{
	{name: "PID", width: 5},
	{name: "PROGRAM", width: 10, most: 60, left: true},
	{name: "KIND", width: 7, left: true, drop: 3},
	{name: "GPU", width: 3, drop: 2},
	{name: "USED", width: 5, drop: 1},
	{name: "OTHER", width: 5, drop: 9},
	{name: "RESERVED", width: 8},
	{name: "ALLOC", width: 5, drop: 1},
	{name: "CACHED", width: 6, drop: 7},
	{name: "PAUSED", width: 6, drop: 8},
	{name: "PEAK", width: 5, drop: 4},
	{name: "LIMIT", width: 5, drop: 8},
	{name: "CALL/S", width: 6, drop: 2},
	{name: "OOM", width: 3, drop: 6},
	{name: "TREND", width: 6, most: 40, left: true, drop: 5},
}

// sortColumn is the column that an order is seen in.
var sortColumn = map[top.Key]string{"reserved": "RESERVED", "allocated": "ALLOC", "cached": "CACHED", "peak": "PEAK", "used": "USED",
	"rate": "CALL/S", "ooms": "OOM", "pid": "PID", "name": "PROGRAM"}

// The time that curves show: of a process in its line, of a process alone.
const (
	trendSpan  = 2 * time.Minute
	detailSpan = 5 * time.Minute
)

// View draws a frame.
func (v *topView) View() tea.View {
	view := tea.NewView(v.frame())
	view.AltScreen = true
	view.WindowTitle = "cistern top"
	return view
}

func (v *topView) frame() string {
	var lines []string
	switch v.mode {
	case modeDetails:
		lines = v.drawDetails()
	case modeHelp:
		lines = v.drawHelp()
	default:
		lines = v.drawList()
	}
	lines = lines[:min(len(lines), max(0, v.height))]
	for i := range lines {
		lines[i] = fitLine(lines[i], v.width)
	}
	all := strings.Join(lines, "\n")
	if v.ascii {
		all = toASCII(all)
	}
	return all
}

// screen is how many lines each part of the list gets.
type screen struct {
	gpus     int  // devices
	gpuHead  bool // the names of their columns
	gap      bool
	rows     int
	notes    []string
	help     bool
	moreGPUs int // that have no room
}

// screen shares out the lines: the header and one process come first, then the help, GPUs and notes; GPUs take half of
// what there is at most.
func (v *topView) screen() screen {
	left := v.height - 2 // the header, the processes' columns
	var s screen
	take := func(n int) bool {
		if left-n < 1 { // a process
			return false
		}
		left -= n
		return true
	}
	s.help = v.typing || take(1)
	if v.typing {
		left--
	}
	for i, n := range v.notes() {
		if i < mostNotes && take(1) {
			s.notes = append(s.notes, n)
		}
	}
	if n := len(v.table.GPUs); n > 0 {
		s.gpuHead = left > 5 && take(1)
		for s.gpus < n && s.gpus < max(1, v.height/2-2) && take(1) {
			s.gpus++
		}
		s.moreGPUs = n - s.gpus
		if s.moreGPUs > 0 && s.gpus > 1 { // a line says so
			s.gpus--
			s.moreGPUs++
		}
		s.gap = left > 4 && take(1)
	}
	s.rows = max(0, left)
	return s
}

// mostNotes is how many of them there is room for: --once prints all.
const mostNotes = 3

// listRows is how many processes are seen at once.
func (v *topView) listRows() int { return v.screen().rows }

// notes are the lines below the table, the most urgent first.
func (v *topView) notes() []string {
	var notes []string
	if s := v.slow(); s != "" {
		notes = append(notes, s)
	}
	if s := nodeNote(v.state.Look().Node); s != "" {
		notes = append(notes, s)
	}
	return append(notes, notesOf(v.state.Look())...)
}

// slow says that a look takes long.
func (v *topView) slow() string {
	if v.looking.IsZero() {
		return ""
	}
	if d := v.now().Sub(v.looking); d > max(3*time.Second, 2*v.interval) {
		return "looking takes long: " + age(d) + " so far"
	}
	return ""
}

func (v *topView) drawList() []string {
	s := v.screen()
	lines := []string{v.header()}
	if s.gpus > 0 {
		g := fit(liveGPUs, v.width, func(name string) int {
			if name == "NAME" {
				return widest(len(v.table.GPUs), func(i int) string { return shortName(&v.table.GPUs[i]) })(name)
			}
			return v.width
		})
		table := g.table(headStyle, s.gpus, func(i int, name string) cell { return v.gpuCell(&g, &v.table.GPUs[i], name) }, false)
		lines = append(lines, table[1-btoi(s.gpuHead):]...)
		if s.moreGPUs > 0 && s.gpus > 1 {
			lines = append(lines, dimStyle.Render(fmt.Sprintf("     and %d more: g steps through them, 0 to 9 choose", s.moreGPUs)))
		}
		if s.gap {
			lines = append(lines, "")
		}
	}
	lines = append(lines, v.drawRows(s.rows)...)
	for len(lines) < v.height-len(s.notes)-btoi(s.help) {
		lines = append(lines, "")
	}
	for _, n := range s.notes {
		lines = append(lines, warnStyle.Render(n))
	}
	if s.help {
		lines = append(lines, v.footer())
	}
	return lines
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// header says what is looked at, leaving out what has no room.
func (v *topView) header() string {
	counts := make(map[string]int)
	for _, r := range v.table.Rows {
		counts[r.Kind]++
	}
	parts := []string{boldStyle.Render("cistern top")}
	if at := v.state.At(); at.IsZero() {
		parts = append(parts, "looking")
	} else {
		parts = append(parts, at.Format("15:04:05"))
	}
	if v.paused {
		parts = append(parts, warnStyle.Render("PAUSED"))
	}
	if v.choice.GPU >= 0 {
		parts = append(parts, warnStyle.Render(fmt.Sprintf("GPU %d only", v.choice.GPU)))
	}
	if v.choice.Text != "" {
		parts = append(parts, warnStyle.Render("filter "+oneLine(v.choice.Text)))
	}
	of := plural(v.table.All, "process", "processes")
	if n := len(v.table.Rows); n != v.table.All {
		of = fmt.Sprintf("%d of %s", n, of)
	}
	parts = append(parts, of)
	var kinds []string
	for _, k := range []string{top.Cistern, top.Traced, top.Untraced} {
		if counts[k] > 0 {
			kinds = append(kinds, fmt.Sprintf("%d %s", counts[k], k))
		}
	}
	if len(kinds) > 1 {
		parts[len(parts)-1] += ": " + strings.Join(kinds, ", ")
	}
	order := "by " + string(v.choice.Sort)
	if v.choice.Reversed {
		order += ", reversed"
	}
	parts = append(parts, order)
	line := parts[0]
	for _, p := range parts[1:] {
		if ansi.StringWidth(line)+2+ansi.StringWidth(p) <= v.width {
			line += "  " + p
		}
	}
	return line
}

// shortName leaves out whose GPU it is: there is only one maker.
func shortName(g *top.GPU) string { return strings.TrimPrefix(gpuName(g), "NVIDIA ") }

// gpuCell is what a column says of a GPU here.
func (v *topView) gpuCell(g *grid, u *top.GPU, name string) cell {
	c := gpuCell(u, name)
	switch name {
	case "NAME":
		c.text = shortName(u)
	case "MEMORY":
		c = cell{gpuBar(g.at(name), u), plainStyle}
	case "TREND":
		c = cell{area(u.Trend.Columns(top.Held, g.at(name), trendSpan, v.state.At()), 1, float64(u.Total))[0], otherStyle}
	}
	if v.choice.GPU >= 0 && u.Index != v.choice.GPU {
		c = cell{ansi.Strip(c.text), dimStyle}
	}
	return c
}

// drawRows are the processes and their columns.
func (v *topView) drawRows(rows int) []string {
	widestPID := 5
	for i := range v.table.Rows {
		widestPID = max(widestPID, len(fmt.Sprint(v.table.Rows[i].PID)))
	}
	columns := make([]column, 0, len(liveProcesses))
	for _, c := range liveProcesses {
		switch {
		case c.name == "PID":
			c.width = widestPID
		case c.name == "GPU" && len(v.table.GPUs) < 2:
			continue
		case c.name == "GPU": // at 80 columns there is room for no more
			c.width = min(v.widestGPUs(c.width), c.width+max(0, v.width-80))
		case c.name == "LIMIT" && !v.any(func(m *top.Memory) bool { return m.Limit > 0 }):
			continue
		case c.name == "PAUSED" && !v.any(func(m *top.Memory) bool { return m.Paused > 0 }):
			continue
		}
		columns = append(columns, c)
	}
	g := fit(columns, v.width, func(name string) int {
		if name == "TREND" {
			return v.width
		}
		return widest(len(v.table.Rows), func(i int) string { return v.table.Rows[i].Title })(name)
	})
	lines := []string{g.line(func(name string) cell {
		style := headStyle
		if name == sortColumn[v.choice.Sort] {
			style = sortedStyle
		}
		if name == "TREND" {
			name = v.trendName(g.at(name))
		}
		return cell{name, style}
	}, false)}
	if len(v.table.Rows) == 0 {
		text := emptyText(&v.table)
		if v.state.At().IsZero() {
			text = ""
		}
		return append(lines, text)
	}
	for i := v.first; i < min(v.first+rows, len(v.table.Rows)); i++ {
		lines = append(lines, v.rowLine(&g, &v.table.Rows[i], i == v.cursor))
	}
	return lines
}

// widestGPUs is how wide the names of the GPUs are on which processes hold memory, and at least so wide.
func (v *topView) widestGPUs(least int) int {
	for i := range v.table.Rows {
		least = max(least, len(rowGPUs(&v.table, &v.table.Rows[i])))
	}
	return least
}

func (v *topView) any(of func(*top.Memory) bool) bool {
	for i := range v.table.Rows {
		if of(&v.table.Rows[i].Sum) {
			return true
		}
	}
	return false
}

// trendName says which number a curve shows, and of how long, as far as there is room.
func (v *topView) trendName(width int) string {
	name, short := "RESERVED", "TREND"
	if v.series == top.Allocated {
		name, short = "ALLOC", "ALLOC"
	}
	for _, s := range []string{name + ", " + spanText(width, trendSpan), short + " " + spanText(width, trendSpan)} {
		if len(s) <= width {
			return s
		}
	}
	return short
}

// spanText is the time that a curve of so many columns shows.
func spanText(width int, span time.Duration) string {
	return fmt.Sprintf("%.2g min", (top.Width(width, span) * time.Duration(width)).Minutes())
}

func (v *topView) rowLine(g *grid, r *top.Row, selected bool) string {
	line := g.line(func(name string) cell {
		c := rowCell(&v.table, r, name)
		switch name {
		case "PROGRAM":
			c.text = r.Title
		case "TREND":
			c = cell{curve(r.Trend.Columns(v.series, g.at(name), trendSpan, v.state.At())), rowCell(&v.table, r, "KIND").style}
			if r.Stale {
				c = cell{age(r.Age) + " old", warnStyle}
			}
		}
		if r.Stale && name != "TREND" && name != "CALL/S" || r.Kind == top.Untraced {
			c.style = dimStyle
		}
		return c
	}, selected)
	if selected {
		return selectedStyle.Render(line + strings.Repeat(" ", max(0, v.width-ansi.StringWidth(line))))
	}
	return line
}

// footer is the line of keys, or what is typed.
func (v *topView) footer() string {
	if v.typing {
		return "filter: " + v.choice.Text + selectedStyle.Render(" ") + dimStyle.Render("  enter keeps it, esc drops it")
	}
	return keyLine(v.width, "q quit", "↑↓ choose", "enter details", "s sort", "/ filter", "g GPU", "space pause", "? help", "r reverse",
		"t trend")
}

// keyLine writes as many keys as there is room for.
func keyLine(width int, keys ...string) string {
	var b strings.Builder
	n := 0
	for _, k := range keys {
		w := ansi.StringWidth(k) + 2*btoi(n > 0)
		if n+w > width {
			break
		}
		if n > 0 {
			b.WriteString("  ")
		}
		n += w
		key, what, _ := strings.Cut(k, " ")
		b.WriteString(boldStyle.Render(key) + " " + dimStyle.Render(what))
	}
	return b.String()
}

// helpText is what ? shows.
var helpText = []string{
	"GPU memory by process. K, M, G are KiB, MiB, GiB.",
	"",
	"USED      what the driver says: of a GPU by all, of a process by all in it",
	"RESERVED  what Cistern, or a traced program, obtained from the driver",
	"ALLOC     of that, what the program asked for;  CACHED  what is free for reuse",
	"PEAK      the most that was reserved;  LIMIT  what may be",
	"OTHER     used less reserved: the context and its code, other allocators",
	"PAUSED    allocated, without physical memory until it is resumed",
	"CALL/S    driver calls a second;  stale  the process says nothing any more",
	"OOM       requests that failed because memory ran out",
	"",
	fillAllocated + " allocated  " + fillCached + " cached  " + fillTraced + " traced  " + fillOther + " all others  " + fillFree + " free",
	"",
	"up down pgup pgdown home end  choose a process;  enter  its details",
	"s S  next, last order;  r  reverse it;  or at once:  R reserved  A allocated",
	"     C cached  P peak  U used  D driver calls  O out-of-memories  I PID  N name",
	"/    show what has a text in its name, arguments, kind or PID",
	"0-9 g  one GPU only, the next one;  esc  all of everything again",
	"t    trend of what is allocated, or reserved;  space  pause",
	"q ctrl-c  quit;  ctrl-z  suspend",
}

func (v *topView) drawHelp() []string {
	lines := append([]string{}, helpText...)
	for len(lines) < v.height-1 {
		lines = append(lines, "")
	}
	return append(lines[:max(0, min(len(lines), v.height-1))], dimStyle.Render("any key goes back"))
}
