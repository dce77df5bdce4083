package memory

import (
	"fmt"

	"github.com/cistern-gpu/cistern/internal/units"
)

// PauseReport is what Pause or Resume did, in bytes.
type PauseReport struct {
	Blocks   int64  // live blocks that lost, or got back, memory
	Bytes    uint64 // of their memory, what they lost or got back
	Physical uint64 // physical memory given back to the device, or got again
	Kept     uint64 // contents copied
	Shared   uint64 // memory of selected blocks that stayed, because chunks are shared with others
}

// PauseError is memory that cannot be paused. Nothing was.
type PauseError struct {
	Reason string
	Bytes  uint64 // of blocks that it is so with
}

func (e *PauseError) Error() string { return e.Reason }

// String says what was done, in words.
func (r PauseReport) String() string {
	return fmt.Sprintf("%d blocks, %s of memory, %s physical, %s of contents copied, %s stayed", r.Blocks, units.FormatBytes(r.Bytes),
		units.FormatBytes(r.Physical), units.FormatBytes(r.Kept), units.FormatBytes(r.Shared))
}
