package main

import (
	"errors"
	"slices"

	"github.com/cistern-gpu/cistern/internal/environ"
)

// colorWord is the flag --color.
type colorWord string

const (
	colorAuto   colorWord = "auto"
	colorAlways colorWord = "always"
	colorNever  colorWord = "never"
)

var colorWords = []string{string(colorAuto), string(colorAlways), string(colorNever)}

func (c *colorWord) String() string { return string(*c) }

func (c *colorWord) Set(s string) error {
	if !slices.Contains(colorWords, s) {
		return errors.New("expected " + oneOf(colorWords))
	}
	*c = colorWord(s)
	return nil
}

func (c *colorWord) Type() string { return "when" }

// wanted reports whether a terminal gets colours. The flag decides before the variable NO_COLOR (no-color.org) does.
func (c colorWord) wanted() bool {
	return c == colorAlways || c != colorNever && environ.Get("NO_COLOR") == ""
}
