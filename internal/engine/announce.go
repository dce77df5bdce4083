package engine

import (
	"slices"
	"sync/atomic"
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
// that, at most a second for each call of the function, so that the caller's own locks do no more harm. When OnUnmap returns no call of the
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

// A request waits for one call of an observer's function for observerTimeout at most, because the function may be waiting for
// the request's own thread. A thread calls the function for range after range: the wait begins anew when a call has returned,
// and while that thread only waits for Device.mu, which others hold through slow driver calls, it does not pass. So neither slow
// functions nor a slow driver fail a request. A request that nothing can meet fails although other threads never stop publishing:
// it waits anew for observerThreads of them at most, and for observerTotal in all.
const (
	observerTimeout = time.Second
	observerThreads = 20
	observerTotal   = observerThreads * observerTimeout
)

// publication is one thread's way through the ranges that an observer is notified of.
type publication struct {
	returned atomic.Uint32 // how many calls of the function have returned
	ended    atomic.Bool   // all have: the thread waits for Device.mu
}

// observerWait is a request's wait.
type observerWait struct {
	call, total deadline.Deadline
	oldest      *publication // that it waits for
	returned    uint32       // of its calls, when the wait for the next began
	threads     int          // for how many it has waited
}

// goesOn reports whether the request still waits, now that this is the oldest publication under way.
func (w *observerWait) goesOn(oldest *publication, now time.Time) bool {
	returned, another := oldest.returned.Load(), w.oldest != oldest
	switch {
	case another && w.threads < observerThreads:
		w.threads++
	case another || w.returned == returned && !oldest.ended.Load():
		return w.left(now) > 0
	}
	w.oldest, w.returned, w.call = oldest, returned, deadline.Deadline{Limit: observerTimeout}
	return w.left(now) > 0
}

func (w *observerWait) left(now time.Time) time.Duration {
	if !w.total.Begun() {
		w.total.Limit = observerTotal
	}
	return min(w.call.Left(now), w.total.Left(now))
}

// awaitPublished waits until a publication has ended, or, where a request's wait is given, until that is over.
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
	deadline.Poll(func(now time.Time) bool { return w.goesOn(w.oldest, now) }, func() bool {
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
	by := new(publication)
	ob.publishing = append(ob.publishing, by)
	defer ob.publishedBy(t, by) // also if f panics
	ob.gpu.mu.Unlock()
	defer ob.gpu.mu.Lock()
	defer by.ended.Store(true)
	lockrank.MayCall()
	for _, r := range ranges {
		t.f(cuda.Ptr(r.addr), r.size)
		by.returned.Add(1)
	}
}

// publishedBy ends a call of publish.
//
// +checklocks:ob.gpu.mu
func (ob *observers) publishedBy(t *observer, by *publication) {
	t.calls--
	i := slices.Index(ob.publishing, by)
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
