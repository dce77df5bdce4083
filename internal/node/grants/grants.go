// Package grants is the segment that shows all clients of a node's broker what was granted and not yet created: memory that is free
// in the driver, or about to be, and is meant for one process. The growth of every other process leaves it alone.
//
// The broker makes the segment, a file in memory that neither shrinks nor grows and that nothing but the broker's own mapping may
// write. Clients get a descriptor to read. A grant has an end: one that the broker does not renew, because it was stopped or
// killed, delays no process after that.
//
// Linux has all of this; elsewhere New and Open fail.
package grants

import "encoding/binary"

// Slots is how many devices a segment has room for.
const Slots = 128

// The layout, in words of 8 bytes: magic, layout; from slotsAt on for each slot what is granted, how much of that was released already,
// and until when in nanoseconds of the kernel's monotonic clock.
const (
	magic   = 0x544e415247534943 // "CISGRANT"
	layout  = 2
	slotsAt = 2
	perSlot = 3
	words   = slotsAt + perSlot*Slots
	bytes   = 4096
)

var _ [bytes - 8*words]struct{}

func number(b []byte, word int) uint64 { return binary.LittleEndian.Uint64(b[8*word:]) }
