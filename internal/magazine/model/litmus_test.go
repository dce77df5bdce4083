package model

import (
	"maps"
	"slices"
	"testing"
)

// TestLitmus: programs of which it is known what C11 allows. Each returns two digits; a run's end is both.
func TestLitmus(t *testing.T) {
	const x, y, z = location(0), location(1), location(2)
	type program func(*thread) uint64
	nothing := func(*thread) uint64 { return 0 }
	both := func(a, b uint64) uint64 { return 10*a + b }
	sb := func(o, l order) [2]program {
		one := func(own, others location) program {
			return func(t *thread) uint64 {
				t.store(own, 1, o)
				return t.load(others, l)
			}
		}
		return [2]program{one(x, y), one(y, x)}
	}
	mp := func(o, l order) [2]program {
		return [2]program{
			func(t *thread) uint64 {
				t.store(x, 1, relaxed)
				t.store(y, 1, o)
				return 0
			},
			func(t *thread) uint64 {
				a := t.load(y, l)
				return both(a, t.load(x, relaxed))
			},
		}
	}
	publish := func(o, l order) [2]program {
		return [2]program{
			func(t *thread) uint64 {
				t.touch(0, func(d *data) uint64 { d.value = 1; return 0 })
				t.store(y, 1, o)
				return 0
			},
			func(t *thread) uint64 {
				if t.load(y, l) == 0 {
					return 0
				}
				return t.touch(0, func(d *data) uint64 { return d.value })
			},
		}
	}
	chain := func(o order) [2]program { // the flag of mp is passed on by a relaxed read-modify-write
		return [2]program{
			func(t *thread) uint64 {
				t.store(x, 1, relaxed)
				t.store(y, 1, o)
				t.add(y, 1, relaxed)
				return 0
			},
			func(t *thread) uint64 {
				a := t.load(y, acquire)
				return both(a, t.load(x, relaxed))
			},
		}
	}
	for _, c := range []struct {
		name   string
		run    [2]program
		end    program
		ends   []uint64 // 100 times what the first returns, 1000 times the end's, and the second's
		broken bool
	}{
		{"store buffering, relaxed", sb(relaxed, relaxed), nothing, []uint64{0, 1, 100, 101}, false},
		{"store buffering, release and acquire", sb(release, acquire), nothing, []uint64{0, 1, 100, 101}, false},
		{"store buffering, seq_cst", sb(seqCst, seqCst), nothing, []uint64{1, 100, 101}, false},
		{"store buffering, only the stores seq_cst", sb(seqCst, acquire), nothing, []uint64{0, 1, 100, 101}, false},
		{"store buffering, read-modify-writes", [2]program{
			func(t *thread) uint64 { t.exchange(x, 1, seqCst); return t.load(y, seqCst) },
			func(t *thread) uint64 { t.exchange(y, 1, seqCst); return t.load(x, seqCst) },
		}, nothing, []uint64{1, 100, 101}, false},
		{"message passing, relaxed", mp(relaxed, relaxed), nothing, []uint64{0, 1, 10, 11}, false},
		{"message passing, only released", mp(release, relaxed), nothing, []uint64{0, 1, 10, 11}, false},
		{"message passing, only acquired", mp(relaxed, acquire), nothing, []uint64{0, 1, 10, 11}, false},
		{"message passing", mp(release, acquire), nothing, []uint64{0, 1, 11}, false},
		{"release sequence", chain(release), nothing, []uint64{0, 1, 11, 21}, false},
		{"no release sequence", chain(relaxed), nothing, []uint64{0, 1, 10, 11, 20, 21}, false},
		{"publication", publish(release, acquire), nothing, []uint64{0, 1}, false},
		{"publication, relaxed", publish(relaxed, acquire), nothing, []uint64{0}, true},
		{"load buffering, which the model does not have", [2]program{
			func(t *thread) uint64 { a := t.load(x, relaxed); t.store(y, 1, relaxed); return a },
			func(t *thread) uint64 { a := t.load(y, relaxed); t.store(x, 1, relaxed); return a },
		}, nothing, []uint64{0, 1, 100}, false},
		{"coherence: no older value after a newer", [2]program{
			func(t *thread) uint64 { t.store(x, 1, relaxed); t.store(x, 2, relaxed); return 0 },
			func(t *thread) uint64 { a := t.load(x, relaxed); return both(a, t.load(x, relaxed)) },
		}, nothing, []uint64{0, 1, 2, 11, 12, 22}, false},
		{"two stores each, the last of which both lose", [2]program{ // 2+2W: x = y = 1 needs stores put before others
			func(t *thread) uint64 { t.store(x, 1, release); t.store(y, 2, release); return 0 },
			func(t *thread) uint64 { t.store(y, 1, release); t.store(x, 2, release); return 0 },
		}, func(t *thread) uint64 { return both(t.load(x, relaxed), t.load(y, relaxed)) },
			[]uint64{11000, 12000, 21000, 22000}, false},
		{"two stores each, seq_cst", [2]program{
			func(t *thread) uint64 { t.store(x, 1, seqCst); t.store(y, 2, seqCst); return 0 },
			func(t *thread) uint64 { t.store(y, 1, seqCst); t.store(x, 2, seqCst); return 0 },
		}, func(t *thread) uint64 { return both(t.load(x, relaxed), t.load(y, relaxed)) },
			[]uint64{12000, 21000, 22000}, false},
		{"nothing comes between a read-modify-write and what it read", [2]program{
			func(t *thread) uint64 { t.add(x, 1, relaxed); return 0 },
			func(t *thread) uint64 { t.add(x, 1, relaxed); t.store(x, 5, relaxed); return 0 },
		}, func(t *thread) uint64 { return t.load(x, relaxed) }, []uint64{5000, 6000}, false},
		{"one of two exchanges is first", [2]program{
			func(t *thread) uint64 { return t.exchange(x, 1, relaxed) },
			func(t *thread) uint64 { return t.exchange(x, 2, relaxed) },
		}, nothing, []uint64{1, 200}, false},
		{"compare and exchange", [2]program{
			func(t *thread) uint64 { return uint64(flag(t.compareExchange(x, 0, 1, relaxed, relaxed))) },
			func(t *thread) uint64 { return uint64(flag(t.compareExchange(x, 0, 2, relaxed, relaxed))) },
		}, nothing, []uint64{1, 100}, false},
		{"a look before a store hides nothing", [2]program{ // what loom leaves out
			func(t *thread) uint64 { t.load(x, relaxed); t.store(x, 1, relaxed); return 0 },
			func(t *thread) uint64 { return t.load(x, relaxed) },
		}, nothing, []uint64{0, 1}, false},
		{"a mutex", [2]program{
			func(t *thread) uint64 {
				mutex(t, z, func() { t.touch(0, func(d *data) uint64 { d.value++; return 0 }) })
				return 0
			},
			func(t *thread) uint64 {
				mutex(t, z, func() { t.touch(0, func(d *data) uint64 { d.value++; return 0 }) })
				return 0
			},
		}, func(t *thread) uint64 { return t.touch(0, func(d *data) uint64 { return d.value }) }, []uint64{2000}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			var s state
			for l := range s.at {
				s.at[l] = []message{{}}
			}
			got := explore(s, [threads]func(*thread) uint64{
				func(t *thread) uint64 {
					r := c.run[0](t)
					t.note(func(g *ghost) uint64 { g.one = r; return 0 })
					return 0
				},
				func(t *thread) uint64 {
					r := c.run[1](t)
					t.note(func(g *ghost) uint64 { g.other = r; return 0 })
					return 0
				},
				func(t *thread) uint64 {
					r := t.note(func(g *ghost) uint64 { return 100*g.one + g.other })
					return r + 1000*c.end(t)
				},
			})
			if ends := slices.Sorted(maps.Keys(got.results)); !slices.Equal(ends, c.ends) || len(got.broken) > 0 != c.broken || got.stuck > 0 {
				t.Errorf("ends %v, want %v; broken %v, stuck in %d", ends, c.ends, got.broken, got.stuck)
			}
		})
	}
}

// TestStuck: two mutexes that two threads lock in different orders.
func TestStuck(t *testing.T) {
	var s state
	for l := range s.at {
		s.at[l] = []message{{}}
	}
	locks := func(a, b location) func(*thread) uint64 {
		return func(t *thread) uint64 { mutex(t, a, func() { mutex(t, b, func() {}) }); return 0 }
	}
	got := explore(s, [threads]func(*thread) uint64{locks(0, 1), locks(1, 0), func(*thread) uint64 { return 0 }})
	if got.stuck == 0 || len(got.results) != 1 {
		t.Errorf("stuck in %d states, ends %v", got.stuck, got.results)
	}
}
