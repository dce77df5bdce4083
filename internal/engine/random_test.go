package engine_test

import (
	"iter"
	"os"
	"strconv"
	"testing"
	"time"
)

// seeds are those that a random test tries: the one of CISTERN_SEED; new ones for as long as CISTERN_SOAK says; or else n new
// ones, and more until everything wanted was seen.
func seeds(t *testing.T, n int, seen map[string]int, want []string) iter.Seq[uint64] {
	t.Helper()
	if s := os.Getenv("CISTERN_SEED"); s != "" {
		seed, err := strconv.ParseUint(s, 10, 64)
		must(t, err)
		return func(yield func(uint64) bool) { yield(seed) }
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
	first := uint64(time.Now().UnixNano())
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
