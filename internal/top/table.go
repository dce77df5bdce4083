package top

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Key is what processes are sorted by: numbers fall, names and process numbers rise.
type Key string

// Keys are all that there are, in the order in which one steps through them.
var Keys = []Key{"reserved", "allocated", "cached", "peak", "used", "rate", "ooms", "pid", "name"}

// KeyNames are the keys as words.
func KeyNames() []string {
	names := make([]string, len(Keys))
	for i, k := range Keys {
		names[i] = string(k)
	}
	return names
}

// ParseKey reads the name of a key.
func ParseKey(s string) (Key, error) {
	if !slices.Contains(Keys, Key(s)) {
		return "", fmt.Errorf("%q: expected one of %s", s, strings.Join(KeyNames(), ", "))
	}
	return Key(s), nil
}

// Choice is which part of a state is wanted.
type Choice struct {
	Sort     Key
	Reversed bool
	GPU      int    // NVML's index of the one that counts, -1 all
	Text     string // in the program's name or arguments, the kind or the process number; case does not matter
}

// Table is a state as it was asked for.
type Table struct {
	GPUs []GPU // all, whatever was chosen
	Rows []Row // sums are over what was chosen
	All  int   // processes there are, chosen or not
}

// Table filters and sorts. The result stays as it is when the state takes the next look, but for the trends.
func (s *State) Table(c Choice) Table {
	t := Table{GPUs: slices.Clone(s.gpus), All: len(s.rows)}
	for _, r := range s.rows {
		row := *r
		if c.GPU >= 0 {
			row.Holdings = nil
			for _, h := range r.Holdings {
				if chosen(s.gpus, &s.gpus[h.GPU], c.GPU) {
					row.Holdings = append(row.Holdings, h)
				}
			}
			if len(row.Holdings) == 0 {
				continue
			}
			row.Sum, row.Trend = sum(row.Holdings), row.Holdings[0].Trend
		}
		if row.matches(c.Text) {
			t.Rows = append(t.Rows, row)
		}
	}
	slices.SortFunc(t.Rows, func(a, b Row) int {
		by := compare(&a, &b, c.Sort)
		if c.Reversed {
			by = -by
		}
		return cmp.Or(by, cmp.Compare(a.PID, b.PID), cmp.Compare(a.Start, b.Start))
	})
	return t
}

// chosen reports whether a GPU is the one with a number. Simulated ones are numbered by themselves: beside real ones their
// numbers choose nothing.
func chosen(all []GPU, g *GPU, number int) bool {
	return g.Index == number && (!g.Simulated || !slices.ContainsFunc(all, func(o GPU) bool { return !o.Simulated }))
}

// Indices are the GPUs that can be chosen, in order.
func (t *Table) Indices() []int {
	all := make(map[int]bool)
	for i := range t.GPUs {
		if g := &t.GPUs[i]; chosen(t.GPUs, g, g.Index) {
			all[g.Index] = true
		}
	}
	return slices.Sorted(maps.Keys(all))
}

func (r *Row) matches(text string) bool {
	if text == "" {
		return true
	}
	text = strings.ToLower(text)
	return slices.ContainsFunc(append([]string{r.Name, r.Title, r.Kind, strconv.Itoa(r.PID)}, r.Args...), func(s string) bool {
		return strings.Contains(strings.ToLower(s), text)
	})
}

// compare sorts the more important before the less. Processes with an unknown number come last, by what the driver
// says of them.
func compare(a, b *Row, by Key) int {
	switch by {
	case "used":
		return cmp.Compare(max(b.Sum.Used, b.Sum.Reserved), max(a.Sum.Used, a.Sum.Reserved))
	case "rate":
		return cmp.Or(cmp.Compare(btoi(b.Sum.RateKnown), btoi(a.Sum.RateKnown)), cmp.Compare(b.Sum.Rate, a.Sum.Rate))
	case "pid":
		return cmp.Compare(a.PID, b.PID)
	case "name":
		return cmp.Compare(strings.ToLower(a.Title), strings.ToLower(b.Title))
	}
	if numbers[by] == nil {
		by = Keys[0]
	}
	return cmp.Or(cmp.Compare(btoi(b.Sum.Page), btoi(a.Sum.Page)), cmp.Compare(b.Sum.Number(by), a.Sum.Number(by)),
		cmp.Compare(b.Sum.Used, a.Sum.Used))
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}
