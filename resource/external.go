package resource

import (
	"errors"
	"fmt"

	"github.com/cistern-gpu/cistern/cuda"
)

// ExternalOptions are functions of the user's and what is to be known of their memory.
type ExternalOptions struct {
	// Alloc gets size bytes, never 0, aligned to align bytes; 0 is what it has. Null without an error is out of memory.
	Alloc func(size, align uint64, st cuda.Stream) (cuda.Ptr, error)
	// Free gives memory back. See Resource.Free for what the caller knows.
	Free func(p cuda.Ptr, size, align uint64, st cuda.Stream) error
	// MemInfo may be nil where it is not known.
	MemInfo func() (free, total uint64, err error)
	// Traits describe the memory; Name is "external" where it is empty, Align 256 where it is 0.
	Traits Traits
}

// External is memory from functions of the user's. A result that is not aligned as it should be is given back, and an
// error.
func External(o ExternalOptions) (Resource, error) {
	if o.Alloc == nil || o.Free == nil {
		return nil, errors.New("external: a function to allocate and one to free are needed")
	}
	if o.Traits.Name == "" {
		o.Traits.Name = "external"
	}
	if o.Traits.Align == 0 {
		o.Traits.Align = 256
	}
	if o.Traits.Align&(o.Traits.Align-1) != 0 {
		return nil, fmt.Errorf("external: %w of %d bytes is not a power of two", ErrAlign, o.Traits.Align)
	}
	return &external{o}, nil
}

type external struct{ ExternalOptions }

// Alloc lets requests for more than the natural alignment pass: the function gets it as an argument.
func (e *external) Alloc(size, align uint64, st cuda.Stream) (cuda.Ptr, error) {
	if size == 0 {
		return 0, nil
	}
	if err := Check(e.Traits().Name, e.Traits().Device, size, align, max(align, 1)); err != nil {
		return 0, err
	}
	p, err := e.ExternalOptions.Alloc(size, align, st)
	if err != nil {
		return 0, err
	}
	if p == 0 {
		return 0, fmt.Errorf("%s memory of %d bytes on device %d: %w", e.Traits().Name, size, e.Traits().Device, cuda.ErrOutOfMemory)
	}
	if align = max(align, e.Traits().Align); uint64(p)&(align-1) != 0 {
		err := fmt.Errorf("%s memory at %#x lacks the %w of %d bytes", e.Traits().Name, uint64(p), ErrAlign, align)
		return 0, both(err, e.ExternalOptions.Free(p, size, align, st))
	}
	return p, nil
}

func (e *external) Free(p cuda.Ptr, size, align uint64, st cuda.Stream) error {
	if p == 0 {
		return nil
	}
	return e.ExternalOptions.Free(p, size, align, st)
}

func (e *external) MemInfo() (free, total uint64, err error) {
	if e.ExternalOptions.MemInfo == nil {
		return 0, 0, fmt.Errorf("%s: the resource does not report how much memory there is", e.Traits().Name)
	}
	return e.ExternalOptions.MemInfo()
}

func (e *external) Equal(other Resource) bool { return Resource(e) == other }

func (e *external) Traits() Traits { return e.ExternalOptions.Traits }
