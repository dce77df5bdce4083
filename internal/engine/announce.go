package engine

import (
	"slices"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/deadline"
	"github.com/cistern-gpu/cistern/internal/engine/phys"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/internal/lockrank"
)

// Those who register memory elsewhere, with a network card or with NCCL, must know what is mapped. They are told of it
// when it is out of everybody's reach: of new memory before any of it is handed out, of memory that goes when the GPU is
// done with it and before it is unmapped. No lock is held meanwhile.

// OnUnmap sets the one function (nil: none) that is called before memory of the device is unmapped or given back to
// where it came from, once for each chunk or segment. The GPU is done with the memory then, and none of it is handed
// out. While there is such a function memory stays where it was mapped: nothing moves, and what unmaps are Trim, the end
// of a pool, and the last stage before a request fails, which takes free memory from all pools as StageLend.
//
// The function is called with no lock held, perhaps by several threads at once. It may free, and ask, but must not
// allocate from the device or trim it. A request that would fail while another thread is telling waits for that, for at
// most a second for each call of the function, so that locks of the caller's do no more harm. When OnUnmap returns no call of the former function is
// under way, so a function must not replace itself.
func (d *Device) OnUnmap(f func(addr cuda.Ptr, size uint64)) {
	d.state.observers.set(&d.state.observers.onUnmap, f) // +checklocksignore: of the field only the address is taken
}

// OnMap sets the one function (nil: none) that is told of new memory of the device, chunk by chunk or segment by segment,
// before any of it is handed out. Snapshot tells what was mapped before. What is said of the function of OnUnmap holds
// for this one.
func (d *Device) OnMap(f func(addr cuda.Ptr, size uint64)) {
	d.state.observers.set(&d.state.observers.onMap, f) // +checklocksignore: likewise
}

// observer is a function that is told of memory, and how often it is being called. Guarded by Device.mu.
type observer struct {
	f     func(addr cuda.Ptr, size uint64)
	calls int
}

func (ob *observers) set(at **observer, f func(addr cuda.Ptr, size uint64)) {
	ob.gpu.mu.Lock()
	defer ob.gpu.mu.Unlock()
	old := *at
	*at = nil
	if f != nil {
		*at = &observer{f: f}
	}
	for old != nil && old.calls > 0 {
		ob.awaitPublished(nil)
	}
}

// A request waits for a function that may be waiting for the request's own thread for observerTimeout. It begins anew when the
// call that was the oldest has ended: functions that come back, however slowly, fail no request. So that a request which nothing
// can meet fails while other threads never stop publishing, that happens observerCalls times at most.
const (
	observerTimeout = time.Second
	observerCalls   = 20
)

// observerWait is a request's wait.
type observerWait struct {
	deadline.Deadline
	oldest uint64 // the call that it waits for
	calls  int    // for how many it has waited
}

// waitFor has the waiter wait for the oldest call under way.
func (w *observerWait) waitFor(oldest uint64) {
	if w.oldest != oldest && w.calls < observerCalls {
		*w = observerWait{Deadline: deadline.Deadline{Limit: observerTimeout}, oldest: oldest, calls: w.calls + 1}
	}
}

// awaitPublished waits until a call of an observer has ended, or, where that is given, until timeout is at an end.
// The caller holds Device.mu and nothing else; it is let go meanwhile.
//
// +checklocks:ob.gpu.mu
func (ob *observers) awaitPublished(w *observerWait) {
	if ob.publishDone == nil {
		ob.publishDone = make(chan struct{})
	}
	published := ob.publishDone
	ob.gpu.mu.Unlock()
	defer ob.gpu.mu.Lock()
	if w == nil {
		<-published
		return
	}
	w.Poll(func() bool {
		select {
		case <-published:
			return true
		default:
			return false
		}
	})
}

// publish calls a function, if there is one, for ranges that are out of everybody's reach. The caller holds Device.mu and
// nothing else; it is let go meanwhile.
//
// +checklocks:ob.gpu.mu
func (ob *observers) publish(t *observer, ranges []run) {
	if t == nil || len(ranges) == 0 {
		return
	}
	t.calls++
	ob.published++
	ob.publishing = append(ob.publishing, ob.published)
	defer ob.publishedBy(t, ob.published) // also if f panics
	ob.gpu.mu.Unlock()
	defer ob.gpu.mu.Lock()
	lockrank.MayCall()
	for _, r := range ranges {
		t.f(cuda.Ptr(r.addr), r.size)
	}
}

// publishedBy ends a call of publish.
//
// +checklocks:ob.gpu.mu
func (ob *observers) publishedBy(t *observer, call uint64) {
	t.calls--
	i := slices.Index(ob.publishing, call)
	ob.publishing = slices.Delete(ob.publishing, i, i+1)
	if ob.publishDone != nil {
		close(ob.publishDone)
		ob.publishDone = nil
	}
}

// unmapReady unmaps the old mappings that the GPU is known to be done with, telling of them before where somebody wants
// to know. The caller holds Device.mu and nothing else; it is let go meanwhile.
//
// +checklocks:mv.gpu.mu
func (mv *mover) unmapReady() {
	defer mv.reap(nil)
	if mv.observers.onUnmap == nil || mv.phys.mem.Stale.Len() == 0 || mv.gpu.health.Broken() != nil {
		return
	}
	var ranges []run
	stale := mv.phys.mem.Stale.All()
	for i := range stale {
		if z := &stale[i]; z.Published == phys.Unpublished && mv.streams.all[z.Stream].timeline.IsOver(z.Epoch) {
			z.Published = phys.BeingPublished
			ranges = append(ranges, run{z.Addr, mv.phys.mem.Chunk(z.Chunk).Size})
		}
	}
	defer func() {
		mine := map[uint64]bool{} // addresses: no two old mappings have the same
		for _, r := range ranges {
			mine[r.addr] = true
		}
		stale := mv.phys.mem.Stale.All()
		for i := range stale {
			if mine[stale[i].Addr] {
				stale[i].Published = phys.Published
			}
		}
	}()
	mv.observers.publish(mv.observers.onUnmap, ranges)
}

// publish tells of new memory that was mapped at block, the last part of which has just become free, and makes it free
// memory of the request's stream heap. stamp is until when the stream heap's stream uses it. The caller holds Device.mu and the
// stream heap's lock; both are let go meanwhile, so that the request may find less than it was meant to.
//
// +checklocks:c.d.gpu.mu
func (c *request) publish(block heap.ID, at run, stamp uint64, pieces []run) {
	d, s := c.d, c.s
	block = s.blocks.Unmap(block, at.addr, at.size) // a block that is not taken, looked up or merged with
	d.state.phys.quota.Spare += at.size
	d.state.phys.rebalanceAll(s, nil)
	s.arena.Unlock()
	defer func() {
		s.arena.Lock()
		d.state.phys.quota.Spare -= at.size
		s.blocks.Map(s.blocks.Reap(block), at.addr, at.size, stamp)
		s.gauges.SetFree(s.blocks.FreeBlocks, int64(at.size))
	}()
	d.state.observers.publish(d.state.observers.onMap, pieces)
}
