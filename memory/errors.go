package memory

import (
	"errors"
	"fmt"

	"github.com/cistern-gpu/cistern/cuda"
)

// ErrUnknownPointer is what errors.Is finds in the error of an operation on an address that is not a live allocation
// of this allocator: never handed out, or freed already.
var ErrUnknownPointer = errors.New("not a live allocation of this allocator")

// PointerError is an operation on an address that is no live allocation.
type PointerError struct {
	Op     string
	Ptr    cuda.Ptr
	Detail string // "freed twice", …
}

func (e *PointerError) Error() string {
	if e.Detail != "" {
		return fmt.Sprintf("%s %#x: %s: %s", e.Op, uint64(e.Ptr), ErrUnknownPointer, e.Detail)
	}
	return fmt.Sprintf("%s %#x: %s", e.Op, uint64(e.Ptr), ErrUnknownPointer)
}

func (e *PointerError) Unwrap() error { return ErrUnknownPointer }
