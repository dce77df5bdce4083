// Package suggest finds the word that was meant by one that does not exist: a command, a flag, a policy, a setting.
package suggest

import (
	"slices"
	"strings"
)

// leastPrefix is the length from which the beginning of a name suggests the name.
const leastPrefix = 3

// Closest are the names that a mistyped word is nearest to, in the order of names: those with the fewest edits, if these
// are at most a third of the word's letters (one in short words); else those that begin with the word. Case is ignored.
func Closest(word string, names []string) []string {
	word = strings.ToLower(word)
	best := max(1, len(word)/3)
	var near, longer []string
	for _, name := range names {
		lower := strings.ToLower(name)
		d := distance(word, lower)
		if d < best {
			best, near = d, nil
		}
		if d == best && d < len(lower) {
			near = append(near, name)
		}
		if len(word) >= leastPrefix && strings.HasPrefix(lower, word) {
			longer = append(longer, name)
		}
	}
	if len(near) == 0 {
		return longer
	}
	return near
}

// Question is "did you mean a or b?" with the names closest to the word, each behind prefix; "" where none is close.
func Question(word, prefix string, names []string) string {
	near := slices.Clone(Closest(word, names))
	if len(near) == 0 {
		return ""
	}
	for i := range near {
		near[i] = prefix + near[i]
	}
	last := len(near) - 1
	if last > 0 {
		return "did you mean " + strings.Join(near[:last], ", ") + " or " + near[last] + "?"
	}
	return "did you mean " + near[0] + "?"
}

// distance is the number of edits from a to b: a letter added, left out or replaced, or two neighbours exchanged (the
// optimal string alignment distance).
func distance(a, b string) int {
	before, last, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			row[j] = min(last[j]+1, row[j-1]+1, last[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, last, row = last, row, before
	}
	return last[len(b)]
}
