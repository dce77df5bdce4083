package ledger

import (
	"cmp"
	"fmt"
	"math"
	"time"

	"github.com/cistern-gpu/cistern/internal/node/protocol"
	"github.com/cistern-gpu/cistern/internal/units"
)

// Grant is a question of a client for memory, and what it got, until the request that asked is over.
type Grant struct {
	client   ClientID
	slot     Slot
	need     uint64
	promised uint64 // that others were asked for and have not answered
	got      uint64 // that others released
	left     uint64 // that the driver had free for the grants of others when it began
	noPause  bool   // for it
	more     uint64 // beside what is needed, if the unused memory of others has that too
}

// Part is what one victim is asked for on behalf of a grant.
type Part struct {
	Client ClientID
	Slot   Slot
	Grant  uint64
	Bytes  uint64
	Keep   uint64        // reserved bytes that stay, by policy
	Hold   time.Duration // for the victim's own floor
	Pause  bool          // of memory in use that the victim is to pause
	At     time.Duration // when that was decided
}

// Verdict is what is to be done about a grant.
type Verdict int

// The verdicts.
const (
	Take   Verdict = iota // ask for the parts
	Wait                  // decide again later, as others may stop using memory
	Refuse                // nothing helps
	Enough                // it has what it needs, or its parts are not all answered
)

func (v Verdict) String() string { return [...]string{"take", "wait", "refuse", "enough"}[v] }

// Decision is a verdict.
type Decision struct {
	Verdict Verdict
	Parts   []Part
	Why     string // of Wait and Refuse
}

// Ask opens a grant for a client that needs so many bytes of a device. delay is how long the question has to wait because the client
// asks too often.
func (l *Ledger) Ask(now time.Duration, c ClientID, slot Slot, need uint64) (id uint64, delay time.Duration, ok bool) {
	cl, d := l.clients[c], l.devices[slot]
	if cl == nil || d == nil || d.of(c) == nil {
		return 0, 0, false
	}
	a := d.of(c)
	if a.gaveAt >= 0 && now-a.gaveAt <= RefaultWindow {
		a.Refaults++
		a.Hold = min(2*a.Hold, MostHold)
		a.gaveAt = -1
	}
	cl.tokens = min(Burst, cl.tokens+max(0, now-cl.filled).Seconds()*Rate)
	cl.filled = max(cl.filled, now)
	cl.tokens--
	if cl.tokens < 0 {
		delay = time.Duration(-cl.tokens / Rate * float64(time.Second))
	}
	l.last++
	l.grants[l.last] = &Grant{client: c, slot: slot, need: need}
	return l.last, delay, true
}

// Decide says what to do about a grant now. The parts of Take count as asked for from then on: each is ended by Gave or Missed.
func (l *Ledger) Decide(now time.Duration, id uint64) Decision {
	g := l.grants[id]
	if g == nil {
		return Decision{Verdict: Refuse, Why: "the question is over"}
	}
	need := less(g.need, g.got)
	if need == 0 || g.promised > 0 {
		return Decision{Verdict: Enough}
	}
	d := l.devices[g.slot]
	c := choice{l: l, now: now, need: need}
	could := uint64(0)
	for _, a := range d.accounts {
		if a.Client == g.client {
			continue
		}
		could += less(a.Status.Reserved, a.Policy.Min)
		c.consider(a)
	}
	if g.got == 0 && less(c.spare, need) >= g.more {
		c.need += g.more
	}
	switch {
	case c.spare >= need:
		return Decision{Verdict: Take, Parts: c.take(id, g)}
	case c.spare+c.pausable >= need && !g.noPause:
		parts := c.pause(id, g)
		return Decision{Verdict: Take, Parts: append(parts, c.take(id, g)...)}
	case could < need && less(need, c.spare) <= g.left && l.standing(g):
		return Decision{Verdict: Wait, Why: "free memory is left to grants of other processes"}
	case could < need:
		return Decision{Verdict: Refuse, Why: fmt.Sprintf("other clients have %s reserved above their minimum", units.FormatBytes(could))}
	case now < l.clients[g.client].vain:
		return Decision{Verdict: Refuse, Why: fmt.Sprintf("other clients have %s unused now, and a request waited in vain within the last %v",
			units.FormatBytes(c.spare), InVain)}
	}
	return Decision{Verdict: Wait, Why: fmt.Sprintf("other clients have %s unused now", units.FormatBytes(c.spare))}
}

// choice is one choice of victims.
type choice struct {
	l        *Ledger
	now      time.Duration
	need     uint64
	spare    uint64 // unused memory of all
	victims  []victim
	pausable uint64 // memory in use of all that may be paused
	pausers  []victim
}

type victim struct {
	account *Account
	spare   uint64 // that is left
	taken   uint64
}

// consider adds what an account has.
func (c *choice) consider(a *Account) {
	if n := c.l.spare(c.now, a); n > 0 {
		c.victims = append(c.victims, victim{account: a, spare: n})
		c.spare += n
	}
	if n := c.l.pausable(c.now, a); n > 0 {
		c.pausers = append(c.pausers, victim{account: a, spare: n})
		c.pausable += n
	}
}

// standing reports whether others were granted memory of the device. What they have created of it counts against the asker until they
// say so.
func (l *Ledger) standing(g *Grant) bool {
	for _, x := range l.grants {
		if x.slot == g.slot && x.client != g.client && x.got > 0 {
			return true
		}
	}
	return false
}

// OnlyUnused has nothing be paused for a grant.
func (l *Ledger) OnlyUnused(id uint64) {
	if g := l.grants[id]; g != nil {
		g.noPause = true
	}
}

// More has others release so much beside what a grant needs, if their unused memory has both.
func (l *Ledger) More(id uint64, bytes uint64) {
	if g := l.grants[id]; g != nil && l.devices[g.slot] != nil {
		g.more = min(bytes, l.devices[g.slot].Total)
	}
}

// Leaves notes what the driver has free that the asker leaves to the grants of others.
func (l *Ledger) Leaves(id uint64, bytes uint64) {
	if g := l.grants[id]; g != nil {
		g.left = bytes
	}
}

// take chooses, and notes what is asked for.
func (c *choice) take(id uint64, g *Grant) (chosen []Part) {
	quantum := up(max(c.need/parts, Grain))
	for left := c.need; left > 0; {
		v := &c.victims[0]
		for i := range c.victims {
			if o := &c.victims[i]; o.spare > 0 && (v.spare == 0 || before(o, v)) {
				v = o
			}
		}
		n := min(quantum, v.spare, up(left))
		v.spare -= n
		v.taken += n
		left = less(left, n)
	}
	for i := range c.victims {
		v := &c.victims[i]
		if v.taken == 0 {
			continue
		}
		a := v.account
		a.Asked += v.taken
		g.promised += v.taken
		chosen = append(chosen, Part{Client: a.Client, Slot: a.Slot, Grant: id, Bytes: v.taken, Keep: a.Policy.Min, Hold: a.Hold, At: c.now})
	}
	return chosen
}

// up rounds up to whole grains.
func up(n uint64) uint64 {
	if n > math.MaxUint64-Grain {
		return n
	}
	return (n + Grain - 1) / Grain * Grain
}

// before reports whether a victim is asked before another one.
func before(a, b *victim) bool {
	x, y := a.account, b.account
	if p, q := a.over(), b.over(); p != q {
		return p
	}
	if !a.over() && x.Policy.Priority != y.Policy.Priority {
		return x.Policy.Priority < y.Policy.Priority
	}
	if p, q := a.usage(), b.usage(); p != q {
		return p > q
	}
	return cmp.Or(cmp.Compare(x.Refaults, y.Refaults), cmp.Compare(x.Client, y.Client)) < 0
}

// reserved is what the victim has when it has given what was taken so far, and what it was asked for before.
func (v *victim) reserved() uint64 { return less(v.account.Status.Reserved, v.taken+v.account.Asked) }

// over reports whether that is above its high.
func (v *victim) over() bool {
	return v.account.Policy.High > 0 && v.reserved() > v.account.Policy.High
}

// usage is that for its weight.
func (v *victim) usage() float64 {
	return float64(v.reserved()) / float64(max(v.account.Policy.Weight, 1))
}

// Gave is the answer to a part: what the victim released, and what it has now.
func (l *Ledger) Gave(now time.Duration, p Part, released uint64, s protocol.Status) {
	if p.Bytes == 0 { // it was only asked what it has
		released = 0
	}
	if g := l.grants[p.Grant]; g != nil {
		g.promised = less(g.promised, p.Bytes)
		got := released
		if p.Pause {
			got = min(got, p.Bytes)
		}
		g.got += got
		if d := l.devices[g.slot]; d != nil {
			if a := d.of(g.client); a != nil {
				a.Granted += got
				a.Got += got
			}
		}
	}
	a := l.answered(p)
	if a == nil {
		return
	}
	a.Status = l.devices[p.Slot].possible(s)
	a.Gave += released
	if p.Pause {
		l.pausedFor(now, a, released)
		return
	}
	if released < p.Bytes {
		a.barren = now + Barren
	}
	if released > 0 {
		if a.gaveAt >= 0 && now-a.gaveAt > RefaultWindow {
			a.Hold = max(a.Hold/2, LeastHold)
		}
		a.gaveAt = now
	}
}

// Missed ends a part that was not answered. The client is not asked again until it is heard of, and not for Barren: one that answers
// too late each time would be asked for ever.
func (l *Ledger) Missed(p Part) {
	if g := l.grants[p.Grant]; g != nil {
		g.promised = less(g.promised, p.Bytes)
	}
	a := l.answered(p)
	if a == nil {
		return
	}
	a.Missed++
	if p.Pause { // copying takes a while: it may answer all else. It says so where it may be paused again
		a.Pausable = 0
	} else {
		a.barren = max(a.barren, p.At+Barren)
		l.clients[p.Client].mute = true
	}
}

// answered is the account that a part was asked of, nil where the client is gone.
func (l *Ledger) answered(p Part) *Account {
	d := l.devices[p.Slot]
	if d == nil {
		return nil
	}
	a := d.of(p.Client)
	switch {
	case a == nil:
	case p.Pause:
		a.pausing = false
	default:
		a.Asked = less(a.Asked, p.Bytes)
	}
	return a
}

// Result is what a grant got so far.
func (l *Ledger) Result(id uint64) uint64 {
	if g := l.grants[id]; g != nil {
		return g.got
	}
	return 0
}

// Waited notes how the wait of a grant ended.
func (l *Ledger) Waited(now time.Duration, id uint64) {
	g := l.grants[id]
	if g == nil {
		return
	}
	cl := l.clients[g.client]
	if g.got < g.need {
		cl.vain = now + InVain
	} else {
		cl.vain = -1
	}
}

// End ends a grant: the request that asked is over. Parts that are not answered yet give to no client.
func (l *Ledger) End(id uint64) {
	g := l.grants[id]
	if g == nil {
		return
	}
	delete(l.grants, id)
	if d := l.devices[g.slot]; d != nil {
		if a := d.of(g.client); a != nil {
			a.Granted = less(a.Granted, g.got)
		}
	}
}

// Cancel takes back a part that the victim was not asked for.
func (l *Ledger) Cancel(p Part) {
	if g := l.grants[p.Grant]; g != nil {
		g.promised = less(g.promised, p.Bytes)
	}
	l.answered(p)
}
