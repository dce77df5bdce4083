package ledger

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/internal/node/protocol"
	"github.com/cistern-gpu/cistern/internal/slow"
)

const mib, gib = 1 << 20, 1 << 30

// idle is the status of a client that uses nothing of what it has.
func idle(reserved uint64) protocol.Status {
	return protocol.Status{Reserved: reserved, Cached: reserved}
}

// world is a ledger with clients on device 0.
type world struct {
	t *testing.T
	*Ledger
	now time.Duration
}

// granted is what of the device is granted.
func (w *world) granted() uint64 {
	n, _ := w.Granted(0)
	return n
}

func newWorld(t *testing.T, clients ...protocol.Status) *world {
	w := &world{t: t, Ledger: New(), now: time.Hour}
	for i, s := range clients {
		w.Join(w.now, ClientID(i+1), 0, 80*gib, Policy{Weight: 1})
		w.Update(ClientID(i+1), 0, s)
	}
	return w
}

// ask asks for a client, and returns the decision as bytes by victim.
func (w *world) ask(c ClientID, need uint64) (id uint64, v Verdict, from map[ClientID]uint64, parts []Part) {
	w.t.Helper()
	id, delay, ok := w.Ask(w.now, c, 0, need)
	if !ok || delay > 0 {
		w.t.Fatal(delay, ok)
	}
	d := w.Decide(w.now, id)
	from = map[ClientID]uint64{}
	for _, p := range d.Parts {
		from[p.Client] += p.Bytes
	}
	return id, d.Verdict, from, d.Parts
}

func (w *world) want(from map[ClientID]uint64, want map[ClientID]uint64) {
	w.t.Helper()
	for c, n := range want {
		if from[c] != n {
			w.t.Errorf("client %d is asked for %d MiB, want %d", c, from[c]/mib, n/mib)
		}
	}
	if len(from) != len(want) {
		w.t.Errorf("%v, want %v", from, want)
	}
}

// all answers all parts in full, and leaves the victims with so much less.
func (w *world) all(parts []Part) {
	for _, p := range parts {
		a, _ := w.Account(p.Client, p.Slot)
		s := a.Status
		s.Reserved, s.Cached = s.Reserved-p.Bytes, s.Cached-p.Bytes
		w.Gave(w.now, p, p.Bytes, s)
	}
}

// The client with the most for its weight gives first, those above their high before all others, and those of higher priority last.
func TestVictims(t *testing.T) {
	w := newWorld(t, protocol.Status{}, idle(10*gib), idle(30*gib))
	_, v, from, _ := w.ask(1, 8*gib)
	if v != Take {
		t.Fatal(v)
	}
	w.want(from, map[ClientID]uint64{3: 8 * gib})

	w = newWorld(t, protocol.Status{}, idle(10*gib), idle(30*gib))
	w.SetPolicy(3, 0, Policy{Weight: 100})
	_, _, from, _ = w.ask(1, 8*gib)
	w.want(from, map[ClientID]uint64{2: 8 * gib})

	w = newWorld(t, protocol.Status{}, idle(10*gib), idle(30*gib))
	w.SetPolicy(3, 0, Policy{Weight: 1, Priority: 1})
	_, _, from, _ = w.ask(1, 16*gib)
	w.want(from, map[ClientID]uint64{2: 10 * gib, 3: 6 * gib})

	w = newWorld(t, protocol.Status{}, idle(10*gib), idle(30*gib))
	w.SetPolicy(2, 0, Policy{Weight: 1, High: 4 * gib, Priority: 9})
	_, _, from, _ = w.ask(1, 16*gib)
	w.want(from, map[ClientID]uint64{2: 6 * gib, 3: 10 * gib})

	w = newWorld(t, protocol.Status{}, idle(20*gib), idle(20*gib)) // equals share
	_, _, from, _ = w.ask(1, 16*gib)
	w.want(from, map[ClientID]uint64{2: 8 * gib, 3: 8 * gib})
}

// Victims are few, however many clients there are.
func TestFewVictims(t *testing.T) {
	all := []protocol.Status{{}}
	for range 1000 {
		all = append(all, idle(256*mib))
	}
	w := newWorld(t, all...)
	_, v, from, _ := w.ask(1, gib)
	if v != Take || len(from) > 9 {
		t.Errorf("%v of %d clients", v, len(from))
	}
}

// Memory below min, in use, pinned, or that was in use a moment ago is not taken.
func TestFloor(t *testing.T) {
	for name, c := range map[string]struct {
		s    protocol.Status
		p    Policy
		need uint64
		want Verdict
	}{
		"unused":            {idle(10 * gib), Policy{}, 10 * gib, Take},
		"min":               {idle(10 * gib), Policy{Min: 4 * gib}, 6 * gib, Take},
		"below min":         {idle(10 * gib), Policy{Min: 4 * gib}, 7 * gib, Refuse},
		"in use":            {protocol.Status{Reserved: 10 * gib, Active: 10 * gib}, Policy{}, gib, Wait},
		"pinned":            {protocol.Status{Reserved: 10 * gib, Cached: 10 * gib, Pinned: 10 * gib}, Policy{}, gib, Wait},
		"used a moment ago": {protocol.Status{Reserved: 10 * gib, Cached: 10 * gib, Peaks: [protocol.Windows]uint64{0, 10 * gib, 10 * gib, 10 * gib, 10 * gib}}, Policy{}, gib, Wait},
		"used long ago":     {protocol.Status{Reserved: 10 * gib, Cached: 10 * gib, Peaks: [protocol.Windows]uint64{0, 0, 0, 0, 10 * gib}}, Policy{}, 9 * gib, Take},
		"too much":          {idle(10 * gib), Policy{}, 11 * gib, Refuse},
	} {
		w := newWorld(t, protocol.Status{}, c.s)
		w.SetPolicy(2, 0, c.p)
		if _, v, _, _ := w.ask(1, c.need); v != c.want {
			t.Errorf("%s: %v, want %v", name, v, c.want)
		}
	}
}

// What was asked for is not asked for again, and is granted as it is released.
func TestGrants(t *testing.T) {
	w := newWorld(t, protocol.Status{}, idle(10*gib), protocol.Status{})
	first, v, _, parts := w.ask(1, 6*gib)
	if v != Take || w.granted() != 6*gib || w.Available(w.now, 3, 0) != 4*gib {
		t.Fatal(v, w.granted(), w.Available(w.now, 3, 0))
	}
	if d := w.Decide(w.now, first); d.Verdict != Enough {
		t.Error(d)
	}
	if _, v, _, _ := w.ask(3, 6*gib); v != Wait {
		t.Error(v)
	}
	second, v, _, more := w.ask(3, 4*gib)
	if v != Take || w.granted() != 10*gib {
		t.Fatal(v, w.granted())
	}
	w.all(parts)
	w.all(more)
	if w.Result(first) != 6*gib || w.Result(second) != 4*gib || w.granted() != 10*gib {
		t.Error(w.Result(first), w.Result(second), w.granted())
	}
	if a, _ := w.Account(1, 0); a.Granted != 6*gib || a.Got != 6*gib {
		t.Errorf("%+v", a)
	}
	w.End(first)
	if w.granted() != 4*gib {
		t.Error(w.granted())
	}
	w.Leave(3)
	if w.granted() != 0 {
		t.Error(w.granted())
	}
}

// A client that gave less than it was asked for is not asked for a moment, and the rest is taken of others.
func TestShortAnswer(t *testing.T) {
	w := newWorld(t, protocol.Status{}, idle(10*gib), idle(6*gib))
	id, _, from, parts := w.ask(1, 4*gib)
	w.want(from, map[ClientID]uint64{2: 4 * gib})
	w.Gave(w.now, parts[0], gib, idle(9*gib))
	d := w.Decide(w.now, id)
	if d.Verdict != Take || len(d.Parts) != 1 || d.Parts[0].Client != 3 || d.Parts[0].Bytes != 3*gib {
		t.Errorf("%+v", d)
	}
	w.all(d.Parts)
	if w.Result(id) != 4*gib {
		t.Error(w.Result(id))
	}
	w.now += Barren
	if _, v, from, _ := w.ask(1, 4*gib); v != Take || from[2] == 0 {
		t.Error(v, from)
	}
}

// A client that does not answer is skipped until it says something, and for a while: one that answers too late each time would be
// asked for ever.
func TestMute(t *testing.T) {
	w := newWorld(t, protocol.Status{}, idle(10*gib), idle(6*gib))
	id, _, _, parts := w.ask(1, 4*gib)
	w.Missed(parts[0])
	if !w.Mute(2) || w.granted() != 0 {
		t.Error(w.Mute(2), w.granted())
	}
	d := w.Decide(w.now, id)
	if d.Verdict != Take || d.Parts[0].Client != 3 {
		t.Errorf("%+v", d)
	}
	w.Heard(2)
	if a, _ := w.Account(2, 0); w.Mute(2) || a.Missed != 1 || a.Asked != 0 {
		t.Errorf("%+v", a)
	}
	if _, v, from, _ := w.ask(1, 8*gib); v != Wait {
		t.Error(v, from)
	}
	w.now += Barren
	if _, v, from, _ := w.ask(1, 8*gib); v != Take || from[2] == 0 {
		t.Error(v, from)
	}
}

// A client that is only asked what it has gives nothing, whatever it says.
func TestInquiry(t *testing.T) {
	w := newWorld(t, protocol.Status{}, idle(10*gib))
	w.Gave(w.now, Part{Client: 2}, gib, idle(9*gib))
	if a, _ := w.Account(2, 0); a.Gave != 0 || a.Status.Reserved != 9*gib {
		t.Errorf("%+v", a)
	}
}

// A client that asks soon after it gave keeps its peaks for longer, and one that does not for a shorter time, within bounds.
func TestRefaults(t *testing.T) {
	w := newWorld(t, protocol.Status{}, idle(80*gib))
	hold := func() time.Duration {
		a, _ := w.Account(2, 0)
		return a.Hold
	}
	give := func() {
		id, v, _, parts := w.ask(1, gib)
		if v != Take {
			t.Fatal(v)
		}
		w.all(parts)
		w.End(id)
	}
	if hold() != FirstHold {
		t.Error(hold())
	}
	for range 10 {
		give()
		w.now += RefaultWindow + 1
	}
	if hold() != LeastHold {
		t.Errorf("%v after ten times without a refault", hold())
	}
	for range 10 {
		give()
		w.now += RefaultWindow / 2
		id, _, _, _ := w.ask(2, gib)
		w.End(id)
	}
	if a, _ := w.Account(2, 0); hold() != MostHold || a.Refaults != 10 {
		t.Errorf("%v after ten refaults: %+v", hold(), a)
	}
}

// A client that waited and was granted nothing does not wait again for a while.
func TestWaitInVain(t *testing.T) {
	w := newWorld(t, protocol.Status{}, protocol.Status{Reserved: 10 * gib, Active: 10 * gib})
	id, v, _, _ := w.ask(1, gib)
	if v != Wait {
		t.Fatal(v)
	}
	w.Waited(w.now, id)
	w.End(id)
	if id, v, _, _ = w.ask(1, gib); v != Refuse {
		t.Error(v)
	}
	w.End(id)
	w.now += InVain
	if _, v, _, _ = w.ask(1, gib); v != Wait {
		t.Error(v)
	}
}

// Questions beyond a burst have to wait, in proportion.
func TestRate(t *testing.T) {
	w := newWorld(t, protocol.Status{})
	var delay time.Duration
	for i := range Burst + 20 {
		var id uint64
		id, delay, _ = w.Ask(w.now, 1, 0, gib)
		w.End(id)
		if (delay > 0) != (i >= Burst) {
			t.Fatalf("question %d: %v", i, delay)
		}
	}
	if want := 20 * time.Second / Rate; delay < want-time.Millisecond || delay > want+time.Millisecond {
		t.Error(delay)
	}
	w.now += 10 * time.Second
	if _, delay, _ = w.Ask(w.now, 1, 0, gib); delay != 0 {
		t.Error(delay)
	}
}

// Questions of clients and about devices that are not there are none.
func TestUnknown(t *testing.T) {
	w := newWorld(t, idle(gib))
	for _, x := range []struct {
		c    ClientID
		slot Slot
	}{{9, 0}, {1, 3}} {
		if _, _, ok := w.Ask(w.now, x.c, x.slot, gib); ok {
			t.Error(x)
		}
		w.Update(x.c, x.slot, idle(5))
		w.SetPolicy(x.c, x.slot, Policy{})
		if _, ok := w.Account(x.c, x.slot); ok {
			t.Error(x)
		}
	}
	w.Leave(9)
	w.Heard(9)
	w.End(99)
	w.Missed(Part{Client: 9, Slot: 9})
	w.Gave(w.now, Part{Client: 9}, 5, idle(5))
	if d := w.Decide(w.now, 99); d.Verdict != Refuse {
		t.Error(d)
	}
	if w.Total(3) != 0 || w.Total(0) != 80*gib || w.Accounts(3) != nil || len(w.Accounts(0)) != 1 || w.Available(0, 1, 3) != 0 {
		t.Error("device 3")
	}
}

// oracle is a naive ledger: lists of what happened.
type oracle struct {
	clients map[ClientID]*oracleClient
	parts   []Part // asked for and not answered
	grants  map[uint64]*oracleGrant
}

type oracleClient struct {
	status   protocol.Status
	policy   Policy
	mute     bool
	barren   time.Duration
	pausable uint64
	rested   time.Duration
}

type oracleGrant struct {
	client    ClientID
	need, got uint64
	left      uint64
	noPause   bool
}

func (o *oracle) asked(c ClientID) (n uint64) {
	for _, p := range o.parts {
		if p.Client == c && !p.Pause {
			n += p.Bytes
		}
	}
	return n
}

func (o *oracle) promised(id uint64) (n uint64) {
	for _, p := range o.parts {
		if p.Grant == id {
			n += p.Bytes
		}
	}
	return n
}

// spare is what a client may be asked for at most, by the rules as the documents state them.
func (o *oracle) spare(now time.Duration, c ClientID, hold time.Duration) uint64 {
	x := o.clients[c]
	if x.mute || now < x.barren {
		return 0
	}
	unused, above, asked := less(x.status.Cached, x.status.Pinned), less(x.status.Reserved, max(x.policy.Min, x.status.Floor(hold))), o.asked(c)
	for n := uint64(0); ; n += 64 * mib { // the most that is neither more than is unused nor goes below what stays
		step := min(64*mib, less(unused, n+asked), less(above, n+asked))
		if step < 64*mib {
			return n + step
		}
	}
}

// pausing reports whether a client was asked to pause and has not answered.
func (o *oracle) pausing(c ClientID) bool {
	return slices.ContainsFunc(o.parts, func(p Part) bool { return p.Client == c && p.Pause })
}

// pausable is what a client may be asked to pause at most: what it said, of what is not asked for without, if its min stays.
func (o *oracle) pausable(now time.Duration, c ClientID, spare uint64) uint64 {
	x := o.clients[c]
	n := min(x.pausable, less(x.status.Reserved, spare+o.asked(c)))
	if x.mute || now < x.rested || o.pausing(c) || x.status.Reserved-n < x.policy.Min {
		return 0
	}
	return n
}

// TestOracle: random operations, with clients that come, go, lie and die, against the oracle.
func TestOracle(t *testing.T) { random(t, 1, 30_000) }

// TestSlowOracle is that a million times.
func TestSlowOracle(t *testing.T) {
	slow.Only(t)
	for seed := range uint64(20) {
		random(t, seed, 50_000)
	}
}

func random(t *testing.T, seed uint64, steps int) {
	r := rand.New(rand.NewPCG(seed, 5))
	l, o := New(), &oracle{clients: map[ClientID]*oracleClient{}, grants: map[uint64]*oracleGrant{}}
	now, next := time.Duration(0), ClientID(0)
	some := func(m map[ClientID]*oracleClient) ClientID {
		ids := make([]ClientID, 0, len(m))
		for c := range m {
			ids = append(ids, c)
		}
		if len(ids) == 0 {
			return 0
		}
		slices.Sort(ids)
		return ids[r.IntN(len(ids))]
	}
	grant := func() uint64 {
		ids := make([]uint64, 0, len(o.grants))
		for id := range o.grants {
			ids = append(ids, id)
		}
		if len(ids) == 0 {
			return 0
		}
		slices.Sort(ids)
		return ids[r.IntN(len(ids))]
	}
	status := func() protocol.Status {
		s := protocol.Status{Reserved: r.Uint64N(100) * 32 * mib}
		s.Active = r.Uint64N(s.Reserved + 1)
		s.Cached = s.Reserved - s.Active
		if r.IntN(4) == 0 {
			s.Pinned = r.Uint64N(s.Cached + 1)
		}
		for i := range s.Peaks {
			s.Peaks[i] = max(s.Active, s.Peaks[max(i-1, 0)]) + r.Uint64N(gib)*uint64(r.IntN(2))
		}
		if r.IntN(20) == 0 { // a lie
			s.Cached, s.Reserved, s.Active, s.Peaks[1] = r.Uint64(), r.Uint64(), r.Uint64(), r.Uint64()
		}
		return s
	}
	for step := range steps {
		now += time.Duration(r.ExpFloat64() * float64(100*time.Millisecond))
		c := some(o.clients)
		switch op := r.IntN(100); {
		case op < 5 || c == 0:
			if len(o.clients) < 12 {
				next++
				p := Policy{Weight: r.Uint32N(4), Priority: int32(r.IntN(3)), Min: r.Uint64N(gib) * uint64(r.IntN(2)), High: r.Uint64N(gib) * uint64(r.IntN(2))}
				l.Join(now, next, 0, 80*gib, p)
				o.clients[next] = &oracleClient{policy: p}
			}
		case op < 7: // it dies
			for _, p := range o.parts {
				if p.Client == c {
					l.Missed(p)
				}
			}
			o.parts = slices.DeleteFunc(o.parts, func(p Part) bool { return p.Client == c })
			l.Leave(c)
			delete(o.clients, c)
			for id, g := range o.grants {
				if g.client == c {
					delete(o.grants, id)
				}
			}
		case op < 40:
			s := status()
			l.Update(c, 0, s)
			o.clients[c].status = credible(s)
		case op < 60:
			need := (1 + r.Uint64N(60)) * 16 * mib
			id, delay, ok := l.Ask(now, c, 0, need)
			if !ok || delay < 0 {
				t.Fatalf("step %d: %v %v", step, delay, ok)
			}
			o.grants[id] = &oracleGrant{client: c, need: need, left: r.Uint64N(gib) * r.Uint64N(2), noPause: r.IntN(4) == 0}
			if l.Leaves(id, o.grants[id].left); o.grants[id].noPause {
				l.OnlyUnused(id)
			}
		case op < 75:
			id := grant()
			if id == 0 {
				continue
			}
			o.decide(t, l, now, id, step)
		case op < 90 && len(o.parts) > 0:
			i := r.IntN(len(o.parts))
			p := o.parts[i]
			o.parts = slices.Delete(o.parts, i, i+1)
			o.answer(l, now, p, r, status())
		case op < 91:
			n := r.Uint64N(4*gib) * r.Uint64N(1<<40) >> r.IntN(41) // now and then a lie
			l.Pausable(c, 0, n)
			o.clients[c].pausable = min(n, 80*gib)
		case op < 93:
			l.Heard(c)
			o.clients[c].mute = false
		case op < 99:
			if id := grant(); id != 0 {
				l.End(id)
				delete(o.grants, id)
			}
		}
		o.compare(t, l, step)
	}
}

// answer answers a part, or does not.
func (o *oracle) answer(l *Ledger, now time.Duration, p Part, r *rand.Rand, s protocol.Status) {
	x := o.clients[p.Client]
	if r.IntN(10) == 0 {
		l.Missed(p)
		if p.Pause {
			x.pausable = 0
		} else {
			x.mute, x.barren = true, max(x.barren, p.At+Barren)
		}
		return
	}
	released := p.Bytes
	switch {
	case r.IntN(3) == 0:
		released = r.Uint64N(p.Bytes + 1)
	case p.Pause: // all goes, whatever the grant needs
		released += r.Uint64N(8 * gib)
	}
	l.Gave(now, p, released, s)
	x.status = credible(s)
	switch {
	case p.Pause && released == 0:
		x.rested = now + Barren
	case p.Pause:
		x.pausable, x.rested = 0, now+PauseRest
	case released < p.Bytes:
		x.barren = now + Barren
	}
	if g := o.grants[p.Grant]; g != nil {
		g.got += min(released, p.Bytes)
	}
}

// credible is what of a status can be true of a device of 80 GiB.
func credible(s protocol.Status) protocol.Status {
	for _, x := range []struct {
		at   *uint64
		most uint64
	}{{&s.Reserved, 80 * gib}, {&s.Active, s.Reserved}, {&s.Cached, s.Reserved}, {&s.Pinned, s.Cached}, {&s.Peaks[1], 80 * gib}} {
		*x.at = min(*x.at, x.most, 80*gib)
	}
	s.Pinned = min(s.Pinned, s.Cached)
	return s
}

// decide checks a decision.
func (o *oracle) decide(t *testing.T, l *Ledger, now time.Duration, id uint64, step int) {
	t.Helper()
	g := o.grants[id]
	could, unused, spare, inUse, pausable := uint64(0), uint64(0), map[ClientID]uint64{}, uint64(0), map[ClientID]uint64{}
	for c, x := range o.clients {
		if c == g.client {
			continue
		}
		a, _ := l.Account(c, 0)
		spare[c] = o.spare(now, c, a.Hold)
		unused += spare[c]
		pausable[c] = o.pausable(now, c, spare[c])
		inUse += pausable[c]
		could += less(x.status.Reserved, x.policy.Min)
	}
	if g.noPause {
		inUse, pausable = 0, map[ClientID]uint64{}
	}
	need, open := less(g.need, g.got), o.promised(id) > 0
	d := l.Decide(now, id)
	taken := uint64(0)
	for _, p := range d.Parts {
		most, keep := spare[p.Client], o.clients[p.Client].policy.Min
		if p.Pause {
			if most, keep = pausable[p.Client], 0; unused >= need {
				t.Fatalf("step %d: %+v, though %d are unused of %d", step, p, unused, need)
			}
		}
		if p.Bytes == 0 || p.Bytes > most || p.Grant != id || p.Client == g.client || p.Keep != keep {
			t.Fatalf("step %d: %+v of %d", step, p, most)
		}
		taken += p.Bytes
		o.parts = append(o.parts, p)
	}
	switch d.Verdict {
	case Enough:
		if need != 0 && !open {
			t.Fatalf("step %d: enough, of %d", step, need)
		}
	case Take:
		if need == 0 || open || taken < need || taken > need+Grain*uint64(len(o.clients)) {
			t.Fatalf("step %d: %d of %d", step, taken, need)
		}
	case Wait, Refuse:
		if unused+inUse >= need && need > 0 && !open || taken > 0 || d.Why == "" ||
			(d.Verdict == Wait) != (could >= need && now >= l.clients[g.client].vain || could < need && unused+g.left >= need && o.standing(g) > 0) {
			t.Fatalf("step %d: %v, though %d are unused of %d, %d in all", step, d.Verdict, unused, need, could)
		}
	}
}

// standing is what others were granted.
func (o *oracle) standing(g *oracleGrant) (n uint64) {
	for _, x := range o.grants {
		if x.client != g.client {
			n += x.got
		}
	}
	return n
}

// compare checks the sums.
func (o *oracle) compare(t *testing.T, l *Ledger, step int) {
	t.Helper()
	granted, by := uint64(0), map[ClientID]uint64{}
	for id, g := range o.grants {
		granted += o.promised(id) + g.got
		by[g.client] += g.got
		if l.Result(id) != g.got {
			t.Fatalf("step %d: grant %d got %d, want %d", step, id, l.Result(id), g.got)
		}
	}
	if n, _ := l.Granted(0); n != granted {
		t.Fatalf("step %d: %d granted, want %d", step, n, granted)
	}
	if len(l.Accounts(0)) != len(o.clients) || len(l.grants) != len(o.grants) {
		t.Fatalf("step %d: %d clients, %d grants, want %d, %d", step, len(l.Accounts(0)), len(l.grants), len(o.clients), len(o.grants))
	}
	for _, a := range l.Accounts(0) {
		if x := o.clients[a.Client]; x == nil || a.Asked != o.asked(a.Client) || a.Granted != by[a.Client] || a.Pausable != x.pausable || a.pausing != o.pausing(a.Client) || a.Status != x.status || l.Mute(a.Client) != x.mute {
			t.Fatalf("step %d: %+v, want asked %d, granted %d, %+v", step, a, o.asked(a.Client), by[a.Client], x)
		}
	}
}

// What a client says is bounded, so that sums over clients do not overflow.
func TestPossible(t *testing.T) {
	const all = 1<<64 - 1
	w := newWorld(t, protocol.Status{Reserved: all, Allocated: all, Active: all, Cached: all, Paused: all, Pinned: all, Peaks: [protocol.Windows]uint64{all}})
	a, _ := w.Account(1, 0)
	s := a.Status
	for _, n := range []uint64{s.Reserved, s.Allocated, s.Active, s.Cached, s.Paused, s.Pinned, s.Peaks[0]} {
		if n > mostTotal {
			t.Errorf("%+v", s)
		}
	}
}
