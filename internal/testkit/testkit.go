// Package testkit has what the tests of many packages need. It imports nothing of the module, and only tests import it.
package testkit

import (
	"os"
	"testing"
)

// Must stops the test on an error.
func Must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Descriptors is how many file descriptors this process has open, the one that it looks with included.
func Descriptors(t testing.TB) int {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	Must(t, err)
	return len(names)
}
