//go:build !linux

package offload

import (
	"errors"

	"github.com/cistern-gpu/cistern/cuda"
)

// Elsewhere the driver allocates page-locked memory.

const canMap = false

type hostMemory struct{}

func (hostMemory) is() bool       { return false }
func (hostMemory) bytes() []byte  { return nil }
func (hostMemory) base() cuda.Ptr { return 0 }

func mapHost(uint64) (hostMemory, error) { return hostMemory{}, errors.ErrUnsupported }
func unmapHost(hostMemory)               {}
func enough(uint64) error                { return nil }
