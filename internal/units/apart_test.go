package units

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

func TestFormatApart(t *testing.T) {
	const mib, gib = 1 << 20, 1 << 30
	for _, c := range []struct {
		sizes []uint64
		want  []string
	}{
		{nil, nil},
		{[]uint64{90 * mib, 2 * gib}, []string{"90.00 MiB", "2.00 GiB"}},
		{[]uint64{2 * gib, 2 * gib}, []string{"2.00 GiB", "2.00 GiB"}},
		{[]uint64{2284 * mib, 2285 * mib, 2284 * mib, 3 * mib}, []string{"2.230 GiB", "2.231 GiB", "2.230 GiB", "3.00 MiB"}},
		{[]uint64{gib - 1024, gib}, []string{"1023.999 MiB", "1.000 GiB"}},
		{[]uint64{4*gib - 512, 4 * gib}, []string{"4294966784 bytes", "4294967296 bytes"}},
		{[]uint64{math.MaxUint64, math.MaxUint64 - 1}, []string{"18446744073709551615 bytes", "18446744073709551614 bytes"}},
	} {
		if got := FormatApart(c.sizes...); !slices.Equal(got, c.want) {
			t.Errorf("FormatApart(%d) = %q; want %q", c.sizes, got, c.want)
		}
	}
}

// Whatever the sizes, two that differ read differently, and the rounding keeps their order.
func TestFormatApartRandom(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		n := r.Uint64() >> r.IntN(60)
		sizes := []uint64{n, n + r.Uint64()>>(r.IntN(64)), r.Uint64() >> r.IntN(64), n}
		texts := FormatApart(sizes...)
		for i := range sizes {
			for j := range sizes {
				if (sizes[i] == sizes[j]) != (texts[i] == texts[j]) {
					t.Fatalf("%d are written as %q", sizes, texts)
				}
			}
		}
	}
}

func TestSprintf(t *testing.T) {
	got := Sprintf("%s, less than the %s that %d %s asked for", Size(2_394_000_000), Size(2_395_000_000), 2, "threads")
	if want := "2.230 GiB, less than the 2.231 GiB that 2 threads asked for"; got != want {
		t.Errorf("%q; want %q", got, want)
	}
	if got := Sprintf("%v and %s", Size(5<<20), "no other"); got != "5.00 MiB and no other" {
		t.Error(got)
	}
}
