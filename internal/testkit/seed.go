package testkit

import (
	"os"
	"strconv"
	"testing"
	"time"
)

// Seed is where a random test starts: at the same sequence in every run, at that of CISTERN_SEED, or with CISTERN_SEED=new
// at one that no run tried before. A failing test names it.
func Seed(t testing.TB) uint64 {
	t.Helper()
	switch s := os.Getenv("CISTERN_SEED"); s {
	case "":
		return 1
	case "new":
		return uint64(time.Now().UnixNano())
	default:
		seed, err := strconv.ParseUint(s, 10, 64)
		Must(t, err)
		return seed
	}
}
