package sim

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
)

// past is the set of uses that something comes after: what the order checker must know, kept without vector clocks.
type past map[int]bool

func (p past) add(o past) { maps.Copy(p, o) }

// oracleUse is one use of the bytes [lo, hi) of the chunk.
type oracleUse struct {
	id     int
	lo, hi int
	read   bool
}

// orderOracle says, from the rules of streams and events alone, whether a use races: every use since the beginning
// is kept, and compared with.
type orderOracle struct {
	streams map[cuda.Stream]past
	events  []past
	host    past
	uses    []oracleUse
}

func (o *orderOracle) prepare(s cuda.Stream, legacy cuda.Stream, nonBlocking cuda.Stream) {
	o.streams[s].add(o.host)
	switch s {
	case nonBlocking:
	case legacy:
		for k, p := range o.streams {
			if k != legacy && k != nonBlocking {
				o.streams[s].add(p)
			}
		}
	default:
		o.streams[s].add(o.streams[legacy])
	}
}

// use adds a use on s and reports whether it races.
func (o *orderOracle) use(s cuda.Stream, lo, hi int, read bool) bool {
	race := false
	for _, u := range o.uses {
		if u.lo < hi && lo < u.hi && !(u.read && read) && !o.streams[s][u.id] {
			race = true
		}
	}
	id := len(o.uses)
	o.uses = append(o.uses, oracleUse{id, lo, hi, read})
	o.streams[s][id] = true
	return race
}

// Random operations on five streams over one chunk of two mappings: the checker finds the first race exactly when the
// oracle does, and allows unmapping exactly when the host has seen every use through the mapping.
func TestOrderCheckerAgainstOracle(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	races, unmaps := 0, 0
	for round := range 400 {
		rng := rand.New(rand.NewPCG(seed, uint64(round)))
		if err := orderRound(rng, &races, &unmaps); err != nil {
			t.Fatalf("seed %d, round %d: %v", seed, round, err)
		}
	}
	if races < 100 || unmaps < 20 {
		t.Errorf("only %d races and %d refused unmaps in 400 rounds: the test tests little", races, unmaps)
	}
}

func orderRound(rng *rand.Rand, races, unmaps *int) error {
	const size = 4 * mib
	d := New(Options{Check: CheckOrder, Lag: 3})
	nb := d.NewStreamNonBlocking(0)
	streams := []cuda.Stream{cuda.StreamNull, d.NewStream(0), d.NewStream(0), d.NewStream(0), nb}
	p, err := d.AddressReserve(8*size, 0, 0)
	h, err2 := d.MemCreate(size, cuda.MemProp{})
	if err := errors.Join(err, err2, d.MemMap(p, size, h), d.MemMap(p+size, size, h),
		d.MemSetAccess(p, 2*size, []cuda.Device{0})); err != nil {
		return err
	}
	o := &orderOracle{streams: map[cuda.Stream]past{}, host: past{}}
	for _, s := range streams {
		o.streams[s] = past{}
	}
	var events []cuda.Event
	for range 4 {
		e, err := d.EventCreate(0)
		if err != nil {
			return err
		}
		events = append(events, e)
		o.events = append(o.events, nil) // nothing recorded
	}
	var through [2]past
	through[0], through[1] = past{}, past{}
	fine := rng.IntN(2) == 0 // many small ranges, or few large ones
	for step := range 150 {
		s := streams[rng.IntN(len(streams))]
		e := rng.IntN(len(events))
		switch op := rng.IntN(16); {
		case op < 7:
			lo, n := rng.IntN(32)*(size/32), 1+rng.IntN(size/16)
			if fine {
				lo, n = rng.IntN(64)*100, 1+rng.IntN(300)
			}
			hi, read, m := min(lo+n, size), rng.IntN(3) == 0, rng.IntN(2)
			o.prepare(s, cuda.StreamNull, nb)
			want := o.use(s, lo, hi, read)
			through[m][len(o.uses)-1] = true
			f := d.Use
			if read {
				f = d.Read
			}
			err := f(0, s, p+cuda.Ptr(m*size+lo), uint64(hi-lo))
			if (err != nil) != want {
				return fmt.Errorf("step %d: use of %d to %d on %d (read %v): oracle says race %v, got %v", step, lo, hi, s, read, want, err)
			}
			if want {
				*races++
				return nil
			}
		case op < 10:
			o.prepare(s, cuda.StreamNull, nb)
			o.events[e] = maps.Clone(o.streams[s])
			if err := d.EventRecord(0, events[e], s); err != nil {
				return err
			}
		case op < 13:
			if o.events[e] != nil {
				o.prepare(s, cuda.StreamNull, nb)
				o.streams[s].add(o.events[e])
			}
			if err := d.StreamWaitEvent(0, s, events[e]); err != nil {
				return err
			}
		case op < 14:
			d.Advance(time.Duration(rng.IntN(4)))
			done, err := d.EventQuery(0, events[e])
			if err != nil {
				return err
			}
			if done {
				o.host.add(o.events[e])
			}
		case op < 15:
			if rng.IntN(3) == 0 {
				o.prepare(s, cuda.StreamNull, nb)
				o.host.add(o.streams[s])
				if err := d.StreamSynchronize(0, s); err != nil {
					return err
				}
			}
		default:
			m := rng.IntN(2)
			want := false
			for id := range through[m] {
				if !o.host[id] {
					want = true
				}
			}
			at := p + cuda.Ptr(m*size)
			err := d.MemUnmap(at, size)
			if (err != nil) != want {
				return fmt.Errorf("step %d: unmap of mapping %d: oracle says in use %v, got %v", step, m, want, err)
			}
			if want {
				*unmaps++
				continue
			}
			through[m] = past{}
			if err := errors.Join(d.MemMap(at, size, h), d.MemSetAccess(at, size, []cuda.Device{0})); err != nil {
				return err
			}
		}
	}
	return nil
}

// sound checks what touch relies on: spans in rising order within bounds, none sharing its readers with another.
func (r *ranges) sound(lo, hi uint64, readers map[*mark]bool) error {
	if r.lo != lo || r.hi != hi {
		return fmt.Errorf("bounds [%d, %d), want [%d, %d)", r.lo, r.hi, lo, hi)
	}
	if h := r.halves; h != nil {
		mid := lo + (hi-lo)/2
		if len(r.spans) != 0 {
			return fmt.Errorf("spans beside halves in [%d, %d)", lo, hi)
		}
		return errors.Join(h[0].sound(lo, mid, readers), h[1].sound(mid, hi, readers))
	}
	at := lo
	for _, s := range r.spans {
		if s.lo < at || s.hi <= s.lo || s.hi > hi {
			return fmt.Errorf("span [%d, %d) after %d in [%d, %d)", s.lo, s.hi, at, lo, hi)
		}
		at = s.hi
		if len(s.reads) > 0 {
			if readers[&s.reads[0]] {
				return fmt.Errorf("span [%d, %d) shares its readers", s.lo, s.hi)
			}
			readers[&s.reads[0]] = true
		}
	}
	return nil
}

// The uses of a chunk against one cell per byte, with many spans so that halving and joining happen.
func TestRangesAgainstBytes(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 2))
	const size, ranks = 4096, 4
	type cell struct {
		write mark
		reads [ranks]uint64
	}
	var cells [size]cell
	r := ranges{hi: size}
	var host vector
	host.set(ranks-1, 0)
	var count [ranks]uint64
	deep, conflicts := false, 0
	for step := range 60_000 {
		rank := rng.IntN(ranks)
		count[rank]++
		m := mark{rank, count[rank]}
		// A clock that covers random parts of the past.
		seen := append(vector(nil), host...)
		for i := range seen {
			if rng.IntN(8) != 0 {
				seen[i] = count[i]
			}
		}
		seen[rank] = m.n
		lo := rng.IntN(size)
		hi := min(size, lo+1+rng.IntN(6))
		if rng.IntN(200) == 0 {
			hi = min(size, lo+1+rng.IntN(size))
		}
		read := rng.IntN(3) == 0
		want := false
		for i := lo; i < hi; i++ {
			c := &cells[i]
			want = want || !seen.covers(c.write)
			if read {
				c.reads[rank] = m.n
				continue
			}
			for k, n := range c.reads {
				want = want || !seen.covers(mark{k, n})
			}
			*c = cell{write: m}
		}
		if _, bad := r.touch(uint64(lo), uint64(hi), m, read, seen, host); bad != want {
			t.Fatalf("seed %d, step %d: [%d, %d) read %v: conflict %v, want %v", seed, step, lo, hi, read, bad, want)
		}
		if want {
			conflicts++
		}
		if step%64 == 0 || hi-lo > 100 {
			if err := r.sound(r.lo, r.hi, map[*mark]bool{}); err != nil {
				t.Fatalf("seed %d, step %d: %v", seed, step, err)
			}
		}
		deep = deep || r.halves != nil && r.halves[0].halves != nil
		if rng.IntN(500) == 0 {
			k := rng.IntN(ranks)
			host[k] = count[k]
		}
	}
	if !deep || conflicts < 1000 {
		t.Errorf("halved twice: %v; conflicts: %d", deep, conflicts)
	}
}
