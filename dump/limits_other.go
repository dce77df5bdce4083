//go:build !linux && !darwin

package dump

import "github.com/cistern-gpu/cistern/trace"

func rlimits() []trace.Limit { return nil }
