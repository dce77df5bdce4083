package report

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"charm.land/lipgloss/v2"
	"charm.land/lipgloss/v2/table"
	"github.com/charmbracelet/x/ansi"
)

// grid is a table: the first column is text and so are those from textFrom on; the rest are numbers, set to the right.
type grid struct {
	head        []string
	rows        [][]string
	textFrom    int
	numberFirst bool // the first column is one too
	left        int  // rows that were not added, beyond mostRows

	optional []string // heads of columns that a narrow terminal leaves out, the first first
}

// mostRows and mostText bound what a table shows of what a file may have any number of. Drawing costs 35 µs for a row, and
// breaking a text grows with the square of its length.
const (
	mostRows = 1000
	mostText = 2000 // bytes of a cell
)

func (g *grid) add(cells ...string) {
	if len(g.rows) >= mostRows {
		g.left++
		return
	}
	for i, c := range cells {
		if len(c) > mostText {
			cells[i] = strings.ToValidUTF8(c[:mostText], "") + "…"
		}
	}
	g.rows = append(g.rows, cells)
}

// longestRule is of how many characters the line below a table's head is at most, where no terminal bounds it.
const longestRule = 160

// columnGap is what lies between two columns.
const columnGap = 2

// widths are those of the columns.
func (g *grid) widths() []int {
	all := make([]int, len(g.head))
	for _, row := range append([][]string{g.head}, g.rows...) {
		for i, cell := range row {
			all[i] = max(all[i], lipgloss.Width(cell))
		}
	}
	return all
}

func (g *grid) width() int {
	sum := columnGap * (len(g.head) - 1)
	for _, n := range g.widths() {
		sum += n
	}
	return sum
}

// drop leaves the column with this head out.
func (g *grid) drop(head string) {
	column := slices.Index(g.head, head)
	g.head = slices.Delete(slices.Clone(g.head), column, column+1)
	for i, row := range g.rows {
		g.rows[i] = slices.Delete(row, column, column+1)
	}
	if column < g.textFrom {
		g.textFrom--
	}
}

// cut leaves the last column out.
func (g *grid) cut() {
	last := len(g.head) - 1
	g.head = g.head[:last]
	for i, row := range g.rows {
		g.rows[i] = row[:last]
	}
}

// betweenSettings reports whether a name may be broken before its byte i as in torch:key:word,key:2: behind a comma, and behind
// a colon before a word, but for those of C++.
func betweenSettings(name string, i int) bool {
	word := name[i] >= 'A' && name[i] <= 'Z' || name[i] >= 'a' && name[i] <= 'z'
	return name[i-1] == ',' || name[i-1] == ':' && word && (i < 2 || name[i-2] != ':')
}

// leastLast is the fewest columns of a terminal that the last column of a table gets.
const leastLast = 24

// wrapLast breaks the text of the last column so that the table is no wider than a terminal.
func (g *grid) wrapLast(width int) {
	last := len(g.head) - 1
	left := width
	for _, n := range g.widths()[:last] {
		left -= n + columnGap
	}
	for _, row := range g.rows {
		row[last] = strings.Join(breakName(row[last], max(left, leastLast)), "\n")
	}
}

// breakName breaks a name into lines: behind spaces and between settings, before "::" and "/", and where there are none
// anywhere.
func breakName(name string, width int) []string {
	var lines []string
	for lipgloss.Width(name) > width {
		at, n := 0, 0
		for i, r := range name {
			if n > 0 && (strings.HasPrefix(name[i:], "::") || r == '/') || i > 0 && (name[i-1] == ' ' || betweenSettings(name, i)) {
				at = i
			}
			if n += lipgloss.Width(string(r)); n > width {
				if r == ' ' {
					at = i // a space at the end of a line is not seen
				}
				if at == 0 {
					at = max(i, 1)
				}
				break
			}
		}
		lines = append(lines, strings.TrimRight(name[:at], " "))
		name = strings.TrimLeft(name[at:], " ")
	}
	return append(lines, name)
}

// fitted is the table with so many columns left out that it is no wider than a terminal, and their heads. Where that does
// not do, the last column or the first is broken into lines, if it is text and enough is left for it. It is nil where
// nothing does.
func (g *grid) fitted(width int) (fits *grid, left []string) {
	if g.width() <= width {
		return g, nil
	}
	fits = &grid{head: slices.Clone(g.head), textFrom: g.textFrom, numberFirst: g.numberFirst}
	for _, row := range g.rows {
		fits.rows = append(fits.rows, slices.Clone(row))
	}
	for _, head := range g.optional {
		fits.drop(head)
		left = append(left, head)
		if fits.width() <= width {
			return fits, left
		}
	}
	last := len(fits.head) - 1
	if widths := fits.widths(); fits.textFrom > 0 && last >= fits.textFrom && fits.width()-widths[last]+leastLast <= width {
		fits.wrapLast(width)
		return fits, left
	}
	if first := width - fits.width() + fits.widths()[0]; !fits.numberFirst && first >= leastLast {
		for _, row := range fits.rows {
			row[0] = strings.Join(breakName(row[0], first), "\n")
		}
		return fits, left
	}
	return nil, nil
}

// write writes the table. For a terminal that is too narrow it has fewer columns; if these are too wide too, the first cell of
// each row is on a line of its own; and if that does not do, all cells of a row are below each other.
func (g *grid) write(w io.Writer, s Style) {
	if s.Width == 0 {
		g.draw(w, s)
	} else if fits, left := g.fitted(s.Width); fits != nil {
		fits.draw(w, s)
		writeLeftOut(w, left, s)
	} else if !g.titled(w, s) {
		g.stack(w, s)
	}
	if g.left > 0 {
		fmt.Fprintf(w, "%s more\n", plural(g.left, "row"))
	}
}

func writeLeftOut(w io.Writer, heads []string, s Style) {
	if len(heads) > 0 {
		writeWrapped(w, "  ", s.paint("not shown, for lack of columns: "+strings.Join(heads, ", "), faint), s)
	}
}

// titleIndent is what lies before the cells below a title.
const titleIndent = 2

// titled writes the table without its first column, and above each row the first cell as its title. It reports false, and has
// written nothing, where the other columns do not fit either, or the first is no text.
func (g *grid) titled(w io.Writer, s Style) bool {
	if g.numberFirst {
		return false
	}
	body := &grid{head: g.head[1:], textFrom: max(g.textFrom-1, 0), numberFirst: true, optional: g.optional}
	for _, row := range g.rows {
		body.rows = append(body.rows, row[1:])
	}
	body, left := body.fitted(s.Width - titleIndent)
	if body == nil {
		return false
	}
	var text strings.Builder
	inner := s
	inner.Width -= titleIndent
	body.draw(&text, inner)
	lines := slices.Collect(strings.Lines(text.String()))
	const headLines = 2 // the heads and the rule
	indent := strings.Repeat(" ", titleIndent)
	fmt.Fprint(w, indent, lines[0], indent, lines[1])
	lines = lines[headLines:]
	for i, row := range body.rows {
		height := 1
		for _, cell := range row {
			height = max(height, 1+strings.Count(cell, "\n"))
		}
		if title := g.rows[i][0]; title != "" {
			for k, line := range breakName(title, max(s.Width-titleIndent, leastLast)) {
				fmt.Fprintln(w, strings.Repeat(" ", titleIndent*min(k, 1))+s.paint(line, bold))
			}
		}
		for _, line := range lines[:height] {
			fmt.Fprint(w, strings.TrimRight(indent+line, " \n"), "\n")
		}
		lines = lines[height:]
	}
	writeLeftOut(w, left, s)
	return true
}

// stack writes each row as lines of its own: its first cell, and below it the others with the heads of their columns.
func (g *grid) stack(w io.Writer, s Style) {
	label := 0
	for _, head := range g.head[1:] {
		label = max(label, lipgloss.Width(head))
	}
	for _, row := range g.rows {
		if strings.Join(row, "") == "" {
			continue // between two kinds of rows
		}
		title := strings.Join(strings.Split(row[0], "\n"), " ")
		if g.numberFirst {
			title = g.head[0] + " " + title
		}
		for i, line := range breakName(title, max(s.Width-2, leastLast)) {
			fmt.Fprintln(w, strings.Repeat(" ", 2*min(i, 1))+s.paint(line, bold))
		}
		for i, cell := range row[1:] {
			lines := []string{cell}
			if !strings.Contains(cell, "\x1b") { // what is painted is short
				lines = breakName(strings.ReplaceAll(cell, "\n", " "), max(s.Width-label-4, leastLast))
			}
			head := g.head[i+1]
			for _, line := range lines {
				switch {
				case line == "":
				case g.head[i+1] == "":
					fmt.Fprintln(w, "  "+line)
				default:
					fmt.Fprintf(w, "  %-*s  %s\n", label, head, line)
				}
				head = ""
			}
		}
	}
}

// draw writes the table as it is.
func (g *grid) draw(w io.Writer, s Style) {
	t := table.New().Border(lipgloss.NormalBorder()).BorderTop(false).BorderBottom(false).BorderLeft(false).
		BorderRight(false).BorderColumn(false).Headers(g.head...).Rows(g.rows...).
		StyleFunc(func(row, col int) lipgloss.Style {
			style := lipgloss.NewStyle().PaddingRight(columnGap)
			if (col > 0 || g.numberFirst) && (g.textFrom == 0 || col < g.textFrom) {
				style = style.Align(lipgloss.Right)
			}
			if row == table.HeaderRow && s.Color {
				style = style.Bold(true)
			}
			return style
		})
	if s.Color {
		t = t.BorderStyle(faint)
	}
	rule := longestRule // of text that is no terminal's, where names may be of any length
	if s.Width > 0 {
		rule = s.Width
	}
	for line := range strings.Lines(t.Render()) {
		if bare := ansi.Strip(line); strings.Trim(bare, "─\n") == "" && lipgloss.Width(bare) > rule {
			line = ansi.Truncate(strings.TrimRight(line, "\n"), rule, "")
		}
		fmt.Fprintln(w, strings.TrimRight(line, " \n"))
	}
}
