// Package arena is the hot path of the engine: requests that are met from cache, and frees. An arena is what one (pool,
// stream) owns: a stream heap for each size class, and one lock over them and their statistics. A program uses a stream from
// one thread at a time as a rule, so the lock is nearly always free.
//
// An operation of this package takes that lock and no other but leaves, allocates no Go memory and makes no driver call,
// except that a free may record an event on its stream (Heap.NoteFree). It knows nothing of the device. Where it does not
// suffice it changes nothing and returns an Outcome, and the caller carries the operation out with the device's lock.
//
// # Locks
//
// The arena's lock protects the stream heaps of all classes, also their blocks and the gauges, which the engine shares. What
// the engine changes there it changes with the device's lock as well.
//
// # Magazines
//
// The C library hands blocks of the default pool out again, and takes them back, without a call into Go, as long as that is
// between the program and one arena: package internal/magazine. The lock of an arena with a magazine excludes C as well, and
// its holders find the magazine empty: what C code took back is free. Go programs have no magazines.
package arena

import (
	"sync/atomic"

	"github.com/cistern-gpu/cistern/internal/engine/health"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/internal/lockrank"
	"github.com/cistern-gpu/cistern/internal/magazine"
)

// Arena is what one (pool, stream) owns.
type Arena struct {
	mu       lockrank.Mutex
	magazine atomic.Pointer[magazine.Magazine] // set once, by holders of mu; nil while there is none
	health   *health.State
	late     *Late

	Quota   quota.Arena // guarded by the arena's lock
	Planned bool        // the engine's, guarded by the device's lock

	// +checklocks:mu
	heaps [quota.NumClasses]*Heap // by class, nil where there is none
}

// New is an arena without stream heaps of a device with that state.
func New(h *health.State, late *Late) *Arena {
	return &Arena{mu: lockrank.Mutex{Rank: lockrank.Arena}, health: h, late: late}
}

// Lock locks the arena and empties its magazine.
//
// +checklocksacquire:a.mu
// +checklocksignore: it is the lock
func (a *Arena) Lock() {
	if lockrank.Checking() {
		a.mu.Lock()
	} else {
		a.mu.Mutex.Lock()
	}
	if f := a.magazine.Load(); f != nil {
		a.empty(f)
	}
}

// TryLock is Lock where no thread has to be waited for.
//
// +checklocksignore: it is the lock
func (a *Arena) TryLock() bool {
	if !a.mu.TryLock() {
		return false
	}
	if f := a.magazine.Load(); f != nil {
		a.empty(f)
	}
	return true
}

// LookIn is Lock for a holder that only reads the gauges: the magazine keeps its blocks.
//
// +checklocksacquire:a.mu
func (a *Arena) LookIn() {
	a.mu.Lock()
	if f := a.magazine.Load(); f != nil {
		f.Lock()
		a.takeStock(f)
	}
}

// Enter is Lock, and leaves the magazine as it is: the heap takes its blocks for used ones, and the gauges are as of the last
// stock.
//
// +checklocksacquire:a.mu
func (a *Arena) Enter() {
	a.mu.Lock()
	if f := a.magazine.Load(); f != nil {
		f.Lock()
	}
}

// leave is Unlock for a holder that changed nothing but the magazine f since it entered.
//
// +checklocksrelease:a.mu
func (a *Arena) leave(f *magazine.Magazine) {
	f.Unlock()
	a.mu.Unlock()
}

// Unlock unlocks the arena, and sets what C may do from now on.
//
// +checklocksrelease:a.mu
// +checklocksignore: it is the lock
func (a *Arena) Unlock() {
	if f := a.magazine.Load(); f != nil {
		a.refill(f)
	}
	if lockrank.Checking() {
		a.mu.Unlock()
	} else {
		a.mu.Mutex.Unlock()
	}
}

// Add gives the arena a stream heap with these blocks, in the order of a stream.
func (a *Arena) Add(class int, t *timeline.Stream, blocks *heap.Heap) *Heap {
	h := &Heap{arena: a, class: class, stream: t, blocks: blocks, gauges: &a.Quota.Classes[class]}
	a.Lock()
	a.heaps[class] = h
	a.Unlock()
	return h
}

// Succeed puts a stream heap of another stream in the place of this one, with the blocks, all of which are over. This one
// stays, with empty, for callers that may still have it.
//
// +checklocksignore: the caller has locked the arena
func (h *Heap) Succeed(t *timeline.Stream, empty *heap.Heap) *Heap {
	n := &Heap{arena: h.arena, class: h.class, stream: t, blocks: h.blocks, gauges: h.gauges}
	n.blocks.FreeBins.Each(heap.Align, func(_ heap.ID, b *heap.Block) bool {
		b.Stamp = 0
		return true
	})
	h.blocks = empty
	h.arena.heaps[h.class] = n
	return n
}

// Remove removes the stream heap of a class. The arena is gone with its last one. The caller has the device's lock as well.
//
// +checklocks:a.mu
func (a *Arena) Remove(class int) {
	a.heaps[class] = nil
	a.Quota.Gone = a.heaps == [quota.NumClasses]*Heap{}
}
