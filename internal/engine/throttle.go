package engine

import (
	"math"

	"github.com/cistern-gpu/cistern/internal/engine/quota"
)

// throttle watches what part of a program's time goes into moving memory, counted in work (see Growing or moving in the package
// comment). A program that does little but allocate, in sizes that never fit what was just freed, would spend nearly all its
// time on moves: it gets new memory instead. Guarded by Device.mu.
type throttle struct {
	spent float64 // on moving, in us; what was spent t ago counts exp(-t/throttleSpan)
	often float64 // requests that moved something, likewise
	on    bool
}

// Work in us. Eight recorded runs of training and serving on an H200 spent 64 us or more on a request, and 2.5 us or more on a
// MiB of requests. The constants are lower, so that a program that only allocates is throttled. A chunk that moves takes five
// driver calls (h200_driver_costs.csv).
const (
	requestWork = 0.5
	mibWork     = 1.5
	chunkWork   = 28
)

const (
	throttleSpan = 50_000 // us
	// throttleAbove is the share of the time from which the throttle is on, until it is below throttleBelow.
	throttleAbove, throttleBelow = 0.3, 0.05
	// throttleOften is by how many requests that must be, so that a few that move much are not enough.
	throttleOften = 120
	// throttleSlack is what may be reserved above the highest active memory meanwhile: 1/throttleSlack of it.
	throttleSlack = 2
)

// throttleMark is how many requests a stream heap had met, and their bytes, when the throttle last heard of it.
type throttleMark struct{ requests, bytes int64 }

// worked notes what a stream heap's requests stand for since they last were noted. now is what they add up to.
func (p *throttle) worked(seen *throttleMark, now throttleMark) {
	p.pass(requestWork*float64(now.requests-seen.requests) + mibWork*float64(now.bytes-seen.bytes)/(1<<20))
	*seen = now
}

// moved notes that a request moved so many chunks.
func (p *throttle) moved(chunks int) {
	work := chunkWork * float64(chunks)
	p.pass(work)
	p.spent += work
	p.often++
	if p.spent > throttleAbove*throttleSpan && p.often > throttleOften {
		p.on = true
	}
}

// pass lets time pass.
func (p *throttle) pass(us float64) {
	fade := math.Exp(-us / throttleSpan)
	p.spent *= fade
	p.often *= fade
	if p.spent < throttleBelow*throttleSpan {
		p.on = false
	}
}

// workedNow is what the stream heap's requests add up to. The caller holds the arena's lock.
func (s *streamHeap) workedNow() throttleMark {
	ever := s.gauges.Ever()
	return throttleMark{ever[quota.Allocs], ever[quota.Allocated]}
}
