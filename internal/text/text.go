// Package text cleans text that comes from elsewhere: tags, names of threads, paths, frames, settings. It is called where
// such text enters, by the readers of files and by what the library is given, so that no writer has to look again.
package text

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// Clean makes one line of valid UTF-8 that no terminal, table or viewer takes for anything but text: control characters, line
// ends, those that turn the direction of writing, and bytes that are no UTF-8 become U+FFFD.
func Clean(s string) string {
	if plain(s) {
		return s
	}
	return strings.Map(func(r rune) rune { // which gives U+FFFD for each byte that is no UTF-8
		switch {
		case unicode.IsControl(r), r == '\u2028', r == '\u2029', r >= '\u202a' && r <= '\u202e', r >= '\u2066' && r <= '\u2069', r == '\u200e', r == '\u200f', r == '\u061c':
			return utf8.RuneError
		}
		return r
	}, s)
}

// plain reports whether s is printable ASCII, as most text is.
func plain(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

// CleanAll is Clean for a list, in place.
func CleanAll(list []string) []string {
	for i, s := range list {
		list[i] = Clean(s)
	}
	return list
}
