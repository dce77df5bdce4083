//go:build !linux && !darwin

package dump

import (
	"math"

	"github.com/cistern-gpu/cistern/trace"
)

func rlimits() []trace.Limit { return nil }

func largest() uint64 { return math.MaxUint64 }
