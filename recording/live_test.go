package recording

import (
	"math"
	"slices"
	"testing"

	"github.com/cistern-gpu/cistern/event"
)

// A handle that is mapped twice is one piece of memory until its last mapping goes; maps without handles all count.
func TestReservedCountsHandlesOnce(t *testing.T) {
	tr := &Trace{InitialSegments: []Segment{{Size: 1}}, Events: []event.Event{
		{Kind: event.SegmentMap, Addr: 0x1000, Size: 10, Handle: 7},
		{Kind: event.SegmentMap, Addr: 0x2000, Size: 10, Handle: 7},
		{Kind: event.SegmentMap, Addr: 0x3000, Size: 100},
		{Kind: event.SegmentUnmap, Addr: 0x1000, Size: 10, Handle: 7},
		{Kind: event.SegmentUnmap, Addr: 0x2000, Size: 10, Handle: 7},
		{Kind: event.SegmentAlloc, Addr: 0x4000, Size: 1000},
		{Kind: event.SegmentMap, Addr: 0x5000, Size: 10, Handle: 7}, // the number is used again
		{Kind: event.SegmentFree, Addr: 0x4000, Size: 1000},
	}}
	var got []uint64
	tr.Reserved(func(i int, n uint64) { got = append(got, uint64(i), n) })
	if want := []uint64{0, 11, 2, 111, 4, 101, 5, 1101, 6, 1111, 7, 111}; !slices.Equal(got, want) {
		t.Errorf("events and bytes %v, want %v", got, want)
	}
	if peak := tr.RecordedPeakReserved(); peak != 1111 {
		t.Errorf("peak %d, want 1111", peak)
	}
}

func TestSinceUS(t *testing.T) {
	const most, least = math.MaxInt64, math.MinInt64
	for _, c := range []struct{ from, to, want int64 }{{0, 0, 0}, {1, 3, 2}, {3, 1, 0}, {-3, 4, 7}, {0, 1.7e15, 1.7e15}, {0, most, LongestUS}, {least, most, LongestUS}, {most, least, 0}} {
		if got := SinceUS(c.from, c.to); got != c.want {
			t.Errorf("from %d to %d: %d; expected %d", c.from, c.to, got, c.want)
		}
	}
}
