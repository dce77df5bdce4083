// Package checked turns the check of locks on (internal/lockrank) in the tests that import it. Benchmarks are measured
// without.
package checked

import (
	"os"
	"slices"
	"strings"

	"github.com/cistern-gpu/cistern/internal/lockrank"
)

func init() {
	if !slices.ContainsFunc(os.Args, func(a string) bool { return a == "-test.bench" || strings.HasPrefix(a, "-test.bench=") }) {
		lockrank.Check()
	}
}
