package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/charmbracelet/x/ansi"

	"github.com/cistern-gpu/cistern/internal/top"
)

// One process of `cistern top`: its devices, its trend, and its allocations.

// detailDevices are the columns of a process's devices.
var detailDevices = []column{
	{name: "GPU", width: 4},
	{name: "NAME", width: 8, most: 30, left: true, drop: 12},
	{name: "USED", width: 5, drop: 2},
	{name: "OTHER", width: 5, drop: 6},
	{name: "RESERVED", width: 8},
	{name: "ALLOC", width: 5, drop: 1},
	{name: "ACTIVE", width: 6, drop: 8},
	{name: "CACHED", width: 6, drop: 3},
	{name: "PAUSED", width: 6, drop: 7},
	{name: "PEAK", width: 5, drop: 2},
	{name: "PEAK-ALLOC", width: 10, drop: 11},
	{name: "LIMIT", width: 5, drop: 4},
	{name: "CALLS", width: 5, drop: 9},
	{name: "CALL/S", width: 6, drop: 4},
	{name: "RETRIES", width: 7, drop: 10},
	{name: "OOM", width: 4, drop: 5},
	{name: "P99", width: 5, drop: 13},
	{name: "P99.9", width: 5, drop: 14},
	{name: "LONGEST", width: 7, drop: 10},
}

// detailUses are the columns of allocations.
var detailUses = []column{
	{name: "BYTES", width: 5},
	{name: "SHARE", width: 5, drop: 1},
	{name: "BLOCKS", width: 6, drop: 2},
	{name: "PART", width: 8, most: 20, left: true, drop: 3},
	{name: "NAME", width: 8, most: 1000, left: true},
}

// graphHeight is how many lines the trend gets: more where the terminal is high.
func (v *topView) graphHeight() int {
	switch {
	case v.height >= 40:
		return 6
	case v.height >= 20:
		return 3
	}
	return 0
}

// detailHead are the lines above the list.
func (v *topView) detailHead() []string {
	d := &v.shown
	r := &d.row
	state := r.Kind
	switch {
	case d.ended:
		state += ", ended"
	case r.Stale:
		state += ", silent for " + age(r.Age)
	}
	if v.paused {
		state += ", PAUSED"
	}
	if r.Dropped > 0 {
		state += fmt.Sprintf(", %d events of the trace dropped", r.Dropped)
	}
	if r.Version != "" {
		state += ", version " + oneLine(r.Version)
	}
	lines := []string{boldStyle.Render(fmt.Sprint(r.PID)) + " " + r.Title, dimStyle.Render(state)}
	if r.Conf != "" && v.height >= 12 {
		lines = append(lines, dimStyle.Render("settings "+oneLine(r.Conf)))
	}
	lines = append(lines, v.drawDevices()...)
	if n := v.graphHeight(); n > 0 {
		lines = append(lines, v.drawGraph(n)...)
	}
	return lines
}

// mostDevices is how many devices are listed before the lists of holders, of which something has to be seen.
func (v *topView) mostDevices() int { return max(1, v.height/4) }

func (v *topView) drawDevices() []string {
	r := &v.shown.row
	gpus := v.table.GPUs
	label := func(h *top.Holding) *top.GPU {
		if h.GPU < len(gpus) {
			return &gpus[h.GPU]
		}
		return new(top.GPU)
	}
	g := fit(detailDevices, v.width, widest(len(r.Holdings), func(i int) string { return label(&r.Holdings[i]).Name }))
	n, more := len(r.Holdings), 0 // seen, not seen
	if most := v.mostDevices(); n > most {
		n, more = most-1, n-most+1
	}
	lines := g.table(headStyle, n, func(i int, name string) cell {
		h := &r.Holdings[i]
		switch name {
		case "GPU":
			return cell{gpuLabel(label(h)), boldStyle}
		case "NAME":
			return cell{label(h).Name, plainStyle}
		}
		return memoryCell(&h.Memory, r.Stale, name)
	}, false)
	if more > 0 {
		lines = append(lines, g.line(func(name string) cell {
			if name == "GPU" {
				return cell{fmt.Sprintf("+%d", more), dimStyle}
			}
			return cell{}
		}, false))
	}
	if len(r.Holdings) > 1 {
		lines = append(lines, g.line(func(name string) cell {
			switch name {
			case "GPU":
				return cell{"all", boldStyle}
			case "NAME":
				return cell{}
			}
			return memoryCell(&r.Sum, r.Stale, name)
		}, false))
	}
	return lines
}

// drawGraph is the trend over the width of the terminal.
func (v *topView) drawGraph(height int) []string {
	r := &v.shown.row
	width := max(1, min(v.width, 150)-7)
	values := r.Trend.Columns(v.series, width, detailSpan, v.state.At())
	most := max(0, slices.Max(values))
	name := "reserved"
	switch {
	case v.series == top.Allocated:
		name = "allocated"
	case !r.Sum.Page:
		name = "used"
	}
	lines := []string{"", dimStyle.Render(name + " over the last " + spanText(width, detailSpan))}
	for i, l := range area(values, height, most) {
		label := ""
		switch i {
		case 0:
			label = amount(uint64(most))
		case height - 1:
			label = "0"
		}
		lines = append(lines, dimStyle.Render(pad(label, 5, false))+"  "+allocatedStyle.Render(strings.TrimRight(l, " ")))
	}
	return lines
}

// detailRows is how many lines the list of holders has.
func (v *topView) detailRows() int {
	return max(1, v.height-len(v.detailHead())-4) // a line of air, the lists, their columns, the keys
}

func (v *topView) drawDetails() []string {
	d := &v.shown
	lines := v.detailHead()
	if v.height-len(lines) > 5 {
		lines = append(lines, "")
	}
	if !d.row.Sum.Page {
		lines = append(lines, "Only the driver's number is known: the process neither uses Cistern nor is traced.")
	} else {
		lines = append(lines, v.sections())
		lines = append(lines, v.drawUses(max(1, v.height-len(lines)-2))...)
	}
	for len(lines) < v.height-1 {
		lines = append(lines, "")
	}
	lines = lines[:max(0, min(len(lines), v.height-1))]
	return append(lines, keyLine(v.width, "esc back", "tab list", "↑↓ choose", "enter open", "t trend", "space pause", "q quit"))
}

// sections names the lists, and how long they are.
func (v *topView) sections() string {
	d := &v.shown
	var parts []string
	for _, i := range d.sections() {
		s := detailSections[i]
		text := s.name
		if d.held != nil {
			text += fmt.Sprintf(" %d", len(s.of(d.held)))
		}
		if i == d.section {
			parts = append(parts, sortedStyle.Render(text))
		} else {
			parts = append(parts, dimStyle.Render(text))
		}
	}
	return strings.Join(parts, "   ")
}

// sections are the lists that a process of this kind has.
func (d *details) sections() []int {
	var all []int
	for i, s := range detailSections {
		if s.only == "" || s.only == d.row.Kind {
			all = append(all, i)
		}
	}
	return all
}

func (v *topView) drawUses(rows int) []string {
	d := &v.shown
	uses := d.uses()
	switch {
	case d.held == nil && d.ended:
		return []string{"it ended before it answered"}
	case d.held == nil:
		return []string{d.waiting(v.state.At())}
	case len(uses) == 0:
		return []string{"none: " + v.whyNone()}
	}
	var sum uint64
	for _, u := range uses {
		sum += u.Bytes
	}
	g := fit(detailUses, v.width, func(name string) int {
		if name == "PART" {
			return 20
		}
		return v.width
	})
	lines := []string{g.line(func(name string) cell {
		if name == "PART" {
			name = ""
		}
		return cell{name, headStyle}
	}, false)}
	rows--
	d.clamp(rows, len(uses))
	if d.open {
		d.first = d.cursor // as much of it as there is room for
	}
	for i := d.first; i < len(uses) && len(lines) <= rows; i++ {
		u := &uses[i]
		line := g.line(func(name string) cell {
			switch name {
			case "BYTES":
				return cell{amount(u.Bytes), boldStyle}
			case "SHARE":
				return cell{fmt.Sprintf("%.0f%%", 100*float64(u.Bytes)/float64(max(1, sum))), plainStyle}
			case "BLOCKS":
				return cell{blockCount(u.Blocks), plainStyle}
			case "PART":
				return cell{bar(g.at(name), max(1, sum), part{u.Bytes, fillAllocated, allocatedStyle}), plainStyle}
			}
			return cell{useName(u.Name), plainStyle}
		}, i == d.cursor)
		if i == d.cursor {
			line = selectedStyle.Render(ansi.Strip(line))
		}
		lines = append(lines, line)
		if i == d.cursor && d.open {
			for _, frame := range frames(u.Name, v.width) {
				if len(lines) > rows {
					break
				}
				lines = append(lines, frame)
			}
		}
	}
	return lines
}

// frames are a stack's, a line each, the innermost first, without their folders where they do not fit; or a long name on
// as many lines as it needs.
func frames(name string, width int) []string {
	const indent = "      "
	all := strings.Split(name, "\n")
	if len(all) == 1 {
		return wrapText(indent+oneLine(name), max(8, width))
	}
	var lines []string
	for _, f := range all {
		f = oneLine(f)
		if function, file, ok := strings.Cut(f, " /"); ok && len(indent)+ansi.StringWidth(f) > width {
			f = function + " " + file[strings.LastIndexByte(file, '/')+1:]
		}
		if f != "" {
			lines = append(lines, indent+f)
		}
	}
	return lines
}

// detailsTimeout is how long a process may take to send its details.
const detailsTimeout = 3 * time.Second

// waiting says what has been heard so far of the details.
func (d *details) waiting(now time.Time) string {
	if now.Sub(d.since) < detailsTimeout {
		return "asking"
	}
	if d.row.Stale {
		return "it does not answer: it says nothing any more"
	}
	return "it does not answer: a process of this kind may have no details"
}

// whyNone says why a list is empty.
func (v *topView) whyNone() string {
	switch detailSections[v.shown.section].name {
	case "tags":
		return "no allocation has a tag"
	case "libraries":
		return "no allocation names a library"
	case "stacks":
		return "stacks are not recorded (setting stacks, or trace --stacks)"
	}
	return "nothing is allocated"
}
