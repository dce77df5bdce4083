package engine

import (
	"math/bits"
	"time"

	"github.com/cistern-gpu/cistern/internal/engine/health"
	"github.com/cistern-gpu/cistern/internal/engine/views"
	"github.com/cistern-gpu/cistern/memory"
)

// attempts notes what was tried, how often and with which success.
type attempts struct {
	drv   *health.Driver // for its clock
	tried memory.Stages
	pass  int32 // how often it has started at the first stage
	began time.Duration
	steps [memory.NumStages]step
	oom   error // what the upstream said in this pass, nil where a limit was in the way
}

// step is what a Step is made of. Notes are written only when a request fails.
type step struct {
	tries, last int32 // last is the pass of the last try
	gained      uint64
	took        time.Duration
	found       uint64 // the most bytes that were available in one try
	stop        stop
	asked, gave int32 // functions that were called, and those of them that gave memory back; for collect: waits for the GPU
	err         error // what the driver or the upstream said last
	note        string
}

// stop is why no memory was asked for.
type stop = views.Stop

const (
	stopNot       = views.StopNot
	stopLimit     = views.StopLimit
	stopPoolLimit = views.StopPoolLimit
	stopLacks     = views.StopLacks
)

// of is a stage's step.
func (l *attempts) of(r memory.Stages) *step { return &l.steps[bits.TrailingZeros16(uint16(r))] }

// try notes that a stage is tried.
func (l *attempts) try(r memory.Stages) *step {
	l.tried |= r
	s := l.of(r)
	if s.tries == 0 || s.last != l.pass {
		s.tries++
		s.last = l.pass
	}
	return s
}

// start starts the clock of what is tried next.
func (l *attempts) start() { l.began = l.drv.Now() }

// lap ends what a stage did, which what comes next begins with.
func (l *attempts) lap(r memory.Stages, gained uint64) {
	now := l.drv.Now()
	s := l.of(r)
	s.took += now - l.began
	s.gained += gained
	l.began = now
}

// found ends a look for chunks of which there were so many bytes.
func (l *attempts) found(r memory.Stages, bytes uint64) {
	s := l.of(r)
	s.found = max(s.found, bytes)
	l.lap(r, 0)
}

// less is a-b, 0 where others made that less.
func less(a, b uint64) uint64 { return a - min(a, b) }

// report describes the steps of a request or a resume that has failed, for e, whose figures are there. p is the pool that it
// was for.
//
// +checklocks:us.gpu.mu
func (us *usage) report(r *reclaimer, e *memory.OutOfMemoryError, p *Pool) []memory.Step {
	tooLarge := e.Requested > maxRequest
	f := views.Failure{Error: e, Allowed: r.allowed, Resuming: r.scope.heap == nil && !tooLarge, TooLarge: tooLarge,
		HasSpill: p.spill != nil, Registered: us.observers.onUnmap != nil, PoolLimit: p.limit}
	p.backing.explain(&f)
	return f.Steps(func(x memory.Stages) views.Attempt {
		s := r.log.of(x)
		if x == memory.StageNode && s.tries == 0 {
			s.note = notAsked(r, p)
		}
		return views.Attempt{Tries: int(s.tries), Gained: s.gained, Took: s.took, Found: s.found, Stop: s.stop, Asked: int(s.asked), Gave: int(s.gave), Err: s.err, Note: s.note}
	})
}
