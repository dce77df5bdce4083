package engine

import (
	"cmp"
	"time"

	"github.com/cistern-gpu/cistern/internal/engine/quota"
)

// The limit of free memory (config.Options.CacheLimit). As in mimalloc and tcmalloc, memory goes back when it was not needed for a
// while; as there, no thread of the engine's does that. Slow requests and slow frees look after it, and ReleaseUnused.
//
// Memory was not needed in a span of time if it was reserved beyond the highest active memory in the span. The hot path takes no
// step for that: a quota.Watch has requests and frees come to the device's lock when they exceed what was noted, at most a few
// times a span. Memory is released as for other processes (giveBack): what the host knows the GPU to be done with, largest chunks
// first. Below the limit there is no driver call.

// cacheLimit is when memory was released last, and is next.
type cacheLimit struct {
	gpu   *gpu
	phys  *physical
	pools *poolTable
	// +checklocks:gpu.mu
	began int64 // when the span began, in us of the journal's clock
	// +checklocks:gpu.mu
	next int64 // nothing is tried before
	// +checklocks:gpu.mu
	wait int64 // from the last try to the next, in us
}

// Nothing is released twice within firstRetry, as what the GPU was not done with will not be so at once. Where a try released
// nothing, waits double up to lastRetry. That is shorter than a training step: memory that each step uses last is never known to be
// unused between two steps, but is within one.
const (
	firstRetry = int64(10 * time.Millisecond / time.Microsecond)
	lastRetry  = 10 * firstRetry
)

// watchPart is by what part of its memory a device may exceed what was noted, and watchLeast by how much at least.
const (
	watchPart  = 64
	watchLeast = 2 << 20
)

// ReleaseUnused releases free memory of a device above the limit of free memory (config.Options.CacheLimit) that was not needed for as long as
// the options say, and returns how many bytes went. It does not wait for the GPU: what that is not done with stays. Requests and
// frees do the same when they take the device's lock. A program that may be idle for long calls it now and then.
func ReleaseUnused(d *Device) (released uint64, err error) {
	if d.opts.CacheLimit == 0 {
		return 0, nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return limitCache(d)
}

// limitCache is ReleaseUnused for a request or a free that is done. The caller holds Device.mu and nothing else.
//
// +checklocks:d.gpu.mu
func limitCache(d *Device) (released uint64, err error) {
	c := d.state.cache
	if d.opts.CacheLimit == 0 || d.health.Broken() != nil {
		return 0, nil
	}
	now := d.journal.Now()
	if !c.due(now) {
		if d.state.phys.quota.WatchReached() {
			c.watch()
		}
		return 0, nil
	}
	d.state.phys.rebalanceAll(nil, nil)
	over := c.unused()
	if over > 0 {
		g := giveBack{d: d, need: over, keep: less(d.state.phys.quota.Reserved, over)}
		if err = g.releaseIdle(); err == nil && g.missing() > 0 {
			err = g.mark()
		}
		released = g.released
	}
	c.tried(now, released, over-min(over, released))
	return released, err
}

// mark has events recorded behind the last uses of what is to go, so that a later try can see that they are over.
//
// +checklocks:g.d.gpu.mu
func (g *giveBack) mark() (first error) {
	for _, w := range g.unfinished() {
		if w.Epoch >= w.Stream.Epoch() {
			first = cmp.Or(first, w.Stream.CloseLate())
		}
	}
	return first
}

// due reports whether a span is over. A clock that was set back begins another one.
//
// +checklocks:c.gpu.mu
func (c *cacheLimit) due(now int64) bool {
	if now < c.began {
		c.began, c.next = now, now
	}
	return now >= c.next && now-c.began >= c.gpu.opts.CacheDecay.Microseconds()
}

// unused is by how many bytes the memory that was not needed in the span exceeds the limit. The sums have been taken.
//
// +checklocks:c.gpu.mu
func (c *cacheLimit) unused() uint64 {
	q := &c.phys.quota
	needed := q.Now(quota.ActiveBytes)
	if c.gpu.opts.CacheDecay > 0 {
		needed = q.Watch.MostActive()
	}
	have := int64(q.Total()) + q.Paused[quota.GroupAll].Current
	return uint64(max(0, have-needed-int64(c.kept())))
}

// kept is how many free bytes stay: the limit, and what may not be released or is not the device's own.
//
// +checklocks:c.gpu.mu
func (c *cacheLimit) kept() uint64 {
	n := min(c.gpu.opts.CacheLimit, maxRequest)
	for _, s := range c.pools.heaps {
		if s != nil && !mayGive(s.pool) {
			s.arena.Lock()
			n += s.blocks.FreeBytes
			s.arena.Unlock()
		}
	}
	return n
}

// tried begins another span, unless there is memory left that can go once the GPU is done with it. For that the span goes on, up
// to twice as long.
//
// +checklocks:c.gpu.mu
func (c *cacheLimit) tried(now int64, released, left uint64) {
	if c.wait = min(2*c.wait, lastRetry); released > 0 || c.wait < firstRetry {
		c.wait = firstRetry
	}
	c.next = now + c.wait
	w := &c.phys.quota.Watch
	if w.Soon = left >= segmentUnit; !w.Soon || now-c.began >= 2*c.gpu.opts.CacheDecay.Microseconds() {
		c.began, w.Active, w.Step = now, 0, 0
	}
	if w.Soon || c.gpu.opts.CacheDecay > 0 {
		w.Step = c.step()
	}
	c.watch()
}

// watch has the next free that makes much more memory free take the device's lock, or the first that exceeds the limit.
//
// +checklocks:c.gpu.mu
func (c *cacheLimit) watch() {
	q, kept := &c.phys.quota, int64(c.kept())
	if q.Watch.Free = kept; q.Now(quota.FreeBytes) >= kept {
		q.Watch.Free = q.Now(quota.FreeBytes) + c.step()
	}
	c.phys.rebalanceAll(nil, nil)
}

// +checklocks:c.gpu.mu
func (c *cacheLimit) step() int64 {
	return int64(max(watchLeast, c.phys.quota.Total()/watchPart))
}

// newCacheLimit watches free memory from the start, where there is a limit.
//
// +checklocksignore: no other thread has the device
func newCacheLimit(g *gpu, ph *physical, pools *poolTable) *cacheLimit {
	if g.opts.CacheLimit > 0 {
		ph.quota.Watch = quota.Watch{Free: int64(min(g.opts.CacheLimit, maxRequest)), Step: watchLeast}
	}
	return &cacheLimit{gpu: g, phys: ph, pools: pools}
}
