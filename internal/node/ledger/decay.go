package ledger

import (
	"time"

	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// DecayLook is how often Decay has to be called: more often than the longest window of a status's peaks, so that it sees them all.
const DecayLook = protocol.Window << (protocol.Windows - 2)

// Decays reports whether a client of a device has a policy by which unneeded cache is released.
func (l *Ledger) Decays(slot Slot) bool {
	if d := l.devices[slot]; d != nil {
		for _, a := range d.accounts {
			if a.Policy.Decay > 0 {
				return true
			}
		}
	}
	return false
}

// Decay looks at what the clients of a device need, and returns what they have not needed for the time of their policy. The parts
// count as asked for, of no grant: each is ended by Gave or Missed.
func (l *Ledger) Decay(now time.Duration, slot Slot) (parts []Part) {
	d := l.devices[slot]
	if d == nil {
		return nil
	}
	for _, a := range d.accounts {
		if a.Policy.Decay <= 0 {
			a.looked = 0
			continue
		}
		if a.looked == 0 || now-a.looked > 2*DecayLook { // peaks may have been missed: from here on all are seen
			a.from, a.needed = now, 0
		}
		a.looked = now
		a.needed = max(a.needed, a.Status.Active)
		for _, peak := range a.Status.Peaks {
			a.needed = max(a.needed, peak)
		}
		if now-a.from < a.Policy.Decay {
			continue
		}
		keep := max(a.Policy.Min, a.needed)
		a.from, a.needed = now, 0
		n := min(l.spare(now, a), less(a.Status.Reserved, keep))
		if n < Grain {
			continue
		}
		a.Asked += n
		parts = append(parts, Part{Client: a.Client, Slot: slot, Bytes: n, Keep: keep, Hold: a.Hold, At: now})
	}
	return parts
}
