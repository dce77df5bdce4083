package cistern

import (
	"math"
	"time"
)

// pace watches what part of the host's time is spent on moving memory. Moving keeps what is held close to what is used, and
// costs a few per cent of a program that also computes. A program that does little but allocate, in sizes that never fit
// what was just freed, would spend nearly all its time on it: there memory is got instead, up to half as much again as was
// ever active. What is cached that way moves later, when memory is short.
type pace struct {
	at    time.Duration // when the two below were last brought up to date
	spent float64       // seconds of moving, those of t ago counting exp(-t/paceSpan)
	often float64       // requests that moved something, likewise
	hasty bool
}

const (
	paceSpan = 50 * time.Millisecond
	// Hasty from the one share of the time on, until it is below the other.
	hastyAbove, hastyBelow = 0.4, 0.05
	// hastyOften is by how many requests that must be, so that a few that move much, or meet a slow host, are not enough.
	hastyOften = 120
	// hastySlack is what may be held above the most that was ever active meanwhile: 1/hastySlack of it.
	hastySlack = 2
)

// moved notes that moving took the time from start to end.
func (p *pace) moved(start, end time.Duration) {
	p.until(end)
	p.spent += (end - start).Seconds()
	p.often++
	if p.spent > hastyAbove*paceSpan.Seconds() && p.often > hastyOften {

		p.hasty = true
	}
}

// until brings spent up to date.
func (p *pace) until(now time.Duration) {
	if now > p.at {
		fade := math.Exp(-float64(now-p.at) / float64(paceSpan))
		p.spent *= fade
		p.often *= fade
		p.at = now
		if p.spent < hastyBelow*paceSpan.Seconds() {
			p.hasty = false
		}
	}
}
