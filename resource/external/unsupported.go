//go:build !linux || !cgo

package external

import (
	"errors"

	"github.com/cistern-gpu/cistern/cuda"
)

type functions struct{}

func load(Options) (*functions, error) {
	return nil, errors.New("external: this program was built without functions of libraries (they need Linux and cgo)")
}

func (f *functions) alloc(uint64, cuda.Device, cuda.Stream) cuda.Ptr { return 0 }

func (f *functions) dealloc(cuda.Ptr, uint64, cuda.Device, cuda.Stream) {}
