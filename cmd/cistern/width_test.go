//go:build linux && amd64

package main

import (
	"strconv"
	"strings"
	"testing"

	"github.com/charmbracelet/x/ansi"
)

// TestTablesFitTheTerminal: on a terminal no line is wider than it, whatever is shown, but for those to be copied into a shell;
// what has no place is named, and where columns do not fit, a name is above its row.
func TestTablesFitTheTerminal(t *testing.T) {
	inFolder(t)
	for _, width := range []uint16{80, 100, 120} {
		for _, args := range [][]string{
			{"replay", "--policy", "torch", "--policy", "torch:expandable_segments:True,garbage_collection_threshold:0.8", "--policy", "direct", "two.pickle"},
			{"replay", "--policy", "torch", "--policy", "direct", "tagged.pickle"},
			{"inspect", "tagged.pickle", "rmm.csv"}, {"diff", "tagged.pickle", "tagged-later.pickle"}, {"tune", "--budget", "1s", "tiny.pickle"},
			{"report", "oom.cistern"},
		} {
			text := shownOn(t, width, nil, args...)
			for line := range strings.Lines(text) {
				line = strings.TrimRight(line, "\r\n")
				if n := ansi.StringWidth(line); n > int(width) && !strings.Contains(line, "_CONF=") {
					t.Errorf("%v at %d columns: a line of %d: %s", args, width, n, ansi.Strip(line))
				}
			}
		}
	}
	if text := ansi.Strip(shownOn(t, 80, nil, "replay", "--policy", "direct", "tiny.pickle")); !strings.Contains(text, "not shown, for lack of columns: retries") ||
		!strings.Contains(text, "\r\npolicy ") {
		t.Errorf("fewer columns:\n%s", text)
	}
	if text := ansi.Strip(shownOn(t, 80, nil, "replay", "--policy", "torch:expandable_segments:True,max_split_size_mb:64", "rmm.csv")); !strings.Contains(text, "\r\ntorch:expandable_segments:True, ") ||
		!strings.Contains(text, "\r\nmax_split_size_mb:64\r\n") {
		t.Errorf("a name on two lines:\n%s", text)
	}
	if text := ansi.Strip(shownOn(t, 80, nil, "replay", "--policy", "torch", "tiny.pickle")); !strings.Contains(text, "\r\n  peak reserved  ratio ") ||
		!strings.Contains(text, "\r\ntorch:default\r\n      40.00 MiB  1.429  ") {
		t.Errorf("a name above its row:\n%s", text)
	}
}

// TestColor: a terminal gets colours unless the environment or the flag says otherwise; a file gets them if the flag says so.
func TestColor(t *testing.T) {
	inFolder(t)
	for _, c := range []struct {
		vars, args []string
		want       bool
	}{
		{nil, nil, true}, {[]string{"NO_COLOR=1"}, nil, false}, {nil, []string{"--color=never"}, false},
		{[]string{"NO_COLOR=1"}, []string{"--color", "always"}, true}, {nil, []string{"--color", "auto"}, true},
	} {
		if got := strings.Contains(shownOn(t, 80, c.vars, append([]string{"inspect", "tiny.pickle"}, c.args...)...), "\x1b["); got != c.want {
			t.Errorf("%v %v: colours %v", c.vars, c.args, got)
		}
	}
	for word, want := range map[string]bool{"auto": false, "always": true, "never": false} {
		if out, _, code := cistern(t, "", "inspect", "--color", word, "tiny.pickle"); code != exitOK || strings.Contains(out, "\x1b[") != want {
			t.Errorf("%s: code %d, %q", word, code, out)
		}
	}
	if _, errs, code := cistern(t, "", "inspect", "--color", "red", "tiny.pickle"); code != exitBad || errs != "cistern: --color red: expected auto, always or never\n" {
		t.Errorf("code %d, %q", code, errs)
	}
}

// shownOn is what the command writes on a terminal of so many columns.
func shownOn(t *testing.T, width uint16, vars []string, args ...string) string {
	t.Helper()
	term := onTerminal(t, width, 40, vars, args...)
	<-term.eof
	_ = term.cmd.Wait()
	if code := term.cmd.ProcessState.ExitCode(); code != exitOK {
		t.Fatalf("%v at %s columns: code %d\n%s", args, strconv.Itoa(int(width)), code, term.out.String())
	}
	return term.out.String()
}
