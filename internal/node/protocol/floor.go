package protocol

import (
	"math"
	"time"
)

// Floor is what a client keeps of what it has reserved, by default: what was active at the peak of the last hold, and of higher
// peaks before that a part that halves with each half of hold. So the cache between two phases of a job stays the job's, and that
// of a phase that is over does not.
func (s *Status) Floor(hold time.Duration) uint64 {
	floor := s.Active
	for i, peak := range s.Peaks {
		if peak <= s.Active {
			continue
		}
		above := float64(peak - s.Active)
		if age := Window<<i - hold; age > 0 {
			above *= math.Exp2(-float64(age) / (float64(max(hold, 1)) / 2))
		}
		floor = max(floor, s.Active+uint64(above))
	}
	return floor
}
