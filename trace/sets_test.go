package trace

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// addrMap does what a Go map does.
func TestAddrMap(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	var m addrMap
	want := map[uint64]uint32{}
	for i := range 200_000 {
		addr := uint64(rng.IntN(3000)) * 512 // few, so that they are hit again; 0 is one of them
		switch rng.IntN(3) {
		case 0:
			m.set(addr, uint32(i))
			want[addr] = uint32(i)
		case 1:
			m.del(addr)
			delete(want, addr)
		}
		got, ok := m.get(addr)
		if w, wok := want[addr]; got != w || ok != wok || m.n != len(want) {
			t.Fatalf("step %d: %d %v of %d; expected %d %v of %d", i, got, ok, m.n, w, wok, len(want))
		}
	}
}

// segset does what a sorted list does.
func TestSegset(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	var set segset
	pages := map[uint64]bool{} // the bytes that are covered, by page
	const page = 4096
	covered := func(addr, size uint64) (n uint64) {
		for a := addr; a < addr+size; a += page {
			if pages[a] {
				n += page
			}
		}
		return n
	}
	for i := range 60_000 {
		addr, size := uint64(rng.IntN(5000))*page, uint64(1+rng.IntN(6))*page
		if rng.IntN(2) == 0 {
			if got, want := set.cut(addr, size), covered(addr, size); got != want {
				t.Fatalf("step %d: cut %d bytes; expected %d", i, got, want)
			}
			for a := addr; a < addr+size; a += page {
				delete(pages, a)
			}
			continue
		}
		if got, want := set.overlapping(addr, size) != nil, covered(addr, size) > 0; got != want {
			t.Fatalf("step %d: overlapping %v; expected %v", i, got, want)
		}
		if covered(addr, size) > 0 {
			s := set.at(addr)
			if got, want := s != nil, pages[addr]; got != want {
				t.Fatalf("step %d: at %v; expected %v", i, got, want)
			}
			continue
		}
		set.join(Segment{Addr: addr, Size: size, Expandable: true})
		for a := addr; a < addr+size; a += page {
			pages[a] = true
		}
	}
	// Neighbours are one segment each.
	var want []Segment
	var addrs []uint64
	for a := range pages {
		addrs = append(addrs, a)
	}
	slices.Sort(addrs)
	for _, a := range addrs {
		if n := len(want); n > 0 && want[n-1].Addr+want[n-1].Size == a {
			want[n-1].Size += page
			continue
		}
		want = append(want, Segment{Addr: a, Size: page, Expandable: true})
	}
	got := set.all()
	if len(got) != len(want) || set.n != len(want) {
		t.Fatalf("%d segments, %d counted; expected %d", len(got), set.n, len(want))
	}
	for i := range got {
		if got[i].Addr != want[i].Addr || got[i].Size != want[i].Size {
			t.Fatalf("segment %d: %+v; expected %+v", i, got[i], want[i])
		}
	}
}

// strtab gives equal strings equal ids, and every id its string.
func TestStrtab(t *testing.T) {
	tab := newStrtab(newBudget(plenty, plenty))
	ids := map[string]uint32{}
	for i := range 100_000 {
		s := fmt.Sprint("s", i*7919%30_000)
		if i%1000 == 0 {
			s = string(make([]byte, i*3)) // longer than a piece, and empty
		}
		id, err := tab.id([]byte(s))
		if err != nil {
			t.Fatal(err)
		}
		if w, ok := ids[s]; ok && w != id {
			t.Fatalf("%q has ids %d and %d", clip([]byte(s)), w, id)
		}
		ids[s] = id
	}
	for s, id := range ids {
		if got := tab.get(uint64(id)); string(got) != s {
			t.Fatalf("id %d is %q; expected %q", id, clip(got), clip([]byte(s)))
		}
	}
}

// nothing and plenty are what a budget has read.
func nothing() int64 { return 0 }
func plenty() int64  { return 1 << 40 }

// A range that would pass the end of the address space is cut no further, and cutting it ends.
func TestSegsetEndOfAddresses(t *testing.T) {
	var s segset
	s.insert(Segment{Addr: 1 << 40, Size: 1 << 30, Expandable: true})
	s.insert(Segment{Addr: math.MaxUint64 - 511, Size: 4096, Expandable: true})
	if had := s.cut(1<<40+512, math.MaxUint64-3); had != 1<<30-512+511 {
		t.Errorf("%d bytes were cut", had)
	}
	if got := s.all(); len(got) != 1 || got[0].Addr != 1<<40 || got[0].Size != 512 {
		t.Errorf("left: %+v", got)
	}
}
