package objects

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// oracle is the same bookkeeping in the plainest way: a list of generations that is gone through.
type oracle struct{ all []*generation }

type generation struct {
	id              uint64
	name            protocol.ObjectName
	mode            uint32
	gid             uint32
	built, unlinked bool
	writer          Session
	pins            map[Session]int
	used            time.Time
	ttl             time.Duration
	gone            bool
}

func (m *oracle) find(id uint64) *generation {
	for _, g := range m.all {
		if g.id == id && !g.gone {
			return g
		}
	}
	return nil
}

// latest is the one with the name.
func (m *oracle) latest(n protocol.ObjectName) *generation {
	for _, g := range m.all {
		if !g.gone && g.built && !g.unlinked && g.name == n {
			return g
		}
	}
	return nil
}

// sweep are the generations that no name and no pin keeps. They are gone then.
func (m *oracle) sweep() (freed []uint64) {
	for _, g := range m.all {
		if !g.gone && g.unlinked && len(g.pins) == 0 {
			g.gone = true
			freed = append(freed, g.id)
		}
	}
	return freed
}

func (g *generation) reads(who Cred) bool {
	return who.Operates || who.UID == g.name.UID || g.mode&4 != 0 || g.mode&0o40 != 0 && slices.Contains(who.Groups, g.gid)
}

// TestStoreModel: whatever sessions do, live or dying, the store frees what an oracle frees, once, and lists what that lists.
func TestStoreModel(t *testing.T) {
	for seed := range uint64(30) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { model(t, rand.New(rand.NewPCG(seed, 1))) })
	}
}

func model(t *testing.T, r *rand.Rand) {
	s, m := NewStore(Limits{}, 0), &oracle{}
	now := time.Unix(1000, 0)
	users := []Cred{{UID: 1, Groups: []uint32{10}}, {UID: 2, Groups: []uint32{20, 10}}, {UID: 3}, {UID: 0, Operates: true}}
	freedEver := map[uint64]bool{}
	for step := range 3000 {
		session := Session(r.IntN(6) + 1)
		who := users[int(session)%len(users)] // a connection is of one user
		name := protocol.ObjectName{UID: uint32(r.IntN(3) + 1), Name: []string{"a", "b/c"}[r.IntN(2)]}
		var id uint64
		if len(m.all) > 0 && r.IntN(4) > 0 {
			id = m.all[max(0, len(m.all)-1-r.IntN(12))].id
		}
		var freed, want []uint64
		var err error
		ok := true
		what := ""
		switch r.IntN(9) {
		case 0, 1:
			what = "begin"
			name.UID = who.UID
			mode := []uint32{0o600, 0o640, 0o604, 0o644}[r.IntN(4)]
			ttl := []time.Duration{0, 5 * time.Second}[r.IntN(2)]
			id, err = s.Begin(session, who, Object{ObjectName: name, Bytes: 1, Mode: mode, GID: 10, TTL: ttl}, Quota{}, 0)
			m.all = append(m.all, &generation{id: id, name: name, mode: mode, gid: 10, writer: session, pins: map[Session]int{}, ttl: ttl})
		case 2:
			what = "commit"
			freed, err = s.Commit(session, id, "", now)
			g := m.find(id)
			if ok = g != nil && !g.built && !g.unlinked && g.writer == session; ok {
				if old := m.latest(g.name); old != nil {
					old.unlinked = true
				}
				g.built, g.used = true, now
			}
		case 3:
			what = "abandon"
			freed, err = s.Abandon(session, id)
			g := m.find(id)
			if ok = g != nil && !g.built && !g.unlinked && g.writer == session; ok {
				g.unlinked = true
			}
		case 4, 5:
			what = "pin"
			if r.IntN(3) > 0 {
				if g := m.find(id); g != nil {
					name = g.name
				}
			} else {
				id = 0
			}
			_, err = s.Pin(session, who, name, id)
			g := m.latest(name)
			if id != 0 {
				g = m.find(id)
			}
			if ok = g != nil && g.built && g.name == name && g.reads(who); ok {
				g.pins[session]++
			}
		case 6:
			what = "unpin"
			freed, err = s.Unpin(session, id, now)
			g := m.find(id)
			if ok = g != nil && g.pins[session] > 0; ok {
				if g.pins[session]--; g.pins[session] == 0 {
					delete(g.pins, session)
					g.used = now
				}
			}
		case 7:
			what = "remove"
			if r.IntN(2) == 0 {
				id = 0
			}
			freed, err = s.Remove(who, name, id)
			g := m.latest(name)
			if id != 0 {
				if g = m.find(id); g != nil && (g.name != name || g.unlinked) {
					g = nil
				}
			}
			if ok = g != nil && (who.Operates || who.UID == name.UID); ok {
				g.unlinked = true
			}
		case 8:
			if r.IntN(2) == 0 {
				what = "leave"
				freed = s.Leave(session, now)
				for _, g := range m.all {
					if !g.built && g.writer == session {
						g.unlinked = true
					}
					if g.pins[session] > 0 {
						delete(g.pins, session)
						g.used = now
					}
				}
			} else {
				what = "expire"
				now = now.Add(time.Duration(r.IntN(4)) * time.Second)
				freed = s.Expire(now)
				for _, g := range m.all {
					if !g.gone && g.built && !g.unlinked && g.ttl != 0 && len(g.pins) == 0 && now.Sub(g.used) >= g.ttl {
						g.unlinked = true
					}
				}
			}
		}
		want = m.sweep()
		slices.Sort(freed)
		slices.Sort(want)
		if (err == nil) != ok || !slices.Equal(freed, want) {
			t.Fatalf("step %d, %s of %d: freed %v, %v; want %v, %v", step, what, id, freed, err, want, ok)
		}
		for _, g := range freed {
			if freedEver[g] {
				t.Fatalf("step %d: generation %d is freed twice", step, g)
			}
			freedEver[g] = true
		}
		if step%50 == 0 {
			same(t, s, m, users)
		}
	}
	for session := range Session(8) {
		s.Leave(session, now)
	}
	for _, o := range s.List(Cred{Operates: true}, nil) {
		if _, err := s.Remove(Cred{Operates: true}, o.ObjectName, o.Generation); err != nil {
			t.Error(err)
		}
	}
	if len(s.all) != 0 || len(s.named) != 0 {
		t.Errorf("%d generations and %d names are left", len(s.all), len(s.named))
	}
}

// same compares what users see.
func same(t *testing.T, s *Store, m *oracle, users []Cred) {
	t.Helper()
	for _, who := range users {
		got, want := map[uint64]string{}, map[uint64]string{}
		for _, o := range s.List(who, nil) {
			x := o.Listed("")
			got[x.Generation] = fmt.Sprint(x.Name, x.UID, x.State, x.Readers)
		}
		for _, g := range m.all {
			if g.gone || !g.reads(who) {
				continue
			}
			state := protocol.ObjectCommitted
			if g.unlinked {
				state = protocol.ObjectRemoved
			} else if !g.built {
				state = protocol.ObjectBuilding
			}
			want[g.id] = fmt.Sprint(g.name.Name, g.name.UID, state, len(g.pins))
		}
		if !maps.Equal(got, want) {
			t.Fatalf("user %d sees %v: want %v", who.UID, got, want)
		}
	}
}

func TestLimits(t *testing.T) {
	const gib = 1 << 30
	s := NewStore(Limits{Objects: 5, UserObjects: 3, Layouts: 100, UserLayouts: 60, Builds: 2}, 41)
	me, root := Cred{UID: 1}, Cred{Operates: true}
	begin := func(by Session, who Cred, reserved uint64, layout int, q Quota) error {
		id, err := s.Begin(by, who, Object{ObjectName: protocol.ObjectName{UID: who.UID, Name: "x"}, Bytes: 1, Reserved: reserved, Mode: 0o600, LayoutSize: layout}, q, 10*gib)
		if err == nil && id < 42 {
			t.Errorf("generation %d", id)
		}
		return err
	}
	fails := func(err error, words string) {
		t.Helper()
		if !errors.Is(err, ErrLimit) || !strings.Contains(err.Error(), words) {
			t.Errorf("%v: want %q", err, words)
		}
	}
	fails(begin(1, me, 11*gib, 0, Quota{}), "may have 10.00 GiB")
	fails(begin(1, me, 5*gib, 0, Quota{Max: 6 * gib, Reserved: 2 * gib}), "max is 6.00 GiB")
	fails(begin(1, me, 1, 0, Quota{Max: 6 * gib, Reserved: 1 << 63}), "max is 6.00 GiB")
	if err := errors.Join(begin(1, me, 4*gib, 50, Quota{Max: 6 * gib, Reserved: 2 * gib}), begin(1, me, 0, 0, Quota{})); err != nil {
		t.Fatal(err)
	}
	fails(begin(1, me, 0, 0, Quota{}), "builds 2 objects")
	fails(begin(2, me, 0, 20, Quota{}), "layouts")
	fails(begin(2, me, 3*gib, 0, Quota{Max: 6 * gib}), "objects of user 1 have 4.00 GiB")
	fails(begin(2, me, 7*gib, 0, Quota{}), "may have 10.00 GiB")
	if err := begin(2, me, 0, 0, Quota{}); err != nil {
		t.Fatal(err)
	}
	fails(begin(2, me, 0, 0, Quota{}), "user 1 has 3 objects")
	if err := errors.Join(begin(3, root, 0, 45, Quota{}), begin(3, root, 0, 0, Quota{})); err != nil {
		t.Fatal(err)
	}
	fails(begin(4, root, 0, 0, Quota{}), "there are 5 objects")
}

func TestNames(t *testing.T) {
	for name, ok := range map[string]bool{"a": true, "weights/llama-8b@v1.2:x+y=z_": true, "": false, "/a": false, "a/": false, "a//b": false, "a b": false,
		"é": false, "a\x00": false, strings.Repeat("x", 255): true, strings.Repeat("x", 256): false} {
		if err := CheckName(name); (err == nil) != ok {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestRestore(t *testing.T) {
	s := NewStore(Limits{}, 0)
	o := Object{ObjectName: protocol.ObjectName{UID: 1, Name: "x"}, Generation: 7, Bytes: 1, Mode: 0o600, TTL: time.Second}
	now := time.Unix(100, 0)
	if err := s.Restore(o, now); err != nil {
		t.Fatal(err)
	}
	if s.Restore(o, now) == nil {
		t.Error("restored twice")
	}
	o.Generation = 6
	if s.Restore(o, now) == nil {
		t.Error("two generations have a name")
	}
	if id, err := s.Begin(1, Cred{UID: 1}, o, Quota{}, 0); id != 8 || err != nil {
		t.Error(id, err)
	}
	if got := s.Expire(now.Add(time.Second)); !slices.Equal(got, []uint64{7}) {
		t.Error(got)
	}
}
