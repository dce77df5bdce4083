package engine

import (
	"time"

	"github.com/cistern-gpu/cistern/internal/deadline"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/views"
	"github.com/cistern-gpu/cistern/internal/latency"
	"github.com/cistern-gpu/cistern/internal/lockrank"
	"github.com/cistern-gpu/cistern/memory"
)

// glance is what Gauges knows.
type glance struct {
	mu     lockrank.Mutex
	last   memory.Gauges   // +checklocks:mu
	before memory.Counters // guarded by Device.mu: what ResetAccumulated has taken from the counts
	recent quota.Recent    // +checklocks:mu
	// requests are all that were met, as of last, and took is how long those took that the hot path did not meet.
	requests uint64            // +checklocks:mu
	took     latency.Histogram // +checklocks:mu
	slow     latency.Histogram // in us, of requests that took the device's lock, guarded by Device.mu
}

// glanceWait is how long Gauges waits for a request that holds the device's lock over driver calls, of which one may wait
// for the GPU.
const glanceWait = 2 * time.Millisecond

// Gauges fills g in. It is for displays that refresh: it allocates no Go memory, makes no driver call of its own, leaves the
// blocks in magazines where they are, and waits some milliseconds at most. A device that is busier than that has the figures of
// the last call, but for DriverCalls.
//
// +checklocksignore: TryLock is not known to the analyser
func (v *Views) Gauges(g *memory.Gauges) {
	x := &v.phys.glance
	x.mu.Lock()
	defer x.mu.Unlock()
	wait := deadline.Deadline{Limit: glanceWait}
	if wait.Poll(v.gpu.mu.TryLock) {
		before := x.last.Paused
		most := v.phys.look(&x.last)
		x.requests, x.took = v.phys.requests(), x.slow
		v.gpu.mu.Unlock()
		// What was paused since the last call had physical memory at its beginning, what was resumed has it now.
		x.recent.Add(time.Since(started), most-min(most, before, x.last.Paused))
		x.last.Recent = x.recent.Peaks()
	}
	x.last.DriverCalls = v.gpu.drv.Calls()
	*g = x.last
}

// Requests returns how many requests were met, as of the last call of Gauges, and adds the times in microseconds of those that the
// hot path did not meet to took: from the call until the request was met or failed, waits for locks and for the GPU included. The
// others took less than a microsecond, and no clock is read for them.
func (v *Views) Requests(took *latency.Histogram) uint64 {
	x := &v.phys.glance
	x.mu.Lock()
	defer x.mu.Unlock()
	took.Merge(&x.took)
	return x.requests
}

// requests is how many requests were ever met. The sums were taken just now.
//
// +checklocks:ph.gpu.mu
func (ph *physical) requests() uint64 {
	n := ph.quota.Retired(quota.Allocs)
	for _, l := range ph.pools.arenas {
		l.LookIn()
		for c := range l.Quota.Classes {
			n += l.Quota.Classes[c].Ever()[quota.Allocs]
		}
		l.Unlock()
	}
	return uint64(n)
}

// pinnedFree is the free memory of pinned pools. The caller holds Device.mu and no arena's lock.
//
// +checklocksignore: the lock is known by another name here
func (pt *poolTable) pinnedFree() (bytes uint64) {
	for _, s := range pt.heaps {
		if s != nil && s.pool.pinned {
			s.arena.LookIn()
			bytes += uint64(s.gauges.Now()[quota.FreeBytes])
			s.arena.Unlock()
		}
	}
	return bytes
}

// started is the time that Recent counts from.
var started = time.Now()

// look takes the sums, and returns the most that was active since it was called last. The caller holds Device.mu and nothing else.
//
// +checklocks:ph.gpu.mu
func (ph *physical) look(g *memory.Gauges) (most uint64) {
	var now quota.Gauges
	most = uint64(ph.quota.TakeRecent())
	for _, l := range ph.pools.arenas {
		l.LookIn()
		for c := range l.Quota.Classes {
			for i, v := range l.Quota.Classes[c].Now() {
				now[i] += v
			}
		}
		most += uint64(l.Quota.TakeRecent())
		l.Unlock()
	}
	*g = views.Gauges(&ph.quota, &now)
	g.Pinned = ph.pools.pinnedFree()
	g.Retries, g.OOMs = uint64(ph.counts.Retries+ph.glance.before.Retries), uint64(ph.counts.OOMs+ph.glance.before.OOMs)
	return most
}
