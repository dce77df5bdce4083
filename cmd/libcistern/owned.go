//go:build linux && cgo

package main

/*
#include "shim.h"
*/
import "C"

import (
	"sync"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/resource"
)

// owned is a pool's resource that was made here, by name. What it holds beside memory (a pool of the driver's, a stream, a
// file) goes when the pool has been released and all memory is back, whichever comes last.
type owned struct {
	resource.Resource
	mu sync.Mutex
	// +checklocks:mu
	out int // allocations, and calls under way
	// +checklocks:mu
	ended bool // no more requests come
	// +checklocks:mu
	gone bool // it is closed
}

// ownedTrimmer is that over a resource that keeps memory, which it is asked to give back as long as it is there.
type ownedTrimmer struct {
	*owned
	trimmer resource.Trimmer
}

// own makes a resource a pool's.
func own(r resource.Resource) (resource.Resource, *owned) {
	o := &owned{Resource: r}
	if t, ok := resource.As[resource.Trimmer](r); ok {
		return &ownedTrimmer{o, t}, o
	}
	return o, o
}

func (o *ownedTrimmer) Trim() error {
	if !o.use() {
		return nil
	}
	defer o.less()
	return o.trimmer.Trim()
}

// Upstream makes what the resource can do known (resource.As).
func (o *owned) Upstream() resource.Resource { return o.Resource }

func (o *owned) Alloc(size, align uint64, st cuda.Stream) (cuda.Ptr, error) {
	if !o.use() {
		return 0, &failure{C.CISTERN_INVALID, "the pool was released"}
	}
	p, err := o.Resource.Alloc(size, align, st)
	if err != nil || p == 0 {
		o.less()
	}
	return p, err
}

func (o *owned) Free(p cuda.Ptr, size, align uint64, st cuda.Stream) error {
	err := o.Resource.Free(p, size, align, st)
	if err == nil && p != 0 {
		o.less()
	}
	return err
}

// itself is what two resources are compared by.
func (o *owned) itself() *owned { return o }

func (o *owned) Equal(other resource.Resource) bool {
	x, ok := other.(interface{ itself() *owned })
	return ok && (x.itself() == o || o.Resource.Equal(x.itself().Resource))
}

// use notes that an allocation or a call is coming, and reports whether there is still something to call.
func (o *owned) use() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.gone {
		return false
	}
	o.out++
	return true
}

// less notes that it is over.
func (o *owned) less() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.out--
	o.close()
}

// end says that no more requests come.
func (o *owned) end() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ended = true
	o.close()
}

// close closes what is not needed any more. What fails then does no harm: the memory is back.
//
// +checklocks:o.mu
func (o *owned) close() {
	if o.ended && o.out == 0 && !o.gone {
		o.gone = true
		_ = resource.Close(o.Resource)
	}
}
