package analyze

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/replay"
)

// A search replays each draw once: the odds of a limit, and what it takes for sure, have most in common.
func TestDrawsAreReplayedOnce(t *testing.T) {
	tr := smallTraces(t)[2]
	peak, _ := tr.PeakLive()
	s, _ := searchOf(context.Background(), tr, TuneOptions{GPULag: 20 * time.Millisecond}, peak+1<<30, -1)
	spec := replay.Spec{Name: "direct"}
	first, err := s.draws(spec, s.capacity, 1, 5)
	if err != nil {
		t.Fatal(err)
	}
	done := s.done
	odds, err := s.odds(spec, s.capacity)
	if err != nil {
		t.Fatal(err)
	}
	if n := s.plan.Draws(spec); done != 4 || s.done != n || odds.Replays != n {
		t.Errorf("%d replays for 4 draws, and %d for all %d", done, s.done, n)
	}
	again, err := s.draws(spec, s.capacity, 1, 5)
	if err != nil || s.done != odds.Replays {
		t.Errorf("%v, %d replays; expected no more", err, s.done)
	}
	for i := range first {
		if first[i] != again[i] {
			t.Errorf("draw %d has two results", i+1)
		}
	}
	if _, err := s.draws(spec, s.capacity+1, 1, 2); err != nil || s.done != odds.Replays+1 {
		t.Errorf("%v, %d replays; expected one more for another limit", err, s.done)
	}
}

// A smallest limit whose search ends early has no odds of a smaller one, rather than those of no replay.
func TestFloorCutShort(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	s, _ := searchOf(ctx, smallTraces(t)[2], TuneOptions{}, 0, -1)
	cancel()
	f, err := (&bisection{search: s, spec: replay.Spec{Name: "direct"}, high: 100, failed: 50}).floor()
	if !errors.Is(err, context.Canceled) || f.Below != nil || f.Capacity != 100*FloorStep {
		t.Errorf("%v, %+v", err, f)
	}
}
