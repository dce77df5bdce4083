package main

import (
	"math"
	"strings"
	"unicode/utf8"

	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/cistern-gpu/cistern/internal/top"
)

// What `cistern top` draws with: colours that every terminal has, bars, curves, and the characters for them.

var (
	plainStyle     = lipgloss.NewStyle()
	boldStyle      = lipgloss.NewStyle().Bold(true)
	dimStyle       = lipgloss.NewStyle().Faint(true)
	allocatedStyle = lipgloss.NewStyle().Foreground(lipgloss.Color("2"))
	cachedStyle    = lipgloss.NewStyle().Foreground(lipgloss.Color("3"))
	otherStyle     = lipgloss.NewStyle().Foreground(lipgloss.Color("4"))
	tracedStyle    = lipgloss.NewStyle().Foreground(lipgloss.Color("6"))
	warnStyle      = lipgloss.NewStyle().Foreground(lipgloss.Color("3")).Bold(true)
	alarmStyle     = lipgloss.NewStyle().Foreground(lipgloss.Color("1")).Bold(true)
	selectedStyle  = lipgloss.NewStyle().Reverse(true)
	headStyle      = lipgloss.NewStyle().Faint(true)
	sortedStyle    = lipgloss.NewStyle().Bold(true).Underline(true)
)

// The characters of bars and curves. Where the terminal's locale has only ASCII, plainly takes their place at the end.
const (
	fillAllocated = "█"
	fillCached    = "▓"
	fillTraced    = "▞"
	fillOther     = "▒"
	fillFree      = "·"
	ellipsis      = "…"
)

// rising are the steps of a curve, within a line.
var rising = strings.Split("▁▂▃▄▅▆▇█", "")

// plainly are the characters that say the same in ASCII.
var plainly = map[rune]string{'▁': "_", '▂': ".", '▃': "-", '▄': "=", '▅': "+", '▆': "*", '▇': "%", '█': "#",
	'▓': "+", '▞': "x", '▒': "o", '·': ".", '…': "~", '×': "x", '↑': "^", '↓': "v", '↵': "<"}

// asciiOnly says whether the locale that the environment names has nothing else. Containers often name none, and have
// terminals that can do everything.
func asciiOnly(env func(string) string) bool {
	for _, name := range []string{"LC_ALL", "LC_CTYPE", "LANG"} {
		if v := strings.ToUpper(env(name)); v != "" {
			return !strings.Contains(v, "UTF-8") && !strings.Contains(v, "UTF8")
		}
	}
	return false
}

// toASCII writes a frame for such a terminal; every character keeps its width.
func toASCII(s string) string {
	var b strings.Builder
	for _, r := range s {
		switch p, ok := plainly[r]; {
		case r < utf8.RuneSelf:
			b.WriteRune(r)
		case ok:
			b.WriteString(p)
		default:
			b.WriteString(strings.Repeat("?", ansi.StringWidth(string(r))))
		}
	}
	return b.String()
}

// curve draws values, of which -1 are not known, in one line. The largest one reaches the top; what is more than nothing
// is drawn.
func curve(values []float64) string {
	most := 0.0
	for _, v := range values {
		most = max(most, v)
	}
	return area(values, 1, most)[0]
}

// area draws values in several lines, from 0 to most.
func area(values []float64, height int, most float64) []string {
	steps := len(rising)
	lines := make([]string, height)
	for row := range height {
		var b strings.Builder
		for _, v := range values {
			level := 0
			if v > 0 && most > 0 {
				level = int(math.Ceil(v / most * float64(height*steps)))
			}
			level -= (height - 1 - row) * steps // what is left for this line
			switch {
			case v < 0 || level <= 0 && !(v == 0 && row == height-1):
				b.WriteString(" ")
			case level <= 0:
				b.WriteString(rising[0])
			default:
				b.WriteString(rising[min(level, steps)-1])
			}
		}
		lines[row] = b.String()
	}
	return lines
}

// part is a stretch of a bar.
type part struct {
	bytes uint64
	fill  string
	style lipgloss.Style
}

// bar draws parts of a whole. Rounding is over the sum, so that the bar ends where it should; what is there at all gets a
// column as long as there is one.
func bar(width int, whole uint64, parts ...part) string {
	var b strings.Builder
	done, sum := 0, uint64(0)
	for _, p := range parts {
		sum += p.bytes
		end := done
		if whole > 0 {
			end = int(math.Round(min(1, float64(sum)/float64(whole)) * float64(width)))
		}
		if p.bytes > 0 && end <= done {
			end = done + 1
		}
		end = min(max(end, done), width)
		b.WriteString(p.style.Render(strings.Repeat(p.fill, end-done)))
		done = end
	}
	b.WriteString(dimStyle.Render(strings.Repeat(fillFree, width-done)))
	return b.String()
}

// gpuBar shows the use of a GPU's memory: what is in use on Cistern and what it caches, what traced programs hold, and all
// else that the driver says is used. What is paused takes no memory of the GPU.
func gpuBar(width int, u *top.GPU) string {
	cached := min(u.Cached, u.Reserved)
	rest := u.Held() - min(u.Held(), u.Reserved+u.Traced)
	return bar(width, u.Total, part{u.Reserved - cached, fillAllocated, allocatedStyle},
		part{cached, fillCached, cachedStyle}, part{u.Traced, fillTraced, tracedStyle}, part{rest, fillOther, otherStyle})
}

// fitLine cuts a line to a width.
func fitLine(line string, width int) string {
	if ansi.StringWidth(line) <= width {
		return line
	}
	return ansi.Truncate(line, width, ellipsis)
}
