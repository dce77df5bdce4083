package resource

import (
	"fmt"
	"sync/atomic"

	"github.com/cistern-gpu/cistern/cuda"
)

// limitUnit is what sizes are rounded up to where they are counted against a limit, in bytes: RMM's alignment of all
// allocations.
const limitUnit = 256

// LimitingAdaptor bounds what is out through it, as RMM's limiting_resource_adaptor: a request that would exceed the
// limit is out of memory, and the upstream is not asked. Sizes count rounded up to 256 bytes, or to the alignment that
// was asked for where that is larger.
type LimitingAdaptor struct {
	adaptor
	limit uint64
	out   atomic.Uint64
}

// Limiting makes that adaptor; limit is in bytes.
func Limiting(up Resource, limit uint64) *LimitingAdaptor {
	return &LimitingAdaptor{adaptor: adaptor{up}, limit: limit}
}

// Limit is the limit in bytes, Allocated what counts against it.
func (l *LimitingAdaptor) Limit() uint64     { return l.limit }
func (l *LimitingAdaptor) Allocated() uint64 { return l.out.Load() }

func padded(size, align uint64) uint64 {
	if align&(align-1) != 0 {
		align = 0 // the upstream refuses it
	}
	return roundUp(size, max(align, limitUnit))
}

// Alloc takes from the limit first, so that two threads cannot both have what is left of it.
func (l *LimitingAdaptor) Alloc(size, align uint64, st cuda.Stream) (cuda.Ptr, error) {
	n := padded(min(size, everything), min(align, everything))
	for {
		out := l.out.Load()
		if out > l.limit || n > l.limit-out {
			return 0, &LimitError{Limit: l.limit, Allocated: out, Size: size}
		}
		if l.out.CompareAndSwap(out, out+n) {
			break
		}
	}
	p, err := l.up.Alloc(size, align, st)
	if err != nil || p == 0 {
		l.out.Add(-n)
	}
	return p, err
}

func (l *LimitingAdaptor) Free(p cuda.Ptr, size, align uint64, st cuda.Stream) error {
	err := l.up.Free(p, size, align, st)
	if err == nil && p != 0 {
		l.out.Add(-padded(size, align))
	}
	return err
}

// MemInfo is what is left of the limit, and the limit, or the upstream's memory where that is less.
func (l *LimitingAdaptor) MemInfo() (free, total uint64, err error) {
	free, total, err = l.up.MemInfo()
	if err != nil {
		return 0, 0, err
	}
	return min(free, l.limit-min(l.out.Load(), l.limit)), min(total, l.limit), nil
}

func (l *LimitingAdaptor) Equal(other Resource) bool { return sameResource(l, other) }

// LimitError is a request that a LimitingAdaptor refused. errors.Is finds cuda.ErrOutOfMemory in it.
type LimitError struct {
	Limit, Allocated, Size uint64 // bytes
}

func (e *LimitError) Error() string {
	return fmt.Sprintf("%d bytes beside the %d allocated exceed the limit of %d bytes: %v", e.Size, e.Allocated, e.Limit,
		cuda.ErrOutOfMemory)
}

func (e *LimitError) Unwrap() error { return cuda.ErrOutOfMemory }
