package ledger

import (
	"testing"

	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// busy is the status of a client that uses all that it has.
func busy(reserved uint64) protocol.Status {
	return protocol.Status{Reserved: reserved, Active: reserved, Allocated: reserved}
}

// pauses are the bytes of the parts that are pauses, by client.
func pauses(parts []Part) map[ClientID]uint64 {
	all := map[ClientID]uint64{}
	for _, p := range parts {
		if p.Pause {
			all[p.Client] += p.Bytes
		}
	}
	return all
}

// Memory in use that may be paused is the second choice: after the unused memory of all clients, and for what that lacks.
func TestPauseIsSecond(t *testing.T) {
	both := protocol.Status{Reserved: 30 * gib, Active: 20 * gib, Cached: 10 * gib}
	for _, c := range []struct {
		need   uint64
		want   Verdict
		from   map[ClientID]uint64
		paused map[ClientID]uint64
	}{
		{14 * gib, Take, map[ClientID]uint64{2: 10 * gib, 3: 4 * gib}, map[ClientID]uint64{}},
		{15 * gib, Take, map[ClientID]uint64{2: 15 * gib}, map[ClientID]uint64{2: 15 * gib}}, // all goes, and spares the caches
		{36 * gib, Take, map[ClientID]uint64{2: 30 * gib, 3: 4 * gib, 4: 2 * gib}, map[ClientID]uint64{2: 20 * gib, 4: 2 * gib}},
		{37 * gib, Wait, map[ClientID]uint64{}, map[ClientID]uint64{}},
		{51 * gib, Refuse, map[ClientID]uint64{}, map[ClientID]uint64{}},
	} {
		w := newWorld(t, protocol.Status{}, both, idle(4*gib), busy(16*gib))
		w.Pausable(2, 0, 20*gib)
		w.Pausable(4, 0, 2*gib)
		_, v, from, parts := w.ask(1, c.need)
		if v != c.want {
			t.Errorf("%d GiB: %v, want %v", c.need/gib, v, c.want)
		}
		w.want(from, c.from)
		w.want(pauses(parts), c.paused)
	}
}

// Pauses keep the order of victims and a client's min, which all or nothing of its memory leaves.
func TestPauseKeepsPolicy(t *testing.T) {
	for name, c := range map[string]struct {
		p    Policy // of client 2, which has the most
		want ClientID
	}{
		"the most reserved":  {Policy{Weight: 1}, 2},
		"weight":             {Policy{Weight: 10}, 3},
		"priority":           {Policy{Weight: 1, Priority: 1}, 3},
		"min":                {Policy{Weight: 1, Min: 1}, 3},
		"min beside it":      {Policy{Weight: 1, Min: 10 * gib}, 3},
		"above high":         {Policy{Weight: 9, High: gib}, 2},
		"of another's grant": {Policy{Weight: 1}, 2},
	} {
		w := newWorld(t, protocol.Status{}, busy(20*gib), busy(16*gib))
		w.SetPolicy(2, 0, c.p)
		w.Pausable(2, 0, 20*gib)
		w.Pausable(3, 0, 16*gib)
		_, v, _, parts := w.ask(1, 8*gib)
		if v != Take {
			t.Fatal(name, v)
		}
		t.Run(name, func(t *testing.T) { w.want(pauses(parts), map[ClientID]uint64{c.want: 8 * gib}) })
	}
}

// A grant counts what it needs of a pause; a client that pauses is not asked a second time, nor again before it says that it can,
// and has rested.
func TestPauseOnce(t *testing.T) {
	w := newWorld(t, protocol.Status{}, busy(40*gib), protocol.Status{})
	w.Pausable(2, 0, 40*gib)
	id, _, _, parts := w.ask(1, 8*gib)
	if w.granted() != 8*gib {
		t.Error(w.granted())
	}
	if _, v, _, _ := w.ask(3, 8*gib); v != Wait {
		t.Error("a second pause of a client that pauses: ", v)
	}
	w.Gave(w.now, parts[0], 40*gib, protocol.Status{Paused: 40 * gib})
	if a, _ := w.Account(2, 0); w.Result(id) != 8*gib || w.granted() != 8*gib || a.Gave != 40*gib || a.Pauses != 1 || a.Pausable != 0 {
		t.Errorf("%d of %d, %+v", w.Result(id), w.granted(), a)
	}
	w.End(id)
	w.Update(2, 0, busy(40*gib)) // its owner has it again
	w.Pausable(2, 0, 40*gib)
	if _, v, _, _ := w.ask(1, 8*gib); v != Wait {
		t.Error("a client that has not rested: ", v)
	}
	w.now += PauseRest
	id, v, _, parts := w.ask(1, 8*gib)
	if v != Take {
		t.Fatal(v)
	}
	w.Gave(w.now, parts[0], 0, busy(40*gib)) // a capture is under way
	if d := w.Decide(w.now, id); d.Verdict != Wait {
		t.Error("a client that could not: ", d)
	}
	w.now += Barren
	d := w.Decide(w.now, id)
	if d.Verdict != Take {
		t.Fatal(d)
	}
	w.Missed(d.Parts[0])
	if a, _ := w.Account(2, 0); w.Mute(2) || a.Pausable != 0 || a.Missed != 1 {
		t.Errorf("a pause takes a while, and the client may answer all else: %v, %+v", w.Mute(2), a)
	}
	w.now += PauseRest
	if d := w.Decide(w.now, id); d.Verdict != Wait {
		t.Error("a client that did not answer: ", d)
	}
}

// What others have created of their grants counts against a request until they say so: it waits for that, and for no other reason.
func TestWaitsForOthersGrants(t *testing.T) {
	w := newWorld(t, protocol.Status{}, idle(4*gib), protocol.Status{})
	first, _, _, parts := w.ask(1, 4*gib)
	w.all(parts)
	second, v, _, _ := w.ask(3, 6*gib)
	if v != Refuse {
		t.Error("nothing is left to others: ", v)
	}
	w.Leaves(second, 5*gib)
	if d := w.Decide(w.now, second); d.Verdict != Refuse {
		t.Error("less than it needs is left to others: ", d)
	}
	w.Leaves(second, 6*gib)
	if d := w.Decide(w.now, second); d.Verdict != Wait {
		t.Error(d)
	}
	w.End(first)
	if d := w.Decide(w.now, second); d.Verdict != Refuse {
		t.Error(d)
	}
}
