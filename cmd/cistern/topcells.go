package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/cistern-gpu/cistern/internal/top"
)

// Tables of `cistern top`, as cells in columns: which columns fit a width, and how numbers are written in five of them.

// column is one of a table's.
type column struct {
	name  string
	width int  // least
	most  int  // grows up to where there is room; 0: not at all
	left  bool // text begins at the left
	first bool // grows before the others
	drop  int  // where not all fit, the one with the largest goes first; 0 stays
}

// cell is text with the style that it has on a terminal.
type cell struct {
	text  string
	style lipgloss.Style
}

// grid is the columns that fit.
type grid struct {
	columns []column
	widths  []int
	gap     int
}

// fit chooses columns for a width, 0 for no limit. What room is left is for the columns that grow, in turn, as far as
// content says that they have something to show there.
func fit(columns []column, width int, content func(name string) int) grid {
	g := grid{columns: slices.Clone(columns), gap: 1}
	for i := range g.columns {
		c := &g.columns[i]
		if c.most == 0 {
			continue
		}
		if has := max(c.width, content(c.name)); width == 0 {
			c.width = has
		} else {
			c.most = min(c.most, has)
		}
	}
	need := func() int {
		n := g.gap * (len(g.columns) - 1)
		for _, c := range g.columns {
			n += c.width
		}
		return n
	}
	for width > 0 && need() > width {
		worst := 0
		for i, c := range g.columns {
			if c.drop > g.columns[worst].drop {
				worst = i
			}
		}
		if g.columns[worst].drop == 0 {
			break
		}
		g.columns = slices.Delete(g.columns, worst, worst+1)
	}
	for _, c := range g.columns {
		g.widths = append(g.widths, c.width)
	}
	if width == 0 {
		g.gap = 2
		return g
	}
	spare := width - need()
	for ; spare < 0; spare++ { // nothing may be dropped any more
		widest := slices.Index(g.widths, slices.Max(g.widths))
		if g.widths[widest] <= 1 {
			break
		}
		g.widths[widest]--
	}
	// Air between the columns comes before more of a text than its half.
	if gaps := len(g.columns) - 1; spare >= gaps+20 {
		g.gap = 2
		spare -= gaps
	}
	for _, first := range []bool{true, false} {
		for grown := true; spare > 0 && grown; {
			grown = false
			for i, c := range g.columns {
				if spare > 0 && g.widths[i] < c.most && c.first == first {
					g.widths[i]++
					spare--
					grown = true
				}
			}
		}
	}
	return g
}

// at is the width that a column got, 0 where it was dropped.
func (g *grid) at(name string) int {
	for i, c := range g.columns {
		if c.name == name {
			return g.widths[i]
		}
	}
	return 0
}

// line writes one row. plain leaves styles out.
func (g *grid) line(of func(name string) cell, plain bool) string {
	var b strings.Builder
	for i, c := range g.columns {
		x := of(c.name)
		last := i == len(g.columns)-1
		text := pad(x.text, g.widths[i], c.left)
		if last {
			text = strings.TrimRight(text, " ")
		}
		if !plain {
			text = x.style.Render(text)
		}
		b.WriteString(text)
		if !last {
			b.WriteString(strings.Repeat(" ", g.gap))
		}
	}
	return b.String()
}

// table writes rows below the names of the columns.
func (g *grid) table(head lipgloss.Style, rows int, of func(i int, name string) cell, plain bool) []string {
	lines := []string{g.line(func(name string) cell { return cell{name, head} }, plain)}
	for i := range rows {
		lines = append(lines, g.line(func(name string) cell { return of(i, name) }, plain))
	}
	return lines
}

// pad makes text exactly so many cells wide.
func pad(text string, width int, left bool) string {
	text = ansi.Truncate(text, width, ellipsis)
	fill := strings.Repeat(" ", max(0, width-ansi.StringWidth(text)))
	if left {
		return text + fill
	}
	return fill + text
}

// unknown stands for a number that is not known, or does not exist.
const unknown = "-"

// amount writes bytes in at most five columns, three digits and a binary unit: 98.2G.
func amount(n uint64) string {
	v, unit := float64(n), "B"
	for _, u := range "KMGTPE" {
		if v < 999.5 {
			break
		}
		v /= 1024
		unit = string(u)
	}
	if unit == "B" {
		if n == 0 {
			return "0"
		}
		return strconv.FormatUint(n, 10) + "B"
	}
	return digits(v) + unit
}

// digits writes three of them.
func digits(v float64) string {
	switch {
	case v < 9.995:
		return strconv.FormatFloat(v, 'f', 2, 64)
	case v < 99.95:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return strconv.FormatFloat(v, 'f', 0, 64)
}

// count writes a number of things in at most five columns.
func count(n uint64) string {
	if n < 10000 {
		return strconv.FormatUint(n, 10)
	}
	v, unit := float64(n), ""
	for _, u := range "kMGTPE" {
		if v < 999.5 {
			break
		}
		v /= 1000
		unit = string(u)
	}
	return digits(v) + unit
}

// few writes a number of things in three columns: 12, 4k, 2e6.
func few(n uint64) string {
	switch {
	case n < 1000:
		return strconv.FormatUint(n, 10)
	case n < 100_000:
		return strconv.FormatUint(n/1000, 10) + "k"
	}
	exponent := 0
	for ; n >= 10; n /= 10 {
		exponent++
	}
	return fmt.Sprintf("%de%d", n, exponent)
}

// rate writes how often something happens in a second.
func rate(v float64) string {
	switch {
	case v == 0:
		return "0"
	case v < 0.05:
		return "<0.1"
	case v < 9.95:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return count(uint64(v + 0.5))
}

// age writes a time in its largest unit.
func age(d time.Duration) string {
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// amountIf writes bytes that may not be known.
func amountIf(n uint64, known bool) string {
	if !known {
		return unknown
	}
	return amount(n)
}

// indices writes which GPUs: 0, 0,3, 0-7.
func indices(all []int) string {
	all = slices.Compact(slices.Sorted(slices.Values(all)))
	var parts []string
	for i := 0; i < len(all); {
		j := i
		for j+1 < len(all) && all[j+1] == all[j]+1 {
			j++
		}
		switch {
		case j == i:
			parts = append(parts, strconv.Itoa(all[i]))
		case j == i+1:
			parts = append(parts, strconv.Itoa(all[i]), strconv.Itoa(all[j]))
		default:
			parts = append(parts, fmt.Sprintf("%d-%d", all[i], all[j]))
		}
		i = j + 1
	}
	return strings.Join(parts, ",")
}

// columnNumbers are the numbers that columns show as they are, and their styles.
var columnNumbers = map[string]struct {
	number top.Key
	style  lipgloss.Style
}{
	"RESERVED":   {"reserved", boldStyle},
	"ALLOC":      {"allocated", allocatedStyle},
	"ACTIVE":     {"active", plainStyle},
	"CACHED":     {"cached", cachedStyle},
	"PAUSED":     {"paused", plainStyle},
	"PEAK":       {"peak", plainStyle},
	"PEAK-ALLOC": {"peak-allocated", plainStyle},
}

// memoryCell is what a column of memory says, of a process or of one of its devices.
func memoryCell(m *top.Memory, stale bool, name string) cell {
	if c, ok := columnNumbers[name]; ok {
		return cell{amountIf(m.Number(c.number), m.Page), c.style}
	}
	switch {
	case name == "USED":
		return cell{amountIf(m.Used, m.UsedKnown), plainStyle}
	case name == "OTHER":
		return cell{amountIf(m.Other, m.OtherKnown), plainStyle}
	case name == "LIMIT":
		if m.Limit > 0 && m.PeakReserved >= m.Limit-m.Limit/20 {
			return cell{amount(m.Limit), warnStyle}
		}
		return cell{amountIf(m.Limit, m.Limit > 0), plainStyle}
	case name == "CALL/S" && stale:
		return cell{"stale", warnStyle}
	case name == "CALL/S" && m.RateKnown:
		return cell{rate(m.Rate), plainStyle}
	case !m.Page || name == "CALL/S":
		return cell{unknown, plainStyle}
	case name == "CALLS":
		return cell{count(m.DriverCalls), plainStyle}
	case name == "P99" || name == "P99.9" || name == "LONGEST":
		return cell{requestTime(&m.Requests, name), plainStyle}
	case name == "RETRIES":
		return cell{count(m.Retries), plainStyle}
	case m.OOMs > 0:
		return cell{few(m.OOMs), alarmStyle}
	}
	return cell{"0", plainStyle}
}

// requestTime is how long requests took.
func requestTime(r *top.Requests, name string) string {
	if r.Met == 0 {
		return unknown
	}
	us := r.Slow.Max
	switch name {
	case "P99":
		us = r.Quantile(0.99)
	case "P99.9":
		us = r.Quantile(0.999)
	}
	switch {
	case us == 0:
		return "<1us"
	case us < 1000:
		return fmt.Sprintf("%dus", us)
	case us < 999_500:
		return fmt.Sprintf("%.3gms", float64(us)/1e3)
	}
	return fmt.Sprintf("%.3gs", float64(us)/1e6)
}

// gpuLabel is how a GPU is named in a column.
func gpuLabel(g *top.GPU) string {
	if g.Simulated {
		return "sim" + strconv.Itoa(g.Index)
	}
	if g.Part != "" {
		return g.Part
	}
	if g.Unnamed() && !g.Known {
		return "?" + strconv.Itoa(g.Index)
	}
	return strconv.Itoa(g.Index)
}

// gpuName is what a GPU is called, and whose it is where every process has one.
func gpuName(g *top.GPU) string {
	if g.Name == "" {
		return unknown
	}
	if g.Simulated && g.Processes > 1 {
		return fmt.Sprintf("%s ×%d", g.Name, g.Processes)
	}
	return g.Name
}

// gpuCell is what a column says of a GPU.
func gpuCell(g *top.GPU, name string) cell {
	switch name {
	case "GPU":
		return cell{gpuLabel(g), boldStyle}
	case "NAME":
		return cell{gpuName(g), plainStyle}
	case "USED":
		return cell{amountIf(g.Used, g.Known), boldStyle}
	case "TOTAL":
		return cell{amountIf(g.Total, g.Total > 0), plainStyle}
	case "FREE":
		if g.Known && g.Free < g.Total/20 {
			return cell{amount(g.Free), warnStyle}
		}
		return cell{amountIf(g.Free, g.Known), plainStyle}
	case "RESERVED":
		return cell{amount(g.Reserved), plainStyle}
	case "ALLOC":
		return cell{amount(g.Allocated), allocatedStyle}
	case "TRACED":
		return cell{amount(g.Traced), plainStyle}
	case "UTIL":
		if g.Utilization < 0 {
			return cell{unknown, plainStyle}
		}
		return cell{strconv.Itoa(g.Utilization) + "%", plainStyle}
	}
	return cell{"", plainStyle}
}
