package pytorch

import (
	"bytes"
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
)

// Integers of LONG1, as Python defines them.
func TestLong(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for range 200_000 {
		b := make([]byte, rng.IntN(14))
		for i := range b {
			switch rng.IntN(3) {
			case 0:
				b[i] = 0xff
			case 1:
				b[i] = byte(rng.Uint32())
			}
		}
		want := new(big.Int)
		for i := len(b) - 1; i >= 0; i-- {
			want.Lsh(want, 8).Or(want, big.NewInt(int64(b[i])))
		}
		if len(b) > 0 && b[len(b)-1]&0x80 != 0 {
			want.Sub(want, new(big.Int).Lsh(big.NewInt(1), uint(8*len(b))))
		}
		got := long(bytes.Clone(b))
		switch {
		case want.IsUint64():
			if got.k != kInt || got.u != want.Uint64() {
				t.Fatalf("%x: got %v %d; expected %s", b, got.k, got.u, want)
			}
		case want.IsInt64():
			if got.k != kNeg || int64(got.u) != want.Int64() {
				t.Fatalf("%x: got %v %d; expected %s", b, got.k, int64(got.u), want)
			}
		default:
			if got.k != kBig {
				t.Fatalf("%x: got %v; expected more than 64 bits: %s", b, got.k, want)
			}
		}
	}
	if v := long([]byte{0, 0, 0, 0, 0, 0, 0, 0x80}); v.k != kNeg || int64(v.u) != math.MinInt64 {
		t.Errorf("%v", v)
	}
}
