package engine

import (
	"errors"
	"fmt"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/journal"
	"github.com/cistern-gpu/cistern/internal/engine/views"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/memory"
)

// Requests with options. A block's label is its tag and its library in one number (heap.Block.Tag). Sums look at every block,
// so that requests and frees need not count by label.

// AllocOptions say more of a request than its size and stream.
type AllocOptions struct {
	Pool *Pool // nil: where the stream is routed to, else the default pool
	Tag  uint32
	// Library numbers the library that makes the request, 1 to MaxLibrary; 0 is unknown. The numbers are the caller's, as tags
	// are.
	Library uint8
	// HostOrder asks for memory that the host knows the GPU to be done with, for callers that do not say on which stream they
	// use it. Memory that is known to be done is preferred; else the end of its last use is waited for, with no lock held. On a
	// stream that is being captured it is an error. The free is in the order of the stream that is named, as a rule the legacy
	// default stream: work on it, and on all streams that block with it, is over before the memory is used again. Other streams
	// are to be named by RecordStream before the free, or waited for.
	HostOrder bool
	// Cached asks for cached memory that may be used at once, and for nothing else. Where it takes more (a driver call, a wait
	// for the GPU or for another thread, a callback), the result is null, without an error, and nothing happened. It is for
	// callers that hold a lock which others may need meanwhile. Not together with HostOrder.
	Cached bool
	// Stack is the number of the request's stack (Stacks.Of), 0 none. The history names it, and the block keeps it while stacks
	// are kept (Stacks.Keep).
	Stack uint32
	// Thread is the kernel's number of the requesting thread, 0 unknown, for the history.
	Thread uint32
}

// origin is where a request comes from.
type origin struct {
	label, stack, thread uint32
}

// AllocWith is Alloc with options.
func (d *Device) AllocWith(size uint64, st *Stream, o AllocOptions) (cuda.Ptr, error) {
	p := o.Pool
	if p == nil {
		p = st.poolOn(&d.gpu)
	} else if p.dev != d {
		return 0, fmt.Errorf("pool {%d, %d} belongs to device %d, not to device %d", p.id[0], p.id[1], p.dev.id, d.id)
	}
	if o.Tag > memory.MaxTag {
		return 0, fmt.Errorf("tag %d: the largest is %d", o.Tag, memory.MaxTag)
	}
	if o.Tag != 0 && !d.state.usage.tagged.Load() {
		d.state.usage.tagged.Store(true)
	}
	if o.Library != 0 && !d.state.usage.labelled.Load() {
		d.state.usage.labelled.Store(true)
	}
	by := origin{journal.Label(o.Tag, o.Library), o.Stack, o.Thread}
	if catch := d.catch.Load(); catch != nil && by.stack == 0 {
		by.stack = (*catch)(size)
	}
	if o.Cached {
		if o.HostOrder {
			return 0, errors.New("host-ordered memory can need a wait, so it cannot be requested from the cache alone")
		}
		return p.allocCached(size, st, by), nil
	}
	addr, err := allocOrdered(p, size, st, by, o.HostOrder)
	for err != nil && o.Pool == nil && replaced(p, st, err) {
		p = st.poolOn(&d.gpu)
		addr, err = allocOrdered(p, size, st, by, o.HostOrder)
	}
	return addr, err
}

// allocOrdered is alloc, or allocHost.
func allocOrdered(p *Pool, size uint64, st *Stream, by origin, host bool) (cuda.Ptr, error) {
	if host {
		return p.allocHost(size, st, by)
	}
	return p.alloc(size, st, by)
}

// LibraryUsage adds up the live blocks by library, the most bytes first. It looks at every block.
func (v *Views) LibraryUsage() []memory.LibraryUse {
	v.gpu.mu.Lock()
	defer v.gpu.mu.Unlock()
	return v.usage.byLibrary()
}

// byLibrary is LibraryUsage. The caller holds Device.mu and nothing else.
//
// +checklocks:us.gpu.mu
func (us *usage) byLibrary() []memory.LibraryUse {
	return us.sum(func(_ *streamHeap, _ heap.ID, b *heap.Block) uint32 { return uint32(journal.LibraryOf(b.Tag)) }).Libraries()
}

// sum adds up the live blocks by a key. The caller holds Device.mu and nothing else.
//
// +checklocks:us.gpu.mu
func (us *usage) sum(key func(*streamHeap, heap.ID, *heap.Block) uint32) views.Usage {
	out := views.Usage{}
	for _, s := range us.pools.heaps {
		if s == nil {
			continue
		}
		s.arena.Lock()
		s.blocks.Each(func(id heap.ID, b *heap.Block) bool {
			if b.State == heap.Used {
				out.Add(key(s, id, b), b, s.paused.missing(b))
			}
			return true
		})
		s.arena.Unlock()
	}
	return out
}
