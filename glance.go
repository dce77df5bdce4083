package cistern

import (
	"time"

	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/front"
	"github.com/cistern-gpu/cistern/internal/lockrank"
)

// Gauges are the figures of a device that somebody watches: bytes at one moment, and counts since the start, which
// ResetAccumulated does not change.
type Gauges struct {
	Reserved  uint64 // physical memory held
	Allocated uint64 // handed out, rounded
	Active    uint64 // the same, and what was given back and other streams still use
	Cached    uint64 // inactive: Reserved + Paused = Active + Cached
	Paused    uint64 // of Active: without physical memory

	PeakReserved, PeakAllocated, PeakActive, PeakCached, PeakPaused uint64 // since the start or ResetPeaks

	Limit       uint64 // 0: none
	DriverCalls uint64 // made by the engine for the device
	Retries     uint64 // as in Counters
	OOMs        uint64
}

// glance is what Gauges knows.
type glance struct {
	mu     lockrank.Mutex
	last   Gauges   // +checklocks:mu
	before Counters // guarded by Device.mu: what ResetAccumulated has taken from the counts
}

// glanceWait is how long Gauges waits for a request that holds the device's lock over driver calls, of which one may wait
// for the GPU.
const glanceWait = 2 * time.Millisecond

// Gauges fills g in. It is for pages that are kept current: it allocates no Go memory, makes no driver call of its own,
// leaves what C code may hand out by itself where it is, and waits for nobody longer than some milliseconds. A device that
// is busier than that has the figures of the last call, but for DriverCalls.
//
// +checklocksignore: TryLock is not known to the analyser
func (d *Device) Gauges(g *Gauges) {
	x := &d.glance
	x.mu.Lock()
	defer x.mu.Unlock()
	if d.tryLock(glanceWait) {
		d.look(&x.last)
		d.mu.Unlock()
	}
	x.last.DriverCalls = d.drv.Calls()
	*g = x.last
}

// tryLock locks Device.mu if that is to be had in time.
func (d *Device) tryLock(wait time.Duration) bool {
	const pause = 50 * time.Microsecond
	for ; !d.mu.TryLock(); wait -= pause {
		if wait <= 0 {
			return false
		}
		front.Nap(pause)
	}
	return true
}

// look takes the sums. The caller holds Device.mu and nothing else.
//
// +checklocks:d.mu
func (d *Device) look(g *Gauges) {
	var now quota.Gauges
	for _, l := range d.lanes {
		l.mu.lookIn()
		for c := range l.quota.Classes {
			for i, v := range l.quota.Classes[c].Now() {
				now[i] += v
			}
		}
		l.mu.Unlock()
	}
	cached := uint64(now[quota.FreeBytes]) + d.quota.Spare
	held, paused := &d.quota.Physical[quota.GroupAll].Bytes, &d.quota.Paused[quota.GroupAll]
	*g = Gauges{
		Reserved: d.quota.Total(), PeakReserved: uint64(held.Peak),
		Allocated: uint64(now[quota.Allocated]), PeakAllocated: uint64(d.quota.Peak(quota.Allocated)),
		Active: uint64(now[quota.ActiveBytes]), PeakActive: uint64(d.quota.Peak(quota.ActiveBytes)),
		Cached: cached, PeakCached: max(cached, uint64(d.quota.Peak(quota.FreeBytes))),
		Paused: uint64(paused.Current), PeakPaused: uint64(paused.Peak),
		Limit:   d.quota.Limit,
		Retries: uint64(d.counts.Retries + d.glance.before.Retries), OOMs: uint64(d.counts.OOMs + d.glance.before.OOMs),
	}
}
