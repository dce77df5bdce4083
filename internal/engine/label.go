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

// Requests that say more: on whose behalf, and that no stream will be named. A block's label is its tag and its library in
// one number (heap.Block.Tag); sums look at every block, so that requests and frees keep no books of it.

// AllocOptions say more of a request than its size and stream.
type AllocOptions struct {
	Pool *Pool // nil: where the stream is routed to, else the default pool
	Tag  uint32
	// Library numbers the library that asks, 1 to MaxLibrary; 0 is who does not say. What the numbers stand for is the
	// caller's business, as with tags.
	Library uint8
	// HostOrder asks for memory that the host knows the GPU to be done with, for those who do not say on which stream
	// they use it. Memory that is known so already is preferred; else the end of its last use is waited for, with no
	// lock held. On a stream that is being captured it is an error. The stream that is named, as a rule the legacy
	// default stream, is the one whose order the free is in: work on it, and on all streams that block with it, is over
	// before the memory is used again. Streams that do not block with it are to be named by RecordStream before the
	// free, or be waited for.
	HostOrder bool
	// Cached asks for what is cached and may be used at once, and for nothing else: where it takes more (a driver call,
	// waiting for the GPU or for another thread, asking others) the result is null, without an error, and nothing
	// happened. It is for those who hold a lock that others may need meanwhile. Not together with HostOrder.
	Cached bool
	// Stack is the number of the stack that asks (Allocator.StackOf), 0 none: the history tells it, and the block keeps it
	// while stacks are kept (KeepStacks).
	Stack uint32
	// Thread is the kernel's number of the thread that asks, 0 unknown, for the history.
	Thread uint32
}

// origin is on whose behalf a request is made.
type origin struct {
	label, stack, thread uint32
}

// AllocWith is Alloc with options.
func (d *Device) AllocWith(size uint64, st *Stream, o AllocOptions) (cuda.Ptr, error) {
	p := o.Pool
	if p == nil {
		if p = st.route.Load(); p == nil || p.dev != d {
			p = d.pool0
		}
	} else if p.dev != d {
		return 0, fmt.Errorf("pool {%d, %d} is device %d's, not device %d's", p.id[0], p.id[1], p.dev.id, d.id)
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
			return 0, errors.New("host-ordered memory may have to be waited for: it cannot be asked for from the cache alone")
		}
		return p.allocCached(size, st, by), nil
	}
	if o.HostOrder {
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

// libraryUsage is LibraryUsage. The caller holds Device.mu and nothing else.
//
// +checklocks:us.gpu.mu
func (us *usage) byLibrary() []memory.LibraryUse {
	return us.sum(func(_ *streamHeap, _ heap.ID, b *heap.Block) uint32 { return uint32(journal.LibraryOf(b.Tag)) }).Libraries()
}

// usage adds up the live blocks by a key. The caller holds Device.mu and nothing else.
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
