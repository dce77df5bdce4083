package engine_test

import (
	"iter"
	"os"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/internal/testkit"
)

// seeds are those that a random test tries: the one that CISTERN_SEED names; else as many from testkit.Seed on as CISTERN_SOAK
// has time for, or n, and more until everything wanted was seen.
func seeds(t *testing.T, n int, seen map[string]int, want []string) iter.Seq[uint64] {
	t.Helper()
	first := testkit.Seed(t)
	if s := os.Getenv("CISTERN_SEED"); s != "" && s != "new" {
		return func(yield func(uint64) bool) { yield(first) }
	}
	if testing.Short() {
		want = nil
	}
	goesOn := func(tried int) bool {
		missing := unseen(seen, want)
		if tried == 100*n && len(missing) > 0 {
			t.Errorf("%d seeds had none of %q: the test tests less than it says", tried, missing)
		}
		return tried < n || tried < 100*n && len(missing) > 0
	}
	if s := os.Getenv("CISTERN_SOAK"); s != "" {
		budget, err := time.ParseDuration(s)
		must(t, err)
		began, enough := time.Now(), goesOn
		goesOn = func(tried int) bool { return time.Since(began) < budget || enough(tried) }
	}
	t.Logf("from CISTERN_SEED=%d", first)
	return func(yield func(uint64) bool) {
		for tried := 0; !t.Failed() && goesOn(tried); tried++ {
			if !yield(first + uint64(tried)) {
				return
			}
		}
	}
}

// unseen is what of those things has not happened.
func unseen(seen map[string]int, want []string) (out []string) {
	for _, k := range want {
		if seen[k] == 0 {
			out = append(out, k)
		}
	}
	return out
}

// quick is n, or less with -short, as under the race detector.
func quick(n, less int) int {
	if testing.Short() {
		return less
	}
	return n
}
