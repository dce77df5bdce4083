//go:build linux || darwin

package dump

import (
	"syscall"

	"github.com/cistern-gpu/cistern/trace"
)

// rlimits is what the process may not exceed itself: mapping memory of a GPU takes addresses.
func rlimits() []trace.Limit {
	var r syscall.Rlimit
	// RLIM_INFINITY is the largest number of a signed or an unsigned type.
	if err := syscall.Getrlimit(syscall.RLIMIT_AS, &r); err != nil || r.Cur >= 1<<63-1 {
		return nil
	}
	return []trace.Limit{{Kind: "rlimit", Bytes: r.Cur, From: "RLIMIT_AS (ulimit -v): addresses of the process"}}
}
