//go:build linux && amd64

package main

import (
	"strings"
	"testing"

	"github.com/charmbracelet/x/ansi"
)

// TestTraceOnTerminal: the table at a program's end is no wider than the terminal that it is read on.
func TestTraceOnTerminal(t *testing.T) {
	x := newTraced(t)
	for _, width := range []uint16{80, 100} {
		term := onTerminal(t, width, 40, []string{"CISTERN_AUDIT_LIBRARY=" + x.library, "STANDIN=" + x.standin},
			"trace", "--stacks=native", "--", x.program, "dlsym", "everything")
		<-term.eof
		_ = term.cmd.Wait()
		text := term.out.String()
		_, table, found := strings.Cut(text, "driver calls of")
		if !found || !strings.Contains(table, "never freed: ") || !strings.Contains(table, "everything") {
			t.Fatalf("at %d columns the table is\n%s", width, text)
		}
		for line := range strings.Lines(table) {
			if n := ansi.StringWidth(strings.TrimRight(line, "\r\n")); n > int(width) {
				t.Errorf("at %d columns one line has %d: %s", width, n, line)
			}
		}
	}
}
