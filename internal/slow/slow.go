// Package slow marks tests for the second stage of CI: those that take long, and those that measure CPU time or speed and
// need a machine to themselves. `make slow` runs them one by one.
package slow

import (
	"os"
	"strings"
	"testing"
)

// Only skips a test outside that stage, which finds its tests by the prefix TestSlow.
func Only(tb testing.TB) {
	tb.Helper()
	if !strings.HasPrefix(tb.Name(), "TestSlow") {
		tb.Fatalf("%s is left to `make slow`, but its name does not begin with TestSlow", tb.Name())
	}
	if os.Getenv("CISTERN_SLOW") != "1" {
		tb.Skip("part of `make slow` (CISTERN_SLOW=1)")
	}
}
