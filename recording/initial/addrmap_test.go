package initial

import (
	"math/rand/v2"
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
