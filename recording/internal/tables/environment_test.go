package tables

import (
	"strings"
	"testing"
)

func TestEnvironmentText(t *testing.T) {
	for in, want := range map[string]string{
		"2.11.0+cu130":                     "2.11.0+cu130",
		"a\nb\x1b[31m":                     "a\ufffdb\ufffd[31m",
		strings.Repeat("x", 4<<20):         strings.Repeat("x", 256),
		strings.Repeat("\xff", 300):        strings.Repeat("\ufffd", 85),
		strings.Repeat("x", 255) + "größe": strings.Repeat("x", 255) + "g",
	} {
		got := EnvironmentText(in)
		if got != want {
			t.Errorf("%.20q became %.20q of %d bytes, want %.20q of %d", in, got, len(got), want, len(want))
		}
		if again := EnvironmentText(got); again != got {
			t.Errorf("%.20q became %.20q the second time", got, again)
		}
	}
}
