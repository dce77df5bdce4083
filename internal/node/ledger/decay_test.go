package ledger

import (
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// Cache that a client did not need for the time of its policy is asked for, once, and what it needed meanwhile stays.
func TestDecay(t *testing.T) {
	const gib = 1 << 30
	l := New()
	l.Join(1, 1, 0, 100*gib, Policy{Decay: time.Minute, Min: 2 * gib})
	l.Join(1, 2, 0, 100*gib, Policy{})
	if !l.Decays(0) || l.Decays(1) {
		t.Error("which devices have such a policy")
	}
	status := protocol.Status{Reserved: 10 * gib, Active: gib, Cached: 9 * gib}
	now := time.Duration(1)
	// wait looks for so long, and returns when a part came, and which.
	wait := func(d time.Duration) (after time.Duration, p Part) {
		t.Helper()
		for begun := now; now < begun+d; {
			now += DecayLook
			parts := l.Decay(now, 0)
			if len(parts) > 1 {
				t.Fatalf("%+v", parts)
			}
			if len(parts) == 1 {
				return now - begun, parts[0]
			}
		}
		return 0, Part{}
	}
	l.Update(1, 0, status)
	l.Update(2, 0, status)
	if after, p := wait(2 * time.Minute); after < time.Minute || p.Client != 1 || p.Bytes != 8*gib || p.Keep != 2*gib || p.Grant != 0 {
		t.Fatalf("%v, %+v", after, p)
	} else if _, again := wait(2 * time.Minute); again.Bytes != 0 {
		t.Errorf("asked for twice: %+v", again)
	} else {
		l.Gave(now, p, p.Bytes, protocol.Status{Reserved: 2 * gib, Active: gib, Cached: gib})
	}
	if a, _ := l.Account(1, 0); a.Gave != 8*gib || a.Asked != 0 {
		t.Errorf("%+v", a)
	}
	if _, p := wait(3 * time.Minute); p.Bytes != 0 {
		t.Errorf("below the minimum: %+v", p)
	}
	// A peak, even between two looks, keeps what it needed for that time.
	l.Update(1, 0, status)
	now += DecayLook
	l.Decay(now, 0)
	peak := status
	peak.Peaks[protocol.Windows-1] = 6 * gib
	l.Update(1, 0, peak)
	now += DecayLook
	l.Decay(now, 0)
	l.Update(1, 0, status)
	if _, p := wait(2 * time.Minute); p.Bytes != 4*gib || p.Keep != 6*gib {
		t.Errorf("%+v", p)
	} else {
		l.Missed(p)
	}
	// One that looks too late has missed peaks, and begins anew.
	l.Heard(1)
	now += time.Hour
	if parts := l.Decay(now, 0); len(parts) != 0 {
		t.Errorf("%+v", parts)
	}
	l.SetPolicy(1, 0, Policy{})
	if _, p := wait(time.Hour); p.Bytes != 0 || l.Decays(0) {
		t.Errorf("%+v", p)
	}
}
