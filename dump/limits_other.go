//go:build !linux && !darwin

package dump

import (
	"math"

	"github.com/cistern-gpu/cistern/recording"
)

func rlimits() []recording.Limit { return nil }

func largest() uint64 { return math.MaxUint64 }
