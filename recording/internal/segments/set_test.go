package segments

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cistern-gpu/cistern/recording"
)

// Set does what a sorted list does.
func TestSegset(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	var set Set
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
			if got, want := set.Cut(addr, size), covered(addr, size); got != want {
				t.Fatalf("step %d: cut %d bytes; expected %d", i, got, want)
			}
			for a := addr; a < addr+size; a += page {
				delete(pages, a)
			}
			continue
		}
		if got, want := set.Overlapping(addr, size) != nil, covered(addr, size) > 0; got != want {
			t.Fatalf("step %d: overlapping %v; expected %v", i, got, want)
		}
		if covered(addr, size) > 0 {
			s := set.At(addr)
			if got, want := s != nil, pages[addr]; got != want {
				t.Fatalf("step %d: at %v; expected %v", i, got, want)
			}
			continue
		}
		set.Join(recording.Segment{Addr: addr, Size: size, Expandable: true})
		for a := addr; a < addr+size; a += page {
			pages[a] = true
		}
	}
	// Neighbours are one segment each.
	var want []recording.Segment
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
		want = append(want, recording.Segment{Addr: a, Size: page, Expandable: true})
	}
	got := set.All()
	if len(got) != len(want) || set.list.Len() != len(want) {
		t.Fatalf("%d segments, %d counted; expected %d", len(got), set.list.Len(), len(want))
	}
	for i := range got {
		if got[i].Addr != want[i].Addr || got[i].Size != want[i].Size {
			t.Fatalf("segment %d: %+v; expected %+v", i, got[i], want[i])
		}
	}
}

// A range that would pass the end of the address space is cut no further, and cutting it ends.
func TestSegsetEndOfAddresses(t *testing.T) {
	var s Set
	s.Insert(recording.Segment{Addr: 1 << 40, Size: 1 << 30, Expandable: true})
	s.Insert(recording.Segment{Addr: math.MaxUint64 - 511, Size: 4096, Expandable: true})
	if had := s.Cut(1<<40+512, math.MaxUint64-3); had != 1<<30-512+511 {
		t.Errorf("%d bytes were cut", had)
	}
	if got := s.All(); len(got) != 1 || got[0].Addr != 1<<40 || got[0].Size != 512 {
		t.Errorf("left: %+v", got)
	}
}
