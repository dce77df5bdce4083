//go:build linux && cgo && cistern_inject

package main

import (
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/open"
	"github.com/cistern-gpu/cistern/cuda/sim"
)

// Built with the tag cistern_inject, which only a test sets, the library has a bug: getting more than injectAfter bytes
// from the driver panics.
const injectAfter = 512 << 20

func init() {
	openDriver = func(spec string) (cuda.Driver, error) {
		drv, err := open.Open(spec)
		if err != nil {
			return nil, err
		}
		return &faulty{Driver: drv.(*sim.Driver)}, nil
	}
}

type faulty struct {
	*sim.Driver
	created uint64
}

func (f *faulty) MemCreate(size uint64, prop cuda.MemProp) (cuda.Handle, error) {
	if f.created += size; f.created > injectAfter {
		panic("injected")
	}
	return f.Driver.MemCreate(size, prop)
}
