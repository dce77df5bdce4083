package units

import "fmt"

// maxDecimals is how many a size is written with before it is written in bytes.
const maxDecimals = 4

// FormatApart writes sizes that are compared with each other: as FormatBytes does, and those that differ and would read the same
// with as many more decimals as it takes, in bytes where four are not enough.
func FormatApart(sizes ...uint64) []string {
	digits := make([]int, len(sizes))
	texts := make([]string, len(sizes))
	for i := range digits {
		digits[i] = decimals
	}
	for alike := true; alike; {
		first := make(map[string]int, len(sizes))
		for i, n := range sizes {
			if texts[i] = formatBytes(n, digits[i]); digits[i] > maxDecimals {
				texts[i] = exactBytes(n)
			}
		}
		alike = false
		more := make([]bool, len(sizes))
		for i, n := range sizes {
			k, seen := first[texts[i]]
			if !seen {
				first[texts[i]] = i
			} else if sizes[k] != n {
				more[i], more[k], alike = true, true, true
			}
		}
		for i, n := range sizes {
			if k := first[texts[i]]; more[i] || more[k] && sizes[k] == n {
				digits[i]++
			}
		}
	}
	return texts
}

// Size is a size in a sentence of Sprintf's.
type Size uint64

// String is FormatBytes.
func (s Size) String() string { return FormatBytes(uint64(s)) }

// Sprintf is fmt.Sprintf for one sentence: its arguments of type Size are written by FormatApart, so that no two sizes that the
// sentence holds against each other look the same.
func Sprintf(format string, args ...any) string {
	var sizes []uint64
	for _, a := range args {
		if s, ok := a.(Size); ok {
			sizes = append(sizes, uint64(s))
		}
	}
	texts := FormatApart(sizes...)
	written := make([]any, len(args))
	for i, a := range args {
		written[i] = a
		if _, ok := a.(Size); ok {
			written[i], texts = texts[0], texts[1:]
		}
	}
	return fmt.Sprintf(format, written...)
}
