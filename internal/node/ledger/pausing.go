package ledger

import (
	"slices"
	"time"
)

// Pausing memory in use whose owner lets the broker do so. A client says how many bytes that is (Pausable), and pauses all of it or
// nothing. A part of a grant counts what the grant needs of it; the rest is free for all. After an answer there is nothing to pause
// until the client says so again.

// Pausable is what a client lets the broker pause of a device, as it says.
func (l *Ledger) Pausable(c ClientID, slot Slot, bytes uint64) {
	if d := l.devices[slot]; d != nil {
		if a := d.of(c); a != nil {
			a.Pausable = min(bytes, d.Total)
		}
	}
}

// pausable is what would go if an account paused now, beside what it can be asked for without: nothing where less than its min
// would stay.
func (l *Ledger) pausable(now time.Duration, a *Account) uint64 {
	if a.pausing || now < a.rested || l.clients[a.Client].mute {
		return 0
	}
	n := min(a.Pausable, less(a.Status.Reserved, l.spare(now, a)+a.Asked))
	if a.Status.Reserved-n < a.Policy.Min {
		return 0
	}
	return n
}

// pause chooses clients to pause until they have what the unused memory lacks, notes what is asked for, and has less be needed of
// that memory.
func (c *choice) pause(id uint64, g *Grant) (chosen []Part) {
	slices.SortFunc(c.pausers, func(x, y victim) int {
		if before(&x, &y) {
			return -1
		}
		return 1
	})
	lacking := up(c.need - c.spare)
	for _, v := range c.pausers {
		if lacking == 0 {
			break
		}
		n := min(v.spare, lacking)
		lacking -= n
		if v.spare > n { // all of it goes: what is more than was lacking spares the others' caches
			n = min(v.spare, up(c.need))
		}
		c.need = less(c.need, n)
		a := v.account
		a.pausing = true
		g.promised += n
		chosen = append(chosen, Part{Client: a.Client, Slot: a.Slot, Grant: id, Bytes: n, Pause: true, At: c.now})
	}
	return chosen
}

// pausedFor is the answer to a part of a pause.
func (l *Ledger) pausedFor(now time.Duration, a *Account, released uint64) {
	if released == 0 { // it could not: a capture is under way, or another pause
		a.rested = now + Barren
		return
	}
	a.Pausable = 0
	a.Pauses++
	a.rested = now + PauseRest
}
