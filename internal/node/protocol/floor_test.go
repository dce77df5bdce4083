package protocol

import (
	"testing"
	"time"
)

func TestFloor(t *testing.T) {
	const gib = 1 << 30
	s := Status{Active: 20 * gib, Peaks: [Windows]uint64{20 * gib, 20 * gib, 60 * gib, 60 * gib, 60 * gib}} // the peak was up to 1 s ago
	for hold, want := range map[time.Duration]uint64{
		time.Second:             60 * gib,
		2 * time.Second:         60 * gib,
		500 * time.Millisecond:  30 * gib, // an age of 500 ms: two halves of 500 ms
		125 * time.Millisecond:  20 * gib, // nearly
		-time.Second:            20 * gib,
		1000000 * time.Hour / 1: 60 * gib,
	} {
		if got := s.Floor(hold); got < want || got > want+gib/64 {
			t.Errorf("hold %v: %d, want %d", hold, got, want)
		}
	}
	if s := (Status{Active: 5, Peaks: [Windows]uint64{4, 4}}); s.Floor(time.Second) != 5 {
		t.Error(s.Floor(time.Second))
	}
	if s := (Status{Active: 0, Peaks: [Windows]uint64{1 << 63}}); s.Floor(time.Second) != 1<<63 {
		t.Error(s.Floor(time.Second))
	}
}
