//go:build linux || darwin

package dump

import (
	"math"
	"syscall"

	"github.com/cistern-gpu/cistern/recording"
)

// rlimits is what the process may not exceed itself: mapping memory of a GPU takes addresses.
func rlimits() []recording.Limit {
	var r syscall.Rlimit
	// RLIM_INFINITY is the largest number of a signed or an unsigned type.
	if err := syscall.Getrlimit(syscall.RLIMIT_AS, &r); err != nil || r.Cur >= 1<<63-1 {
		return nil
	}
	return []recording.Limit{{Kind: "rlimit", Bytes: r.Cur, From: "RLIMIT_AS (ulimit -v): addresses of the process"}}
}

// largest is the largest file that the process may make, in bytes.
func largest() uint64 {
	var r syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &r); err != nil {
		return math.MaxUint64
	}
	return r.Cur
}
