package latency

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// Every value lies in its bucket, buckets follow each other without a gap, and a bucket's values differ by an eighth at most.
func TestBuckets(t *testing.T) {
	for i := range Buckets {
		if got := bucketOf(last(i)); got != i {
			t.Fatalf("bucket %d ends with %d, which is in bucket %d", i, last(i), got)
		}
		if i+1 < Buckets && bucketOf(last(i)+1) != i+1 {
			t.Fatalf("%d is in bucket %d, want %d", last(i)+1, bucketOf(last(i)+1), i+1)
		}
		if i > 0 && (last(i)-last(i-1)-1)*(1<<Bits) > last(i-1)+1 {
			t.Errorf("bucket %d is from %d to %d", i, last(i-1)+1, last(i))
		}
	}
	if bucketOf(1<<63) != Buckets-1 {
		t.Error("a very large value has no bucket")
	}
}

// Quantiles are those of the sorted values, within an eighth above.
func TestQuantiles(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		var h Histogram
		var all []uint64
		below := uint64(rng.IntN(1000))
		all = append(all, make([]uint64, below)...)
		for range 1 + rng.IntN(1000) {
			v := 1 + rng.Uint64N(1<<rng.IntN(30))
			h.Add(v)
			all = append(all, v)
		}
		slices.Sort(all)
		for _, q := range []float64{0, 0.5, 0.9, 0.99, 0.999, 1} {
			want := all[min(len(all)-1, int(q*float64(len(all))))]
			got := h.Quantile(q, below)
			if got < want || got > h.Max || want <= last(Buckets-2) && got > want+want/(1<<Bits) {
				t.Fatalf("quantile %g of %d values, %d below: %d, want %d", q, len(all), below, got, want)
			}
		}
	}
	var none Histogram
	if none.Quantile(0.5, 0) != 0 || none.Quantile(0.5, 10) != 0 {
		t.Error("quantiles of nothing")
	}
}

func TestMerge(t *testing.T) {
	var a, b, both Histogram
	for v := range uint64(1000) {
		a.Add(v * v)
		b.Add(v + 7)
		both.Add(v * v)
		both.Add(v + 7)
	}
	a.Merge(&b)
	if a != both {
		t.Error("the sum of two histograms is another one than that of all values")
	}
}
