package cistern

import (
	"fmt"
	"math/bits"
	"strings"
	"time"

	"github.com/cistern-gpu/cistern/internal/units"
)

// Step is what a rung of the ladder did for a request that failed, or why it was passed over.
type Step struct {
	Rung  Rungs // one of them
	Tries int   // how often the ladder, which starts over when something changed, came to it; 0: it was passed over
	// Gained is the bytes that it made free or got from the driver, which were not enough. What other threads gave back
	// while the rung let the locks go counts as well.
	Gained uint64
	// Took is the time spent on it, by the driver's clock, waiting for the GPU included. Looking for a block that fits is
	// not timed.
	Took time.Duration
	Note string // what the driver said, what there was to be had, why it was passed over; "" where there is nothing to say
}

// ladder is how far a request, or a resume, has come.
type ladder struct {
	d     *Device
	tried Rungs
	pass  int32 // how often it has started at the first rung
	began time.Duration
	steps [numRungs]step
	// resuming: it is not a request's, and has fewer rungs.
	resuming bool
}

// step is what a Step is made of. Notes are written only when the ladder ends.
type step struct {
	tries, last int32 // last is the pass of the last try
	gained      uint64
	took        time.Duration
	found       uint64 // the most bytes that there were to be had in one try
	stop        stop
	asked, gave int32 // functions that were called, and those of them that gave memory back; for collect: waits for the GPU
	err         error // what the driver or the upstream said last
}

// stop is why no memory was asked for.
type stop uint8

const (
	stopNot stop = iota
	stopLimit
	stopPoolLimit
	stopLacks
)

const numRungs = 7

var _ = [1]struct{}{}[rungEnd-1<<numRungs]

// of is a rung's step.
func (l *ladder) of(r Rungs) *step { return &l.steps[bits.TrailingZeros16(uint16(r))] }

// try notes that a rung is tried.
func (l *ladder) try(r Rungs) *step {
	l.tried |= r
	s := l.of(r)
	if s.tries == 0 || s.last != l.pass {
		s.tries++
		s.last = l.pass
	}
	return s
}

// start starts the clock of what is tried next.
func (l *ladder) start() { l.began = l.d.drv.Now() }

// lap ends what a rung did, which what comes next begins with.
func (l *ladder) lap(r Rungs, gained uint64) {
	now := l.d.drv.Now()
	s := l.of(r)
	s.took += now - l.began
	s.gained += gained
	l.began = now
}

// less is a-b, 0 where others made that less.
func less(a, b uint64) uint64 { return a - min(a, b) }

// idle is the bytes that nobody uses: what the device's pools have free, and what the driver has. The caller holds
// Device.mu and nothing else.
//
// +checklocks:d.mu
func (d *Device) idle() uint64 {
	n := d.quota.Spare
	for _, s := range d.spaces {
		if s != nil {
			s.mu.Lock()
			n += s.heap.FreeBytes
			s.mu.Unlock()
		}
	}
	if free, _, err := d.drv.MemInfo(d.id); err == nil {
		n += free
	}
	return n
}

// report tells the steps of a ladder that has ended, for e, whose figures are there. p is the pool that the request was
// for, and allowed are the rungs that could be tried.
//
// +checklocks:l.d.mu
func (l *ladder) report(e *OutOfMemoryError, p *Pool, allowed Rungs) []Step {
	out := make([]Step, 0, numRungs)
	for r := RungFit; r < rungEnd; r <<= 1 {
		s := l.of(r)
		out = append(out, Step{Rung: r, Tries: int(s.tries), Gained: s.gained, Took: s.took, Note: l.note(r, s, e, p, allowed)})
	}
	return out
}

// +checklocks:l.d.mu
func (l *ladder) note(r Rungs, s *step, e *OutOfMemoryError, p *Pool, allowed Rungs) string {
	d := l.d
	switch {
	case l.resuming && r&(RungGrow|RungLend|RungCallback) == 0:
		return "not for resuming"
	case r == RungSpill && p.spill == nil:
		return "the pool has none"
	case allowed&r == 0:
		return "off by the settings"
	case e.Requested > maxRequest:
		return "no device has that much memory"
	}
	var notes []string
	add := func(format string, args ...any) { notes = append(notes, fmt.Sprintf(format, args...)) }
	switch r {
	case RungFit:
		if s.tries > 0 {
			add("the largest free block is %s", units.FormatBytes(e.Largest))
		}
	case RungCollect:
		switch {
		case s.tries == 0:
			add("nothing that is free waits for the GPU")
		case s.asked > 0:
			add("waited for the GPU")
		}
	case RungRemap:
		switch {
		case p.segments != nil:
			add("the pool is made of segments, which do not move")
		case d.onUnmap != nil:
			add("memory is registered elsewhere, so nothing moves")
		case s.tries > 0:
			add("%s of free chunks could move", units.FormatBytes(s.found))
		}
	case RungGrow:
		switch s.stop {
		case stopLimit:
			add("the limit of %s is in the way", units.FormatBytes(e.Limit))
		case stopPoolLimit:
			add("the pool's limit of %s is in the way", units.FormatBytes(p.limit))
		case stopLacks:
			add("not asked for, as the device has less than that")
		}
	case RungLend:
		if s.found > 0 {
			add("%s of other pools' free chunks could be had", units.FormatBytes(s.found))
		}
	case RungCallback:
		switch {
		case s.tries == 0:
			add("no function is registered")
		default:
			add("%d of %d functions gave memory back", s.gave, s.asked)
		}
	}
	if s.err != nil {
		add("%s", oneLine(s.err))
	}
	return strings.Join(notes, "; ")
}

// oneLine is an error's text on one line: joined errors have several.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
