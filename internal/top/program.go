package top

import (
	"path/filepath"
	"regexp"
	"strings"
	"unicode"
)

// interpreters run what their first argument names, which tells more than they do.
var interpreters = regexp.MustCompile(`^(python|pypy|perl|ruby|node|bash|sh|julia)[0-9.]*$`)

// title is the line that tells a program from others best: the program without its folder and with its arguments, and
// for scripts and modules these without the interpreter. What would steer the terminal is taken out.
func title(name string, args []string) string {
	if len(args) == 0 || args[0] == "" {
		if name == "" {
			name = "?"
		}
		return printable(name)
	}
	words := append([]string{base(args[0])}, args[1:]...)
	if interpreters.MatchString(words[0]) {
		words = script(words)
	}
	return printable(strings.Join(words, " "))
}

// base leaves out the folder. A program may have written what it likes in the place of its name; only what begins like a
// path is one.
func base(s string) string {
	if strings.HasPrefix(s, "/") || strings.HasPrefix(s, ".") {
		return filepath.Base(strings.TrimSuffix(s, " (deleted)"))
	}
	return s
}

// script is what an interpreter runs, with its arguments.
func script(words []string) []string {
	for i := 1; i < len(words); i++ {
		switch w := words[i]; {
		case w == "-m" && i+1 < len(words):
			return words[i+1:]
		case w == "-c" || w == "-e" || w == "-":
			return append([]string{words[0]}, words[i:]...)
		case w == "-W" || w == "-X":
			i++ // takes a word
		case !strings.HasPrefix(w, "-"):
			return append([]string{base(w)}, words[i+1:]...)
		}
	}
	return words
}

// printable makes one line of what a process calls itself.
func printable(s string) string {
	s = strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case unicode.IsControl(r), unicode.Is(unicode.Cf, r), r == unicode.ReplacementChar:
			return '?'
		}
		return r
	}, s)
	return strings.Join(strings.Fields(s), " ")
}
