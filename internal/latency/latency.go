// Package latency counts durations of which the long ones matter, in memory of constant size: a histogram whose buckets grow
// with the values, so that every value is known within a fixed part of it. A quantile is the largest value of its bucket, so it is
// never less than what was counted; the maximum is exact.
//
// A Histogram has no lock. Its owner's lock guards it.
package latency

import "math/bits"

// Bits is by how many binary digits the values of a bucket agree: they differ by at most an eighth.
const Bits = 3

// mostBits is the number of binary digits of values that are told apart; larger ones are counted in the last bucket.
const mostBits = 27

// Buckets is the number of buckets.
const Buckets = (mostBits - Bits + 1) << Bits

// Histogram counts values in the unit that its owner chooses. The zero value has counted nothing.
type Histogram struct {
	Counts [Buckets]uint64
	Max    uint64 // of all values
}

// Add counts a value.
func (h *Histogram) Add(v uint64) {
	h.Counts[bucketOf(v)]++
	h.Max = max(h.Max, v)
}

// Merge counts what another histogram has counted.
func (h *Histogram) Merge(o *Histogram) {
	for i, n := range o.Counts {
		h.Counts[i] += n
	}
	h.Max = max(h.Max, o.Max)
}

// bucketOf is the bucket of a value: the values below 1<<Bits have one each, and each doubling above has 1<<Bits.
func bucketOf(v uint64) int {
	if v >= 1<<mostBits {
		return Buckets - 1
	}
	shift := max(0, bits.Len64(v)-Bits-1)
	return shift<<Bits + int(v>>shift)
}

// last is the largest value of a bucket.
func last(bucket int) uint64 {
	shift := max(0, bucket>>Bits-1)
	return uint64(bucket-shift<<Bits+1)<<shift - 1
}

// Count is how many values were counted.
func (h *Histogram) Count() (n uint64) {
	for _, c := range h.Counts {
		n += c
	}
	return n
}

// Quantile is a value that all but a part of 1-q of the values do not exceed, where below more values than were counted are less
// than the least of them, and 0 where nothing was counted or the quantile lies among those below.
func (h *Histogram) Quantile(q float64, below uint64) uint64 {
	total := h.Count() + below
	rank := uint64(q * float64(total)) // so many may be less
	if rank >= total {
		return h.Max
	}
	if rank < below {
		return 0
	}
	seen := below
	for i, c := range h.Counts {
		if seen += c; seen > rank {
			if i == Buckets-1 {
				return h.Max
			}
			return min(last(i), h.Max)
		}
	}
	return h.Max
}
