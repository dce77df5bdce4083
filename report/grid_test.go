package report

import (
	"strings"
	"testing"
)

// TestGridWithTitles: where the columns behind the names fit a terminal and all together do not, each name is above its row, and
// below it are all columns.
func TestGridWithTitles(t *testing.T) {
	long := strings.Repeat("expandable_segments:True,", 3) + "last:1"
	table := func() *grid {
		g := &grid{head: []string{"setting", "reserved", "driver time", "syncs", "survives"}, textFrom: 4}
		g.add(long, "7.19 GiB", "4.02 to 8.94 ms", "0", "8 of 8")
		g.add("default", "19.64 GiB", "1.39 to 3.08 ms", "1,016", "18 of 32")
		g.rows = append(g.rows, make([]string, 5))
		g.add("cistern", "6.55 GiB", "74.02 to 164.48 ms", "0", "8 of 8")
		return g
	}
	for _, c := range []struct {
		width int
		want  string
	}{
		{130, `
setting                                                                           reserved         driver time  syncs  survives
───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
expandable_segments:True,expandable_segments:True,expandable_segments:True,last:1   7.19 GiB     4.02 to 8.94 ms      0  8 of 8
`},
		{60, `
   reserved         driver time  syncs  survives
  ────────────────────────────────────────────────
expandable_segments:True,expandable_segments:True,
  expandable_segments:True,last:1
   7.19 GiB     4.02 to 8.94 ms      0  8 of 8
default
  19.64 GiB     1.39 to 3.08 ms  1,016  18 of 32

cistern
   6.55 GiB  74.02 to 164.48 ms      0  8 of 8
`},
		{44, `
expandable_segments:True,
  expandable_segments:True,
  expandable_segments:True,last:1
  reserved     7.19 GiB
`},
	} {
		var b strings.Builder
		table().write(&b, Style{Width: c.width})
		squeeze := func(s string) string { // what a column's width is, is the drawing's
			s = strings.ReplaceAll(s, "─", "")
			return strings.Join(strings.Fields(s), " ")
		}
		got, want := b.String(), strings.TrimPrefix(c.want, "\n")
		if c.width == 60 && got != want || !strings.HasPrefix(squeeze(got), squeeze(want)) {
			t.Errorf("at %d columns:\n%s\nwant\n%s", c.width, got, want)
		}
	}
	numbers := &grid{head: []string{"device", "one", "two"}, numberFirst: true}
	numbers.add("0", strings.Repeat("1", 20), strings.Repeat("2", 20))
	var b strings.Builder
	if numbers.write(&b, Style{Width: 44}); !strings.HasPrefix(b.String(), "device 0\n") {
		t.Errorf("a table of numbers:\n%s", b.String())
	}
}
