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

// Libraries that register memory elsewhere, with a network card or with NCCL, must know which memory is mapped. Their functions
// learn of new memory before any of it is handed out, and of old memory when the GPU is done with it and before it is unmapped.
// No request can get the memory meanwhile, and no lock is held.

// OnUnmap sets the one function (nil: none) that is called before memory of the device is unmapped or given back to its
// upstream, once for each chunk or segment. The GPU is done with the memory, and none of it is handed out. While there is such
// a function, nothing moves: memory is unmapped by Trim, at the end of a pool, and by the last stage before a request fails,
// which takes free memory from all pools as StageLend.
//
// The function is called with no lock held, perhaps by several threads at once. It may free memory and read statistics, but
// must not allocate from the device or trim it. A request that would fail while another thread calls an observer waits for
// that, at most a second for each call, so that the caller's own locks do no more harm. When OnUnmap returns no call of the
// former function is under way, so a function must not replace itself.
func (d *Device) OnUnmap(f func(addr cuda.Ptr, size uint64)) {
	d.state.observers.set(&d.state.observers.onUnmap, f) // +checklocksignore: of the field only the address is taken
}

// OnMap sets the one function (nil: none) that is called with new memory of the device, chunk by chunk or segment by segment,
// before any of it is handed out. Views.Snapshot lists the memory that was mapped before. The rules for the function of OnUnmap
// apply here, too.
func (d *Device) OnMap(f func(addr cuda.Ptr, size uint64)) {
	d.state.observers.set(&d.state.observers.onMap, f) // +checklocksignore: likewise
}

// observer is a function that is notified of memory, and how often it is being called. Guarded by Device.mu.
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

// A request waits for a call of an observer for observerTimeout at most, because the function may be waiting for the request's
// own thread. The wait begins anew when the oldest call has ended, so slow functions fail no request. It begins anew
// observerCalls times at most, so that a request which nothing can meet fails although other threads never stop publishing.
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

// publish calls a function, if there is one, for ranges that are out of reach. The caller holds Device.mu and nothing else; it
// is let go meanwhile.
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

// unmapReady unmaps the old mappings that the GPU is known to be done with. If there is an observer, it is notified before. The
// caller holds Device.mu and nothing else; it is let go meanwhile.
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

// publish notifies the observer of new memory that was mapped at block, whose last part has just become free. Then it makes
// that free memory of the request's stream heap. stamp is until when the stream heap's stream uses it. The caller holds
// Device.mu and the stream heap's lock; both are let go meanwhile, so that the request may find less than it was meant to.
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
